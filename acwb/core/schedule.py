"""A schedule says exactly what a step does, in order; a timeline says what that costs. Both are values, without torch.

The captured step is the schedule that runs every op once and frees every storage after its last use. Recomputing an op
is one more `Run` with the next copy number, which makes new storages under the same names; swapping is a pair of
entries. An op reads the newest copy of what it needs.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy

from acwb.core.graph import Op, Phase, StepGraph
from acwb.core.graph_arrays import GraphArrays, arrays_of
from acwb.errors import AcwbError


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op. Copy 0 is the original, a higher one a recomputation; `by_rule`, only of its first output."""

    op: str
    copy: int = 0
    by_rule: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Give a storage's memory back."""

    storage: str
    copy: int = 0


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Move a storage out of the device's memory, beside the computation."""

    storage: str
    copy: int = 0


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring a storage back; `stall` is the time in seconds that the computation waits for it."""

    storage: str
    copy: int = 0
    stall: float = 0.0


Entry = Run | Free | SwapOut | SwapIn


@dataclass(frozen=True, repr=False)
class Schedule:
    """Everything that a step does, in order."""

    entries: tuple[Entry, ...]

    def __len__(self) -> int:
        return len(self.entries)

    def replayed(self, graph: StepGraph) -> tuple[str, ...]:
        """The random ops that run again with the numbers of their first run, for which a random state is kept."""
        again = dict.fromkeys(run.op for run in self.entries if isinstance(run, Run) and run.copy and not run.by_rule)
        return tuple(name for name in again if graph.op(name).random)

    def __repr__(self) -> str:
        runs = [entry for entry in self.entries if isinstance(entry, Run)]
        again = sum(run.copy > 0 for run in runs)
        swaps = sum(isinstance(entry, SwapOut) for entry in self.entries)
        return f"Schedule({len(runs):,} runs, {again:,} of them recomputations, {swaps:,} swaps)"


class _FirstEntries:
    """The entries of a graph that almost every schedule has: the first run of each op, the free of each first copy."""

    def __init__(self, graph: StepGraph) -> None:
        self.runs = [Run(op.name) for op in graph.ops]
        self.frees = [Free(storage.name) for storage in graph.storages]


_FIRST_ENTRIES: WeakKeyDictionary[GraphArrays, _FirstEntries] = WeakKeyDictionary()


def _first_entries(graph: StepGraph) -> _FirstEntries:
    if arrays_of(graph) not in _FIRST_ENTRIES:
        _FIRST_ENTRIES[arrays_of(graph)] = _FirstEntries(graph)
    return _FIRST_ENTRIES[arrays_of(graph)]


class ScheduleBuilder:
    """Lists what runs, in order; a view is taken again before it is read, if its base was made again since."""

    def __init__(self, graph: StepGraph) -> None:
        self.runs: list[Run] = []
        self._graph = graph
        self._through = arrays_of(graph).through
        self._readers = arrays_of(graph).readers
        self._firsts = _first_entries(graph).runs
        self._next = 0  # the next op that has not run yet
        self._copies: dict[int, int] = {}  # of each op that ran again
        self._made: dict[str, int] = {}  # where each storage that was made again was made last
        self._taken: dict[int, int] = {}  # where each view that was taken again was taken last
        self._done: list[int] = [-1] * len(graph.ops)  # where each op ran first

    def run_until(self, stop: int) -> None:
        """Run all ops up to number `stop`, those that have not run yet."""
        while self._next < stop:
            end = stop
            if self._made:  # else no view is of an older copy
                reader = bisect_left(self._readers, self._next)
                end = min(stop, self._readers[reader]) if reader < len(self._readers) else stop
                if end == self._next:
                    self._renew(self._through[end])
                    end += 1
            position = len(self.runs)
            self._done[self._next : end] = range(position, position + end - self._next)
            self.runs += self._firsts[self._next : end]
            self._next = end

    def recompute(self, rank: int, by_rule: bool = False) -> None:
        """Run op number `rank` again, by its recompute rule if it is to be `by_rule`."""
        self._renew(self._through[rank + by_rule * len(self._graph.ops)])
        for name in made_by(self._graph.ops[rank], by_rule):
            self._made[name] = len(self.runs)
        self._append(rank, by_rule)

    def _renew(self, views: Sequence[int]) -> None:
        """Take views again that are of older copies."""
        for view in views:
            taken = self._taken.get(view, self._done[view])
            if any(self._made.get(name, -1) > taken for name in self._graph.ops[view].inputs):
                self._append(view, False)

    def _append(self, rank: int, by_rule: bool) -> None:
        self._copies[rank] = self._copies.get(rank, 0) + 1
        if self._graph.ops[rank].view:
            self._taken[rank] = len(self.runs)
        self.runs.append(Run(self._graph.ops[rank].name, self._copies[rank], by_rule))

    def was_recomputed(self, name: str) -> bool:
        """Whether there is a newer copy of a storage than the first."""
        return name in self._made


def made_by(op: Op, by_rule: bool = False) -> tuple[str, ...]:
    """The storages that a run of `op` makes."""
    return op.outputs[:1] if by_rule else op.outputs


def with_frees(graph: StepGraph, runs: Sequence[Run]) -> Schedule:
    """The schedule that does `runs` and frees every storage right after its last use."""
    numbers, count, end = arrays_of(graph), len(graph.ops), len(runs)
    ops = numpy.array([graph.rank[run.op] + count * run.by_rule for run in runs], dtype=numpy.int64)
    made_at, made = numbers.makes.of(ops)
    used_at, used = numbers.uses.of(ops)
    used_at, used = used_at[numbers.made[used]], used[numbers.made[used]]
    used_at, used = numpy.append(used_at, numpy.full(len(numbers.kept), end)), numpy.append(used, numbers.kept)
    # A storage and a place as one number, in which the last making before a use is the next number below.
    order = numpy.argsort(made * (end + 1) + made_at, kind="stable")
    makings = (made * (end + 1) + made_at)[order]
    last = made_at[order].copy()
    numpy.maximum.at(last, numpy.searchsorted(makings, used * (end + 1) + used_at) - 1, used_at)
    freed_after = numpy.empty_like(last)
    freed_after[order] = last
    freed = numpy.argsort(freed_after, kind="stable")  # those of the same place in the order in which they were made
    firsts = _first_entries(graph).frees
    frees = [
        Free(firsts[storage].storage, copy) if (copy := runs[at].copy) else firsts[storage]
        for storage, at in zip(made[freed].tolist(), made_at[freed].tolist(), strict=True)
    ]
    bounds = numpy.searchsorted(freed_after[freed], numpy.arange(end), side="right").tolist()
    entries: list[Entry] = []
    done = 0
    for run, bound in zip(runs, bounds, strict=True):
        entries.append(run)
        if bound > done:
            entries += frees[done:bound]
            done = bound
    return Schedule(tuple(entries))


def just_in_time(graph: StepGraph, discard: Collection[str] = ()) -> Schedule:
    """Run the step as captured, but recompute the activations in `discard` right before they are first needed again.

    A recomputed activation stays until its last use; what else its recomputation needs is run again too, and dropped.
    """
    dropped = frozenset(discard)
    unknown = dropped - {activation.name for activation in graph.activations}
    if unknown:
        raise AcwbError(f"{', '.join(sorted(unknown))} cannot be discarded: not an activation of this graph.")
    listing = ScheduleBuilder(graph)
    for rank, op in enumerate(graph.ops):
        if dropped and op.phase is Phase.BACKWARD and (chain := _missing(graph, op, dropped, listing)):
            listing.run_until(rank)
            for source in chain:
                listing.recompute(source)
    listing.run_until(len(graph.ops))
    return with_frees(graph, listing.runs)


def _missing(graph: StepGraph, op: Op, dropped: frozenset[str], listing: ScheduleBuilder) -> list[int]:
    """The forward ops that make again what `op` reads and is not there, in order."""
    found: set[int] = set()
    waiting = [op]
    while waiting:
        for name in waiting.pop().inputs:
            if name not in graph.maker or (
                name in graph.surviving and (name not in dropped or listing.was_recomputed(name))
            ):
                continue
            source = graph.rank[graph.maker[name]]
            if graph.ops[source].phase is Phase.FORWARD and source not in found:
                found.add(source)
                waiting.append(graph.ops[source])
    return sorted(found)
