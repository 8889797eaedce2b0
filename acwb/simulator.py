"""Predicts a step: what a schedule needs in memory at every point, and in time. Exact at the level of storages.

`simulate` takes what was measured (a `Profile`) and a `Schedule`, and gives a `Timeline`; nothing is estimated and
nothing has a threshold. `freeing` and `just_in_time` make schedules: every storage is freed right after its last use,
and what was discarded is run again right before the op that needs it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy

from acwb.costs import Profile
from acwb.errors import AcwbError
from acwb.graph import Op, Phase, Role, StepGraph
from acwb.schedule import Entry, Free, Run, Schedule, SwapIn, SwapOut, Timeline

Copy = tuple[str, int]


def freeing(graph: StepGraph, runs: Sequence[Run]) -> Schedule:
    """The schedule that does `runs` and frees every storage right after its last use."""
    results: dict[str, tuple[Copy, ...]] = {}
    last_use: dict[Copy, int] = {}
    for position, run in enumerate(runs):
        op = graph.ops[graph.rank[run.op]]
        for item in (*taken(op, results, run.short), *((name, 0) for name in op.holds)):
            last_use[item] = position
        results[op.name] = result_of(op, run.copy, results, run.short)
        for name in made_by(op, run.short):
            last_use[name, run.copy] = position
    ending: dict[int, list[Free]] = {}
    for (name, copy), position in last_use.items():
        if copy or (name in graph.maker and name not in graph.kept):
            ending.setdefault(position, []).append(Free(name, copy))
    entries: list[Entry] = []
    for position, run in enumerate(runs):
        entries.append(run)
        entries += ending.get(position, ())
    return Schedule(tuple(entries))


def made_by(op: Op, short: bool = False) -> tuple[str, ...]:
    """The storages that a run of `op` makes."""
    return op.outputs[:1] if short else op.outputs


def taken(op: Op, results: Mapping[str, tuple[Copy, ...]], short: bool = False) -> Iterator[Copy]:
    """The storages that a run of `op` reads: of the newest results that it takes, the parts that it names as inputs."""
    needs, names = ((*op.needs, op.name), set(op.shortcut)) if short else (op.needs, set(op.inputs))
    for need in needs:
        for item in results[need]:
            if item[0] in names:
                yield item


def result_of(op: Op, copy: int, results: Mapping[str, tuple[Copy, ...]], short: bool = False) -> tuple[Copy, ...]:
    """The storages that a run's result lives in: those that it makes, is a view of, or writes into."""
    if short:
        return ((op.outputs[0], copy), *results[op.name][1:])
    if op.outputs:
        return tuple((name, copy) for name in op.outputs)
    found = dict(item for item in taken(op, results) if item[0] in (op.mutates or op.inputs))
    return tuple((name, found.get(name, 0)) for name in op.mutates or op.inputs)


def just_in_time(graph: StepGraph, discard: Collection[str] = ()) -> Schedule:
    """Run the step as captured, but recompute the activations in `discard` right before they are first needed again.

    A recomputed activation stays until its last use; what else its recomputation needs is run again too, and dropped.
    """
    dropped = frozenset(discard)
    unknown = dropped - {activation.name for activation in graph.activations}
    if unknown:
        raise AcwbError(f"{', '.join(sorted(unknown))} cannot be discarded: not an activation of this graph.")
    return freeing(graph, _JustInTime(graph, dropped).runs())


class _JustInTime:
    """Lists the ops to run, with recomputations, for a set of discarded activations."""

    def __init__(self, graph: StepGraph, discard: frozenset[str]) -> None:
        self.graph = graph
        self.discard = discard
        self.newest: dict[str, int] = {}  # of each op
        self.results: dict[str, tuple[Copy, ...]] = {}  # what the newest run of each op made, or is a view of
        self.found: list[Run] = []

    def runs(self) -> list[Run]:
        for op in self.graph.ops:
            if op.phase is Phase.BACKWARD and self.discard:
                self._provide(op, set())
            self._run(op, 0)
        return self.found

    def _run(self, op: Op, copy: int) -> None:
        self.found.append(Run(op.name, copy))
        self.newest[op.name] = copy
        self.results[op.name] = result_of(op, copy, self.results)

    def _provide(self, op: Op, chain: set[str]) -> None:
        """Run again what `op` needs and no longer has; `chain` holds what was run for this purpose."""
        for name in op.needs:
            source = self.graph.ops[self.graph.rank[name]]
            if source.phase is Phase.FORWARD and name not in chain and not self._has(source, op):
                self._provide(source, chain)
                self._run(source, self.newest[name] + 1)
                chain.add(name)

    def _has(self, source: Op, reader: Op) -> bool:
        """Whether what `reader` takes of the newest result of `source` is alive in the backward phase."""
        return all(
            name in self.graph.surviving and (copy > 0 or name not in self.discard)
            for name, copy in self.results[source.name]
            if name in reader.inputs
        )


def simulate(profile: Profile, schedule: Schedule) -> Timeline:
    """What `schedule` costs, at every point; a schedule that uses what is not there is refused."""
    simulation = _Simulation(profile)
    for entry in schedule.entries:
        simulation.take(entry)
    return simulation.timeline(schedule)


class _Simulation:
    """The state of memory while a schedule is followed."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.graph = profile.graph
        self.born: dict[Copy, int] = {}  # of what is alive: at which entry it came
        self.lives: list[tuple[Copy, int, int]] = []  # of what was: from which entry on, to before which
        self.swapped: set[Copy] = set()
        self.results: dict[str, tuple[Copy, ...]] = {}
        self.now = 0
        self.changes: dict[Role, list[tuple[int, int]]] = {role: [] for role in Role}
        self.workspaces: list[int] = []
        self.seconds = 0.0
        for storage in self.graph.storages:
            if storage.name not in self.graph.maker:
                self._make((storage.name, 0))

    def take(self, entry: Entry) -> None:
        workspace = 0
        if isinstance(entry, Run):
            workspace = self._run(entry)
        elif isinstance(entry, Free):
            self._drop((entry.storage, entry.copy))
        elif isinstance(entry, SwapOut):
            self._drop((entry.storage, entry.copy))
            self.swapped.add((entry.storage, entry.copy))
        else:
            self._swap_in(entry)
        self.workspaces.append(workspace)
        self.now += 1

    def _run(self, run: Run) -> int:
        op = self._op(run.op)
        for need in op.needs:
            if need not in self.results:
                raise AcwbError(f"The schedule runs {run.op} before {need}, whose result it takes.")
        if run.short and (op.name not in self.profile.shortcuts or not run.copy):
            raise AcwbError(f"The schedule runs {run.op} by a shortcut, which the profile does not have for it.")
        for item in taken(op, self.results, run.short):
            if item not in self.born:
                raise AcwbError(f"The schedule runs {run.op} when copy {item[1]} of {item[0]} is no longer there.")
        if op.mutates and run.copy:
            raise AcwbError(f"The schedule runs {run.op} again, which writes into {', '.join(op.mutates)}.")
        for name in made_by(op, run.short):
            self._make((name, run.copy))
        self.results[op.name] = result_of(op, run.copy, self.results, run.short)
        if run.short:
            seconds, workspace = self.profile.shortcuts[op.name]
        else:
            seconds, workspace = self.profile.seconds[op.name], self.profile.workspace_bytes[op.name]
        self.seconds += seconds
        return workspace

    def _op(self, name: str) -> Op:
        if name not in self.graph.rank:
            raise AcwbError(f"The schedule runs {name}, which is not an op of this graph.")
        return self.graph.ops[self.graph.rank[name]]

    def _make(self, item: Copy) -> None:
        if item in self.born:
            raise AcwbError(f"The schedule makes copy {item[1]} of {item[0]}, which is there already.")
        self.born[item] = self.now
        storage = self.graph.storage[item[0]]
        self.changes[storage.role].append((self.now, storage.bytes))

    def _drop(self, item: Copy) -> None:
        if item not in self.born:
            raise AcwbError(f"The schedule frees copy {item[1]} of {item[0]}, which is not there.")
        self.lives.append((item, self.born.pop(item), self.now))
        storage = self.graph.storage[item[0]]
        self.changes[storage.role].append((self.now, -storage.bytes))

    def _swap_in(self, entry: SwapIn) -> None:
        item = (entry.storage, entry.copy)
        if item not in self.swapped:
            raise AcwbError(f"The schedule swaps in copy {entry.copy} of {entry.storage}, which was not swapped out.")
        self.swapped.remove(item)
        self._make(item)
        self.seconds += entry.stall

    def timeline(self, schedule: Schedule) -> Timeline:
        """The timeline, once every entry was taken."""
        by_role = {role: self._curve(changes) for role, changes in self.changes.items()}
        tensors = sum(by_role.values(), start=numpy.zeros(self.now, dtype=numpy.int64))
        total = tensors + numpy.array(self.workspaces, dtype=numpy.int64)
        peak_step = int(total.argmax())
        return Timeline(
            tensor_bytes=tuple(tensors.tolist()),
            total_bytes=tuple(total.tolist()),
            by_role={role: tuple(sizes.tolist()) for role, sizes in by_role.items()},
            seconds=self.seconds,
            peak_step=peak_step,
            peak_entry=schedule.entries[peak_step],
            alive_at_peak=self._alive_at(peak_step),
        )

    def _curve(self, changes: list[tuple[int, int]]) -> "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]":
        """Bytes after every entry, from their changes."""
        steps = numpy.zeros(self.now, dtype=numpy.int64)
        if changes:
            at, sizes = zip(*changes, strict=True)
            numpy.add.at(steps, numpy.array(at), numpy.array(sizes, dtype=numpy.int64))
        return steps.cumsum()

    def _alive_at(self, step: int) -> tuple[Copy, ...]:
        """Who is alive after an entry, the largest first."""
        alive = [item for item, start in self.born.items() if start <= step]
        alive += [item for item, start, stop in self.lives if start <= step < stop]
        return tuple(sorted(alive, key=lambda item: (-self.graph.storage[item[0]].bytes, item)))
