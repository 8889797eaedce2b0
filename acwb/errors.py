"""The errors that acwb raises on purpose: one sentence on what was wrong, with the value, and what to do."""

import sys
import warnings
from pathlib import Path

MAX_QUOTED = 80


class AcwbError(Exception):
    """Base of every error that acwb raises on purpose."""


class CaptureError(AcwbError):
    """A training step could not be captured.

    Attributes:
        module: path of the module whose forward was running, "" outside of any module.
        location: "file:line" of the user's own code, "" where none was on the stack.
    """

    def __init__(self, message: str, module: str = "", location: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.location = location


class ChangedStepError(AcwbError):
    """A step was run with something that differs from what it was captured with.

    Attributes:
        name: what differs ("batch[0]", "layer1.0.conv1.weight", a module's path).
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.name)


class InfeasibleBudgetError(AcwbError):
    """No plan fits the budget.

    Attributes:
        floor_bytes: the least peak that was found.
        op: the op that stands at it.
        storages: the largest storages that are alive there.
    """

    def __init__(self, message: str, floor_bytes: int, op: str, storages: tuple[str, ...]) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.op = op
        self.storages = storages

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.floor_bytes, self.op, self.storages)


class DoesNotFitError(AcwbError):
    """A run was stopped by the memory that it was given, or was not tried because it needs more than there is."""


class ProcessDiedError(AcwbError):
    """A fresh process ended without an answer."""


class CancelledError(AcwbError):
    """A fresh process was ended because somebody asked for it."""


def quoted(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


def check_type(verb: str, value: object, kind: type, source: str) -> None:
    """Refuse an argument that is not what another function of acwb gave."""
    if not isinstance(value, kind):
        raise AcwbError(f"{verb} takes a {kind.__name__}, as {source} gives it, not {type(value).__name__}.")


def check_maker(verb: str, make: object) -> None:
    """Refuse what is no function of a batch size."""
    if not callable(make):
        raise AcwbError(
            f"{verb} takes a function that makes a Subject for a batch size, acwb.models.resnet152 say, not "
            f"{type(make).__name__}."
        )


def check_count(name: str, count: object) -> None:
    """Refuse a number of rounds, iterations, repeats or the like that is no whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise AcwbError(f"{name} is {count!r}: give a whole number of at least 1.")


def warn_user(message: str) -> None:
    """Warn at the innermost line outside of acwb, however deep inside the package the cause was seen."""
    package = str(Path(__file__).parent)
    level = 1
    while sys._getframe(level).f_code.co_filename.startswith(package) and sys._getframe(level).f_back is not None:
        level += 1
    warnings.warn(message, stacklevel=level + 1)
