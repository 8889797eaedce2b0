"""Measures a step beside what was predicted of it: `measure(step)`.

Memory comes from a fresh process, time from another one in which the step and eager take turns. The model in
this process is not touched.
"""

import copy
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from acwb.capture.step import TracedStep
from acwb.core.profile import Profile
from acwb.errors import AcwbError, check_count
from acwb.evaluation.baselines import builder_of, eager
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.evaluation.memory import Peaks, peaks_of_each
from acwb.evaluation.memory_cap import train_within
from acwb.evaluation.timing import Ratio, interleave, ratio
from acwb.execution.rewriter import PlannedStep
from acwb.files import Saved
from acwb.planning.heuristics import keep_all
from acwb.planning.plan import Plan
from acwb.subject import Step, StepBuilder, Subject
from acwb.units import format_bytes, format_seconds, parse_bytes

ROUNDS = 11


@dataclass(frozen=True)
class Prediction:
    """Predicted peaks and overhead of a plan; the overhead is relative to the captured step without a plan."""

    tensor_bytes: int
    allocator_bytes: int
    overhead: float

    @classmethod
    def of(cls, plan: Plan) -> "Prediction":
        """The simulated peaks and overhead of `plan`."""
        return cls(plan.timeline.tensor_peak_bytes, plan.timeline.peak_bytes, plan.overhead)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Prediction":
        """The prediction that a file holds; older ones call the peaks tensors and allocator."""
        older = {"tensors": "tensor_bytes", "allocator": "allocator_bytes"}
        return cls(**{older.get(name, name): value for name, value in content.items()})


@dataclass(frozen=True, repr=False)
class Measurement(Saved):
    """A step as it was measured, beside eager and beside its prediction.

    Attributes:
        subject: what was trained, on what.
        budget_bytes: the plan's, if there is one.
        predicted: None for a step without a plan or a profile.
        peaks: of the step.
        eager_peaks: of the same workload in eager.
        seconds: of the step, round by round.
        eager_seconds: of eager in the same rounds.
    """

    KIND = "Measurement"

    subject: str
    budget_bytes: int | None
    predicted: Prediction | None
    peaks: Peaks
    eager_peaks: Peaks
    seconds: tuple[float, ...]
    eager_seconds: tuple[float, ...]

    @property
    def time(self) -> Ratio:
        """The time of the step relative to eager's."""
        return ratio(list(self.seconds), list(self.eager_seconds))

    @property
    def fits(self) -> bool:
        """Whether the allocator's and the process's measured peaks are within the budget."""
        return (
            self.budget_bytes is None or max(self.peaks.allocator_bytes, self.peaks.process_bytes) <= self.budget_bytes
        )

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Measurement":
        """Read a measurement from the JSON content of its file."""
        return cls(
            content["subject"],
            content["budget_bytes"],
            Prediction.read(content["predicted"]) if content["predicted"] else None,
            Peaks.of(content["peaks"]),
            Peaks.of(content["eager_peaks"]),
            tuple(content["seconds"]),
            tuple(content["eager_seconds"]),
        )

    def __repr__(self) -> str:
        budget = f", budget {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        lines = [f"Measurement: {self.subject}{budget}", f"  {'':<14}{'predicted':>12}{'measured':>12}{'eager':>12}"]
        said = self.predicted
        for name in ("tensor", "allocator", "process"):
            ours, plain = getattr(self.peaks, f"{name}_bytes"), getattr(self.eager_peaks, f"{name}_bytes")
            predicted = getattr(said, f"{name}_bytes", None)
            sizes = "".join(
                f"{format_bytes(size) if size is not None else '–':>12}" for size in (predicted, ours, plain)
            )
            exact = f"   measured ÷ predicted {ours / predicted:.4f}" if predicted and ours else ""
            lines.append(f"  {name:<14}{sizes}{exact}")
        predicted_time = f"×{1 + said.overhead:.3f}" if said else "–"
        lines.append(
            f"  {'time':<14}{predicted_time:>12}{f'×{self.time.median:.3f}':>12}{'×1':>12}   {describe_time(self)}"
        )
        lines.append(
            "  peaks: what exists before the step included; process: the growth of a process that does only this"
        )
        return "\n".join(lines)


def describe_time(measurement: Measurement) -> str:
    """Describe the measured time relative to eager: interval, rounds, and whether it is within noise."""
    time = measurement.time
    plain = format_seconds(statistics.median(measurement.eager_seconds))
    noise = ", within noise" if time.is_noise else ""
    return f"95 % [{time.low:.3f}, {time.high:.3f}] of eager's {plain}, {time.rounds} rounds{noise}"


def measure(
    step: TracedStep, rounds: int = ROUNDS, memory: int | float | str | None = None, profile: Profile | None = None
) -> Measurement:
    """Peaks and time of a captured or planned step, beside eager and beside its prediction.

    Args:
        step: what `acwb.trace` or `acwb.rewrite` gave. Fresh processes capture it again; this one stays as it is.
        rounds: how often the step and eager are timed in turn.
        memory: first run two iterations under this hard cap; `DoesNotFitError` if it does not fit.
        profile: of a step without a plan, to predict from.

    Example:
        >>> acwb.measure(acwb.rewrite(step, plan))
    """
    if not isinstance(step, TracedStep):
        raise AcwbError(f"measure takes a step as acwb.trace or acwb.rewrite gives it, not {type(step).__name__}.")
    check_count("rounds", rounds)
    plan = step.plan if isinstance(step, PlannedStep) else keep_all(profile) if profile is not None else None
    if plan is not None and profile is not None and plan.profile.graph.fingerprint != profile.graph.fingerprint:
        raise AcwbError("The profile is of another step: leave it out, a planned step knows its own.")
    subject, method = step.subject, builder_of(step)
    make = partial(copy.deepcopy, subject)
    methods = {"step": method, "eager": eager}
    most = plan.profile.peak_bytes if plan else sum(storage.bytes for storage in step.graph.storages)
    with tqdm(total=2, desc="measuring", leave=False) as progress:
        if memory is not None:
            train_within(make, method, parse_bytes(memory, plan.profile.peak_bytes if plan else None))
        peaks = peaks_of_each(make, methods, dict.fromkeys(methods, most), step.device)
        progress.update()
        seconds = seconds_of(make, methods, rounds)
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
    make: Callable[[], Subject], methods: Mapping[str, StepBuilder], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """The seconds of methods that take turns in a fresh process, round by round."""
    return run_in_fresh_process(_seconds, make, methods, rounds)


def _seconds(make: Callable[[], Subject], methods: Mapping[str, StepBuilder], rounds: int) -> dict[str, list[float]]:
    subject = make()
    steps: dict[str, Step] = {name: method(subject.twin()) for name, method in methods.items()}
    return interleave(steps, rounds)
