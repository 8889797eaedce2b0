"""A step is all or nothing: an interrupt rolls it back, or is deferred to its end."""

import signal
import threading
from collections.abc import Callable, Iterator
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
    signal.raise_signal(signal.SIGINT)


class Terminated(BaseException):
    """Raised by a handler of SIGTERM, as job schedulers' launchers do."""


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Handlers that raise, whatever the process was started with: in the background of a script SIGINT is ignored."""

    def raise_terminated(*_: object) -> None:
        raise Terminated

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, raise_terminated)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


ACTS = pytest.mark.parametrize(
    ("act", "error"), [(fail, RuntimeError), (interrupt, KeyboardInterrupt), (terminate, Terminated)]
)


def planned(subject: Subject) -> acwb.TracedStep:
    step = acwb.trace(subject)
    return acwb.rewrite(step, acwb.plan(acwb.profile(step, repeats=1), ENOUGH, planner="recompute_all"))


def without_gradients(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if not key.startswith("gradient")}


@pytest.mark.parametrize("share", [0.2, 0.45, 0.7], ids=["in forward", "after it", "in backward"])
@ACTS
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


@pytest.mark.parametrize(("act", "error"), [(interrupt, KeyboardInterrupt), (terminate, Terminated)])
def test_a_signal_while_the_optimizer_runs_waits_for_its_end(
    act: Callable[[], None], error: type[BaseException]
) -> None:
    subject, plain = (acwb.models.tiny_encoder() for _ in range(2))
    step = planned(subject)
    (expected,) = train(plain, plain.eager_step, 1)
    torch.manual_seed(11)
    subject.optimizer.register_step_pre_hook(lambda *_: act())
    with pytest.raises(error):
        step.run()
    assert differences([snapshot(subject, expected["loss"])], [expected]) == []


def test_deferred_signals_are_all_handled_at_the_end() -> None:
    done = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def work() -> None:
        with defer_signals():
            interrupt()
            terminate()
            done.append("after both")

    with pytest.raises(Terminated) as caught:
        work()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)  # which came first
    assert done == ["after both"]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_signal_that_waited_is_handled_as_soon_as_signals_are_admitted() -> None:
    done = []

    def work() -> None:
        with defer_signals() as signals:
            interrupt()
            done.append("set up")
            with signals.admit():
                done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["set up"]


def test_after_a_signal_is_raised_others_wait_until_everything_is_undone() -> None:
    done = []

    def work() -> None:
        with defer_signals() as signals:
            try:
                with signals.admit():
                    interrupt()
            finally:
                terminate()
                done.append("undone")

    with pytest.raises(Terminated):
        work()
    assert done == ["undone"]


def test_ignored_signals_stay_ignored_and_default_ones_stay_the_systems() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with defer_signals() as signals, signals.admit():
        interrupt()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_no_handler_is_touched() -> None:
    handlers: list[Any] = []

    def work() -> None:
        with defer_signals() as signals, signals.admit():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


@ACTS
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
