"""A step is all or nothing: an interrupt rolls it back, or is deferred to its end."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import acwb
from acwb.evaluation.memory import LiveBytesMeter
from acwb.rollback import defer_signals
from acwb.subject import Subject
from support.bitwise import differences, snapshot, train

ENOUGH = 10**15


class Failing(TorchDispatchMode):
    """While entered, does something before an op of a given number."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.at = at
        self.act = act
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            self.act()
        return function(*args, **(kwargs or {}))


def fail() -> None:
    raise RuntimeError("planted")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def planned(subject: Subject) -> acwb.TracedStep:
    step = acwb.trace(subject)
    return acwb.rewrite(step, acwb.plan(acwb.profile(step, repeats=1), ENOUGH, planner="recompute_all"))


def without_gradients(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if not key.startswith("gradient")}


@pytest.mark.parametrize("share", [0.2, 0.45, 0.7], ids=["in forward", "after it", "in backward"])
@pytest.mark.parametrize(("act", "error"), [(fail, RuntimeError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("name", ["tiny_encoder", "tiny_resnet"])
def test_an_interrupted_step_leaves_everything_as_it_was(
    name: str, act: Callable[[], None], error: type[BaseException], share: float
) -> None:
    subject, plain = (getattr(acwb.models, name)() for _ in range(2))
    step = planned(subject)
    torch.manual_seed(3)
    loss = step.run()
    before = snapshot(subject, loss)
    computed = sum(op.phase is not acwb.Phase.OPTIMIZER for op in step.graph.ops)
    step.free_gradients()
    with LiveBytesMeter() as meter, pytest.raises(error) as caught, Failing(int(share * computed), act):
        step.run()
    assert caught.value is not None  # and still, with its traceback:
    assert meter.live == 0
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    after = snapshot(subject, loss)
    assert differences([without_gradients(after)], [without_gradients(before)]) == []
    torch.manual_seed(3)
    plain.eager_step()
    state = torch.get_rng_state()
    again = snapshot(subject, step.run())
    torch.set_rng_state(state)
    assert differences([again], [snapshot(plain, plain.eager_step())]) == []


def test_an_interrupt_while_the_optimizer_runs_waits_for_its_end() -> None:
    subject, plain = (acwb.models.tiny_encoder() for _ in range(2))
    step = planned(subject)
    (expected,) = train(plain, plain.eager_step, 1)
    torch.manual_seed(11)
    subject.optimizer.register_step_pre_hook(lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        step.run()
    assert differences([snapshot(subject, expected["loss"])], [expected]) == []


def test_a_deferred_interrupt_is_raised_at_the_end() -> None:
    done = []

    def work() -> None:
        with defer_signals():
            interrupt()
            done.append("after it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("act", "error"), [(fail, RuntimeError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_interrupted_pass_of_the_drop_in_leaves_everything_as_it_was(
    place: str, act: Callable[[], None], error: type[BaseException]
) -> None:
    subject, plain = (acwb.models.tiny_encoder() for _ in range(2))
    model = acwb.checkpoint(
        subject.model, subject.batch, ENOUGH, loss_fn=subject.loss_fn, planner="recompute_all", repeats=1
    )
    torch.manual_seed(3)
    subject.loss_fn(model, subject.batch).backward()
    before = snapshot(subject, torch.zeros(()))

    def forward() -> None:
        with Failing(20, act):
            model(subject.batch[0])

    def backward() -> None:
        state = torch.get_rng_state()
        loss = subject.loss_fn(model, subject.batch)
        try:
            with Failing(40, act):
                loss.backward()
        finally:
            del loss
            torch.set_rng_state(state)

    with LiveBytesMeter() as meter, pytest.raises(error):
        forward() if place == "forward" else backward()
    assert meter.live == 0
    assert differences([snapshot(subject, torch.zeros(()))], [before]) == []
    torch.manual_seed(3)
    for each, called in ((plain, plain.model), (subject, model)):
        torch.manual_seed(4)
        for parameter in each.model.parameters():
            parameter.grad = None
        each.loss_fn(called, each.batch).backward()
    for mine, theirs in zip(subject.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
