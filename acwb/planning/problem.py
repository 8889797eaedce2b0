"""What stays the same while plans for a profile are made: ops and storages as numbers."""

from collections.abc import Iterable

from acwb.core.graph import Phase
from acwb.core.graph_arrays import arrays_of
from acwb.core.profile import Profile
from acwb.planning.pins import NO_PINS, Pins


class PlanningProblem:
    """A profile in numbers, with what is pinned; of storages only those that the step makes.

    An op is known by its rank; the recompute rule of op number n is op number n + count.
    """

    def __init__(self, profile: Profile, pins: Pins = NO_PINS) -> None:
        graph = profile.graph
        self.profile = profile
        self.graph = graph
        self.pins = pins
        self.count = len(graph.ops)
        self.end = 2 * self.count
        self.names = [storage.name for storage in graph.storages if storage.name in graph.maker]
        number = {name: position for position, name in enumerate(self.names)}
        self.size = [graph.storage[name].bytes for name in self.names]
        self.maker = [graph.rank[graph.maker[name]] for name in self.names]

        def numbers(names: Iterable[str]) -> tuple[int, ...]:
            return tuple(number[name] for name in dict.fromkeys(names) if name in number)

        self.makes = [numbers(op.outputs) for op in graph.ops] + [numbers(op.outputs[:1]) for op in graph.ops]
        self.new_bytes = [sum(self.size[each] for each in made) for made in self.makes]
        self.reads = [numbers(op.inputs) for op in graph.ops] + [numbers(op.rule_inputs) for op in graph.ops]
        short = [profile.rules.get(op.name, (0.0, 0)) for op in graph.ops]
        self.seconds = [profile.seconds[op.name] for op in graph.ops] + [seconds for seconds, _ in short]
        self.workspace = [profile.workspace_bytes[op.name] for op in graph.ops] + [size for _, size in short]
        self.random = [op.random for op in graph.ops] + [False] * self.count  # by a recompute rule, nothing is drawn
        self.state_bytes = graph.environment.random_state_bytes
        self.uses: list[list[int]] = [[] for _ in self.names]
        for rank, op in enumerate(graph.ops):
            for each in numbers((*op.inputs, *op.mutates, *op.holds)):
                self.uses[each].append(2 * rank + 1)
        for name in graph.kept:
            self.uses[number[name]].append(self.end)
        again = [op.phase is Phase.FORWARD and op.recomputable for op in graph.ops]
        self.droppable = [
            again[self.maker[each]] and name not in graph.kept and name not in pins.keep
            for each, name in enumerate(self.names)
        ]
        self.pinned = frozenset(numbers(pins.recompute))  # must be made again
        first = next((rank for rank, op in enumerate(graph.ops) if op.phase is not Phase.FORWARD), self.count)
        self.boundary = 2 * first  # where the forward phase ends
        # Through which views each op or rule reads each storage.
        self.views: list[dict[int, tuple[int, ...]]] = []
        for through in arrays_of(graph).through:
            found: dict[int, tuple[int, ...]] = {}
            for view in through:
                for each in numbers(graph.ops[view].inputs):
                    found[each] = (*found.get(each, ()), view)
            self.views.append(found)
        self.viewed = {each for found in self.views for each in found}
        # For the first output of an op with a recompute rule that saves time: which other outputs of that op it needs.
        self.rule_needs = {
            number[op.outputs[0]]: tuple(each for each in self.reads[self.count + rank] if self.maker[each] == rank)
            for rank, op in enumerate(graph.ops)
            if short[rank][0] < self.seconds[rank] and op.name in profile.rules
        }

    def may_recompute(self, op: int) -> bool:
        """Whether a number stands for an op that may be recomputed, or for a recompute rule that the profile has."""
        if not 0 <= op < 2 * self.count:
            return False
        base = self.graph.ops[op % self.count]
        return base.recomputable and (op < self.count or base.name in self.profile.rules)
