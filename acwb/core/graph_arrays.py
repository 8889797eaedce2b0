"""A step's graph as integer arrays, for arithmetic over whole schedules.

An op is its rank, a storage its position in `StepGraph.storages`; the recompute rule of an op has a number, too.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy

from acwb.core.graph import Role, StepGraph

Array = numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]
IntOrArray = TypeVar("IntOrArray", int, Array)


class RaggedArray:
    """A list of numbers for each key 0, 1, 2, …, laid end to end, so that those of many keys are gathered at once."""

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self._lengths = numpy.array([len(numbers) for numbers in lists], dtype=numpy.int64)
        self._starts = self._lengths.cumsum() - self._lengths
        self._flat = numpy.array([number for numbers in lists for number in numbers], dtype=numpy.int64)

    def of(self, keys: Array) -> tuple[Array, Array]:
        """The numbers of all `keys` in turn: for each number, the position of its key in `keys`, and the number."""
        lengths = self._lengths[keys]
        positions = numpy.repeat(numpy.arange(len(keys)), lengths)
        within = numpy.arange(len(positions)) - numpy.repeat(lengths.cumsum() - lengths, lengths)
        return positions, self._flat[self._starts[keys][positions] + within]


class OpNumbering:
    """Numbers of ops and of their recompute rules: op k has number k, its rule number k + count."""

    def __init__(self, count: int) -> None:
        self.count = count

    def number(self, rank: int, by_rule: bool = False) -> int:
        """The number of op `rank`, or of its rule."""
        return rank + self.count if by_rule else rank

    def rule_of(self, op: int) -> int:
        """The number of an op's rule."""
        return op + self.count

    def base_op(self, op: IntOrArray) -> IntOrArray:
        """The rank of the op that a number stands for, itself or by its rule."""
        return op % self.count

    def is_rule(self, op: int) -> bool:
        """Whether a number stands for a rule."""
        return op >= self.count

    def counterpart(self, op: int) -> int:
        """The rule of an op, or the op of a rule."""
        return (op + self.count) % (2 * self.count)


class GraphArrays(OpNumbering):
    """A graph as arrays; ops have the numbers of `OpNumbering`, storages their positions.

    Attributes:
        by_size: the position of each storage in the order from the largest to the smallest.
        made: whether the step makes each storage.
        kept: the storages that are alive at the end of the step.
        makes: the storages that each op or rule makes.
        reads: the storages that each op or rule reads.
        uses: the storages that must be alive while each op or rule runs, also those that it writes into or holds.
        needs: the ops whose results each op is called with.
        views: the views through which each op or rule reads, after the views that those were taken of.
        through: the same as tuples.
        readers: the ops that read through views, ascending.
        bases: the storages that each op which is a view is a view of.
    """

    def __init__(self, graph: StepGraph) -> None:
        super().__init__(len(graph.ops))
        self.position = {storage.name: position for position, storage in enumerate(graph.storages)}
        self.sizes = numpy.array([storage.bytes for storage in graph.storages], dtype=numpy.int64)
        roles = list(Role)
        self.roles = numpy.array([roles.index(storage.role) for storage in graph.storages], dtype=numpy.int64)
        order = sorted(range(len(graph.storages)), key=lambda at: (-graph.storages[at].bytes, graph.storages[at].name))
        self.by_size = numpy.argsort(numpy.array(order, dtype=numpy.int64))
        self.made = numpy.array([storage.name in graph.maker for storage in graph.storages], dtype=bool)

        def positions(names: Iterable[str]) -> list[int]:
            return [self.position[name] for name in dict.fromkeys(names)]

        ops, rank = graph.ops, graph.rank
        inputs, rule_inputs = [positions(op.inputs) for op in ops], [positions(op.rule_inputs) for op in ops]
        self.kept = numpy.array(positions(sorted(graph.kept)), dtype=numpy.int64)
        self.makes = RaggedArray([positions(op.results(by_rule)) for by_rule in (False, True) for op in ops])
        self.reads = RaggedArray(inputs + rule_inputs)
        self.uses = RaggedArray([positions((*op.inputs, *op.mutates, *op.holds)) for op in ops] + rule_inputs)
        self.needs = RaggedArray([[rank[name] for name in op.needs] for op in ops])
        self.bases = RaggedArray([bases if op.view else [] for op, bases in zip(ops, inputs, strict=True)])
        views: list[list[int]] = []
        for op in ops:
            own = [rank[name] for name in op.needs if ops[rank[name]].view]
            views.append(list(dict.fromkeys(view for last in own for view in (*views[last], last))))
        rule_views = [
            [view for view in views_of_op if set(ops[view].inputs) <= set(op.rule_inputs)]
            for op, views_of_op in zip(ops, views, strict=True)
        ]
        self.through = [tuple(views_of_op) for views_of_op in views + rule_views]
        self.readers = [position for position, views_of_op in enumerate(views) if views_of_op]
        self.views = RaggedArray(views + rule_views)


def arrays_of(graph: StepGraph) -> GraphArrays:
    """The graph as arrays; they are made once and stay with the graph, like its cached properties."""
    if "_arrays" not in graph.__dict__:
        graph.__dict__["_arrays"] = GraphArrays(graph)
    arrays: GraphArrays = graph.__dict__["_arrays"]
    return arrays
