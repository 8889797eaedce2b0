"""The fastest plan of a small step by A* search, or a lower bound where time runs out.

The space is that of all schedules: the ops in their order; before each, any earlier op that writes nowhere may be
recomputed, as often and in whatever order; any resident storage may be dropped at any time. A state is the next op and
the resident set. Dropping is free, so a state with a superset of storages at no higher cost dominates; and whatever is
missing and needed must be recomputed, which bounds the remaining cost from below.
"""

import heapq
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from acwb.core.graph import StepGraph
from acwb.core.profile import Profile
from acwb.core.schedule import Schedule, ScheduleBuilder, with_frees
from acwb.core.simulator import simulate
from acwb.errors import AcwbError
from acwb.planning.bounds import lower_bound
from acwb.planning.frontier import explore
from acwb.planning.plan import Plan
from acwb.units import format_bytes

LIMIT_SECONDS = 60.0


def optimal(profile: Profile, budget_bytes: int | None = None, limit_seconds: float = LIMIT_SECONDS) -> Plan:
    """The fastest plan within a budget if the search ends in time, else the frontier's; with `Plan.proven_seconds`.

    Args:
        profile: the result of `acwb.profile`.
        budget_bytes: the limit on the peak; by default the peak without a plan.
        limit_seconds: how long to search.
    """
    size = profile.peak_bytes if budget_bytes is None else budget_bytes
    frontier = explore(profile)
    fallback = frontier.at(size) if size >= frontier.floor_bytes else None
    search = ScheduleSearch(profile, size, fallback.extra_seconds if fallback else math.inf)
    search.run(limit_seconds)
    proven = search.proven_seconds
    if search.schedule is not None and simulate(profile, search.schedule).peak_bytes > size:
        # The search does not count saved RNG states, so its bound holds; it is repeated with room left for them.
        states = 1 + sum(op.random for op in profile.graph.ops)
        room = size - states * profile.graph.environment.random_state_bytes
        search = ScheduleSearch(profile, room, fallback.extra_seconds if fallback else math.inf)
        search.run(limit_seconds)
        search.proven_seconds = proven
        search.stopped = search.schedule is None
    if search.schedule is not None:
        peak = simulate(profile, search.schedule).peak_bytes
        return Plan(profile, search.schedule, "optimal", budget_bytes, peak, search.proven_seconds)
    if fallback is not None:
        if search.stopped:
            proven = max(proven, min(lower_bound(profile, size), fallback.extra_seconds))
        return Plan(profile, fallback.schedule, "optimal", budget_bytes, fallback.timeline.peak_bytes, proven)
    if search.stopped:
        raise AcwbError(
            f"No plan for {format_bytes(size)} was found in {limit_seconds:g} s of search, nor proved not to exist: "
            f"give more time, or {format_bytes(frontier.floor_bytes)}, for which frontier has one."
        )
    raise frontier.infeasible(size)


@dataclass(frozen=True)
class Move:
    """A run of an op: the items that it reads and makes, as bits of a `ResidentSet`."""

    rank: int
    by_rule: bool
    reads: int
    makes: int
    ends: int  # the views of an older copy of what is made
    seconds: float
    workspace: int


@dataclass(frozen=True)
class SearchState:
    """The next op of the step, and the items that are resident."""

    rank: int
    resident: int


class ResidentSet:
    """What can be resident, as bits of one integer: each storage that the step makes, and each view of a storage."""

    def __init__(self, graph: StepGraph) -> None:
        made = [storage for storage in graph.storages if storage.name in graph.maker]
        views = [op.name for op in graph.ops if op.view]
        names = [*(storage.name for storage in made), *views]
        self._bit = {name: 1 << position for position, name in enumerate(names)}
        self.size = {1 << position: storage.bytes for position, storage in enumerate(made)}
        self._views: dict[int, int] = {}  # of each storage
        for op in graph.ops:
            for item in items_of(self.of(op.inputs) if op.view else 0):
                self._views[item] = self._views.get(item, 0) | self._bit[op.name]
        self.bytes = cache(self._bytes)

    def of(self, names: Iterable[str]) -> int:
        """The set of the storages and views called `names`."""
        items = 0
        for name in names:
            items |= self._bit.get(name, 0)
        return items

    def views_of(self, storages: int) -> int:
        """The views of a set of storages."""
        views = 0
        for item in items_of(storages):
            views |= self._views.get(item, 0)
        return views

    def _bytes(self, items: int) -> int:
        return sum(self.size.get(item, 0) for item in items_of(items))

    def least_drops(self, items: int, needed: int) -> Iterator[int]:
        """Every minimal subset of `items` with at least `needed` bytes."""
        if needed <= 0:
            yield 0
            return
        sizes = sorted(((self.size.get(item, 0), item) for item in items_of(items)), reverse=True)
        sizes = [pair for pair in sizes if pair[0]]
        left = [0] * (len(sizes) + 1)  # the bytes of all items from a position on
        for position in reversed(range(len(sizes))):
            left[position] = left[position + 1] + sizes[position][0]

        def choose(start: int, missing: int, chosen: int) -> Iterator[int]:
            for position in range(start, len(sizes)):
                if left[position] < missing:
                    return
                size, item = sizes[position]
                if size >= missing:
                    yield chosen | item
                else:
                    yield from choose(position + 1, missing - size, chosen | item)

        yield from choose(0, needed, 0)


def items_of(items: int) -> Iterator[int]:
    """The items of a set, each as a set of its own."""
    while items:
        item = items & -items
        yield item
        items ^= item


class MoveTable:
    """All moves of a step: the first run of each op, and each recomputation.

    Attributes:
        firsts: the first run of each op; it costs nothing, because every schedule has it.
        recomputations: the recomputation of each op, and by each rule.
        recomputing: the recomputations that make each item.
        made: the items that the ops before each rank make.
        needed: the items that the ops from each rank on read.
        useful: the items that can help to recompute what is needed from each rank on.
    """

    def __init__(self, profile: Profile, items: ResidentSet) -> None:
        self._profile = profile
        self._items = items
        graph = profile.graph
        self.firsts = [self._move(rank, first=True) for rank in range(len(graph.ops))]
        self.recomputations = [self._move(rank) for rank, op in enumerate(graph.ops) if op.recomputable]
        self.recomputations += [self._move(graph.rank[name], by_rule=True) for name in profile.rules]
        self.recomputing: dict[int, list[Move]] = {}
        for move in self.recomputations:
            for item in items_of(move.makes):
                self.recomputing.setdefault(item, []).append(move)
        count = len(graph.ops)
        self.made, self.needed = [0] * (count + 1), [0] * (count + 1)
        for rank, move in enumerate(self.firsts):
            self.made[rank + 1] = self.made[rank] | move.makes
        self.needed[count] = items.of(graph.kept)
        for rank in reversed(range(count)):
            self.needed[rank] = self.needed[rank + 1] | self.firsts[rank].reads
        self.useful = [self._closure(self.needed[rank] & self.made[rank]) for rank in range(count + 1)]

    def _move(self, rank: int, first: bool = False, by_rule: bool = False) -> Move:
        profile, items = self._profile, self._items
        op = profile.graph.ops[rank]
        inputs, outputs = op.rule_inputs if by_rule else op.inputs, op.results(by_rule)
        through = [need for need in op.needs if self._is_view_of(need, inputs)]
        seconds, workspace = profile.seconds[op.name], profile.workspace_bytes[op.name]
        if by_rule:
            seconds, workspace = profile.rules[op.name]
        return Move(
            rank,
            by_rule,
            reads=items.of((*inputs, *through, *((*op.mutates, *op.holds) if first else ()))),
            makes=items.of((op.name,) if op.view else outputs),
            ends=items.views_of(items.of(outputs)),
            seconds=0.0 if first else seconds,
            workspace=workspace,
        )

    def _is_view_of(self, name: str, inputs: Sequence[str]) -> bool:
        op = self._profile.graph.op(name)
        return op.view and set(op.inputs) <= set(inputs)

    def _closure(self, items: int) -> int:
        """A set with all that recomputations of its items read, and so on."""
        closure = pending = items
        while pending:
            reads = 0
            for item in items_of(pending):
                for move in self.recomputing.get(item, ()):
                    reads |= move.reads
            pending = reads & ~closure
            closure |= reads
        return closure

    def remaining_seconds(self, state: SearchState) -> float:
        """Lower bound on the cost from a state: what is missing and needed must be recomputed, each op once."""
        seen = pending = self.needed[state.rank] & self.made[state.rank] & ~state.resident
        costs: dict[int, float] = {}
        while pending:
            item = pending & -pending
            pending ^= item
            moves = self.recomputing.get(item)
            if not moves:
                return math.inf
            rank, reads = moves[0].rank, moves[0].reads
            costs[rank] = max(costs.get(rank, 0.0), min(move.seconds for move in moves))
            for move in moves[1:]:
                reads &= move.reads
            missing = reads & ~state.resident & ~seen
            seen |= missing
            pending |= missing
        return sum(costs.values())


class ScheduleSearch:
    """A* over all schedules within a budget, cheapest first.

    Attributes:
        schedule: the fastest schedule, if it is faster than `known_seconds`.
        proven_seconds: no schedule takes less extra time.
        stopped: whether time ran out.
    """

    def __init__(self, profile: Profile, size: int, known_seconds: float) -> None:
        self.graph = profile.graph
        self.known_seconds = known_seconds
        self.schedule: Schedule | None = None
        self.proven_seconds = 0.0
        self.stopped = False
        self._room = size - self.graph.static_bytes
        self._items = ResidentSet(self.graph)
        self._moves = MoveTable(profile, self._items)
        self._came_from: dict[SearchState, tuple[SearchState, Move] | None] = {}

    def run(self, limit_seconds: float) -> None:
        """Search until the fastest schedule is found, none is faster than what is known, or time is up."""
        until = time.monotonic() + limit_seconds
        start = SearchState(0, 0)
        costs = {start: 0.0}
        self._came_from[start] = None
        queue: list[tuple[float, int, int, float, SearchState]] = [(0.0, 0, 0, 0.0, start)]
        expanded: dict[int, list[tuple[int, float]]] = {}  # at each rank, the resident sets with their costs
        order = 0
        while queue:
            bound, _, _, cost, state = heapq.heappop(queue)
            self.proven_seconds = max(self.proven_seconds, bound)
            if state.rank == len(self.graph.ops) and not self._moves.needed[-1] & ~state.resident:
                self.schedule = self._schedule(state)
                return
            if time.monotonic() > until:
                self.stopped = True
                return
            others = expanded.setdefault(state.rank, [])
            is_dominated = any(state.resident & ~more == 0 and paid <= cost for more, paid in others)
            if cost > costs[state] or is_dominated:
                continue
            others.append((state.resident, cost))
            for following, move in self._successors(state):
                paid = cost + move.seconds
                if paid < costs.get(following, math.inf):
                    total = paid + self._moves.remaining_seconds(following)
                    if total < self.known_seconds - 1e-12:
                        costs[following] = paid
                        self._came_from[following] = (state, move)
                        order += 1
                        heapq.heappush(queue, (total, -following.rank, order, paid, following))
        self.proven_seconds = self.known_seconds

    def _successors(self, state: SearchState) -> Iterator[tuple[SearchState, Move]]:
        """The states after each possible move, with as little dropped as it takes."""
        if state.rank < len(self.graph.ops):
            move = self._moves.firsts[state.rank]
            for resident in self._after(state.resident, move):
                yield SearchState(state.rank + 1, resident & self._moves.useful[state.rank + 1]), move
        useful = self._moves.useful[state.rank]
        for move in self._moves.recomputations:
            if move.rank < state.rank and move.makes & ~state.resident & useful:
                for resident in self._after(state.resident, move):
                    yield SearchState(state.rank, resident & useful), move

    def _after(self, resident: int, move: Move) -> Iterator[int]:
        """The possible resident sets after a move."""
        if move.reads & ~resident:
            return
        items = self._items
        over = items.bytes(resident | move.makes) + move.workspace - self._room
        for dropped in items.least_drops(resident & ~move.reads & ~move.makes, over):
            left = resident & ~dropped
            if dropped:
                left &= ~items.views_of(dropped)
            yield (left & ~move.ends) | move.makes

    def _schedule(self, state: SearchState) -> Schedule:
        """The schedule of the moves that led to a state."""
        moves: list[tuple[Move, bool]] = []
        while (came_from := self._came_from[state]) is not None:
            before, move = came_from
            moves.append((move, before.rank == state.rank))
            state = before
        builder = ScheduleBuilder(self.graph)
        for move, is_recomputation in reversed(moves):
            if is_recomputation:
                builder.recompute(move.rank, move.by_rule)
            else:
                builder.run_until(move.rank + 1)
        return with_frees(self.graph, builder.runs)
