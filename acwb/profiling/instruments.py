"""Instruments of a replay: workspace and time of each op, and whether its recompute rule is bitwise equal to it.

Each is a callable that takes an op with its arguments, runs it, and keeps what it measured.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

from acwb.bitwise import equal_with_strides
from acwb.capture.recompute_rules import RecomputeRule
from acwb.core.graph import StepGraph
from acwb.profiling import process_memory
from acwb.profiling.devices import AllocationMeter, Clock
from acwb.profiling.replay import MovedArguments, OpCall, Swapper

BlockPolicy = Callable[..., AbstractContextManager[None]]  # which freed blocks malloc returns to the system meanwhile


def blocks_kept(*_: int) -> AbstractContextManager[None]:
    """The block policy of a step that fits in memory: malloc keeps what it likes."""
    return nullcontext()


def rule_label(name: str) -> str:
    """The name under which the allocation meter has an op's recompute rule."""
    return f"{name} by its recompute rule"


class WorkspaceMeter:
    """Measures what each op allocates, times its recompute rule, and with a swapper the swaps of its activations.

    Attributes:
        rule_seconds: the time of each recompute rule whose result is bitwise equal to that of its op.
    """

    def __init__(
        self,
        meter: AllocationMeter,
        clock: Clock,
        swapper: Swapper | None,
        graph: StepGraph,
        repeats: int,
        returning: BlockPolicy = blocks_kept,
    ) -> None:
        self._meter = meter
        self._clock = clock
        self._swapper = swapper
        self._activations = {activation.name for activation in graph.activations}
        self._repeats = repeats
        self._returning = returning
        self.rule_seconds: dict[str, float] = {}

    def __call__(self, call: OpCall, arguments: MovedArguments) -> Any:
        """Run the op under the allocation meter; then try its rule, and swap what it made."""
        args, kwargs = arguments.take()
        with self._meter.watch(call.op.name):
            result = call.run(args, kwargs)
        if call.rule is not None:
            self._try_rule(call.op.name, call.rule, args, result)
        for name, storage in call.made(result):
            if self._swapper and name in self._activations:
                for _ in range(self._repeats):
                    self._swapper.swap_out(name, storage)
                    self._swapper.swap_in(name, storage)
                self._swapper.forget(name)
        return result

    def _try_rule(self, name: str, rule: RecomputeRule, args: tuple[Any, ...], result: Any) -> None:
        """Compare the result of an op's recompute rule with the op's own, bitwise, and time it if they are equal."""
        with self._meter.watch(rule_label(name)):
            recomputed = rule.kernel(args, result)
        if not equal_with_strides(recomputed, result[0]):
            return
        del recomputed
        marks = []
        with self._returning(process_memory.TIMED_BLOCKS, process_memory.ALL_BLOCKS):
            for _ in range(self._repeats):
                start = self._clock.mark()
                rule.kernel(args, result)
                marks.append((start, self._clock.mark()))
        self.rule_seconds[name] = median(self._clock.seconds(start, stop) for start, stop in marks)


class OpTimer:
    """Times each op, together with freeing what it is the last to use."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def __call__(self, call: OpCall, arguments: MovedArguments) -> Any:
        """Run the op and drop its arguments, timed."""
        args, kwargs = arguments.take()
        start = self._clock.mark()
        result = call.run(args, kwargs)
        del args, kwargs
        self._marks[call.op.name].append((start, self._clock.mark()))
        return result

    def seconds(self) -> dict[str, list[float]]:
        """The seconds of each op in each pass."""
        return {
            name: [self._clock.seconds(start, stop) for start, stop in marks] for name, marks in self._marks.items()
        }

    def medians(self) -> dict[str, float]:
        """The median seconds of each op."""
        return {name: median(seconds) for name, seconds in self.seconds().items()}
