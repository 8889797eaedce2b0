"""The planning problem as integer arrays: everything that does not change during a search.

A profile and pins come in. Time is divided into slots: slot 2k + 1 is op k itself, slot 2k holds the recomputations
inserted right before it. Only the functions here know this.
"""

from collections.abc import Iterable

from acwb.core.graph import Phase
from acwb.core.graph_arrays import IntOrArray, OpNumbering, arrays_of
from acwb.core.profile import Profile
from acwb.planning.pins import NO_PINS, Pins


def slot_of(rank: int) -> int:
    """The slot in which op `rank` runs."""
    return 2 * rank + 1


def slot_before(rank: IntOrArray) -> IntOrArray:
    """The slot of the recomputations right before op `rank`."""
    return 2 * rank


def rank_of_slot(slot: IntOrArray) -> IntOrArray:
    """The op that runs in a slot, or right after it."""
    return slot // 2


def is_op_slot(slot: int) -> bool:
    """Whether a slot is that of an op, not of recomputations."""
    return slot % 2 == 1


class PlanningProblem(OpNumbering):
    """A profile as arrays, with its pins. An op is its rank, a storage its position among those that the step makes.

    Attributes:
        end: the slot after the last op, at which the storages that outlive the step are still used.
        boundary: the slot in which the forward phase ends.
        makes: the storages that each op or rule makes; `new_bytes` are their sizes.
        reads: the storages that each op or rule reads.
        uses: the slots at which the captured step uses each storage, ascending.
        droppable: whether each storage may be dropped and recomputed.
        pinned: the storages that must be recomputed.
        views: through which views each op or rule reads each storage.
        viewed: the storages that are read through views at all.
        rule_needs: for the first output of each op with a recompute rule that saves time: the other outputs of that op
            which the rule reads.
    """

    def __init__(self, profile: Profile, pins: Pins = NO_PINS) -> None:
        graph = profile.graph
        super().__init__(len(graph.ops))
        self.profile = profile
        self.graph = graph
        self.pins = pins
        self.end = slot_before(self.count)
        first_backward = next((rank for rank, op in enumerate(graph.ops) if op.phase is not Phase.FORWARD), self.count)
        self.boundary = slot_before(first_backward)
        self.names = [storage.name for storage in graph.storages if storage.name in graph.maker]
        self._position = {name: position for position, name in enumerate(self.names)}
        self.size = [graph.storage[name].bytes for name in self.names]
        self.maker = [graph.rank[graph.maker[name]] for name in self.names]
        self._list_ops()
        self._list_uses()
        self._list_views()
        self.pinned = frozenset(self._positions(pins.recompute))

    def _positions(self, names: Iterable[str]) -> tuple[int, ...]:
        """The storages that the step makes, of those called `names`."""
        return tuple(self._position[name] for name in dict.fromkeys(names) if name in self._position)

    def _list_ops(self) -> None:
        profile, ops = self.profile, self.graph.ops
        rules = [profile.rules.get(op.name, (0.0, 0)) for op in ops]
        self.makes = [self._positions(op.results(by_rule)) for by_rule in (False, True) for op in ops]
        self.new_bytes = [sum(self.size[storage] for storage in storages) for storages in self.makes]
        self.reads = [self._positions(op.inputs) for op in ops] + [self._positions(op.rule_inputs) for op in ops]
        self.seconds = [profile.seconds[op.name] for op in ops] + [seconds for seconds, _ in rules]
        self.workspace = [profile.workspace_bytes[op.name] for op in ops] + [size for _, size in rules]
        self.random = [op.random for op in ops] + [False] * self.count  # a recompute rule draws no random numbers
        self.state_bytes = self.graph.environment.random_state_bytes
        self.rule_needs = {
            self._position[op.outputs[0]]: tuple(
                storage for storage in self.reads[self.rule_of(rank)] if self.maker[storage] == rank
            )
            for rank, op in enumerate(ops)
            if op.name in profile.rules and rules[rank][0] < self.seconds[rank]
        }

    def _list_uses(self) -> None:
        graph = self.graph
        self.uses: list[list[int]] = [[] for _ in self.names]
        for rank, op in enumerate(graph.ops):
            for storage in self._positions((*op.inputs, *op.mutates, *op.holds)):
                self.uses[storage].append(slot_of(rank))
        for name in graph.kept:
            self.uses[self._position[name]].append(self.end)
        recomputable = [op.phase is Phase.FORWARD and op.recomputable for op in graph.ops]
        self.droppable = [
            recomputable[maker] and name not in graph.kept and name not in self.pins.keep
            for name, maker in zip(self.names, self.maker, strict=True)
        ]

    def _list_views(self) -> None:
        self.views: list[dict[int, tuple[int, ...]]] = []
        for through in arrays_of(self.graph).through:
            views: dict[int, tuple[int, ...]] = {}
            for view in through:
                for storage in self._positions(self.graph.ops[view].inputs):
                    views[storage] = (*views.get(storage, ()), view)
            self.views.append(views)
        self.viewed = {storage for views in self.views for storage in views}

    def may_recompute(self, op: int) -> bool:
        """Whether a number stands for an op that may be recomputed, or for a recompute rule that the profile has."""
        if not 0 <= op < 2 * self.count:
            return False
        base = self.graph.ops[self.base_op(op)]
        return base.recomputable and (not self.is_rule(op) or base.name in self.profile.rules)
