"""Peak memory and latency over batch sizes, with and without a plan, predicted beside measured: `sweep`.

Every batch size is profiled, planned and measured in fresh processes, and written down as soon as it is done: a sweep
that was interrupted goes on where it stopped. A batch size that does not fit is recorded as one that does not.
"""

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

if TYPE_CHECKING:
    import pandas
from acwb import files, models
from acwb.capture.tracer import trace
from acwb.errors import AcwbError, DoesNotFitError, InfeasibleBudgetError, check_count, check_maker
from acwb.evaluation.baselines import eager, planned
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.evaluation.measurement import ROUNDS, seconds_of
from acwb.evaluation.memory import Peaks, peaks_of_each
from acwb.evaluation.memory_cap import train_within
from acwb.evaluation.timing import Ratio, ratio
from acwb.files import Saved
from acwb.planning.frontier import frontier
from acwb.planning.heuristics import keep_all
from acwb.planning.plan import Plan
from acwb.profiling.devices import available_bytes
from acwb.profiling.profiler import profile
from acwb.subject import StepBuilder, Subject, SubjectMaker
from acwb.units import format_bytes, format_seconds, parse_bytes

ANY_PEAK = 1 << 60  # bytes: stands for the peak of a step that is not profiled yet


@dataclass(frozen=True)
class SweepSettings:
    """The settings that all points of a sweep share; a file is continued only with the same ones.

    Attributes:
        budget: for every batch size, as `acwb.plan` takes it; None where a reduction is given.
        reduction: fraction by which the peak above static is to be lowered.
        memory_bytes: hard cap under which each batch size is tried first; None without one.
        rounds: how often the steps with and without a plan are timed in turn.
        repeats: how often the profiler times each op.
        or_floor: whether the plan with the lowest peak is taken where none fits the budget.
    """

    budget: int | float | str | None
    reduction: float | None
    memory_bytes: int | None
    rounds: int
    repeats: int
    torch: str
    or_floor: bool


@dataclass(frozen=True)
class BatchResult:
    """A batch size with or without a plan.

    Attributes:
        problem: why it was not run: it does not fit, or no plan fits the budget. "" where it was run.
        predicted_tensor_bytes: the predicted peak of live tensors; None where there is no plan.
        predicted_bytes: the predicted peak, workspaces included.
        peaks: as measured; None where it was not run.
        seconds: of a step, round by round; empty where it was not run.
    """

    problem: str
    predicted_tensor_bytes: int | None
    predicted_bytes: int | None
    peaks: Peaks | None = None
    seconds: tuple[float, ...] = ()

    @classmethod
    def read(cls, content: dict[str, Any]) -> "BatchResult":
        """Read a batch result from the JSON content of a sweep file, also an older one."""
        peaks = Peaks.of(content["peaks"]) if content["peaks"] else None
        older = {"predicted_tensors": "predicted_tensor_bytes"}
        known = {older.get(name, name): value for name, value in content.items()}
        return cls(**{**known, "peaks": peaks, "seconds": tuple(content["seconds"])})


@dataclass(frozen=True)
class SweepPoint:
    """Predicted and measured results of one batch size, with and without a plan."""

    batch_size: int
    fingerprint: str
    budget_bytes: int
    predicted_overhead: float | None
    eager: BatchResult
    planned: BatchResult

    @property
    def time(self) -> Ratio | None:
        """Time ratio of planned to eager; None where one of them was not run."""
        if not self.eager.seconds or not self.planned.seconds:
            return None
        return ratio(list(self.planned.seconds), list(self.eager.seconds))

    @property
    def at_floor(self) -> bool:
        """Whether no plan fits the budget, so that this is the plan with the minimum feasible peak."""
        return (self.planned.predicted_bytes or 0) > self.budget_bytes

    @property
    def saved(self) -> float | None:
        """The part of the process's peak that the plan saves; None where one of them was not run."""
        if self.eager.peaks is None or self.planned.peaks is None:
            return None
        return 1 - self.planned.peaks.process_bytes / self.eager.peaks.process_bytes

    @classmethod
    def read(cls, content: dict[str, Any]) -> "SweepPoint":
        """Read a sweep point from the JSON content of a sweep file, also an older one."""
        known = {"eager" if name == "plain" else name: value for name, value in content.items()}  # in older files
        sides = {side: BatchResult.read(known[side]) for side in ("eager", "planned")}
        return cls(**{**known, **sides})


@dataclass(frozen=True, repr=False)
class Sweep(Saved):
    """Batch sizes of a subject with and without a plan.

    Attributes:
        subject: its name.
        settings: what the points have in common; a file is continued only with the same.
        points: one for each batch size.
    """

    KIND = "Sweep"

    subject: str
    settings: SweepSettings
    points: tuple[SweepPoint, ...]

    @property
    def frame(self) -> "pandas.DataFrame":
        """The sweep as a table: one row for each batch size, in bytes and seconds."""
        import pandas

        return pandas.DataFrame([_row(point) for point in self.points])

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Sweep":
        """The sweep that a file holds; older ones call the subject by the function that makes it."""
        points = tuple(SweepPoint.read(point) for point in content["points"])
        return cls(models.title(content["subject"]), SweepSettings(**content["settings"]), points)

    def __repr__(self) -> str:
        lines = [
            f"Sweep: {self.subject}, {_describe_settings(self.settings)}",
            f"  {'batch':>6}{'process peak':>14}{'with a plan':>14}{'':>8}{'step':>14}{'with a plan':>14}   time",
        ]
        return "\n".join([*lines, *(_line(point) for point in self.points)])


def _describe_settings(settings: SweepSettings) -> str:
    if settings.reduction is not None:
        wanted = f"peak above static reduced by {settings.reduction:.0%}"
    else:
        wanted = f"budget {settings.budget}"
    return wanted + (f", within {format_bytes(settings.memory_bytes)}" if settings.memory_bytes else "")


def _line(point: SweepPoint) -> str:
    sides = point.eager, point.planned
    peaks = [format_bytes(side.peaks.process_bytes) if side.peaks else "does not fit" for side in sides]
    times = [format_seconds(statistics.median(side.seconds)) if side.seconds else "–" for side in sides]
    saved = f"{-point.saved:+.1%}" if point.saved is not None else ""
    time = f"{point.time}, within noise" if point.time and point.time.is_noise else str(point.time or "")
    predicted = f" (predicted ×{1 + point.predicted_overhead:.3f})" if point.predicted_overhead is not None else ""
    predicted += ", at the floor" if point.at_floor else ""
    return (
        f"  {point.batch_size:>6}{peaks[0]:>14}{peaks[1]:>12}{saved:>8}{times[0]:>14}{times[1]:>14}   {time}{predicted}"
    )


def _row(point: SweepPoint) -> dict[str, Any]:
    row: dict[str, Any] = {"batch_size": point.batch_size, "budget_bytes": point.budget_bytes}
    for name, side in (("eager", point.eager), ("planned", point.planned)):
        row[f"{name}_problem"] = side.problem
        row[f"{name}_predicted_tensor_bytes"] = side.predicted_tensor_bytes
        row[f"{name}_predicted_bytes"] = side.predicted_bytes
        for meter in ("tensor_bytes", "allocator_bytes", "process_bytes"):
            row[f"{name}_{meter}"] = getattr(side.peaks, meter, None)
        row[f"{name}_seconds"] = statistics.median(side.seconds) if side.seconds else None
    time = point.time
    row |= {"predicted_overhead": point.predicted_overhead, "saved": point.saved, "at_floor": point.at_floor}
    return row | {f"time_{name}": getattr(time, name, None) for name in ("median", "low", "high")}


def sweep(
    subject: SubjectMaker,
    batch_sizes: Iterable[int],
    budget: int | float | str | None = None,
    reduction: float | None = None,
    or_floor: bool = False,
    memory: int | float | str | None = None,
    rounds: int = ROUNDS,
    repeats: int = 3,
    path: str | os.PathLike[str] | None = None,
    watcher: Callable[["Sweep"], None] | None = None,
) -> Sweep:
    """Peak memory and latency of each batch size, with and without a plan, predicted beside measured.

    Args:
        subject: `subject(batch_size)` returns the subject to train; `acwb.models.resnet152`, say.
        batch_sizes: in the order in which they are measured.
        budget: for every batch size: bytes, "1.5GiB", or "60%" of its peak without a plan.
        reduction: instead: by which part the peak above static is to be lower, 0.5 for half.
        or_floor: where no plan fits that, take the one with the lowest peak, and say so.
        memory: a hard cap under which each is tried first; without it, what this machine has.
        rounds: how often the steps with and without a plan take turns.
        repeats: how often the profiler times each op.
        path: a JSON file for the points, each as soon as it is measured; what it holds already is not measured again.
        watcher: called with what there is by now, whenever a batch size is done.

    Example:
        >>> acwb.sweep(acwb.models.resnet152, [4, 8, 16], reduction=0.5, path="results/sweep.json")
    """
    check_maker("sweep", subject)
    sizes = list(batch_sizes)
    _check_sizes(sizes, budget, reduction)
    check_count("rounds", rounds)
    check_count("repeats", repeats)
    memory_bytes = parse_bytes(memory) if memory is not None else None
    settings = SweepSettings(budget, reduction, memory_bytes, rounds, repeats, torch.__version__, or_floor)
    name = subject(sizes[0]).name
    if path is not None:
        files.make_folder(Path(path).parent)  # before hours of measuring, not after them
    done = {point.batch_size: point for point in _saved_points(path, name, settings)}
    for size in tqdm(sizes, desc=f"sweep of {name}"):
        if size not in done or done[size].fingerprint != trace(subject(size)).graph.fingerprint:
            done[size] = _point(subject, size, settings)
            if path is not None:
                Sweep(name, settings, tuple(done.values())).save(path)
        if watcher is not None:
            watcher(Sweep(name, settings, tuple(done[each] for each in sizes if each in done)))
    return Sweep(name, settings, tuple(done[size] for size in sizes))


def _check_sizes(sizes: list[int], budget: int | float | str | None, reduction: float | None) -> None:
    """Refuse batch sizes and budgets that cannot be measured, before anything runs."""
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise AcwbError(f"batch_sizes is {sizes!r}: give whole numbers of at least 1, [4, 8, 16] say.")
    if (budget is None) == (reduction is None):
        raise AcwbError(f"budget is {budget!r} and reduction {reduction!r}: give one of them.")
    if reduction is not None and not (isinstance(reduction, (int, float)) and 0 <= reduction < 1):
        raise AcwbError(f"A reduction of {reduction!r} is not a part of the peak above static: give 0.5 for half.")
    if budget is not None:
        parse_bytes(budget, relative_to=ANY_PEAK)


def _saved_points(path: str | os.PathLike[str] | None, name: str, settings: SweepSettings) -> Iterator[SweepPoint]:
    """Points of an interrupted sweep with the same settings, from its file."""
    if path is None or not Path(path).exists():
        return
    earlier = Sweep.load(path)
    if (earlier.subject, earlier.settings) != (name, settings):
        raise AcwbError(
            f"{path} holds another sweep ({earlier.subject}, {earlier.settings}), not {name}, {settings}: choose "
            "another file, or remove this one."
        )
    yield from earlier.points


def _point(make_subject: SubjectMaker, batch_size: int, settings: SweepSettings) -> SweepPoint:
    make = partial(make_subject, batch_size)
    unplanned, plan, problem = run_in_fresh_process(_plans, make, settings)
    methods: dict[str, StepBuilder] = {"eager": eager}
    sides = {"eager": _try_to_fit(make, eager, unplanned, settings), "planned": BatchResult(problem, None, None)}
    if plan is not None:
        methods["planned"] = partial(planned, plan=plan)
        sides["planned"] = _try_to_fit(make, methods["planned"], plan, settings)
    running = {name: methods[name] for name, side in sides.items() if not side.problem}
    if running:
        needed = {name: sides[name].predicted_bytes or 0 for name in running}
        seconds = seconds_of(make, running, settings.rounds)
        peaks = peaks_of_each(make, running, needed, _device_of(unplanned))
        sides |= {name: replace(sides[name], peaks=peaks[name], seconds=tuple(seconds[name])) for name in running}
    return SweepPoint(
        batch_size,
        unplanned.profile.graph.fingerprint,
        _budget(unplanned, settings),
        plan.overhead if plan is not None else None,
        **sides,
    )


def _plans(make: Callable[[], Subject], settings: SweepSettings) -> tuple[Plan, Plan | None, str]:
    """Keeping everything; the plan; or why there is none."""
    costs = profile(trace(make()), settings.repeats)
    unplanned, trade_off = keep_all(costs), frontier(costs)
    try:
        return unplanned, trade_off.at(_budget(unplanned, settings)), ""
    except InfeasibleBudgetError as error:
        if settings.or_floor:
            return unplanned, trade_off.at(trade_off.floor_bytes), ""
        return unplanned, None, str(error)


def _device_of(plan: Plan) -> torch.device:
    return torch.device(plan.profile.graph.environment.device)


def _budget(unplanned: Plan, settings: SweepSettings) -> int:
    if settings.budget is not None:
        return parse_bytes(settings.budget, unplanned.profile.peak_bytes)
    return unplanned.profile.budget(settings.reduction or 0.0)


def _try_to_fit(make: Callable[[], Subject], method: StepBuilder, plan: Plan, settings: SweepSettings) -> BatchResult:
    """Check that a method fits: in training under the memory cap, or by its predicted peak and the free memory."""
    side = BatchResult("", plan.timeline.tensor_peak_bytes, plan.timeline.peak_bytes)
    memory = settings.memory_bytes
    if memory is None:
        needs, has = plan.timeline.peak_bytes, available_bytes(_device_of(plan))
        problem = (
            f"It needs {format_bytes(needs)}, and this machine has {format_bytes(has)} left." if needs > has else ""
        )
        return replace(side, problem=problem)
    try:
        train_within(make, method, memory)
    except DoesNotFitError as error:
        return replace(side, problem=str(error))
    return side
