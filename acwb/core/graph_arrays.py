"""A step's graph as integer arrays, for arithmetic over whole schedules: an op is its rank, a storage its position."""

from collections.abc import Iterable, Sequence

import numpy

from acwb.core.graph import Role, StepGraph

Array = numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]


class RaggedArray:
    """A list of numbers for each key 0, 1, 2, …, laid end to end, so that those of many keys are found at once."""

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self._lengths = numpy.array([len(each) for each in lists], dtype=numpy.int64)
        self._starts = self._lengths.cumsum() - self._lengths
        self._flat = numpy.array([number for each in lists for number in each], dtype=numpy.int64)

    def of(self, keys: Array) -> tuple[Array, Array]:
        """The numbers of all `keys` in turn: for each number, the position of its key in `keys`, and the number."""
        lengths = self._lengths[keys]
        positions = numpy.repeat(numpy.arange(len(keys)), lengths)
        within = numpy.arange(len(positions)) - numpy.repeat(lengths.cumsum() - lengths, lengths)
        return positions, self._flat[self._starts[keys][positions] + within]


class GraphArrays:
    """A graph in numbers, for arithmetic over whole schedules: an op is its rank, a storage its place in `storages`.

    The recompute rule of op number n is number n + len(ops).

    Attributes:
        by_size: the place of each storage when they are listed from the largest to the smallest.
        makes: of each op and rule, the storages that it makes.
        reads: the storages that it reads.
        uses: the storages that must be there when it runs: also those that it writes into or holds.
        needs: of each op, the ops whose results it takes.
        views: of each op and rule, the views through which it reads, and the views that those were taken of.
        bases: of each op that is a view, the storages that it is a view of.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.number = {storage.name: position for position, storage in enumerate(graph.storages)}
        self.sizes = numpy.array([storage.bytes for storage in graph.storages], dtype=numpy.int64)
        roles = list(Role)
        self.roles = numpy.array([roles.index(storage.role) for storage in graph.storages], dtype=numpy.int64)
        order = sorted(
            range(len(graph.storages)), key=lambda each: (-graph.storages[each].bytes, graph.storages[each].name)
        )
        self.by_size = numpy.argsort(numpy.array(order, dtype=numpy.int64))
        self.made = numpy.array([storage.name in graph.maker for storage in graph.storages], dtype=bool)

        def numbered(names: Iterable[str]) -> list[int]:
            return [self.number[name] for name in dict.fromkeys(names)]

        ops, rank = graph.ops, graph.rank
        inputs, shortcuts = [numbered(op.inputs) for op in ops], [numbered(op.rule_inputs) for op in ops]
        self.kept = numpy.array(numbered(sorted(graph.kept)), dtype=numpy.int64)
        self.makes = RaggedArray([numbered(op.outputs) for op in ops] + [numbered(op.outputs[:1]) for op in ops])
        self.reads = RaggedArray(inputs + shortcuts)
        self.uses = RaggedArray([numbered((*op.inputs, *op.mutates, *op.holds)) for op in ops] + shortcuts)
        self.needs = RaggedArray([[rank[name] for name in op.needs] for op in ops])
        self.bases = RaggedArray([found if op.view else [] for op, found in zip(ops, inputs, strict=True)])
        views: list[list[int]] = []
        for op in ops:
            through = [rank[name] for name in op.needs if ops[rank[name]].view]
            views.append(list(dict.fromkeys(each for view in through for each in (*views[view], view))))
        short = [
            [view for view in found if set(ops[view].inputs) <= set(op.rule_inputs)]
            for op, found in zip(ops, views, strict=True)
        ]
        self.through = [tuple(found) for found in views + short]
        self.readers = [rank for rank, found in enumerate(views) if found]  # ops that read through views
        self.views = RaggedArray(views + short)


def arrays_of(graph: StepGraph) -> GraphArrays:
    """The graph as arrays; they are made once and stay with the graph, like its cached properties."""
    if "_arrays" not in graph.__dict__:
        graph.__dict__["_arrays"] = GraphArrays(graph)
    arrays: GraphArrays = graph.__dict__["_arrays"]
    return arrays
