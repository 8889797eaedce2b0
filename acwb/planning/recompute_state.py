"""Incremental search state: the set of recomputations, with peak memory and time updated after each change.

The captured ops run in their order; before any of them, forward ops may be recomputed. Everything else follows: an op
reads the newest copy, and a copy of a storage lives from its run to the last use before the next run. So a change
touches a few live ranges and the recomputations at a few slots, not the whole step, and a search can try thousands.

Slot 2k + 1 is op k; slot 2k holds the recomputations inserted right before it (see `problem`).
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy

from acwb.core.graph_arrays import Array
from acwb.core.schedule import Run, Schedule, ScheduleBuilder
from acwb.planning.problem import PlanningProblem, is_op_slot, rank_of_slot, slot_before, slot_of

EMPTY_SLOT = -(2**62)  # so that a slot without recomputations is never the peak


@dataclass(frozen=True)
class RecomputeChain:
    """Recomputations to insert before op `rank`, to give one storage there.

    Attributes:
        added: the ops and rules to recompute.
        replaced: the rules already there that these ops make superfluous.
        extends: whether it reads storages whose live range has to grow for it.
    """

    rank: int
    added: tuple[int, ...]
    replaced: tuple[int, ...]
    extends: bool


Change = tuple[int, tuple[int, ...], tuple[int, ...]]  # before which op; the recomputations added; those removed
RecomputeSites = Sequence[tuple[int, Sequence[int]]]  # ops, each with the ops and rules that are recomputed before it


class ChangeLog:
    """Change log from which a state can be rebuilt; stored per frontier point instead of the state itself."""

    def __init__(self, problem: PlanningProblem, changes: Sequence[Change]) -> None:
        self.problem = problem
        self._changes = changes  # may grow later
        self._count = len(changes)

    def sites(self) -> RecomputeSites:
        """Which ops are recomputed before which op."""
        sites: dict[int, set[int]] = {}
        for rank, added, removed in self._changes[: self._count]:
            sites[rank] = sites.get(rank, set()).difference(removed).union(added)
        return [(rank, sorted(ops, key=self.problem.base_op)) for rank, ops in sorted(sites.items()) if ops]


class RecomputeState:
    """Which ops are recomputed before which op; storages, ops and rules have the numbers of the problem.

    Attributes:
        chains: the recomputations right before each op, in order.
        seconds: the time of the step.
        idle_from: the slot at which the longest idle gap of each storage starts.
        idle_until: the use with which that gap ends.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.chains: dict[int, list[int]] = {}
        self.seconds = sum(problem.seconds[: problem.count])
        self._read_at: dict[int, set[int]] = {}  # the storages that the chain before each op reads
        self._read_through: dict[int, dict[int, set[int]]] = {}  # the views through which that chain reads each storage
        self._replays: Counter[int] = Counter()  # how often each random op is recomputed
        self._journal: list[Change] = []
        self._before: list[tuple[float, dict[int, int]]] = []  # seconds and changed `_more` before each change
        self._runs = [[slot_of(rank)] for rank in problem.maker]  # the slots in which each storage is made
        self._uses = [list(uses) for uses in problem.uses]  # the slots in which each storage is used
        self._live = numpy.zeros(problem.end + 2, dtype=numpy.int64)  # the bytes of live storages in each slot
        self._live[:] = problem.graph.static_bytes
        self._more = numpy.full(problem.end + 2, EMPTY_SLOT, dtype=numpy.int64)  # the bytes needed beyond those
        self._more[1 : problem.end : 2] = problem.workspace[: problem.count]
        self.idle_from = numpy.zeros(len(problem.names), dtype=numpy.int64)
        self.idle_until = numpy.zeros(len(problem.names), dtype=numpy.int64)
        self._spans: list[list[tuple[int, int]]] = [[] for _ in problem.names]  # from each run to its last use
        self._high = 0  # the last known slot of the peak
        self._ending: defaultdict[int, set[int]] = defaultdict(set)  # the storages whose span ends in a slot
        self._retaken = [0.0] * len(problem.names)  # the seconds for retaking the views of each storage
        for storage in range(len(problem.names)):
            self._follow(storage)

    @property
    def need(self) -> "numpy.ndarray":
        """The bytes needed at every slot."""
        return self._live + self._more

    def peak(self) -> tuple[int, int]:
        """The slot of the peak, and its bytes."""
        need = self.need
        slot = self._high = int(need.argmax())
        return slot, int(need[slot])

    def _is_live(self, storage: int, slot: int) -> bool:
        run = bisect_right(self._runs[storage], slot) - 1
        return run >= 0 and slot <= self._spans[storage][run][1]

    def chain(self, storage: int, rank: int, limit: int = 0, kept: Collection[int] = ()) -> "RecomputeChain":
        """The recomputations that give a storage before op `rank`, from what is alive there anyway.

        A storage that was alive before is used, too, if it could stay alive until then within `limit` bytes, or is
        among those `kept`.
        """
        problem, slot, extends = self.problem, slot_before(rank), False
        present = self.chains.get(rank, ())
        chosen: dict[int, int] = {}  # for each op by rank, the op itself or its rule
        pending = [storage]
        while pending:
            wanted = pending.pop()
            maker = problem.maker[wanted]
            op = problem.rule_of(maker)
            if maker in chosen or op in present or not self._has_rule(wanted, slot):
                op = maker  # the op itself also makes what its recompute rule makes
            if chosen.get(maker) != op:
                chosen[maker] = op
                for read in problem.reads[op]:
                    if not self._is_live(read, slot):
                        if read in kept or (limit and self._can_stay(read, slot, limit)):
                            extends = True
                        else:
                            pending.append(read)
        rules = (problem.rule_of(maker) for maker in chosen)
        replaced = tuple(rule for rule in rules if rule in present)
        return RecomputeChain(rank, tuple(chosen.values()), replaced, extends)

    def _can_stay(self, storage: int, slot: int, limit: int) -> bool:
        """Whether memory allows a storage to stay alive from its last use to a slot."""
        if storage in self.problem.pinned:
            return False
        run = bisect_right(self._runs[storage], slot) - 1
        return self._has_room(storage, self._spans[storage][run][1] + 1, slot, limit)

    def _has_room(self, storage: int, start: int, stop: int, limit: int) -> bool:
        """Whether a storage fits beside what is alive from slot `start` to slot `stop`."""
        high, room = self._high, limit - self.problem.size[storage]
        if start <= high <= stop and self._live[high] + self._more[high] > room:
            return False  # the usual case, without a look at every slot
        return int((self._live[start : stop + 1] + self._more[start : stop + 1]).max(initial=EMPTY_SLOT)) <= room

    def _has_rule(self, storage: int, slot: int) -> bool:
        """Whether a recompute rule can give a storage: there is one, and what it reads of its own op is alive."""
        needs = self.problem.rule_needs.get(storage)
        return needs is not None and all(self._is_live(need, slot) for need in needs)

    def cost(self, chain: "RecomputeChain") -> float:
        """The seconds that a chain adds."""
        seconds = self.problem.seconds
        return sum(seconds[op] for op in chain.added) - sum(seconds[op] for op in chain.replaced)

    def apply(self, chain: "RecomputeChain") -> None:
        """Insert the recomputations of a chain."""
        self._change(chain.rank, chain.added, chain.replaced)

    def load(self, sites: RecomputeSites) -> None:
        """Insert all recomputations of `sites`."""
        for rank, ops in sites:
            self._change(rank, ops, ())

    def mark(self) -> int:
        """A mark of the current state, for `revert`."""
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
        """Add recomputations before op `rank`, and remove others."""
        seconds = self.seconds
        changed = self._rearrange(rank, added, removed)
        self._journal.append((rank, tuple(added), tuple(removed)))
        self._before.append((seconds, {slot: int(self._more[slot]) for slot in changed}))
        for slot in changed:
            self._measure(slot)

    def _rearrange(self, rank: int, added: Sequence[int], removed: Sequence[int]) -> list[int]:
        """Make a change; return the slots whose recomputations have to be measured anew."""
        problem, slot = self.problem, slot_before(rank)
        chain = self.chains.setdefault(rank, [])
        touched = {storage for op in (*added, *removed) for storage in (*problem.reads[op], *problem.makes[op])}
        changed = {slot}
        if any(problem.random[op] for op in (*added, *removed)):
            self._replay(added, removed)
        for op in removed:
            chain.remove(op)
            self.seconds -= problem.seconds[op]
            for storage in problem.makes[op]:
                self._runs[storage].remove(slot)
            for storage in problem.reads[op]:
                self._uses[storage].remove(slot)
        for op in added:
            chain.append(op)
            self.seconds += problem.seconds[op]
            for storage in problem.makes[op]:
                insort(self._runs[storage], slot)
            for storage in problem.reads[op]:
                insort(self._uses[storage], slot)
        chain.sort(key=problem.base_op)
        self._read_through[rank] = self._views_of(chain)
        self._read_at[rank] = {storage for op in chain for storage in problem.reads[op]}
        for storage in touched:
            changed |= self._follow(storage)
        if not chain:
            del self.chains[rank]
        return [slot for slot in changed if not is_op_slot(slot) and slot < problem.end]

    @property
    def has_replays(self) -> bool:
        """Whether random ops are recomputed."""
        return bool(self._replays)

    def _replay(self, added: Sequence[int], removed: Sequence[int]) -> None:
        """Count a saved RNG state for each recomputed random op, and one for the current state (see `Timeline`)."""
        states = len(self._replays) + bool(self._replays)
        self._replays.update(op for op in added if self.problem.random[op])
        self._replays.subtract(op for op in removed if self.problem.random[op])
        self._replays = +self._replays
        self._live += self.problem.state_bytes * (len(self._replays) + bool(self._replays) - states)

    def _views_of(self, chain: Sequence[int]) -> dict[int, set[int]]:
        """The views through which the ops of a chain read each storage."""
        views_of: dict[int, set[int]] = {}
        for op in chain:
            for storage, views in self.problem.views[op].items():
                views_of.setdefault(storage, set()).update(views)
        return views_of

    def _find_gap(self, storage: int) -> None:
        """Find the longest gap between two uses of a storage in which it is idle."""
        if not self.problem.droppable[storage]:
            return
        runs, uses = self._runs[storage], self._uses[storage]
        longest = (0, 0)
        run, before = 1, runs[0]
        for use in uses:
            while run < len(runs) and runs[run] <= use:
                before = runs[run]
                run += 1
            is_longer = use - before > longest[1] - longest[0]
            if is_longer and before < slot_before(rank_of_slot(use)) and use < self.problem.end:
                longest = (before, use)
            before = use
        self.idle_from[storage], self.idle_until[storage] = longest

    def idle_use_after(self, storage: int, slot: int) -> int | None:
        """The next use of a storage that is idle at a slot; None where it is used there, dropped or recomputed."""
        runs, uses = self._runs[storage], self._uses[storage]
        run = bisect_right(runs, slot) - 1
        following = bisect_right(uses, slot_of(rank_of_slot(slot)))
        if run < 0 or following == len(uses) or (is_op_slot(slot) and (slot in uses or slot in runs)):
            return None
        use = uses[following]
        is_end = use >= self.problem.end or (run + 1 < len(runs) and runs[run + 1] <= use)
        return None if is_end else use

    def _follow(self, storage: int) -> set[int]:
        """Update the live ranges of a storage, one from each run to its last use; return the slots at their ends."""
        runs, uses, size = self._runs[storage], self._uses[storage], self.problem.size[storage]
        spans = []
        for run, start in enumerate(runs):
            last = bisect_left(uses, runs[run + 1]) if run + 1 < len(runs) else len(uses)
            spans.append((start, uses[last - 1] if last and uses[last - 1] > start else start))
        changed: set[int] = set()
        before, self._spans[storage] = self._spans[storage], spans
        if before != spans:
            for start, stop in before:
                if (start, stop) not in spans:
                    self._live[start : stop + 1] -= size
                    self._ending[stop].discard(storage)
                    changed |= {start, stop}
            for start, stop in spans:
                if (start, stop) not in before:
                    self._live[start : stop + 1] += size
                    self._ending[stop].add(storage)
                    changed |= {start, stop}
        self._find_gap(storage)
        if storage in self.problem.viewed:
            seconds = self._retake_seconds(storage)
            self.seconds += seconds - self._retaken[storage]
            self._retaken[storage] = seconds
        return changed

    def _retake_seconds(self, storage: int) -> float:
        """The time for retaking the views through which recomputed copies of a storage are read."""
        problem, runs, uses = self.problem, self._runs[storage], self._uses[storage]
        total = 0.0
        for run in range(1, len(runs)):
            following = runs[run + 1] if run + 1 < len(runs) else problem.end
            views: set[int] = set()
            for use in uses[bisect_left(uses, runs[run]) : bisect_left(uses, following)]:
                rank = rank_of_slot(use)
                read_through = problem.views[rank] if is_op_slot(use) else self._read_through.get(rank, {})
                views.update(read_through.get(storage, ()))
            total += sum(problem.seconds[view] for view in sorted(views) if slot_before(view) < runs[run])
        return total

    def _measure(self, slot: int) -> None:
        """Update the peak within a slot of recomputations, relative to all that is alive at some time in the slot."""
        problem, chain = self.problem, self.chains.get(rank_of_slot(slot))
        if not chain:
            self._more[slot] = EMPTY_SLOT
            return
        last: dict[int, int] = {}  # the last position in the chain at which each storage is used
        for position, op in enumerate(chain):
            for storage in problem.reads[op]:
                last[storage] = position
            for storage in problem.makes[op]:
                last[storage] = position
        ending = [0] * len(chain)
        for storage in self._ending[slot]:
            ending[last[storage]] += problem.size[storage]
        held, worst = 0, EMPTY_SLOT
        for op, ended in zip(chain, ending, strict=True):
            held += problem.new_bytes[op]
            if held + problem.workspace[op] > worst:
                worst = held + problem.workspace[op]
            held -= ended
        self._more[slot] = worst - sum([problem.new_bytes[op] for op in chain])

    def restorable(self, limit: int) -> list[tuple[int, int]]:
        """The recomputations (op before which, op or rule) that memory would allow to replace by keeping the result."""
        pairs = [(rank, op) for rank, ops in self.chains.items() for op in ops]
        problem, gaps = self.problem, []  # the gaps that the results would have to stay alive in
        for number, (rank, op) in enumerate(pairs):
            slot = slot_before(rank)
            for storage in problem.makes[op]:
                run = bisect_left(self._runs[storage], slot)
                is_pinned = storage in problem.pinned
                if self._spans[storage][run][1] > slot or storage in self._read_at[rank] or is_pinned:
                    room = EMPTY_SLOT if is_pinned else limit - problem.size[storage]
                    gaps.append((number, self._spans[storage][run - 1][1] + 1, slot + 1, room))
        if not gaps:
            return pairs
        numbers, starts, stops, rooms = numpy.array(gaps, dtype=numpy.int64).T
        fits = _range_maxima(self.need, starts, stops) <= rooms
        stays = numpy.ones(len(pairs), dtype=bool)
        numpy.logical_and.at(stays, numbers, fits)
        return [pairs[number] for number in stays.nonzero()[0].tolist()]

    def has_room_to_stay(self, rank: int, op: int, limit: int) -> bool:
        """Whether memory allows to keep the results of a recomputation alive since their last run instead."""
        slot = slot_before(rank)
        if not self.problem.pinned.isdisjoint(self.problem.makes[op]):
            return False
        for storage in self.problem.makes[op]:
            run = bisect_left(self._runs[storage], slot)
            is_read = self._spans[storage][run][1] > slot or storage in self._read_at[rank]
            if is_read and not self._has_room(storage, self._spans[storage][run - 1][1] + 1, slot, limit):
                return False
        return True

    def restore(self, rank: int, op: int, limit: int) -> bool:
        """Replace a recomputation by keeping its results since their last run, if the peak stays within `limit`."""
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
        """The next recomputation of an op after op `rank`: before which op, and whether by the op or by its rule."""
        runs = self._runs[self.problem.makes[op][0]]
        following = bisect_right(runs, slot_before(rank))
        if following == len(runs):
            return None
        site = rank_of_slot(runs[following])
        return site, op if op in self.chains[site] else self.problem.counterpart(op)

    def _unused(self, rank: int, readers: Iterable[int]) -> list[int]:
        """The recomputations before op `rank` that only the removed `readers` there needed."""
        slot, problem, chain = slot_before(rank), self.problem, self.chains.get(rank, ())
        makers = {problem.maker[storage] for op in readers for storage in problem.reads[op]}
        return [
            op
            for op in chain
            if problem.base_op(op) in makers and not any(self._is_read(storage, slot) for storage in problem.makes[op])
        ]

    def _is_read(self, storage: int, slot: int) -> bool:
        """Whether anything reads the copy of a storage that is made in a slot."""
        runs, uses = self._runs[storage], self._uses[storage]
        run = bisect_left(runs, slot)
        first = bisect_left(uses, slot)
        return first < len(uses) and (run + 1 == len(runs) or uses[first] < runs[run + 1])

    def change_log(self) -> ChangeLog:
        """The log of this state; later changes do not affect it."""
        return ChangeLog(self.problem, self._journal)


def _range_maxima(values: Array, starts: Array, stops: Array) -> Array:
    """The largest of `values` in each range from start to before stop (sparse table); EMPTY_SLOT in an empty one."""
    maxima = numpy.full(len(starts), EMPTY_SLOT, dtype=numpy.int64)
    lengths = stops - starts
    width, level = 1, values  # the largest of each `width` values in a row
    while len(lengths) and width <= lengths.max():
        covered = (lengths >= width) & (lengths < 2 * width)  # ranges that two windows of this width cover
        maxima[covered] = numpy.maximum(level[starts[covered]], level[stops[covered] - width])
        level = numpy.maximum(level[:-width], level[width:])
        width *= 2
    return maxima


def sites_of_schedule(problem: PlanningProblem, schedule: Schedule) -> RecomputeSites:
    """The recomputations of a schedule without swaps; views are left out."""
    sites: list[tuple[int, tuple[int, ...]]] = []
    pending: list[int] = []
    for entry in schedule.entries:
        if isinstance(entry, Run) and entry.copy:
            rank = problem.graph.rank[entry.op]
            if not problem.graph.ops[rank].view:
                pending.append(problem.number(rank, entry.by_rule))
        elif isinstance(entry, Run) and pending:
            sites.append((problem.graph.rank[entry.op], tuple(pending)))
            pending = []
    return sites


def runs_of_sites(problem: PlanningProblem, sites: RecomputeSites) -> list[Run]:
    """All runs of the step with the recomputations of `sites`, in order; views of recomputed storages are retaken."""
    builder = ScheduleBuilder(problem.graph)
    for rank, ops in sites:
        builder.run_until(rank)
        for op in ops:
            builder.recompute(problem.base_op(op), by_rule=problem.is_rule(op))
    builder.run_until(problem.count)
    return builder.runs
