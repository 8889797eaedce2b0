"""Schedules: everything that a step does, in order, as a value without torch; and the builders of schedules.

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
from acwb.core.graph_arrays import Array, GraphArrays, arrays_of
from acwb.errors import AcwbError


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op. Copy 0 is the original, copy > 0 a recomputation; with `by_rule`, only of its first output."""

    op: str
    copy: int = 0
    by_rule: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Free a storage."""

    storage: str
    copy: int = 0


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Move a storage out of the device's memory, in parallel with the computation."""

    storage: str
    copy: int = 0


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring a swapped storage back; `stall` is the time in seconds that the computation waits for it."""

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
        """The random ops that are recomputed with the random numbers of their first run, from a saved RNG state."""
        recomputed = dict.fromkeys(
            run.op for run in self.entries if isinstance(run, Run) and run.copy and not run.by_rule
        )
        return tuple(name for name in recomputed if graph.op(name).random)

    def __repr__(self) -> str:
        runs = [entry for entry in self.entries if isinstance(entry, Run)]
        recomputations = sum(run.copy > 0 for run in runs)
        swaps = sum(isinstance(entry, SwapOut) for entry in self.entries)
        return f"Schedule({len(runs):,} runs, {recomputations:,} of them recomputations, {swaps:,} swaps)"


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
    """Appends runs in order, and retakes a view whenever its base has been recomputed since.

    Places are positions in `runs`.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.runs: list[Run] = []
        self._graph = graph
        self._arrays = arrays_of(graph)
        self._readers = self._arrays.readers
        self._first_runs = _first_entries(graph).runs
        self._next = 0  # the next op that has not run yet
        self._copies: dict[int, int] = {}  # the newest copy of each recomputed op
        self._recomputed_at: dict[str, int] = {}  # the last place at which each storage was recomputed
        self._retaken_at: dict[int, int] = {}  # the last place at which each view was retaken
        self._first_at: list[int] = [-1] * len(graph.ops)  # the place of the first run of each op

    def run_until(self, stop: int) -> None:
        """Run the ops before op number `stop` that have not run yet."""
        while self._next < stop:
            end = stop
            if self._recomputed_at:  # else no view is of an older copy
                reader = bisect_left(self._readers, self._next)
                end = min(stop, self._readers[reader]) if reader < len(self._readers) else stop
                if end == self._next:
                    self._retake(self._arrays.through[end])
                    end += 1
            place = len(self.runs)
            self._first_at[self._next : end] = range(place, place + end - self._next)
            self.runs += self._first_runs[self._next : end]
            self._next = end

    def recompute(self, rank: int, by_rule: bool = False) -> None:
        """Recompute op number `rank`, by its recompute rule if `by_rule`."""
        self._retake(self._arrays.through[self._arrays.number(rank, by_rule)])
        for name in self._graph.ops[rank].results(by_rule):
            self._recomputed_at[name] = len(self.runs)
        self._append(rank, by_rule)

    def _retake(self, views: Sequence[int]) -> None:
        """Retake those of `views` that are of older copies."""
        for view in views:
            taken_at = self._retaken_at.get(view, self._first_at[view])
            if any(self._recomputed_at.get(name, -1) > taken_at for name in self._graph.ops[view].inputs):
                self._append(view, False)

    def _append(self, rank: int, by_rule: bool) -> None:
        self._copies[rank] = self._copies.get(rank, 0) + 1
        if self._graph.ops[rank].view:
            self._retaken_at[rank] = len(self.runs)
        self.runs.append(Run(self._graph.ops[rank].name, self._copies[rank], by_rule))

    def was_recomputed(self, name: str) -> bool:
        """Whether a storage has a newer copy than the first."""
        return name in self._recomputed_at


def with_frees(graph: StepGraph, runs: Sequence[Run]) -> Schedule:
    """The schedule that does `runs` and frees every copy of a storage right after its last use.

    A use is of the newest copy before it. Its definition is `naive_frees` in tests/core/test_schedule.py.
    """
    arrays, end = arrays_of(graph), len(runs)
    ops = numpy.array([arrays.number(graph.rank[run.op], run.by_rule) for run in runs], dtype=numpy.int64)
    made_at, made = arrays.makes.of(ops)
    used_at, used = arrays.uses.of(ops)
    used_at, used = used_at[arrays.made[used]], used[arrays.made[used]]
    used_at, used = numpy.append(used_at, numpy.full(len(arrays.kept), end)), numpy.append(used, arrays.kept)

    def key(storage: Array, place: Array) -> Array:
        """Storage and place as one number: the copy that a use reads has the next smaller key."""
        return storage * (end + 1) + place

    order = numpy.argsort(key(made, made_at), kind="stable")
    last_use = made_at[order].copy()
    reads_copy = numpy.searchsorted(key(made, made_at)[order], key(used, used_at)) - 1
    numpy.maximum.at(last_use, reads_copy, used_at)
    freed_after = numpy.empty_like(last_use)
    freed_after[order] = last_use
    freed = numpy.argsort(freed_after, kind="stable")  # those of the same place in the order in which they were made
    first_frees = _first_entries(graph).frees
    frees = [
        Free(first_frees[storage].storage, copy) if (copy := runs[place].copy) else first_frees[storage]
        for storage, place in zip(made[freed].tolist(), made_at[freed].tolist(), strict=True)
    ]
    stops = numpy.searchsorted(freed_after[freed], numpy.arange(end), side="right").tolist()
    entries: list[Entry] = []
    done = 0
    for run, stop in zip(runs, stops, strict=True):
        entries.append(run)
        if stop > done:
            entries += frees[done:stop]
            done = stop
    return Schedule(tuple(entries))


def just_in_time(graph: StepGraph, discard: Collection[str] = ()) -> Schedule:
    """The captured step, but with the activations in `discard` recomputed right before their first backward use.

    A recomputed activation lives until its last use; other results that its recomputation needs are recomputed, too.
    """
    dropped = frozenset(discard)
    unknown = dropped - {activation.name for activation in graph.activations}
    if unknown:
        raise AcwbError(f"{', '.join(sorted(unknown))} cannot be discarded: not an activation of this graph.")
    builder = ScheduleBuilder(graph)
    for rank, op in enumerate(graph.ops):
        if dropped and op.phase is Phase.BACKWARD and (chain := _missing(graph, op, dropped, builder)):
            builder.run_until(rank)
            for source in chain:
                builder.recompute(source)
    builder.run_until(len(graph.ops))
    return with_frees(graph, builder.runs)


def _missing(graph: StepGraph, op: Op, dropped: frozenset[str], builder: ScheduleBuilder) -> list[int]:
    """The forward ops whose recomputation gives what `op` reads and is not alive, in order."""
    sources: set[int] = set()
    pending = [op]
    while pending:
        for name in pending.pop().inputs:
            if name not in graph.maker or (
                name in graph.surviving and (name not in dropped or builder.was_recomputed(name))
            ):
                continue
            source = graph.rank[graph.maker[name]]
            if graph.ops[source].phase is Phase.FORWARD and source not in sources:
                sources.add(source)
                pending.append(graph.ops[source])
    return sorted(sources)
