"""The numbers behind figures, as rows for a CSV file: what a reader needs to draw them again."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from acwb.core.graph import Phase, StepGraph
from acwb.core.profile import Profile
from acwb.evaluation.batch_sweep import Sweep, SweepPoint
from acwb.planning.frontier import Frontier
from acwb.planning.heuristics import keep_all
from acwb.planning.plan import Decision, Plan
from acwb.units import GIBIBYTE

Rows = list[dict[str, Any]]


def block_rows(graph: StepGraph, module: str) -> Rows:
    """A row for each op of a module: what it reads and makes, and which op it recomputes."""
    return [
        {
            "op": op.name,
            "phase": str(op.phase),
            "module": op.module,
            "recomputes": op.recomputes,
            "reads": " ".join(op.inputs),
            "makes": " ".join(op.outputs),
            "bytes": sum(graph.storage[name].bytes for name in op.outputs),
        }
        for op in graph.ops
        if f"{op.module}.".startswith(f"{module}.")
    ]


def breakdown_rows(plan: Plan) -> Rows:
    """A row for each storage that is alive at the peak, the largest first."""
    graph = plan.profile.graph
    return [
        {
            "storage": name,
            "copy": copy,
            "role": str(graph.storage[name].role),
            "module": graph.op(graph.maker[name]).module if name in graph.maker else "",
            "bytes": graph.storage[name].bytes,
        }
        for name, copy in plan.timeline.alive_at_peak
    ]


def tradeoff_rows(frontier: Frontier, others: Mapping[str, Iterable[Plan]] | None = None) -> Rows:
    """A row for each plan of each planner: its peak and its overhead."""
    ours = [
        {"planner": "frontier", "peak_bytes": point.peak_bytes, "overhead": frontier.overhead(point)}
        for point in frontier.points
    ]
    rest = [
        {"planner": name, "peak_bytes": plan.timeline.peak_bytes, "overhead": plan.overhead}
        for name, plans in (others or {}).items()
        for plan in plans
    ]
    return ours + rest


def summary_row(plan: Plan) -> dict[str, Any]:
    """A plan's row in a report's table: peak and time with and without it, decisions."""
    static, plain, peak = plan.profile.graph.static_bytes, plan.profile.peak_bytes, plan.timeline.peak_bytes
    return {
        "model": plan.profile.graph.title,
        "without a plan, GiB": round(plain / GIBIBYTE, 3),
        "with a plan, GiB": round(peak / GIBIBYTE, 3),
        "peak": f"{peak / plain - 1:+.1%}",
        "peak above static": f"{(peak - static) / (plain - static) - 1:+.1%}",
        "step, ms": round(plan.profile.step_seconds * 1e3, 1),
        "with a plan, ms": round(plan.timeline.seconds * 1e3, 1),
        "time": f"{plan.overhead:+.1%}",
        "kept": sum(decision is Decision.RETAINED for decision in plan.decisions.values()),
        "recomputed": sum(decision is Decision.RECOMPUTE for decision in plan.decisions.values()),
    }


def profile_row(profile: Profile) -> dict[str, Any]:
    """A model's column in a report's table of profiles: ops, time, peak and what it is made of, activations."""
    ops, phases, activations = profile.graph.ops, profile.nodes.groupby("gtype")["run_time_ms"], profile.activations
    timeline = keep_all(profile).timeline
    at_peak = {str(role): sizes[timeline.peak_step] for role, sizes in timeline.by_role.items()}
    at_peak["workspace"] = timeline.peak_bytes - timeline.tensor_bytes[timeline.peak_step]
    return {
        "model": profile.graph.title,
        **{f"{phase} ops": sum(op.phase is phase for op in ops) for phase in Phase},
        **{f"{phase}, ms": round(phases.get_group(phase).sum(), 1) for phase in Phase if phase in phases.groups},
        "peak, GiB": round(timeline.peak_bytes / GIBIBYTE, 3),
        **{f"of which {role}, GiB": round(size / GIBIBYTE, 3) for role, size in at_peak.items()},
        "peak at": ops[profile.peak_rank].name,
        "activations": len(activations),
        "activations, GiB": round(activations["median_mem_size_bytes"].sum() / GIBIBYTE, 3),
        "idle, ms (median)": round(activations["inactive_time_ms"].median(), 1),
        "recomputation, ms (median)": round(activations["recomp_time_ms"].median(), 3),
    }


def batch_rows(sweep: Sweep) -> Rows:
    """A row for each batch size, as a report's tables have it: memory and time with and without a plan."""
    return [_batch_row(sweep.subject, point) for point in sweep.points]


def _batch_row(name: str, point: SweepPoint) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "batch": point.batch_size}
    for words, side in (("without a plan", point.eager), ("with a plan", point.planned)):
        row[f"peak {words}, GiB"] = round(side.peaks.process_bytes / GIBIBYTE, 3) if side.peaks else "does not fit"
        row[f"predicted {words}, GiB"] = round(side.predicted_bytes / GIBIBYTE, 3) if side.predicted_bytes else ""
        row[f"step {words}, ms"] = round(statistics.median(side.seconds) * 1e3) if side.seconds else ""
    row["peak"] = f"{-point.saved:+.1%}" + (" (floor)" if point.at_floor else "") if point.saved is not None else ""
    if point.time is not None:
        row["time"] = f"{point.time.median - 1:+.1%}" + (" (noise)" if point.time.is_noise else "")
        row["95 %"] = f"[{point.time.low - 1:+.1%}, {point.time.high - 1:+.1%}]"
    if point.predicted_overhead is not None:
        row["time, predicted"] = f"{point.predicted_overhead:+.1%}"
    return row
