"""Greedy search for the Pareto frontier of peak memory and time.

At the current peak, drop the idle activation with the best bytes saved per second of recomputation; never accept a drop
that raises another peak; afterwards restore every earlier drop that fits again. To escape greedy's local optimum at low
budgets, restart from LP solutions at several budgets. All non-dominated states form the frontier.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy

from acwb.core.graph import Phase
from acwb.core.schedule import just_in_time
from acwb.errors import AcwbError
from acwb.planning.bounds import PeakRelaxation, relax_at_peak
from acwb.planning.heuristics import per_block, recompute_all, sqrt_n
from acwb.planning.mu_two import discard_sets
from acwb.planning.pins import NO_PINS
from acwb.planning.problem import PlanningProblem
from acwb.planning.recompute_state import ChangeLog, RecomputeChain, RecomputeSites, RecomputeState, sites_of_schedule

HEURISTICS = (recompute_all, sqrt_n, per_block)
SMALL = 100  # ops; a step for which there is time to try everything
MEDIUM = 1000  # ops; a step for which there is time to try some of what the paper does
EFFORT = 50_000  # ops of all such tries together
LEAP = 8  # drops at once
STARTS = 12  # budgets at which the way down begins anew


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of a frontier: its peak and its time; `Frontier.plan(point)` gives the plan itself."""

    peak_bytes: int
    seconds: float
    _log: ChangeLog = field(compare=False, repr=False)

    @property
    def _sites(self) -> RecomputeSites:
        """Which ops are recomputed before which op."""
        return self._log.chains()


def descend(problem: PlanningProblem, starts: int = STARTS) -> list[FrontierPoint]:
    """All non-dominated points that are met, from the largest peak to the floor.

    The way down from keeping everything can end where only several drops at once would help, so what others do is also
    tried; where that leads lower, the way goes on from there. For a small step there is time to improve every point; in
    a larger one the way begins anew at as many budgets as there are `starts`.
    """
    descent = _Descent(problem)
    descent.drop_pinned()
    descent.run()
    points = non_dominated(descent.points)
    if descent.ends_in_optimizer:  # where nothing but the random states that are kept for replays can be spared
        without = _Descent(problem, replays=False)
        without.drop_pinned()
        without.run()
        points = non_dominated(points + without.points)
    if problem.count > SMALL:
        points = _restarted(problem, points, starts)
    for chains in _other_plans(problem) if problem.pins == NO_PINS else ():
        other = _Descent(problem)
        other.start(chains)
        if problem.count <= SMALL or _is_ahead(other.points[0], points):
            other.tidy()
        is_lower = other.points[-1].peak_bytes < points[-1].peak_bytes
        if is_lower or (problem.count <= SMALL and any(_is_ahead(point, points) for point in other.points)):
            other.run()
        points = non_dominated(points + other.points)
    if problem.count <= SMALL:
        points = _improved(problem, points)
    return points


def _restarted(problem: PlanningProblem, points: list[FrontierPoint], starts: int) -> list[FrontierPoint]:
    """The points with those of ways that begin at several budgets, each down to the next one."""
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    sizes = [low + (high - low) * number // starts for number in range(starts)]
    found = list(points)
    for stop, size in zip([0, *sizes], sizes, strict=False):
        if (wanted := relax_at_peak(problem, size)) is not None:
            descent = _Descent(problem)
            descent.drop_pinned()
            descent.keep_only(wanted, size)
            descent.run(stop)
            found += descent.points
    return non_dominated(found)


def _other_plans(problem: PlanningProblem) -> Iterator[RecomputeSites]:
    """What other planners run again where."""
    for habit in HEURISTICS:
        yield sites_of_schedule(problem, habit(problem.profile).schedule)
    if problem.count <= MEDIUM:
        chosen = list(discard_sets(problem.profile))
        for discard in chosen[:: max(1, len(chosen) * problem.count // EFFORT)]:
            yield sites_of_schedule(problem, just_in_time(problem.graph, discard))


def _is_ahead(point: FrontierPoint, points: list[FrontierPoint]) -> bool:
    """Whether a point takes less time than all others that need no more memory."""
    return all(point.seconds < other.seconds for other in points if other.peak_bytes <= point.peak_bytes)


def _improved(problem: PlanningProblem, points: list[FrontierPoint]) -> list[FrontierPoint]:
    """The points after giving up each recomputation in turn, and dropping something else instead."""
    found = list(points)
    for point in points:
        descent = _Descent(problem)
        descent.start(point._sites)
        descent.exchange(point.peak_bytes)
        found += descent.points
    return non_dominated(found)


def non_dominated(points: list[FrontierPoint]) -> list[FrontierPoint]:
    """Those that no other point beats in both memory and time, from the largest peak to the smallest."""
    found: list[FrontierPoint] = []
    best = float("inf")
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if point.seconds < best:
            found.append(point)
            best = point.seconds
    return found[::-1]


class _Descent:
    def __init__(self, problem: PlanningProblem, replays: bool = True) -> None:
        self.problem = problem
        self.state = RecomputeState(problem)
        self.points: list[FrontierPoint] = []
        usable = [
            may and size > 0 and (replays or not problem.random[maker])
            for may, size, maker in zip(problem.droppable, problem.size, problem.maker, strict=True)
        ]
        self.usable = numpy.array(usable, dtype=bool)
        self.scores = numpy.zeros(len(problem.names))  # seconds for each byte, as far as known
        # Nobody pays the time of a whole step for a thousandth of the peak.
        self.too_much = 1000 * self.state.seconds / max(1, self.state.peak()[1])

    @property
    def ends_in_optimizer(self) -> bool:
        """Whether random ops run again, and the peak is where the optimizer runs."""
        at = self.state.peak()[0] // 2
        return self.state.has_replays and self.problem.graph.ops[at].phase is Phase.OPTIMIZER

    def start(self, chains: RecomputeSites) -> None:
        """Begin where some ops run again already."""
        self.state.load(chains)
        self._note()

    def tidy(self) -> None:
        """Undo what is of no use."""
        self._tidy(self.state.peak()[1])
        self._note()

    def _note(self) -> None:
        self.points.append(FrontierPoint(self.state.peak()[1], self.state.seconds, self.state.change_log()))

    def keep_only(self, wanted: PeakRelaxation, limit: int) -> None:
        """Drop all that waits at a look and is not to be kept there, then keep again what fits within a limit."""
        state, slot = self.state, 2 * wanted.rank + 1
        for each in sorted(self.usable.nonzero()[0].tolist(), key=lambda each: -self.problem.maker[each]):
            if each not in wanted.kept and (use := state.idle_use_after(each, slot)) is not None:
                state.apply(state.chain(each, use // 2, kept=wanted.kept))
        self._tidy(max(limit, state.peak()[1]))

    def run(self, stop: int = 0) -> None:
        """Go down as far as it goes, or until the peak is at most `stop`."""
        tidy_below = self.state.peak()[1]
        baseline = tidy_below
        while True:
            slot, peak = self.state.peak()
            if peak < tidy_below:
                self._tidy(peak)
                tidy_below = peak - baseline // 200
            self._note()
            if peak <= stop or (not self._drop(slot, peak) and not self._leap(slot, peak)):
                return

    def exchange(self, limit: int) -> None:
        """Give up each recomputation in turn, and drop something else instead, if that takes less time."""
        state = self.state
        for rank, op in sorted((rank, op) for rank, ops in state.chains.items() for op in ops):
            if op in state.chains.get(rank, ()):
                mark, seconds = state.mark(), state.seconds
                if state.restore(rank, op, sys.maxsize):
                    self._settle(limit, seconds)
                    if state.peak()[1] <= limit and state.seconds < seconds:
                        self._note()
                        continue
                state.revert(mark)

    def _settle(self, limit: int, seconds: float) -> None:
        """Go down to a limit, as long as that takes less than `seconds`."""
        while self.state.seconds < seconds:
            slot, peak = self.state.peak()
            if peak <= limit or not self._drop(slot, peak):
                break
        self._tidy(max(limit, self.state.peak()[1]))

    def _leap(self, slot: int, peak: int) -> bool:
        """Drop something although that makes a new peak, if further drops then lead below the old one."""
        if self.problem.count > SMALL:
            return False
        state = self.state
        for each, use in (self._idle_in_longest_gap(slot) | self._idle_in_shorter_gap(slot)).items():
            mark = state.mark()
            self._take(state.chain(each, use // 2), peak)
            for _ in range(LEAP):
                there, high = state.peak()
                if high < peak or not self._drop(there, high):
                    break
            if state.peak()[1] < peak:
                return True
            state.revert(mark)
        return False

    def _longest(self, slot: int) -> "numpy.ndarray":
        """Which storages wait longest where they wait at `slot`."""
        state = self.state
        return self.usable & (state.idle_from < slot + (slot % 2 == 0)) & (state.idle_until // 2 * 2 > slot)

    def _idle_in_longest_gap(self, slot: int) -> dict[int, int]:
        """What only waits at `slot`, and for which use, as far as this is its longest wait."""
        found = self._longest(slot).nonzero()[0]
        return dict(zip(found.tolist(), self.state.idle_until[found].tolist(), strict=True))

    def _idle_in_shorter_gap(self, slot: int) -> dict[int, int]:
        """What else waits at `slot`, and for which use."""
        others = (self.usable & ~self._longest(slot)).nonzero()[0].tolist()
        return {each: use for each in others if (use := self.state.idle_use_after(each, slot)) is not None}

    def drop_pinned(self) -> None:
        """Make again whatever is pinned to be."""
        for each in sorted(self.problem.pinned, key=lambda each: -self.problem.maker[each]):
            if not self.problem.droppable[each] or self.state.idle_until[each] < self.problem.boundary:
                raise AcwbError(
                    f"{self.problem.names[each]} cannot be recomputed: it does not wait between the forward and the "
                    "backward phase. Take it out of recompute."
                )
            self.state.apply(self.state.chain(each, int(self.state.idle_until[each]) // 2))

    def _drop(self, slot: int, peak: int) -> bool:
        """Drop the cheapest storage that waits at `slot`; False where nothing can be dropped without a new peak."""
        return self._drop_of(self._idle_in_longest_gap(slot), slot, peak) or self._drop_of(
            self._idle_in_shorter_gap(slot), slot, peak
        )

    def _drop_of(self, waiting: dict[int, int], slot: int, peak: int) -> bool:
        state = self.state
        known = numpy.full(len(self.scores), numpy.inf)
        candidates = list(waiting)
        known[candidates] = self.scores[candidates]
        exact: set[int] = set()
        alone: set[int] = set()  # whatever stays for these makes a new peak
        while True:
            each = int(known.argmin())
            if known[each] > self.too_much:
                return False
            known[each] = numpy.inf
            others = float(known.min())
            chain = state.chain(each, waiting[each] // 2, 0 if each in alone else peak)
            score = self._least_cost(chain) / self.problem.size[each]
            if each in exact or score <= others:
                mark, before = state.mark(), state.seconds
                self._take(chain, peak)
                score = (state.seconds - before) / self.problem.size[each]
                if each in exact or score <= others:
                    if score <= self.too_much and int(state.need[slot]) < peak and state.peak()[1] <= peak:
                        self.scores[each] = 0.0  # whatever it waits for next is another matter
                        return True
                    state.revert(mark)
                    if chain.extends:
                        alone.add(each)
                        known[each] = score
                    continue
                state.revert(mark)
                exact.add(each)
            known[each] = self.scores[each] = score

    def _least_cost(self, chain: RecomputeChain) -> float:
        """What a chain costs at least: all that is made again later anyway may turn out to be made only once."""
        again = [op for op in chain.added if self.state.run_later(op, chain.rank)]
        return max(0.0, self.state.cost(chain) - sum(self.problem.seconds[op] for op in again))

    def _take(self, chain: RecomputeChain, limit: int) -> None:
        """Run a chain; what it makes is kept, if there is room, until it would be made again anyway."""
        self.state.apply(chain)
        for op in chain.added:
            if later := self.state.run_later(op, chain.rank):
                self.state.restore(*later, limit)

    def _tidy(self, limit: int) -> None:
        """Keep again whatever fits, the most expensive first."""
        seconds = self.problem.seconds
        for rank, op in sorted(self.state.restorable(limit), key=lambda pair: -seconds[pair[1]]):
            if op in self.state.chains.get(rank, ()):
                self.state.restore(rank, op, limit)
