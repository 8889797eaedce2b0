"""What measures an op during a replay: its time, its kernel's workspace, its recompute rule."""

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
from acwb.profiling.replay import Arguments, OpCall, Swapper

BlockPolicy = Callable[..., AbstractContextManager[None]]  # which freed blocks the C library gives back meanwhile


def blocks_kept(*_: int) -> AbstractContextManager[None]:
    """The C library keeps freed blocks as it likes: there is room."""
    return nullcontext()


def rule_label(name: str) -> str:
    """What an op's recompute rule is measured under."""
    return f"{name} by its recompute rule"


class WorkspaceMeter:
    """Runs an op under the meter; with a swapper, moves each activation that it makes out and in again."""

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
        self.rule_seconds: dict[str, float] = {}  # of ops whose shortcut gives the same bits

    def __call__(self, call: OpCall, arguments: Arguments) -> Any:
        """Run the op, and measure it."""
        args, kwargs = arguments.pop()
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
        """Compare an op's recompute rule with its result, and time it: here, where the ops are not timed."""
        with self._meter.watch(rule_label(name)):
            again = rule.kernel(args, result)
        if not equal_with_strides(again, result[0]):
            return
        del again
        marks = []
        with self._returning(process_memory.TIMED_BLOCKS, process_memory.ALL_BLOCKS):
            for _ in range(self._repeats):
                start = self._clock.mark()
                rule.kernel(args, result)
                marks.append((start, self._clock.mark()))
        self.rule_seconds[name] = median(self._clock.seconds(start, stop) for start, stop in marks)


class OpTimer:
    """Times an op, together with giving back what it used for the last time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def __call__(self, call: OpCall, arguments: Arguments) -> Any:
        """Run the op, and measure it."""
        args, kwargs = arguments.pop()
        start = self._clock.mark()
        result = call.run(args, kwargs)
        del args, kwargs
        self._marks[call.op.name].append((start, self._clock.mark()))
        return result

    def seconds(self) -> dict[str, list[float]]:
        """How long each op took in each pass."""
        return {
            name: [self._clock.seconds(start, stop) for start, stop in marks] for name, marks in self._marks.items()
        }

    def medians(self) -> dict[str, float]:
        """The median seconds of each op."""
        return {name: median(seconds) for name, seconds in self.seconds().items()}
