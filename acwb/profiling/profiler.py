"""Measures every op of a captured step: its time, what its kernel allocates, and what swapping an activation costs.

The step is replayed op by op on the live tensors, in the order and with the lifetimes of a run; whatever it writes into
is put back afterwards. A first pass, which also warms up, reads the allocator and swaps activations; then every op is
timed, `repeats` times. A step that does not fit in memory is replayed with storages swapped out between the phases that
use them (μ-TWO, Algorithm A): besides what exists before the step, little more than one op's inputs, outputs and
workspace must fit at a time.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import fx
from tqdm.auto import tqdm

from acwb.capture.optimizer_step import state_tensors
from acwb.capture.recompute_rules import Rule, rule_of
from acwb.capture.step import TracedStep, kernels_only
from acwb.core.graph import Op, Role, StepGraph
from acwb.core.profile import Conditions, Profile
from acwb.errors import AcwbError
from acwb.profiling import devices
from acwb.profiling.devices import Clock, Meter, Space
from acwb.units import gibibytes

# Workspaces are not known before the step was profiled: a step fits when its storages leave this much room for them.
ROOM_FOR_WORKSPACE = 1.1

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Arguments = list[tuple[tuple[Any, ...], dict[str, Any]]]  # of one call; whoever runs it takes them out
Execute = Callable[["Call", Arguments], Any]
Returning = Callable[..., AbstractContextManager[None]]  # which freed blocks the C library gives back meanwhile


def profile(step: TracedStep, repeats: int = 3, swap: bool | None = None) -> Profile:
    """Measure a captured step; model, optimizer, batch and random state stay as they are.

    Args:
        step: what `acwb.trace` gave.
        repeats: how often each op is timed, after one warm-up; the median counts.
        swap: replay op by op with storages swapped out; by default only where the step does not fit in memory.

    Example:
        >>> profile = acwb.profile(step)
        >>> profile.activations.nlargest(3, "median_mem_size_bytes")
    """
    if not isinstance(step, TracedStep):
        raise AcwbError(f"profile takes the step that acwb.trace gives, not {type(step).__name__}.")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise AcwbError(f"repeats is {repeats!r}: each op must be timed at least once, so give a whole number from 1.")
    device = step.device
    clock, meter = devices.clock_of(device), devices.meter_of(device)
    with unchanged(step) as tensors:
        swapped = not fits(step.graph, device) if swap is None else swap
        swapper = Swapper(devices.space_of(device), clock)
        replay = SwappingReplay(step, tensors, swapper) if swapped else Replay(step, tensors)
        timed = Timed(clock)
        returning: Returning = partial(devices.returning_memory, device) if swapped else _as_it_is
        with tqdm(total=len(replay.calls) * (1 + repeats), desc="profiling", unit="op", leave=False) as progress:
            watched = Watched(meter, clock, None if swapped else swapper, step.graph, repeats, returning)
            with meter, returning(devices.ALL_BLOCKS):
                replay.run(watched, progress)
            with returning(devices.TIMED_BLOCKS):
                for _ in range(repeats):
                    replay.run(timed, progress)
    growth = meter.growth()
    made = {op.name: sum(step.graph.storage[name].bytes for name in op.outputs) for op in step.graph.ops}
    return Profile(
        graph=step.graph,
        seconds=timed.medians(),
        workspace_bytes={name: max(0, growth[name] - size) for name, size in made.items()},
        swap_out_seconds={each.name: median(swapper.out_seconds[each.name]) for each in step.graph.activations},
        swap_in_seconds={each.name: median(swapper.in_seconds[each.name]) for each in step.graph.activations},
        shortcuts={
            name: (seconds, max(0, growth[shortcut_label(name)] - step.graph.storage[f"{name}:0"].bytes))
            for name, seconds in watched.shortcut_seconds.items()
        },
        conditions=Conditions(devices.description(device), torch.get_num_threads(), repeats, swapped),
    )


def _as_it_is(*_: int) -> AbstractContextManager[None]:
    """The C library keeps freed blocks as it likes: there is room."""
    return nullcontext()


def shortcut_label(name: str) -> str:
    """What an op's shortcut is measured under."""
    return f"{name} by its shortcut"


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal in every bit and in layout."""
    if left.dtype != right.dtype or left.shape != right.shape or left.stride() != right.stride():
        return False
    whole = _WHOLE_NUMBERS[left.itemsize]
    return torch.equal(left.view(whole), right.view(whole))


def fits(graph: StepGraph, device: torch.device) -> bool:
    """Whether the storages that the step makes fit beside what exists, with room for workspaces."""
    return ROOM_FOR_WORKSPACE * (max(graph.live_bytes) - graph.static_bytes) <= devices.available_bytes(device)


@contextmanager
def unchanged(step: TracedStep) -> Iterator[dict[str, torch.Tensor]]:
    """Give the tensors that exist before the step, by storage name; at the end they and the random state are as before.

    What the step writes into is kept in a file meanwhile, and so are the parameters' gradients, which a run frees.
    """
    tensors = _existing(step)
    device = step.device
    space = devices.space_of(device)
    written = {name for op in step.graph.ops for name in op.mutates if name in tensors}
    kept = {name: tensors[name].untyped_storage() for name in sorted(written)}
    parked = _gradients(step)
    for name, storage in kept.items():
        space.write(name, storage)
    with ExitStack() as undo:
        undo.enter_context(same_random_state(device))
        for name, storage in parked.items():
            size = storage.nbytes()
            devices.swap_out(space, name, storage)
            undo.callback(devices.swap_in, space, name, storage, size)
        for name, storage in kept.items():
            undo.callback(space.read, name, storage)
        yield tensors


def _existing(step: TracedStep) -> dict[str, torch.Tensor]:
    """The model's, the batch's and the optimizer's tensors; state that the optimizer has not made yet is zero."""
    tensors: dict[str, torch.Tensor] = {}
    bound = step.inputs()
    placeholders = step.fx_graph.find_nodes(op="placeholder")
    names = {id(slot.tensor): slot.name for slot in step.slots}
    state = state_tensors(step.optimizer, names) if step.optimizer is not None else {}
    for number, node in enumerate(placeholders):
        name, recorded = node.meta["storage"], node.meta["val"]
        if node.meta["role"] is not Role.OPTIMIZER_STATE:
            tensors[name] = bound[number]
        elif name in state:
            tensors[name] = state[name]
        else:
            tensors[name] = torch.zeros(recorded.shape, dtype=recorded.dtype, device=recorded.device)
    return tensors


def _gradients(step: TracedStep) -> dict[str, torch.UntypedStorage]:
    """The memory of the gradients that an earlier run left, which the next one frees first."""
    found = {}
    for slot in step.slots:
        gradient = slot.tensor.grad if slot.role is Role.PARAMETER else None
        if gradient is not None and gradient.layout is torch.strided and gradient.untyped_storage().resizable():
            storage = gradient.untyped_storage()
            found[storage._cdata] = (f"{slot.name}.grad", storage)
    return dict(found.values())


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Whatever is drawn meanwhile, the random state is as before at the end."""
    used = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(used, device_type=device.type if used else "cuda"):
        yield


class Swapper:
    """Moves storages out of the device's memory and back, and notes how long that takes."""

    def __init__(self, space: Space, clock: Clock) -> None:
        self._space = space
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self.out_seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.in_seconds: defaultdict[str, list[float]] = defaultdict(list)

    def swap_out(self, name: str, storage: torch.UntypedStorage) -> None:
        """Move a storage out."""
        self._sizes[name] = storage.nbytes()
        start = self._clock.mark()
        devices.swap_out(self._space, name, storage)
        self.out_seconds[name].append(self._clock.seconds(start, self._clock.mark()))

    def swap_in(self, name: str, storage: torch.UntypedStorage) -> None:
        """Bring a storage back."""
        start = self._clock.mark()
        devices.swap_in(self._space, name, storage, self._sizes[name])
        self.in_seconds[name].append(self._clock.seconds(start, self._clock.mark()))

    def forget(self, name: str) -> None:
        """A storage is not moved again."""
        self._space.forget(name)


@dataclass(frozen=True, eq=False)
class Call:
    """An op with its node.

    Attributes:
        results: the nodes that name its result, or (with their positions) parts of it, and are used later.
        dying: the nodes whose value is used here for the last time.
        rule: a cheaper way to make its first output again.
    """

    op: Op
    node: fx.Node
    results: tuple[tuple[fx.Node, int | None], ...]
    dying: tuple[fx.Node, ...]
    rule: Rule | None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op's kernel."""
        kernel: Any = self.node.target
        return kernel(*args, **kwargs)

    def made(self, result: Any) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """The storages of a result that the op made, by name."""
        for name in self.op.outputs:
            tensor = result[int(name.rpartition(":")[2])] if isinstance(result, (tuple, list)) else result
            yield name, tensor.untyped_storage()


def calls_of(step: TracedStep) -> tuple[Call, ...]:
    """The ops of a step in order, each with the nodes that live on after it and those that do not."""
    (output,) = step.fx_graph.find_nodes(op="output")
    outputs, gradients, _ = output.args[0]
    derivatives = [node for node in step.fx_graph.nodes if "derivative_of" in node.meta]
    kept = {*outputs, *gradients, *derivatives}
    order = {node: position for position, node in enumerate(step.fx_graph.nodes)}
    nodes = [node for node in step.fx_graph.nodes if node.op == "call_function"]
    dying: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    used = set(kept)
    for node in nodes:
        users = [user for user in node.users if user is not output and user.target is not operator.getitem]
        if users:
            used.add(node)
            if node not in kept:
                dying[max(users, key=order.__getitem__)].append(node)
    results: defaultdict[fx.Node, list[tuple[fx.Node, int | None]]] = defaultdict(list)
    for node in nodes:
        if node in used:
            item = node.target is operator.getitem
            results[node.args[0] if item else node].append((node, node.args[1] if item else None))
    return tuple(
        Call(
            op, node, tuple(results[node]), tuple(dying[node]), rule_of(node.target, node.args) if op.shortcut else None
        )
        for op, node in zip(
            step.graph.ops, [node for node in nodes if node.target is not operator.getitem], strict=True
        )
    )


class Replay:
    """Runs a step's ops one by one on given tensors, and drops each value at its last use."""

    remedy = "profile with swap=True"

    def __init__(self, step: TracedStep, tensors: Mapping[str, torch.Tensor]) -> None:
        self.calls = calls_of(step)
        self._device = step.device
        self._bound: dict[fx.Node, torch.Tensor] = {}
        for node in step.fx_graph.nodes:
            if node.op == "placeholder":
                self._bound[node] = tensors[node.meta["storage"]]
            elif node.op == "get_attr":
                self._bound[node] = step.constants[node.target]

    def run(self, execute: Execute, progress: "tqdm[Any] | None" = None) -> None:
        """One pass over all ops; `execute` runs each, and measures what it is there to measure."""
        values: dict[fx.Node, Any] = dict(self._bound)
        with kernels_only(self._device):
            for call in self.calls:
                arguments: Arguments = [fx.map_arg((call.node.args, call.node.kwargs), values.__getitem__)]
                for node in call.dying:
                    del values[node]
                with self._room_for(call):
                    self._before(call)
                    result = execute(call, arguments)
                for node, position in call.results:
                    values[node] = result if position is None else result[position]
                self._after(call, result)
                del result
                if progress is not None:
                    progress.update()

    @contextmanager
    def _room_for(self, call: Call) -> Iterator[None]:
        """Say in a sentence where memory ran out."""
        try:
            yield
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            free = gibibytes(devices.available_bytes(self._device))
            raise AcwbError(
                f"There is not enough memory for {call.op.name} while profiling ({free} are free): {self.remedy}."
            ) from error

    def _before(self, call: Call) -> None:
        """What happens before an op is called."""

    def _after(self, call: Call, result: Any) -> None:
        """What happens once it has run."""


class SwappingReplay(Replay):
    """A replay that swaps a storage out after its last use in a phase, and in before its first use in the next one."""

    remedy = "use a smaller batch"

    def __init__(self, step: TracedStep, tensors: Mapping[str, torch.Tensor], swapper: Swapper) -> None:
        super().__init__(step, tensors)
        self._swapper = swapper
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._leaving: defaultdict[str, list[str]] = defaultdict(list)
        self._returning: defaultdict[str, list[str]] = defaultdict(list)
        self._ending: defaultdict[str, list[str]] = defaultdict(list)
        graph = step.graph
        for name, maker in graph.maker.items():
            touching = [graph.ops[rank] for rank in (graph.rank[maker], *graph.users[name])]
            for op, following in pairwise(touching):
                if op.phase is not following.phase:
                    self._leaving[op.name].append(name)
                    self._returning[following.name].append(name)
            self._ending[touching[-1].name].append(name)

    def _before(self, call: Call) -> None:
        for name in self._returning[call.op.name]:
            self._swapper.swap_in(name, self._storages[name])

    def _after(self, call: Call, result: Any) -> None:
        self._storages.update(call.made(result))
        for name in self._leaving[call.op.name]:
            self._swapper.swap_out(name, self._storages[name])
        for name in self._ending[call.op.name]:
            self._storages.pop(name).resize_(0)  # a gradient would otherwise stay


class Watched:
    """Runs an op under the meter; with a swapper, moves each activation that it makes out and in again."""

    def __init__(
        self,
        meter: Meter,
        clock: Clock,
        swapper: Swapper | None,
        graph: StepGraph,
        repeats: int,
        returning: Returning = _as_it_is,
    ) -> None:
        self._meter = meter
        self._clock = clock
        self._swapper = swapper
        self._activations = {activation.name for activation in graph.activations}
        self._repeats = repeats
        self._returning = returning
        self.shortcut_seconds: dict[str, float] = {}  # of ops whose shortcut gives the same bits

    def __call__(self, call: Call, arguments: Arguments) -> Any:
        """Run the op, and measure it."""
        args, kwargs = arguments.pop()
        with self._meter.watch(call.op.name):
            result = call.run(args, kwargs)
        if call.rule is not None:
            self._try_shortcut(call.op.name, call.rule, args, result)
        for name, storage in call.made(result):
            if self._swapper and name in self._activations:
                for _ in range(self._repeats):
                    self._swapper.swap_out(name, storage)
                    self._swapper.swap_in(name, storage)
                self._swapper.forget(name)
        return result

    def _try_shortcut(self, name: str, rule: Rule, args: tuple[Any, ...], result: Any) -> None:
        """Compare an op's shortcut with its result, and time it; here, because it would disturb the ops' own times."""
        with self._meter.watch(shortcut_label(name)):
            again = rule.kernel(args, result)
        if not _same_bits(again, result[0]):
            return
        del again
        marks = []
        with self._returning(devices.TIMED_BLOCKS, devices.ALL_BLOCKS):
            for _ in range(self._repeats):
                start = self._clock.mark()
                rule.kernel(args, result)
                marks.append((start, self._clock.mark()))
        self.shortcut_seconds[name] = median(self._clock.seconds(start, stop) for start, stop in marks)


class Timed:
    """Times an op, together with giving back what it used for the last time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def __call__(self, call: Call, arguments: Arguments) -> Any:
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
