"""The Pareto frontier of a profiled step: every non-dominated trade-off of peak memory and time, down to the floor."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from acwb import files
from acwb.core.graph import Role
from acwb.core.profile import Profile
from acwb.core.schedule import Run, with_frees
from acwb.errors import AcwbError, InfeasibleBudgetError, check_type
from acwb.planning.bounds import lower_bound
from acwb.planning.frontier_search import DEFAULT_EFFORT, FrontierPoint, SearchEffort, descend, non_dominated
from acwb.planning.pins import NO_PINS, Pins, resolve_pins
from acwb.planning.plan import Plan
from acwb.planning.problem import PlanningProblem
from acwb.planning.recompute_state import ChangeLog, runs_of_sites
from acwb.units import format_bytes, parse_bytes
from acwb.value_checks import check_value

BOUND_COUNT = 24  # budgets at which `Frontier.bounds` has a lower bound, beside the floor
MAX_LISTED_STORAGES = 5  # in the message on an infeasible budget
PROCESS_RESERVE = 400  # one part in so many of the budget: processes needed 1 to 5 MB beside 1 to 3 GB of allocations


@dataclass(frozen=True, repr=False)
class Frontier:
    """The Pareto frontier of a profiled step: non-dominated plans from keeping everything to the minimum feasible peak.

    Attributes:
        points: from the largest peak and the least time to the smallest peak (the floor) and the most time.
    """

    _problem: PlanningProblem
    points: tuple[FrontierPoint, ...]

    @property
    def profile(self) -> Profile:
        """The profile that was planned."""
        return self._problem.profile

    @property
    def baseline_bytes(self) -> int:
        """The peak of the step without a plan, also with pins."""
        return self.profile.peak_bytes

    @property
    def floor_bytes(self) -> int:
        """The minimum feasible peak, as far as the search found one."""
        return self.points[-1].peak_bytes

    def at(self, budget: int | float | str) -> Plan:
        """The fastest plan whose peak is within `budget`: bytes, "1.5GiB", or "60%" of the peak without a plan.

        Where possible, a little of the budget is left for memory that a process needs beside torch's allocator.
        """
        size = parse_bytes(budget, self.baseline_bytes)
        reserve = 0 if size >= self.baseline_bytes else size // PROCESS_RESERVE
        point = self.point_within(max(size - reserve, self.floor_bytes))
        if point is None or point.peak_bytes > size:
            raise self.infeasible(size)
        plan = self.plan(point, size)
        if not plan.fits:
            raise AcwbError(
                f"The frontier has a plan of {format_bytes(point.peak_bytes)}, but its peak is "
                f"{format_bytes(plan.timeline.peak_bytes)}: make the frontier of this profile again."
            )
        return plan

    def point_within(self, size: int) -> FrontierPoint | None:
        """The fastest point whose peak is at most `size` bytes, without any reserve."""
        fitting = (point for point in self.points if point.peak_bytes <= size)  # the fastest first
        return next(fitting, None)

    def cheapest_within(self, overhead: float) -> Plan:
        """The plan with the least peak whose overhead is at most `overhead`: 0.05 is 5 % more time."""
        if isinstance(overhead, bool) or not isinstance(overhead, (int, float)) or not overhead >= 0:
            raise AcwbError(f"An overhead of {overhead!r} is not a fraction of the step's time: give 0.05 for 5 %.")
        limit = self.profile.step_seconds * (1 + overhead)
        for point in reversed(self.points):
            if point.seconds <= limit and (plan := self.plan(point)).timeline.seconds <= limit:
                return plan
        raise AcwbError(f"No plan takes at most {overhead:.1%} more time, because of what is pinned: give more.")

    def plan(self, point: FrontierPoint, budget: int | None = None) -> Plan:
        """The plan of a point, with a budget to answer to if one is given."""
        schedule = with_frees(self._problem.graph, runs_of_sites(self._problem, point._sites))
        return Plan(self.profile, schedule, "frontier", budget, point.peak_bytes)

    def overhead(self, point: FrontierPoint) -> float:
        """The overhead of a point: 0.05 is 5 % more time than the step without a plan."""
        return point.seconds / self.profile.step_seconds - 1

    @cached_property
    def bounds(self) -> tuple[tuple[int, float], ...]:
        """Budgets in bytes, from the floor to the peak without a plan, each with a lower bound on the extra seconds."""
        low, high = self.floor_bytes, self.baseline_bytes
        sizes = (low + (high - low) * number // BOUND_COUNT for number in range(BOUND_COUNT + 1))
        return tuple((size, lower_bound(self.profile, size)) for size in sizes)

    def lower_bound_seconds(self, budget: int) -> float:
        """Lower bound on the extra seconds of any plan within a budget: that of the next larger one of `bounds`."""
        return next((seconds for size, seconds in self.bounds if size >= budget), 0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the frontier as JSON, bound to its profile; the file appears whole or not at all."""
        pins = self._problem.pins
        content = {
            "fingerprint": self.profile.graph.fingerprint,
            "measurements": self.profile.digest,
            "keep": sorted(pins.keep),
            "recompute": sorted(pins.recompute),
            "points": [
                {"peak_bytes": point.peak_bytes, "seconds": point.seconds, "recompute_sites": point._sites}
                for point in self.points
            ],
        }
        files.write_saved(path, "Frontier", content)

    @classmethod
    def load(cls, path: str | os.PathLike[str], profile: Profile) -> "Frontier":
        """Read a frontier that `save` wrote, for the profile that it was made for."""
        with files.open_saved(path, "Frontier") as content:
            if content["fingerprint"] != profile.graph.fingerprint:
                raise AcwbError(
                    f"{path} is a frontier of another graph than that of this profile ({profile.graph.title}, "
                    f"{', '.join(profile.graph.environment.batch)}): make one of this profile."
                )
            if content["measurements"] != profile.digest:
                raise AcwbError(
                    f"{path} is a frontier of another profile of this graph, with other times or workspaces: make one "
                    "of this profile."
                )
            pins = Pins(frozenset(content["keep"]), frozenset(content["recompute"]))
            problem = PlanningProblem(profile, pins)
            points = tuple(_point_from_json(problem, item) for item in content["points"])
            if not points or non_dominated(list(points)) != list(points):
                raise ValueError("its points are not a frontier")
            frontier = cls(problem, points)
            for point in (points[0], points[-1]):
                if frontier.plan(point).timeline.peak_bytes != point.peak_bytes:
                    raise ValueError(f"the peak of its plan for {point.peak_bytes:,} bytes is another one")
        return frontier

    def infeasible(self, size: int) -> InfeasibleBudgetError:
        """The error for a budget below the floor: it names the floor, its op and the largest storages alive there."""
        timeline = self.plan(self.points[-1]).timeline
        op = timeline.peak_entry.op if isinstance(timeline.peak_entry, Run) else ""
        storage = self._problem.graph.storage
        alive = [name for name, _ in timeline.alive_at_peak if storage[name].role not in STATIC][:MAX_LISTED_STORAGES]
        listed = ", ".join(f"{name} ({format_bytes(storage[name].bytes)})" for name in alive)
        return InfeasibleBudgetError(
            f"No plan fits in {format_bytes(size)} ({size:,} bytes): the least is {format_bytes(self.floor_bytes)} "
            f"({self.floor_bytes:,} bytes), at {op}, where {format_bytes(self._problem.graph.static_bytes)} of "
            f"parameters, inputs and optimizer state stand beside {listed}. Give at least that, or use a smaller "
            "batch. The search for the least follows measured times: another profile may give a slightly other one.",
            self.floor_bytes,
            op,
            tuple(alive),
        )

    def __repr__(self) -> str:
        static, baseline = self._problem.graph.static_bytes, self.baseline_bytes
        lines = [
            f"Frontier: {len(self.points):,} plans from {format_bytes(baseline)} down to "
            f"{format_bytes(self.floor_bytes)}, of which {format_bytes(static)} are static memory",
            "  peak above static      peak      time",
        ]
        for percent in range(0, 100, 10):
            wanted = static + (baseline - static) * (100 - percent) // 100
            if wanted >= self.floor_bytes:
                point = next(point for point in self.points if point.peak_bytes <= wanted)
                lines.append(
                    f"  {-percent:>+14} %  {format_bytes(point.peak_bytes):>12}  {self.overhead(point):>+7.1%}"
                )
        return "\n".join(lines)


def _point_from_json(problem: PlanningProblem, item: dict[str, Any]) -> FrontierPoint:
    check_value(item["peak_bytes"], int, "peak_bytes")
    check_value(item["seconds"], float, "seconds")
    changes = [(rank, tuple(ops), ()) for rank, ops in item["recompute_sites"]]
    for rank, ops, _ in changes:
        if not 0 <= rank < problem.count or not all(problem.may_recompute(op) for op in ops):
            raise ValueError(f"it recomputes {ops} before op {rank}")
    return FrontierPoint(int(item["peak_bytes"]), float(item["seconds"]), ChangeLog(problem, changes))


STATIC = (Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.OPTIMIZER_STATE)


def frontier(profile: Profile, keep: str | Iterable[str] = (), recompute: str | Iterable[str] = ()) -> Frontier:
    """The Pareto frontier of peak memory and time of a profiled step.

    Args:
        profile: the result of `acwb.profile`, or of `Profile.load`.
        keep: activations that are never dropped, by op name, module path or regular expression.
        recompute: activations that are always dropped and recomputed.

    Example:
        >>> frontier = acwb.frontier(profile)
        >>> plan = frontier.at("2.5GiB")
    """
    check_type("frontier", profile, Profile, "acwb.profile")
    return explore(profile, resolve_pins(profile.graph, keep, recompute))


def explore(profile: Profile, pins: Pins = NO_PINS, effort: SearchEffort = DEFAULT_EFFORT) -> Frontier:
    """The frontier with some activations pinned, and with a given effort."""
    problem = PlanningProblem(profile, pins)
    return Frontier(problem, tuple(descend(problem, effort)))
