"""Compares methods of saving activation memory on one subject, measured by the same code: `make bench`.

In one fresh process, each method is first compared with eager (its wrong results stand beside its
figures), then its peak is read from torch's allocator, then all take turns for the time. For the peak of each one there
is a plan of ours that needs no more.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from acwb import models
from acwb.capture.step import TracedStep
from acwb.capture.tracer import trace
from acwb.evaluation.baselines import (
    INDUCTOR,
    captured,
    eager,
    memory_budget,
    op_policy,
    per_block,
    sqrt_n,
)
from acwb.evaluation.memory import allocated_growth
from acwb.evaluation.timing import Ratio, interleave, ratio
from acwb.evaluation.verifier import BUFFER, GRADIENT, compare
from acwb.execution.rewriter import rewrite
from acwb.files import Saved
from acwb.planning.frontier import Frontier, frontier
from acwb.planning.plan import Plan
from acwb.profiling.profiler import profile
from acwb.subject import Step, StepBuilder, Subject, SubjectMaker
from acwb.units import format_bytes

ROUNDS = 11
EAGER = "eager"
SAME_OVERHEAD = 0.02  # plans whose overheads differ by less than this are one: the smaller one stands for both

ALTERNATIVES: Mapping[str, StepBuilder] = {
    "captured, no plan": captured,
    "per block": per_block,
    "every second block": partial(per_block, every=2),
    "√n segments": sqrt_n,
    "op policy": op_policy,
    **{f"memory budget {share}": partial(memory_budget, share=share) for share in (0.7, 0.3)},
}
COMPILED: Mapping[str, StepBuilder] = {
    f"inductor, budget {share}": partial(memory_budget, share=share, backend=INDUCTOR) for share in (1.0, 0.5)
}


@dataclass(frozen=True)
class MethodResult:
    """Measurements of one method: peak, time, and the tensors that differ from eager.

    Attributes:
        peak_bytes: peak of torch's allocator, static memory included.
        first_seconds: its first step, with all that is compiled or captured for it.
        gradient_error: the relative error of all gradients together against eager's; 0 where all are equal.
        wrong_gradients: number of gradients that are not bitwise equal to eager's.
        wrong_buffers: number of buffers (batch-norm statistics) that are not bitwise equal to eager's.
        seconds: of a step, round by round.
        predicted_overhead: of a plan of ours.
    """

    name: str
    peak_bytes: int
    first_seconds: float
    gradient_error: float
    wrong_gradients: int
    wrong_buffers: int
    seconds: tuple[float, ...] = ()
    predicted_overhead: float | None = None


@dataclass(frozen=True, repr=False)
class MethodComparison(Saved):
    """Methods on one subject; the first row is eager.

    Attributes:
        matching_plans: the plan of ours that needs no more than a method, by the method's name.
        curve: the whole trade-off as predicted: peak in bytes, overhead.
    """

    KIND = "Contest"

    subject: str
    batch_size: int
    options: dict[str, Any]
    static_bytes: int
    rows: tuple[MethodResult, ...]
    matching_plans: Mapping[str, str]
    curve: tuple[tuple[int, float], ...]

    @property
    def title(self) -> str:
        """The subject with its batch size and options, for headings."""
        options = "".join(f", {key} {value}" for key, value in self.options.items())
        return f"{self.subject} at batch {self.batch_size}{options}"

    def row(self, name: str) -> MethodResult:
        """The measurements of the method `name`."""
        return next(row for row in self.rows if row.name == name)

    def time(self, name: str, reference: str = EAGER) -> Ratio:
        """The time of one method relative to another's."""
        return ratio(list(self.row(name).seconds), list(self.row(reference).seconds))

    def share(self, name: str) -> float:
        """Peak above static as a fraction of eager's."""
        return (self.row(name).peak_bytes - self.static_bytes) / (self.row(EAGER).peak_bytes - self.static_bytes)

    @property
    def records(self) -> list[dict[str, Any]]:
        """One record for each method, as the table and the CSV file have it."""
        return [self._record(row) for row in self.rows]

    def _record(self, row: MethodResult) -> dict[str, Any]:
        record: dict[str, Any] = {
            "subject": self.title,
            "method": row.name,
            "peak_bytes": row.peak_bytes,
            "static_bytes": self.static_bytes,
            "peak_above_static": round(self.share(row.name), 4),
            "wrong_gradients": row.wrong_gradients,
            "gradient_error": row.gradient_error,
            "wrong_buffers": row.wrong_buffers,
            "first_seconds": round(row.first_seconds, 3),
            "predicted_overhead": row.predicted_overhead,
        }
        if row.seconds:
            mine = self.time(row.name)
            record |= {"time": mine.median, "time_low": mine.low, "time_high": mine.high, "rounds": mine.rounds}
        if row.name in self.matching_plans:
            record |= {
                "ours": self.matching_plans[row.name],
                "ours_time": self.time(self.matching_plans[row.name]).median,
            }
        return record

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "MethodComparison":
        """The comparison that a file holds; older ones have other words for the subject and the matching plans."""
        return cls(
            subject=models.title(content["subject"]),
            batch_size=content["batch_size"],
            options=content["options"],
            static_bytes=content["static_bytes"],
            rows=tuple(MethodResult(**{**row, "seconds": tuple(row["seconds"])}) for row in content["rows"]),
            matching_plans=content.get("matching_plans", content.get("rivals")),
            curve=tuple((size, more) for size, more in content["curve"]),
        )

    def __repr__(self) -> str:
        whole, before = format_bytes(self.row(EAGER).peak_bytes), format_bytes(self.static_bytes)
        lines = [
            f"{self.title}: eager needs {whole}, of which {before} are static",
            f"  {'method':<22}{'peak':>7}  {'time':<24}{'our plan at that peak':<24}"
            f"{'of its cost':<13}what differs from eager",
        ]
        return "\n".join([*lines, *(self._line(row) for row in self.rows)])

    def _line(self, row: MethodResult) -> str:
        mine = str(self.time(row.name)) if row.seconds else "–"
        other = part = ""
        if row.name in self.matching_plans:
            ours, theirs = self.time(self.matching_plans[row.name]), self.time(row.name)
            other = str(ours)
            costs = theirs.median > 1 and not theirs.is_noise
            part = f"{max(0, ours.median - 1) / (theirs.median - 1):.0%}" if costs else "noise"
        elif row.predicted_overhead is not None:
            other = f"predicted ×{1 + row.predicted_overhead:.3f}"
        return f"  {row.name:<22}{self.share(row.name):>7.1%}  {mine:<24}{other:<24}{part:<13}{_describe_errors(row)}"


def _describe_errors(row: MethodResult) -> str:
    parts = []
    if row.wrong_gradients:
        parts.append(f"{row.wrong_gradients} gradients, relative error {row.gradient_error:.1e}")
    if row.wrong_buffers:
        parts.append(f"{row.wrong_buffers} buffers")
    return "; ".join(parts) or "nothing, bitwise"


def compare_methods(
    make: SubjectMaker,
    batch_size: int,
    options: Mapping[str, Any],
    methods: Mapping[str, StepBuilder],
    rounds: int,
    repeats: int = 3,
    step: TracedStep | None = None,
) -> MethodComparison:
    """Measure all methods and matching plans on one workload; with rounds=0, only check correctness.

    Args:
        make: `make(batch_size=…, **options)` makes the subject.
        batch_size: of the subject.
        options: of the subject.
        methods: what is measured beside eager and our plans, by name.
        rounds: how often all of them are timed in turn.
        repeats: how often the profiler times each op for our plans.
        step: the subject's step, where it is captured already.
    """
    subject = step.subject if step else make(batch_size=batch_size, **options)
    steps: dict[str, Step] = {}
    rows: list[MethodResult] = []
    for label, method in tqdm({EAGER: eager, **methods}.items(), desc=f"{subject.name}: each alone"):
        steps[label], row = _measure_method(label, subject, method)
        rows.append(row)
    static, options = subject.static_bytes, dict(options)
    if not rounds:
        return MethodComparison(subject.name, batch_size, options, static, tuple(rows), {}, ())
    step = step or trace(subject.twin())
    trade_off = frontier(profile(step, repeats))
    plans, matching = _matching_plans(trade_off, rows)
    for label, plan in tqdm(plans.items(), desc=f"{subject.name}: plans"):
        steps[label], row = _measure_method(label, subject, partial(_planned_step, step, plan))
        rows.append(replace(row, predicted_overhead=plan.overhead))
    seconds = interleave(steps, rounds, warm_up=False)
    timed = (replace(row, seconds=tuple(seconds[row.name])) for row in rows)
    curve = tuple((point.peak_bytes, trade_off.overhead(point)) for point in trade_off.points)
    return MethodComparison(subject.name, batch_size, options, static, tuple(timed), matching, curve)


def _measure_method(label: str, subject: Subject, method: StepBuilder) -> tuple[Step, MethodResult]:
    """Build a method's step, compare one iteration with eager, and measure its peak."""
    start = time.perf_counter()
    step = method(subject.twin())
    step()
    first = time.perf_counter() - start
    growth: list[int] = []

    def metered() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        growth.append(allocated_growth(lambda: losses.append(step()), subject.device))
        return losses[0]

    subject.free_gradients()
    found = compare(subject, metered)
    peak = subject.static_bytes + growth[0]
    gradients, buffers = found.of_kind(GRADIENT), found.of_kind(BUFFER)
    return step, MethodResult(label, peak, first, found.gradient_error, len(gradients), len(buffers))


def _planned_step(step: TracedStep, plan: Plan, _subject: Subject) -> Step:
    """A plan of ours, for a step that is captured once for all of them."""
    return rewrite(step, plan).run


def _matching_plans(trade_off: Frontier, rows: list[MethodResult]) -> tuple[dict[str, Plan], dict[str, str]]:
    """Plans of ours for the peaks of the others, and which stands against which."""
    plans: dict[str, Plan] = {}
    matching_plans: dict[str, str] = {}
    saving = [row for row in rows if trade_off.floor_bytes <= row.peak_bytes < (1 - SAME_OVERHEAD) * rows[0].peak_bytes]
    for row in sorted(saving, key=lambda row: row.peak_bytes):
        plan = trade_off.at(row.peak_bytes)
        if not plans or list(plans.values())[-1].overhead - plan.overhead > SAME_OVERHEAD:
            plans[f"ours, {format_bytes(plan.timeline.peak_bytes)}"] = plan
        matching_plans[row.name] = list(plans)[-1]
    return plans, matching_plans
