"""Measures a step beside what was predicted of it: `measure(step)`.

Memory comes from a fresh process, time from another one in which the step and plain PyTorch take turns. The model in
this process is not touched.
"""

import copy
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from tqdm.auto import tqdm

from acwb import files
from acwb.capture.step import TracedStep
from acwb.core.profile import Profile
from acwb.errors import AcwbError
from acwb.evaluation.baselines import behind, eager
from acwb.evaluation.fresh_process import launch
from acwb.evaluation.memory import Peaks, peaks_of_each
from acwb.evaluation.memory_cap import train_within
from acwb.evaluation.timing import Ratio, interleave, ratio
from acwb.execution.rewriter import PlannedStep
from acwb.planning.heuristics import keep_all
from acwb.planning.plan import Plan
from acwb.subject import Contender, Step, Subject
from acwb.units import budget_bytes, gibibytes, milliseconds

ROUNDS = 11


@dataclass(frozen=True)
class Prediction:
    """What a plan says of its step; the overhead is over the captured step without a plan."""

    tensors: int
    allocator: int
    overhead: float

    @classmethod
    def of(cls, plan: Plan) -> "Prediction":
        """What `plan` says."""
        return cls(plan.timeline.tensor_peak_bytes, plan.timeline.peak_bytes, plan.overhead)


@dataclass(frozen=True, repr=False)
class Measurement:
    """A step as it was measured, beside plain PyTorch and beside what was predicted.

    Attributes:
        subject: what was trained, on what.
        budget_bytes: the plan's, if there is one.
        predicted: None for a step without a plan or a profile.
        peaks: of the step.
        eager_peaks: of plain PyTorch.
        seconds: of the step, round by round.
        eager_seconds: of plain PyTorch in the same rounds.
    """

    subject: str
    budget_bytes: int | None
    predicted: Prediction | None
    peaks: Peaks
    eager_peaks: Peaks
    seconds: tuple[float, ...]
    eager_seconds: tuple[float, ...]

    @property
    def time(self) -> Ratio:
        """The time of the step relative to plain PyTorch's."""
        return ratio(list(self.seconds), list(self.eager_seconds))

    @property
    def fits(self) -> bool:
        """Whether no measured peak is above the budget."""
        return self.budget_bytes is None or max(self.peaks.allocator, self.peaks.process) <= self.budget_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file."""
        files.write(path, "Measurement", asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Measurement":
        """Read back what `save` wrote."""
        with files.reading(path, "Measurement") as content:
            return cls(
                content["subject"],
                content["budget_bytes"],
                Prediction(**content["predicted"]) if content["predicted"] else None,
                Peaks(**content["peaks"]),
                Peaks(**content["eager_peaks"]),
                tuple(content["seconds"]),
                tuple(content["eager_seconds"]),
            )

    def __repr__(self) -> str:
        budget = f", budget {gibibytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        lines = [f"Measurement: {self.subject}{budget}", f"  {'':<14}{'predicted':>12}{'measured':>12}{'eager':>12}"]
        said = self.predicted
        for name in ("tensors", "allocator", "process"):
            ours, plain = getattr(self.peaks, name), getattr(self.eager_peaks, name)
            predicted = getattr(said, name, None)
            sizes = "".join(f"{gibibytes(size) if size is not None else '–':>12}" for size in (predicted, ours, plain))
            exact = f"   measured ÷ predicted {ours / predicted:.4f}" if predicted and ours else ""
            lines.append(f"  {name:<14}{sizes}{exact}")
        predicted_time = f"×{1 + said.overhead:.3f}" if said else "–"
        lines.append(f"  {'time':<14}{predicted_time:>12}{f'×{self.time.median:.3f}':>12}{'×1':>12}   {told(self)}")
        lines.append(
            "  peaks: what exists before the step included; process: the growth of a process that does only this"
        )
        return "\n".join(lines)


def told(measurement: Measurement) -> str:
    """The time in words."""
    time = measurement.time
    plain = milliseconds(statistics.median(measurement.eager_seconds))
    noise = ", within noise" if time.is_noise else ""
    return f"95 % [{time.low:.3f}, {time.high:.3f}] of eager's {plain}, {time.rounds} rounds{noise}"


def measure(
    step: TracedStep, rounds: int = ROUNDS, memory: int | float | str | None = None, profile: Profile | None = None
) -> Measurement:
    """Peaks and time of a captured or planned step, beside plain PyTorch and beside what was predicted.

    Args:
        step: what `acwb.trace` or `acwb.rewrite` gave. Fresh processes capture it again; this one stays as it is.
        rounds: how often the step and plain PyTorch take turns.
        memory: first run two iterations under this hard cap; `DoesNotFitError` if it does not fit.
        profile: of a step without a plan, to predict from.

    Example:
        >>> acwb.measure(acwb.rewrite(step, plan))
    """
    if not isinstance(step, TracedStep):
        raise AcwbError(f"measure takes a step as acwb.trace or acwb.rewrite gives it, not {type(step).__name__}.")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise AcwbError(f"rounds is {rounds!r}: give a whole number of at least 1.")
    plan = step.plan if isinstance(step, PlannedStep) else keep_all(profile) if profile is not None else None
    if plan is not None and profile is not None and plan.profile.graph.fingerprint != profile.graph.fingerprint:
        raise AcwbError("The profile is of another step: leave it out, a planned step knows its own.")
    subject, contender = behind(step)
    make = partial(copy.deepcopy, subject)
    contenders = {"step": contender, "eager": eager}
    most = plan.profile.peak_bytes if plan else sum(storage.bytes for storage in step.graph.storages)
    with tqdm(total=2, desc="measuring", leave=False) as progress:
        if memory is not None:
            train_within(make, contender, budget_bytes(memory, plan.profile.peak_bytes if plan else 0))
        peaks = peaks_of_each(make, contenders, dict.fromkeys(contenders, most), step.device)
        progress.update()
        seconds = seconds_of(make, contenders, rounds)
    return Measurement(
        f"{subject.name}, {', '.join(step.graph.environment.batch)}",
        plan.budget_bytes if plan is not None else None,
        Prediction.of(plan) if plan is not None else None,
        peaks["step"],
        peaks["eager"],
        tuple(seconds["step"]),
        tuple(seconds["eager"]),
    )


def seconds_of(
    make: Callable[[], Subject], contenders: Mapping[str, Contender], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """The seconds of contenders that take turns in a fresh process, round by round."""
    return launch(_seconds, make, contenders, rounds)


def _seconds(make: Callable[[], Subject], contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    subject = make()
    steps: dict[str, Step] = {name: contender(subject.twin()) for name, contender in contenders.items()}
    return interleave(steps, rounds)
