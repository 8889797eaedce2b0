"""Prints how the planners trade memory for time, and how planning time grows: `make tradeoff`.

For each real subject: the frontier's overhead at given reductions of the peak, from fresh profiles; all planners at
twenty budgets between floor and baseline; the seconds that planning takes. Then planning time on synthetic networks.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy

import acwb
from acwb import models
from acwb.core.profile import Profile
from acwb.core.simulator import Timeline
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.experiments.synthetic_network import ResidualNetwork
from acwb.planning.frontier import Frontier
from acwb.planning.heuristics import keep_all, per_block, recompute_all, sqrt_n
from acwb.planning.mu_two import mu_two
from acwb.planning.plan import Plan
from acwb.results.figures import save_table

Result = TypeVar("Result")

RESULTS = "results/full"

BUDGETS = 20
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000)
# Subject, batch size, reductions of the peak above static, how many fresh profiles.
SUBJECTS = (
    ("resnet152", 16, (0.3, 0.5, 0.7), 3),
    ("bert", 16, (0.3, 0.5, 0.6), 3),
    ("encoder", 8, (0.2, 0.4), 1),
    ("resnet18", 8, (0.2, 0.4), 1),
)
OTHER_PLANNERS: tuple[Callable[[Profile, int], Plan], ...] = (keep_all, recompute_all, sqrt_n, per_block, mu_two)


@dataclass(frozen=True)
class Reduction:
    """Overhead of reducing the peak above static by a given part, as fractions of the step's time."""

    part: float
    tensors: float  # of the peak of tensor bytes
    total: float  # of the peak of all bytes, workspaces included
    least: float  # the proved bound for all bytes

    def __str__(self) -> str:
        return (
            f"−{self.part:.0%}: {self.tensors:+.2%} time for tensor bytes, {self.total:+.2%} for all bytes "
            f"(lower bound {self.least:+.2%})"
        )


@dataclass(frozen=True)
class Floor:
    """The lowest peak above static, relative to that without a plan: of tensor bytes, and of all bytes."""

    tensors: float
    total: float

    def __str__(self) -> str:
        return f"floor: {self.tensors - 1:.1%} of tensor bytes, {self.total - 1:.1%} of all bytes"


def study_subject(
    name: str, batch_size: int, wanted: tuple[float, ...], beside_others: bool
) -> tuple[list[Reduction], Floor, list[str]]:
    """Overheads and minimum feasible peak from one fresh profile of a subject. Run in a process of its own."""
    subject = models.maker(name)(batch_size=batch_size)
    profile = acwb.profile(acwb.trace(subject))
    return *reductions(profile, wanted), compare_planners(profile) if beside_others else []


def reductions(profile: Profile, wanted: tuple[float, ...]) -> tuple[list[Reduction], Floor]:
    """Overheads of the frontier at the given reductions that are feasible, and its minimum feasible peak."""
    frontier, static = acwb.frontier(profile), profile.graph.static_bytes
    timelines = [frontier.plan(point).timeline for point in frontier.points]
    plain = keep_all(profile).timeline
    whole = plain.tensor_peak_bytes - static, plain.peak_bytes - static
    lowest = min(each.tensor_peak_bytes for each in timelines), min(each.peak_bytes for each in timelines)
    floor = Floor((lowest[0] - static) / whole[0], (lowest[1] - static) / whole[1])
    found = []
    for part in [part for part in wanted if 1 - part >= max(floor.tensors, floor.total)]:
        tensors, total = (static + (1 - part) * size for size in whole)
        first = min(each.seconds for each in timelines if each.tensor_peak_bytes <= tensors)
        second = min(each.seconds for each in timelines if each.peak_bytes <= total)
        least = acwb.lower_bound(profile, int(total)) / plain.seconds
        found.append(Reduction(part, first / plain.seconds - 1, second / plain.seconds - 1, least))
    return found, floor


def compare_planners(profile: Profile) -> list[str]:
    """Every planner at budgets from floor to baseline beside the frontier, and the seconds that each takes."""
    seconds, frontier = _timed(acwb.frontier, profile)
    budgets = [int(size) for size in numpy.linspace(frontier.floor_bytes, frontier.baseline_bytes, BUDGETS)]
    looked_up = [_timed(_timeline, frontier, size) for size in budgets]
    waits = sorted(each * 1e3 for each, _ in looked_up)
    lines = [
        f"frontier: {len(frontier.points)} points in {seconds:.2f} s; a plan with its timeline: median "
        f"{statistics.median(waits):.1f} ms, most {waits[-1]:.1f} ms"
    ]
    for other in OTHER_PLANNERS:
        pairs = [_timed(other, profile, size) for size in budgets]
        fitting = [(ours, plan) for (_, ours), (_, plan) in zip(looked_up, pairs, strict=True) if plan.fits]
        ahead = [ours.seconds / plan.timeline.seconds for ours, plan in fitting]
        claimed = sum(plan.claimed_peak_bytes <= size for size, (_, plan) in zip(budgets, pairs, strict=True))
        behind = sum(ratio > 1 + 1e-9 for ratio in ahead)
        lines.append(
            f"{other.__name__}: fits {len(fitting)} of {BUDGETS} budgets ({claimed} claimed), there the frontier takes "
            + (f"×{min(ahead):.3f} to ×{max(ahead):.3f} of its time" if ahead else "–")
            + f"; ahead of the frontier at {behind}; at most {max(pairs, key=lambda pair: pair[0])[0]:.2f} s to plan"
        )
    return lines


def _timed(function: Callable[..., Result], *arguments: Any) -> tuple[float, Result]:
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def _timeline(frontier: Frontier, size: int) -> Timeline:
    """Without the reserve that `at` leaves: the others leave none."""
    point = frontier.point_within(size)
    assert point is not None  # no budget is below the floor
    return frontier.plan(point).timeline


def growth() -> list[str]:
    """Seconds of planning for growing networks, and the exponent of their growth."""
    lines, counts, seconds = [], [], []
    for size in SIZES:
        profile = ResidualNetwork(size).profile()
        taken, frontier = _timed(acwb.frontier, profile)
        counts.append(len(profile.graph.ops))
        seconds.append(taken)
        lines.append(f"{counts[-1]:,} ops: {len(frontier.points):,} points in {taken:.2f} s")
    exponent = numpy.polyfit(numpy.log(counts), numpy.log(seconds), 1)[0]
    return [*lines, f"planning time grows with the number of ops to the power of {exponent:.2f}"]


def main() -> None:
    """Print everything, a fresh process for each profile; keep the worst of what the profiles say."""
    rows: list[dict[str, Any]] = []
    for name, batch_size, wanted, profiles in SUBJECTS:
        floors: list[Floor] = []
        found: list[list[Reduction]] = []
        for number in range(profiles):
            some, floor, lines = run_in_fresh_process(study_subject, name, batch_size, wanted, number == 0)
            found.append(some)
            floors.append(floor)
            _write(f"{name}, batch {batch_size}, profile {number + 1}: ", [*some, floor, *lines])
        worst = [max(same, key=lambda each: each.tensors) for same in zip(*found, strict=True)]
        floor = max(floors, key=lambda each: each.tensors)
        _write(f"{name}, batch {batch_size}, worst: ", [*worst, floor])
        known = {"subject": models.title(name), "batch_size": batch_size, "profiles": profiles, "floor": floor.tensors}
        rows += [{**known, **asdict(each)} for each in worst]
        save_table("tradeoff", rows, RESULTS)
    _write("synthetic: ", growth())


def _write(start: str, lines: list[Any]) -> None:
    sys.stdout.write("".join(f"{start}{line}\n" for line in lines))
    sys.stdout.flush()
