"""The best plan for a small step, by search: proved, or with the bound that was proved when time ran out.

The space is that of all schedules: the ops in their order; before each, any earlier op that writes nowhere may run
again, as often and in whatever order; whatever is in memory may be dropped at any time. A state is the next op and what
is in memory. Dropping is free, so to have more for no more time is never worse; and whatever is missing and needed must
be made again, which bounds the rest of the way from below (A*).
"""

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

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
    """The fastest plan for a budget if it is found in time, else the frontier's; `Plan.proven_seconds` is the bound.

    Args:
        profile: what `acwb.profile` gave.
        budget_bytes: the limit; without one, everything is kept.
        limit_seconds: how long to search.
    """
    size = profile.peak_bytes if budget_bytes is None else budget_bytes
    known = explore(profile)
    best = known.at(size) if size >= known.floor_bytes else None
    search = ScheduleSearch(profile, size, best.extra_seconds if best else math.inf)
    search.run(limit_seconds)
    proved = search.proven_seconds
    if search.schedule is not None and simulate(profile, search.schedule).peak_bytes > size:
        # The search does not count random states, so what it proved holds; it goes on with room for them.
        states = 1 + sum(op.random for op in profile.graph.ops)
        room = size - states * profile.graph.environment.random_state_bytes
        search = ScheduleSearch(profile, room, best.extra_seconds if best else math.inf)
        search.run(limit_seconds)
        search.proven_seconds = proved
        search.stopped = search.schedule is None
    if search.schedule is not None:
        peak = simulate(profile, search.schedule).peak_bytes
        return Plan(profile, search.schedule, "optimal", budget_bytes, peak, search.proven_seconds)
    if best is not None:
        if search.stopped:
            proved = max(proved, min(lower_bound(profile, size), best.extra_seconds))
        return Plan(profile, best.schedule, "optimal", budget_bytes, best.timeline.peak_bytes, proved)
    if search.stopped:
        raise AcwbError(
            f"No plan for {format_bytes(size)} was found in {limit_seconds:g} s of search, nor proved not to exist: "
            f"give more time, or {format_bytes(known.floor_bytes)}, for which frontier has one."
        )
    raise known.infeasible(size)


@dataclass(frozen=True)
class Move:
    """A run of an op. Items are bits: the storages that the step makes, and the views of storages."""

    rank: int
    by_rule: bool
    reads: int
    makes: int
    ends: int  # views of an older copy of what is made
    seconds: float
    workspace: int


@dataclass(frozen=True)
class SearchState:
    """The next op of the step, and what is in memory."""

    rank: int
    there: int


class ScheduleSearch:
    """The way through all schedules, cheapest first.

    Attributes:
        schedule: the fastest schedule, if it is faster than what was known.
        proven_seconds: no schedule takes less extra time.
        stopped: whether time ran out.
    """

    def __init__(self, profile: Profile, size: int, known_seconds: float) -> None:
        self.profile = profile
        self.graph = profile.graph
        self.known_seconds = known_seconds
        self.schedule: Schedule | None = None
        self.proven_seconds = 0.0
        self.stopped = False
        self._room = size - self.graph.static_bytes
        made = [storage for storage in self.graph.storages if storage.name in self.graph.maker]
        views = [op.name for op in self.graph.ops if op.view]
        self._bit = {name: 1 << position for position, name in enumerate([*(each.name for each in made), *views])}
        self._size = {1 << position: storage.bytes for position, storage in enumerate(made)}
        self._views: dict[int, int] = {}  # of each storage
        for op in self.graph.ops:
            for item in _bits_of(self._bits(op.inputs) if op.view else 0):
                self._views[item] = self._views.get(item, 0) | self._bit[op.name]
        self._firsts = [self._move(rank, first=True) for rank in range(len(self.graph.ops))]
        self._agains = [self._move(rank) for rank, op in enumerate(self.graph.ops) if op.recomputable]
        self._agains += [self._move(self.graph.rank[name], by_rule=True) for name in profile.rules]
        self._makers: dict[int, list[Move]] = {}
        for move in self._agains:
            for item in _bits_of(move.makes):
                self._makers.setdefault(item, []).append(move)
        self._foresee()
        self._came: dict[SearchState, tuple[SearchState, Move] | None] = {}
        self._bytes = cache(self._bytes_of)

    def _bits(self, names: Sequence[str]) -> int:
        found = 0
        for name in names:
            found |= self._bit.get(name, 0)
        return found

    def _move(self, rank: int, first: bool = False, by_rule: bool = False) -> Move:
        op = self.graph.ops[rank]
        inputs, outputs = (op.rule_inputs, op.outputs[:1]) if by_rule else (op.inputs, op.outputs)
        through = [need for need in op.needs if self._is_view_of(need, inputs)]
        seconds, workspace = self.profile.seconds[op.name], self.profile.workspace_bytes[op.name]
        if by_rule:
            seconds, workspace = self.profile.rules[op.name]
        return Move(
            rank,
            by_rule,
            reads=self._bits((*inputs, *through, *((*op.mutates, *op.holds) if first else ()))),
            makes=self._bits((op.name,) if op.view else outputs),
            ends=self._views_of(self._bits(outputs)),
            seconds=0.0 if first else seconds,
            workspace=workspace,
        )

    def _is_view_of(self, name: str, inputs: Sequence[str]) -> bool:
        op = self.graph.op(name)
        return op.view and set(op.inputs) <= set(inputs)

    def _foresee(self) -> None:
        """For each place: what was made before it, what the ops from there on read, and what can help to make that."""
        count = len(self.graph.ops)
        self._made, self._needed, self._useful = [0] * (count + 1), [0] * (count + 1), [0] * (count + 1)
        for rank, move in enumerate(self._firsts):
            self._made[rank + 1] = self._made[rank] | move.makes
        self._needed[count] = self._bits(tuple(self.graph.kept))
        for rank in reversed(range(count)):
            self._needed[rank] = self._needed[rank + 1] | self._firsts[rank].reads
        for rank in range(count + 1):
            found = waiting = self._needed[rank] & self._made[rank]
            while waiting:
                more = 0
                for item in _bits_of(waiting):
                    for move in self._makers.get(item, ()):
                        more |= move.reads
                waiting = more & ~found
                found |= more
            self._useful[rank] = found

    def _bytes_of(self, items: int) -> int:
        return sum(self._size.get(item, 0) for item in _bits_of(items))

    def run(self, limit_seconds: float) -> None:
        """Search until the fastest schedule is found, it is sure that none is faster, or time is up."""
        until = time.monotonic() + limit_seconds
        start = SearchState(0, 0)
        costs = {start: 0.0}
        self._came[start] = None
        waiting: list[tuple[float, int, int, float, SearchState]] = [(0.0, 0, 0, 0.0, start)]
        done: dict[int, list[tuple[int, float]]] = {}
        order = 0
        while waiting:
            least, _, _, cost, state = heapq.heappop(waiting)
            self.proven_seconds = max(self.proven_seconds, least)
            if state.rank == len(self.graph.ops) and not self._needed[-1] & ~state.there:
                self.schedule = self._schedule(state)
                return
            if time.monotonic() > until:
                self.stopped = True
                return
            others = done.setdefault(state.rank, [])
            if cost > costs[state] or any(state.there & ~more == 0 and paid <= cost for more, paid in others):
                continue
            others.append((state.there, cost))
            for following, move in self._steps(state):
                paid = cost + move.seconds
                if paid < costs.get(following, math.inf):
                    total = paid + self._rest(following)
                    if total < self.known_seconds - 1e-12:
                        costs[following] = paid
                        self._came[following] = (state, move)
                        order += 1
                        heapq.heappush(waiting, (total, -following.rank, order, paid, following))
        self.proven_seconds = self.known_seconds

    def _steps(self, state: SearchState) -> Iterator[tuple[SearchState, Move]]:
        """What can run next, after dropping as little as that takes."""
        if state.rank < len(self.graph.ops):
            move = self._firsts[state.rank]
            for there in self._after(state.there, move):
                yield SearchState(state.rank + 1, there & self._useful[state.rank + 1]), move
        for move in self._agains:
            if move.rank < state.rank and move.makes & ~state.there & self._useful[state.rank]:
                for there in self._after(state.there, move):
                    yield SearchState(state.rank, there & self._useful[state.rank]), move

    def _after(self, there: int, move: Move) -> Iterator[int]:
        """What can be in memory after a move."""
        if move.reads & ~there:
            return
        over = self._bytes(there | move.makes) + move.workspace - self._room
        for dropped in self._drops(there & ~move.reads & ~move.makes, over):
            left = there & ~dropped
            if dropped:
                left &= ~self._views_of(dropped)
            yield (left & ~move.ends) | move.makes

    def _views_of(self, storages: int) -> int:
        found = 0
        for item in _bits_of(storages):
            found |= self._views.get(item, 0)
        return found

    def _drops(self, items: int, over: int) -> Iterator[int]:
        """Every least set of items with at least `over` bytes."""
        if over <= 0:
            yield 0
            return
        sizes = sorted(((self._size.get(item, 0), item) for item in _bits_of(items)), reverse=True)
        sizes = [pair for pair in sizes if pair[0]]
        left = [0] * (len(sizes) + 1)
        for position in reversed(range(len(sizes))):
            left[position] = left[position + 1] + sizes[position][0]

        def choose(position: int, missing: int, chosen: int) -> Iterator[int]:
            for at in range(position, len(sizes)):
                if left[at] < missing:
                    return
                size, item = sizes[at]
                if size >= missing:
                    yield chosen | item
                else:
                    yield from choose(at + 1, missing - size, chosen | item)

        yield from choose(0, over, 0)

    def _rest(self, state: SearchState) -> float:
        """The time for what is missing and must be made again, each op once."""
        seen = waiting = self._needed[state.rank] & self._made[state.rank] & ~state.there
        costs: dict[int, float] = {}
        while waiting:
            item = waiting & -waiting
            waiting ^= item
            makers = self._makers.get(item)
            if not makers:
                return math.inf
            rank, reads = makers[0].rank, makers[0].reads
            costs[rank] = max(costs.get(rank, 0.0), min(move.seconds for move in makers))
            for move in makers[1:]:
                reads &= move.reads
            fresh = reads & ~state.there & ~seen
            seen |= fresh
            waiting |= fresh
        return sum(costs.values())

    def _schedule(self, state: SearchState) -> Schedule:
        moves: list[tuple[Move, bool]] = []
        while (came := self._came[state]) is not None:
            before, move = came
            moves.append((move, before.rank == state.rank))
            state = before
        listing = ScheduleBuilder(self.graph)
        for move, again in reversed(moves):
            if again:
                listing.recompute(move.rank, move.by_rule)
            else:
                listing.run_until(move.rank + 1)
        return with_frees(self.graph, listing.runs)


def _bits_of(items: int) -> Iterator[int]:
    while items:
        item = items & -items
        yield item
        items ^= item
