"""A plan in the making: which ops run again where, with its peak and time kept up to date after every change.

The captured ops run in their order; before any of them, forward ops may run again. Everything else follows: a value is
read from its newest run, and a storage is alive from a run to the last use before the next one. So a change touches a
few intervals of memory and the recomputations at a few places, not the whole step, and planners can try thousands.

Time has two slots for each op: its own (odd), and the one in which recomputations run right before it (even).
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy

from acwb.core.graph_arrays import Array
from acwb.core.schedule import Run, Schedule, ScheduleBuilder
from acwb.planning.problem import PlanningProblem

EMPTY_SLOT = -(2**62)  # more than any memory: an empty slot is no peak


@dataclass(frozen=True)
class RecomputeChain:
    """Ops to run again before op `rank`, and shortcuts there that they replace.

    Attributes:
        extends: whether it reads something that has to stay for it.
    """

    rank: int
    added: tuple[int, ...]
    replaced: tuple[int, ...]
    extends: bool


Change = tuple[int, tuple[int, ...], tuple[int, ...]]  # before which op; what is added and what removed
RecomputeSites = Sequence[tuple[int, Sequence[int]]]  # what runs again before which op, both by number


class ChangeLog:
    """The changes that lead to an arrangement: kept in its place, because arrangements are large and many."""

    def __init__(self, problem: PlanningProblem, changes: Sequence[Change]) -> None:
        self.problem = problem
        self._changes = changes  # may grow later
        self._count = len(changes)

    def chains(self) -> RecomputeSites:
        """What runs again before which op."""
        found: dict[int, set[int]] = {}
        for rank, added, removed in self._changes[: self._count]:
            found[rank] = found.get(rank, set()).difference(removed).union(added)
        return [
            (rank, sorted(ops, key=lambda op: op % self.problem.count)) for rank, ops in sorted(found.items()) if ops
        ]


class RecomputeState:
    """Which ops run again before which op."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.chains: dict[int, list[int]] = {}  # the ops that run again right before an op, both by rank
        self.seconds = sum(problem.seconds[: problem.count])
        self._read_at: dict[int, set[int]] = {}  # what a chain reads
        self._read_through: dict[int, dict[int, set[int]]] = {}  # views through which a chain reads each storage
        self._replays: Counter[int] = Counter()  # how often each random op runs again
        self._journal: list[Change] = []
        self._before: list[tuple[float, dict[int, int]]] = []  # seconds and `_more` where they were before each change
        self._runs = [[2 * rank + 1] for rank in problem.maker]
        self._uses = [list(uses) for uses in problem.uses]
        self._live = numpy.zeros(problem.end + 2, dtype=numpy.int64)
        self._live[:] = problem.graph.static_bytes
        self._more = numpy.full(problem.end + 2, EMPTY_SLOT, dtype=numpy.int64)
        self._more[1 : problem.end : 2] = problem.workspace[: problem.count]
        self.idle_from = numpy.zeros(len(problem.names), dtype=numpy.int64)  # the longest gap of each storage
        self.idle_until = numpy.zeros(len(problem.names), dtype=numpy.int64)
        self._spans: list[list[tuple[int, int]]] = [[] for _ in problem.names]  # from each run to its last use
        self._high = 0  # where the peak was when it was last asked for
        self._ending: defaultdict[int, set[int]] = defaultdict(set)  # storages whose life ends in a slot
        self._retaken = [0.0] * len(problem.names)  # seconds for taking views again of each storage
        for each in range(len(problem.names)):
            self._follow(each)

    @property
    def need(self) -> "numpy.ndarray":
        """The bytes needed at every slot."""
        return self._live + self._more

    def peak(self) -> tuple[int, int]:
        """The slot at which most memory is needed, and how much."""
        need = self.need
        slot = self._high = int(need.argmax())
        return slot, int(need[slot])

    def _covers(self, each: int, slot: int) -> bool:
        run = bisect_right(self._runs[each], slot) - 1
        return run >= 0 and slot <= self._spans[each][run][1]

    def chain(self, each: int, rank: int, limit: int = 0, kept: Collection[int] = ()) -> "RecomputeChain":
        """What must change before op `rank` to make a storage there again, from what is alive there anyway.

        What was alive before is used, too, where it could stay until then within `limit` bytes, or is to be `kept`.
        """
        problem, slot, extends = self.problem, 2 * rank, False
        there = self.chains.get(rank, ())
        found: dict[int, int] = {}  # by rank
        waiting = [each]
        while waiting:
            wanted = waiting.pop()
            maker = problem.maker[wanted]
            op = maker + problem.count
            if maker in found or op in there or not self._has_rule(wanted, slot):
                op = maker  # the op itself also makes what its recompute rule makes
            if found.get(maker) != op:
                found[maker] = op
                for read in problem.reads[op]:
                    if not self._covers(read, slot):
                        if read in kept or (limit and self._can_stay(read, slot, limit)):
                            extends = True
                        else:
                            waiting.append(read)
        replaced = tuple(maker + problem.count for maker in found if maker + problem.count in there)
        return RecomputeChain(rank, tuple(found.values()), replaced, extends)

    def _can_stay(self, each: int, slot: int, limit: int) -> bool:
        """Whether a storage could stay from its last use to a slot, as far as memory goes."""
        if each in self.problem.pinned:
            return False
        run = bisect_right(self._runs[each], slot) - 1
        return self._has_room(each, self._spans[each][run][1] + 1, slot, limit)

    def _has_room(self, each: int, start: int, stop: int, limit: int) -> bool:
        """Whether a storage fits beside what is there from slot `start` to slot `stop`."""
        high, room = self._high, limit - self.problem.size[each]
        if start <= high <= stop and self._live[high] + self._more[high] > room:
            return False  # most often so, and found at once
        return int((self._live[start : stop + 1] + self._more[start : stop + 1]).max(initial=EMPTY_SLOT)) <= room

    def _has_rule(self, each: int, slot: int) -> bool:
        """Whether a storage can be made by a recompute rule: there is one, and what it needs of its op is alive."""
        needs = self.problem.rule_needs.get(each)
        return needs is not None and all(self._covers(need, slot) for need in needs)

    def cost(self, chain: "RecomputeChain") -> float:
        """The seconds that a chain takes."""
        seconds = self.problem.seconds
        return sum(seconds[op] for op in chain.added) - sum(seconds[op] for op in chain.replaced)

    def apply(self, chain: "RecomputeChain") -> None:
        """Run a chain."""
        self._change(chain.rank, chain.added, chain.replaced)

    def load(self, chains: RecomputeSites) -> None:
        """Run all these ops again where they are listed."""
        for rank, ops in chains:
            self._change(rank, ops, ())

    def mark(self) -> int:
        """This state, for `revert`."""
        return len(self._journal)

    def revert(self, mark: int) -> None:
        """Undo every change since a mark."""
        while len(self._journal) > mark:
            rank, added, removed = self._journal.pop()
            seconds, measured = self._before.pop()
            self._rearrange(rank, removed, added)
            self.seconds = seconds
            for slot, more in measured.items():
                self._more[slot] = more

    def _change(self, rank: int, added: Sequence[int], removed: Sequence[int]) -> None:
        """Run some ops again before op `rank`, and others no longer."""
        seconds = self.seconds
        changed = self._rearrange(rank, added, removed)
        self._journal.append((rank, tuple(added), tuple(removed)))
        self._before.append((seconds, {slot: int(self._more[slot]) for slot in changed}))
        for slot in changed:
            self._measure(slot)

    def _rearrange(self, rank: int, added: Sequence[int], removed: Sequence[int]) -> list[int]:
        """Do a change; give the slots whose recomputations then need another look."""
        problem, slot = self.problem, 2 * rank
        chain = self.chains.setdefault(rank, [])
        touched = {each for op in (*added, *removed) for each in (*problem.reads[op], *problem.makes[op])}
        changed = {slot}
        if any(problem.random[op] for op in (*added, *removed)):
            self._replay(added, removed)
        for op in removed:
            chain.remove(op)
            self.seconds -= problem.seconds[op]
            for each in problem.makes[op]:
                self._runs[each].remove(slot)
            for each in problem.reads[op]:
                self._uses[each].remove(slot)
        for op in added:
            chain.append(op)
            self.seconds += problem.seconds[op]
            for each in problem.makes[op]:
                insort(self._runs[each], slot)
            for each in problem.reads[op]:
                insort(self._uses[each], slot)
        chain.sort(key=lambda op: op % problem.count)
        self._read_through[rank] = self._views_of(chain)
        self._read_at[rank] = {each for op in chain for each in problem.reads[op]}
        for each in touched:
            changed |= self._follow(each)
        if not chain:
            del self.chains[rank]
        return [each for each in changed if each % 2 == 0 and each < problem.end]

    @property
    def has_replays(self) -> bool:
        """Whether random ops run again."""
        return bool(self._replays)

    def _replay(self, added: Sequence[int], removed: Sequence[int]) -> None:
        """Keep a random state for each random op that runs again, and one more for the stream (see `Timeline`)."""
        states = len(self._replays) + bool(self._replays)
        self._replays.update(op for op in added if self.problem.random[op])
        self._replays.subtract(op for op in removed if self.problem.random[op])
        self._replays = +self._replays
        self._live += self.problem.state_bytes * (len(self._replays) + bool(self._replays) - states)

    def _views_of(self, chain: Sequence[int]) -> dict[int, set[int]]:
        """Through which views the ops of a chain read each storage."""
        found: dict[int, set[int]] = {}
        for op in chain:
            for each, views in self.problem.views[op].items():
                found.setdefault(each, set()).update(views)
        return found

    def _find_gap(self, each: int) -> None:
        """Note the longest time that a storage only waits between two uses."""
        if not self.problem.droppable[each]:
            return
        runs, uses = self._runs[each], self._uses[each]
        best = (0, 0)
        run, before = 1, runs[0]
        for use in uses:
            while run < len(runs) and runs[run] <= use:
                before = runs[run]
                run += 1
            if use - before > best[1] - best[0] and before < use // 2 * 2 and use < self.problem.end:
                best = (before, use)
            before = use
        self.idle_from[each], self.idle_until[each] = best

    def idle_use_after(self, each: int, slot: int) -> int | None:
        """The use for which a storage waits at a slot, at which nothing else needs it."""
        runs, uses = self._runs[each], self._uses[each]
        run = bisect_right(runs, slot) - 1
        following = bisect_right(uses, slot | 1)
        if run < 0 or following == len(uses) or (slot % 2 and (slot in uses or slot in runs)):
            return None
        use = uses[following]
        is_end = use >= self.problem.end or (run + 1 < len(runs) and runs[run + 1] <= use)
        return None if is_end else use

    def _follow(self, each: int) -> set[int]:
        """Count a storage from each of its runs to the last use of that run; give the slots where that changes."""
        runs, uses, size = self._runs[each], self._uses[each], self.problem.size[each]
        spans = []
        for run, start in enumerate(runs):
            last = bisect_left(uses, runs[run + 1]) if run + 1 < len(runs) else len(uses)
            spans.append((start, uses[last - 1] if last and uses[last - 1] > start else start))
        found: set[int] = set()
        before, self._spans[each] = self._spans[each], spans
        if before != spans:
            for start, stop in before:
                if (start, stop) not in spans:
                    self._live[start : stop + 1] -= size
                    self._ending[stop].discard(each)
                    found |= {start, stop}
            for start, stop in spans:
                if (start, stop) not in before:
                    self._live[start : stop + 1] += size
                    self._ending[stop].add(each)
                    found |= {start, stop}
        self._find_gap(each)
        if each in self.problem.viewed:
            seconds = self._retaking(each)
            self.seconds += seconds - self._retaken[each]
            self._retaken[each] = seconds
        return found

    def _retaking(self, each: int) -> float:
        """The time for taking again the views through which later runs of a storage are read."""
        problem, runs, uses = self.problem, self._runs[each], self._uses[each]
        total = 0.0
        for run in range(1, len(runs)):
            following = runs[run + 1] if run + 1 < len(runs) else problem.end
            views: set[int] = set()
            for use in uses[bisect_left(uses, runs[run]) : bisect_left(uses, following)]:
                read_through = problem.views[use // 2] if use % 2 else self._read_through.get(use // 2, {})
                views.update(read_through.get(each, ()))
            total += sum(problem.seconds[view] for view in sorted(views) if 2 * view < runs[run])
        return total

    def _measure(self, slot: int) -> None:
        """How much the recomputations of a slot need at their worst, relative to all that is alive during the slot."""
        problem, chain = self.problem, self.chains.get(slot // 2)
        if not chain:
            self._more[slot] = EMPTY_SLOT
            return
        last: dict[int, int] = {}
        for position, op in enumerate(chain):
            for each in problem.reads[op]:
                last[each] = position
            for each in problem.makes[op]:
                last[each] = position
        ending = [0] * len(chain)
        for each in self._ending[slot]:
            ending[last[each]] += problem.size[each]
        held, worst = 0, EMPTY_SLOT
        for op, ended in zip(chain, ending, strict=True):
            held += problem.new_bytes[op]
            if held + problem.workspace[op] > worst:
                worst = held + problem.workspace[op]
            held -= ended
        self._more[slot] = worst - sum([problem.new_bytes[op] for op in chain])

    def restorable(self, limit: int) -> list[tuple[int, int]]:
        """The recomputations whose results could be kept from their last run instead, as far as memory goes there."""
        pairs = [(rank, op) for rank, ops in self.chains.items() for op in ops]
        problem, waits = self.problem, []
        for number, (rank, op) in enumerate(pairs):
            for each in problem.makes[op]:
                run = bisect_left(self._runs[each], 2 * rank)
                if self._spans[each][run][1] > 2 * rank or each in self._read_at[rank] or each in problem.pinned:
                    size = EMPTY_SLOT if each in problem.pinned else limit - problem.size[each]
                    waits.append((number, self._spans[each][run - 1][1] + 1, 2 * rank + 1, size))
        if not waits:
            return pairs
        numbers, starts, stops, rooms = numpy.array(waits, dtype=numpy.int64).T
        fits = _range_maxima(self.need, starts, stops) <= rooms
        stays = numpy.ones(len(pairs), dtype=bool)
        numpy.logical_and.at(stays, numbers, fits)
        return [pairs[number] for number in stays.nonzero()[0].tolist()]

    def has_room_to_stay(self, rank: int, op: int, limit: int) -> bool:
        """Whether the results of a recomputation could be kept from their last run instead, as far as memory goes."""
        slot = 2 * rank
        if not self.problem.pinned.isdisjoint(self.problem.makes[op]):
            return False
        for each in self.problem.makes[op]:
            run = bisect_left(self._runs[each], slot)
            is_read = self._spans[each][run][1] > slot or each in self._read_at[rank]
            if is_read and not self._has_room(each, self._spans[each][run - 1][1] + 1, slot, limit):
                return False
        return True

    def restore(self, rank: int, op: int, limit: int) -> bool:
        """Keep the results of a recomputation from their last run instead, if the peak stays within `limit`."""
        if not self.has_room_to_stay(rank, op, limit):
            return False
        mark = self.mark()
        unused = [op]
        while unused:
            self._change(rank, (), unused)
            unused = self._unused(rank, unused)
        if self.peak()[1] <= limit:
            return True
        self.revert(mark)
        return False

    def run_later(self, op: int, rank: int) -> tuple[int, int] | None:
        """Where an op is next recomputed after op `rank`, itself or by its rule; and which of the two."""
        runs = self._runs[self.problem.makes[op][0]]
        following = bisect_right(runs, 2 * rank)
        if following == len(runs):
            return None
        place = runs[following] // 2
        chain = self.chains[place]
        return place, op if op in chain else (op + self.problem.count) % (2 * self.problem.count)

    def _unused(self, rank: int, readers: Iterable[int]) -> list[int]:
        """The recomputations before op `rank` whose results nobody reads, of those that `readers` read."""
        slot, problem, chain = 2 * rank, self.problem, self.chains.get(rank, ())
        makers = {problem.maker[each] for op in readers for each in problem.reads[op]}
        return [
            op
            for op in chain
            if op % problem.count in makers and not any(self._read_after(each, slot) for each in problem.makes[op])
        ]

    def _read_after(self, each: int, slot: int) -> bool:
        """Whether anything reads the run of a storage at a slot."""
        runs, uses = self._runs[each], self._uses[each]
        run = bisect_left(runs, slot)
        first = bisect_left(uses, slot)
        return first < len(uses) and (run + 1 == len(runs) or uses[first] < runs[run + 1])

    def change_log(self) -> ChangeLog:
        """How this state was reached; it stays valid while the state goes on from here."""
        return ChangeLog(self.problem, self._journal)


def _range_maxima(values: Array, starts: Array, stops: Array) -> Array:
    """The largest of `values` in each range from start to before stop; NEVER in an empty one."""
    found = numpy.full(len(starts), EMPTY_SLOT, dtype=numpy.int64)
    lengths = stops - starts
    width, level = 1, values  # the largest of each `width` values in a row
    while len(lengths) and width <= lengths.max():
        here = (lengths >= width) & (lengths < 2 * width)
        found[here] = numpy.maximum(level[starts[here]], level[stops[here] - width])
        level = numpy.maximum(level[:-width], level[width:])
        width *= 2
    return found


def sites_of_schedule(problem: PlanningProblem, schedule: Schedule) -> RecomputeSites:
    """What a schedule without swaps runs again before which op; views do not count."""
    found: list[tuple[int, tuple[int, ...]]] = []
    waiting: list[int] = []
    for entry in schedule.entries:
        if isinstance(entry, Run) and entry.copy:
            rank = problem.graph.rank[entry.op]
            if not problem.graph.ops[rank].view:
                waiting.append(rank + problem.count * entry.by_rule)
        elif isinstance(entry, Run) and waiting:
            found.append((problem.graph.rank[entry.op], tuple(waiting)))
            waiting = []
    return found


def runs_of_sites(problem: PlanningProblem, chains: RecomputeSites) -> list[Run]:
    """Everything that runs, in order; a view of what was made again is taken again before it is read."""
    listing = ScheduleBuilder(problem.graph)
    for rank, numbers in chains:
        listing.run_until(rank)
        for number in numbers:
            listing.recompute(number % problem.count, by_rule=number >= problem.count)
    listing.run_until(problem.count)
    return listing.runs
