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
from acwb.planning.problem import PlanningProblem, is_op_slot, rank_of_slot, slot_before, slot_of
from acwb.planning.recompute_state import ChangeLog, RecomputeChain, RecomputeSites, RecomputeState, sites_of_schedule

HEURISTICS = (recompute_all, sqrt_n, per_block)


@dataclass(frozen=True)
class SearchEffort:
    """How much work the search spends; the defaults plan ResNet-152 in seconds.

    Attributes:
        exhaustive_ops: steps up to this many ops get everything: every heuristic is descended from, several drops at
            once are tried where one raises another peak, and every recomputation of every point is exchanged.
        mu_two_ops: steps up to this many ops also start from the choices of μ-TWO.
        mu_two_total_ops: about how many ops all those starts have together; of more choices, every n-th is taken.
        leap_drops: how many drops in a row may stay above the old peak before they lead below it, or are undone.
        restarts: how many budgets, between floor and peak, the descent restarts at from the solution of a linear
            program, in steps of more than `exhaustive_ops`. At 40 % of ResNet-152's peak above static, the time is
            7 % above the lower bound with 12 restarts, and 46 % with none (of the extra time).
        tidy_parts: recomputations that fit again are undone whenever the peak fell by one part in so many.
        dearest_ratio: drops that cost more than this many step times for the whole peak are rejected: at 1000, one step
            time for a thousandth of the peak.
    """

    exhaustive_ops: int = 100
    mu_two_ops: int = 1000
    mu_two_total_ops: int = 50_000
    leap_drops: int = 8
    restarts: int = 12
    tidy_parts: int = 200
    dearest_ratio: int = 1000


DEFAULT_EFFORT = SearchEffort()
WITHOUT_RESTARTS = SearchEffort(restarts=0)


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of a frontier: its peak and its time; `Frontier.plan(point)` gives the plan itself."""

    peak_bytes: int
    seconds: float
    _log: ChangeLog = field(compare=False, repr=False)

    @property
    def _sites(self) -> RecomputeSites:
        """Which ops are recomputed before which op."""
        return self._log.sites()


def descend(problem: PlanningProblem, effort: SearchEffort = DEFAULT_EFFORT) -> list[FrontierPoint]:
    """All non-dominated points that the search meets, from the largest peak to the floor.

    Descent from keeping everything can end where only several drops at once would help, so the plans of heuristics are
    tried, too; where one of them is lower, the descent continues from there. In a small step every point is improved by
    exchanges; in a larger one the descent restarts at several budgets.
    """
    is_small = problem.count <= effort.exhaustive_ops
    descent = _Descent(problem, effort)
    descent.drop_pinned()
    descent.run()
    points = non_dominated(descent.points)
    if descent.ends_in_optimizer:  # where nothing but the random states that are kept for replays can be spared
        without = _Descent(problem, effort, replays=False)
        without.drop_pinned()
        without.run()
        points = non_dominated(points + without.points)
    if not is_small:
        points = _restarted(problem, points, effort)
    for sites in _heuristic_plans(problem, effort) if problem.pins == NO_PINS else ():
        other = _Descent(problem, effort)
        other.start(sites)
        if is_small or _is_ahead(other.points[0], points):
            other.tidy()
        is_lower = other.points[-1].peak_bytes < points[-1].peak_bytes
        if is_lower or (is_small and any(_is_ahead(point, points) for point in other.points)):
            other.run()
        points = non_dominated(points + other.points)
    if is_small:
        points = _exchanged(problem, points, effort)
    return points


def _restarted(problem: PlanningProblem, points: list[FrontierPoint], effort: SearchEffort) -> list[FrontierPoint]:
    """The points with those of descents from the LP solution at several budgets, each down to the next budget."""
    low, high = points[-1].peak_bytes, points[0].peak_bytes
    sizes = [low + (high - low) * number // effort.restarts for number in range(effort.restarts)]
    visited = list(points)
    for stop, size in zip([0, *sizes], sizes, strict=False):
        if (relaxation := relax_at_peak(problem, size)) is not None:
            descent = _Descent(problem, effort)
            descent.drop_pinned()
            descent.keep_only(relaxation, size)
            descent.run(stop)
            visited += descent.points
    return non_dominated(visited)


def _heuristic_plans(problem: PlanningProblem, effort: SearchEffort) -> Iterator[RecomputeSites]:
    """The recompute sites of the heuristics' plans, and in a step that is not too large of μ-TWO's."""
    for heuristic in HEURISTICS:
        yield sites_of_schedule(problem, heuristic(problem.profile).schedule)
    if problem.count <= effort.mu_two_ops:
        choices = list(discard_sets(problem.profile))
        for discard in choices[:: max(1, len(choices) * problem.count // effort.mu_two_total_ops)]:
            yield sites_of_schedule(problem, just_in_time(problem.graph, discard))


def _is_ahead(point: FrontierPoint, points: list[FrontierPoint]) -> bool:
    """Whether a point takes less time than all others that need no more memory."""
    return all(point.seconds < other.seconds for other in points if other.peak_bytes <= point.peak_bytes)


def _exchanged(problem: PlanningProblem, points: list[FrontierPoint], effort: SearchEffort) -> list[FrontierPoint]:
    """The points with those that result from exchanging each recomputation in turn for other drops."""
    visited = list(points)
    for point in points:
        descent = _Descent(problem, effort)
        descent.start(point._sites)
        descent.exchange(point.peak_bytes)
        visited += descent.points
    return non_dominated(visited)


def non_dominated(points: list[FrontierPoint]) -> list[FrontierPoint]:
    """The points that no other point beats in both memory and time, from the largest peak to the smallest."""
    kept: list[FrontierPoint] = []
    least_seconds = float("inf")
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if point.seconds < least_seconds:
            kept.append(point)
            least_seconds = point.seconds
    return kept[::-1]


class _Descent:
    """One greedy descent: a state that loses recomputation time for memory, and the points that it visits.

    `replays=False` drops no result of a random op, for which a random state would be kept.
    """

    def __init__(self, problem: PlanningProblem, effort: SearchEffort, replays: bool = True) -> None:
        self.problem = problem
        self.effort = effort
        self.state = RecomputeState(problem)
        self.points: list[FrontierPoint] = []
        usable = [
            may and size > 0 and (replays or not problem.random[maker])
            for may, size, maker in zip(problem.droppable, problem.size, problem.maker, strict=True)
        ]
        self.usable = numpy.array(usable, dtype=bool)
        self.scores = numpy.zeros(len(problem.names))  # lower bounds on the seconds per byte of dropping each storage
        self.max_score = effort.dearest_ratio * self.state.seconds / max(1, self.state.peak()[1])

    @property
    def ends_in_optimizer(self) -> bool:
        """Whether random ops are recomputed, and the peak is in the optimizer phase."""
        rank = rank_of_slot(self.state.peak()[0])
        return self.state.has_replays and self.problem.graph.ops[rank].phase is Phase.OPTIMIZER

    def start(self, sites: RecomputeSites) -> None:
        """Start from given recomputations."""
        self.state.load(sites)
        self._note()

    def tidy(self) -> None:
        """Undo the recomputations that do not lower the peak."""
        self._tidy(self.state.peak()[1])
        self._note()

    def _note(self) -> None:
        self.points.append(FrontierPoint(self.state.peak()[1], self.state.seconds, self.state.change_log()))

    def keep_only(self, relaxation: PeakRelaxation, limit: int) -> None:
        """Drop every storage that is idle at the relaxation's op and not kept there, then restore what fits again."""
        state, slot = self.state, slot_of(relaxation.rank)
        for storage in sorted(self.usable.nonzero()[0].tolist(), key=lambda storage: -self.problem.maker[storage]):
            if storage not in relaxation.kept and (use := state.idle_use_after(storage, slot)) is not None:
                state.apply(state.chain(storage, rank_of_slot(use), kept=relaxation.kept))
        self._tidy(max(limit, state.peak()[1]))

    def run(self, stop: int = 0) -> None:
        """Drop storages until nothing lowers the peak any more, or it is at most `stop`."""
        tidy_below = self.state.peak()[1]
        baseline = tidy_below
        while True:
            slot, peak = self.state.peak()
            if peak < tidy_below:
                self._tidy(peak)
                tidy_below = peak - baseline // self.effort.tidy_parts
            self._note()
            if peak <= stop or (not self._drop(slot, peak) and not self._leap(slot, peak)):
                return

    def exchange(self, limit: int) -> None:
        """Undo each recomputation in turn and drop other storages instead, if that takes less time."""
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
        """Drop storages until the peak is within `limit`, as long as the step takes less than `seconds`."""
        while self.state.seconds < seconds:
            slot, peak = self.state.peak()
            if peak <= limit or not self._drop(slot, peak):
                break
        self._tidy(max(limit, self.state.peak()[1]))

    def _leap(self, slot: int, peak: int) -> bool:
        """Drop a storage although that raises the peak, if further drops then lead below the old one."""
        if self.problem.count > self.effort.exhaustive_ops:
            return False
        state = self.state
        for storage, use in (self._idle_in_longest_gap(slot) | self._idle_in_shorter_gap(slot)).items():
            mark = state.mark()
            self._take(state.chain(storage, rank_of_slot(use)), peak)
            for _ in range(self.effort.leap_drops):
                new_slot, new_peak = state.peak()
                if new_peak < peak or not self._drop(new_slot, new_peak):
                    break
            if state.peak()[1] < peak:
                return True
            state.revert(mark)
        return False

    def _longest(self, slot: int) -> "numpy.ndarray":
        """Which storages are idle at `slot` in their longest gap between two uses."""
        state = self.state
        begins = state.idle_from < slot + (
            not is_op_slot(slot)
        )  # what is used last in a recompute slot is idle after it
        return self.usable & begins & (slot_before(rank_of_slot(state.idle_until)) > slot)

    def _idle_in_longest_gap(self, slot: int) -> dict[int, int]:
        """Storages that are idle at `slot` in their longest gap, with their next use."""
        storages = self._longest(slot).nonzero()[0]
        return dict(zip(storages.tolist(), self.state.idle_until[storages].tolist(), strict=True))

    def _idle_in_shorter_gap(self, slot: int) -> dict[int, int]:
        """Storages that are idle at `slot` in another gap, with their next use."""
        others = (self.usable & ~self._longest(slot)).nonzero()[0].tolist()
        return {storage: use for storage in others if (use := self.state.idle_use_after(storage, slot)) is not None}

    def drop_pinned(self) -> None:
        """Drop every storage that is pinned to be recomputed."""
        for storage in sorted(self.problem.pinned, key=lambda storage: -self.problem.maker[storage]):
            if not self.problem.droppable[storage] or self.state.idle_until[storage] < self.problem.boundary:
                raise AcwbError(
                    f"{self.problem.names[storage]} cannot be recomputed: it is not idle between the forward and the "
                    "backward phase. Take it out of recompute."
                )
            self.state.apply(self.state.chain(storage, rank_of_slot(int(self.state.idle_until[storage]))))

    def _drop(self, slot: int, peak: int) -> bool:
        """Drop the cheapest storage that is idle at `slot`; False where every drop would raise another peak."""
        return self._drop_of(self._idle_in_longest_gap(slot), slot, peak) or self._drop_of(
            self._idle_in_shorter_gap(slot), slot, peak
        )

    def _drop_of(self, uses: dict[int, int], slot: int, peak: int) -> bool:
        """Drop the idle storage with the least recomputation time per byte, by lazy greedy evaluation.

        `uses` has the next use of each candidate. A score from an earlier turn counts as a lower bound, so only the
        candidate with the least one is evaluated; it is taken if its new score is still the least, else it goes back
        into the queue (lazy evaluation: Minoux 1978; CELF: Leskovec et al. 2007). There are two stages: a lower bound
        on the cost of the chain, then its exact cost, for which it is applied.
        """
        state = self.state
        queue = numpy.full(len(self.scores), numpy.inf)  # the score of each candidate, infinite where it is none
        candidates = list(uses)
        queue[candidates] = self.scores[candidates]
        exact: set[int] = set()  # candidates whose score in the queue is exact
        alone: set[int] = set()  # candidates for whose chain nothing stays alive, because that raised the peak
        while True:
            storage = int(queue.argmin())
            if queue[storage] > self.max_score:
                return False
            queue[storage] = numpy.inf
            second = float(queue.min())
            chain = state.chain(storage, rank_of_slot(uses[storage]), 0 if storage in alone else peak)
            score = self._least_cost(chain) / self.problem.size[storage]
            if storage in exact or score <= second:
                mark, before = state.mark(), state.seconds
                self._take(chain, peak)
                score = (state.seconds - before) / self.problem.size[storage]
                if storage in exact or score <= second:
                    if score <= self.max_score and int(state.need[slot]) < peak and state.peak()[1] <= peak:
                        self.scores[storage] = 0.0  # its next gap has another cost
                        return True
                    state.revert(mark)
                    if chain.extends:
                        alone.add(storage)
                        queue[storage] = score
                    continue
                state.revert(mark)
                exact.add(storage)
            queue[storage] = self.scores[storage] = score

    def _least_cost(self, chain: RecomputeChain) -> float:
        """Lower bound on the cost of a chain: ops that are recomputed later, too, may then not have to be."""
        repeated = [op for op in chain.added if self.state.run_later(op, chain.rank)]
        return max(0.0, self.state.cost(chain) - sum(self.problem.seconds[op] for op in repeated))

    def _take(self, chain: RecomputeChain, limit: int) -> None:
        """Apply a chain, and keep its results, where there is room, until they would be recomputed next."""
        self.state.apply(chain)
        for op in chain.added:
            if later := self.state.run_later(op, chain.rank):
                self.state.restore(*later, limit)

    def _tidy(self, limit: int) -> None:
        """Undo every recomputation whose result fits within `limit`, the most expensive first."""
        seconds = self.problem.seconds
        for rank, op in sorted(self.state.restorable(limit), key=lambda pair: -seconds[pair[1]]):
            if op in self.state.chains.get(rank, ()):
                self.state.restore(rank, op, limit)
