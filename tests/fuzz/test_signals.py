"""A signal at any line of run, verify, profile and the drop-in's halves: the state is that before or that after."""

import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import acwb
from acwb.subject import Subject
from support.bitwise import Snapshot, differences, snapshot

POSITIONS = 300  # of each action and signal, spread evenly over its lines
TRACED = (str(Path(acwb.__file__).parent), contextlib.__file__, "<eval_with_key>")
Action = Callable[[], object]


class Stopped(BaseException):
    """Raised by the handler of a signal."""


def stop(*_: object) -> None:
    raise Stopped


class Lines:
    """Counts lines of acwb, of contextlib and of generated code, and sends a signal at one of them."""

    def __init__(self, at: int = -1, number: int = signal.SIGINT) -> None:
        self.count = 0
        self.at = at
        self.number = number

    def __enter__(self) -> "Lines":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(TRACED) else None

    def _line(self, _frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(self.number)
        return self._line


@dataclass
class Situation:
    """A subject whose state can be put back, and what is done to it.

    Attributes:
        prepare: makes the action, anew for each position.
        may_finish: whether the state after the whole action is right, too.
        frees_gradients: whether the action begins by freeing gradients, also if it is then undone.
    """

    subject: Subject
    prepare: Callable[[], Action]
    may_finish: bool
    frees_gradients: bool = False

    def __post_init__(self) -> None:
        model, optimizer = self.subject.model, self.subject.optimizer
        self._tensors = [*model.parameters(), *model.buffers(), *self.subject.batch]
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._gradients = [(each, each.grad.clone()) for each in model.parameters() if each.grad is not None]
        self._state = {key: _copies(each) for key, each in optimizer.state.items()}
        self._random = torch.get_rng_state()

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.copy_(value)
        for parameter in self.subject.model.parameters():
            parameter.grad = None
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.clone()
        state = self.subject.optimizer.state
        state.clear()
        state.update({key: _copies(each) for key, each in self._state.items()})
        torch.set_rng_state(self._random)

    def now(self) -> Snapshot:
        return snapshot(self.subject, torch.zeros(()))


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def subject_after_a_step() -> Subject:
    torch.manual_seed(2)
    subject = small_subject()
    subject.eager_step()
    return subject


def small_subject() -> Subject:
    """A small model with dropout, batch normalization and momentum."""
    model = torch.nn.Sequential(
        *(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(6, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Subject("small", model, (torch.randn(5, 6),), lambda model, batch: model(*batch).square().mean(), optimizer)


def planned(subject: Subject) -> acwb.TracedStep:
    step = acwb.trace(subject)
    return acwb.rewrite(step, acwb.plan(acwb.profile(step, repeats=1), 10**12, planner="recompute_all"))


def run() -> Situation:
    subject = subject_after_a_step()
    step = planned(subject)
    return Situation(subject, lambda: step.run, may_finish=True, frees_gradients=True)


def verify() -> Situation:
    subject = subject_after_a_step()
    step = planned(subject)
    return Situation(subject, lambda: lambda: acwb.verify(step, iterations=1), may_finish=False)


def profile() -> Situation:
    subject = subject_after_a_step()
    step = acwb.trace(subject)
    return Situation(subject, lambda: lambda: acwb.profile(step, repeats=1), may_finish=False)


def drop_in(subject: Subject) -> torch.nn.Module:
    return acwb.checkpoint(
        subject.model, subject.batch, 10**12, loss_fn=subject.loss_fn, planner="recompute_all", repeats=1
    )


def forward() -> Situation:
    subject = subject_after_a_step()
    model = drop_in(subject)
    return Situation(subject, lambda: lambda: model(*subject.batch), may_finish=True)


def backward() -> Situation:
    subject = subject_after_a_step()
    model = drop_in(subject)

    def prepare() -> Action:
        buffers, state = [buffer.clone() for buffer in subject.model.buffers()], torch.get_rng_state()
        loss = subject.loss_fn(model, subject.batch)
        for buffer, value in zip(subject.model.buffers(), buffers, strict=True):
            buffer.copy_(value)  # only what backward changes is compared
        torch.set_rng_state(state)
        return loss.backward

    return Situation(subject, prepare, may_finish=True)


SITUATIONS = (run, verify, profile, forward, backward)


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("make", SITUATIONS)
def test_a_signal_at_any_line_leaves_the_state_before_or_after(make: Callable[[], Situation], number: int) -> None:
    situation = make()
    situation.restore()
    before = situation.now()
    action = situation.prepare()
    with Lines() as lines:
        action()
    after = situation.now() if situation.may_finish else before
    stopped = 0
    gc.collect()  # a handler that raises within the finalizer of what another test left is only a warning
    for at in sorted({1 + place * lines.count // POSITIONS for place in range(POSITIONS)}):
        situation.restore()
        action = situation.prepare()
        try:
            with Lines(at, number):
                action()
        except Stopped:
            stopped += 1
        found = situation.now()
        wrong = min(differences([found], [_allowed(before, found, situation)]), differences([found], [after]), key=len)
        assert not wrong, f"{number} at line event {at} of {lines.count}: {wrong[:3]}"
    assert stopped > POSITIONS // 2


def _allowed(before: Snapshot, found: Snapshot, situation: Situation) -> Snapshot:
    """The state before; without gradients where the action frees them first and they are all gone."""
    gradients = [key for key in found if key.startswith("gradient")]
    if situation.frees_gradients and all(found[key] is None for key in gradients):
        return {**before, **dict.fromkeys(gradients)}
    return before
