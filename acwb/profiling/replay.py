"""Replays a captured step op by op on the live tensors, in the order and with the live ranges of a run.

`state_preserved` restores afterwards what the step writes into. `SwappingReplay` swaps storages out between the phases
that use them, for a step that does not fit in memory (μ-TWO, Algorithm A).
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from tqdm.auto import tqdm

from acwb._torch import below_autograd, storage_id
from acwb.capture.node_meta import meta_of, step_outputs
from acwb.capture.optimizer_step import state_tensors
from acwb.capture.recompute_rules import RecomputeRule, rule_of
from acwb.capture.step import TracedStep
from acwb.core.graph import Op, Role, output_position
from acwb.errors import AcwbError
from acwb.profiling import devices, process_memory
from acwb.profiling.devices import Clock, SwapSpace
from acwb.rng import preserved
from acwb.units import format_bytes


class MovedArguments:
    """The arguments of one call, to be taken once: whoever runs the op then has the only references, and drops them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._held = [(args, kwargs)]

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments, which are not held here any longer."""
        return self._held.pop()


Execute = Callable[["OpCall", MovedArguments], Any]


@contextmanager
def state_preserved(step: TracedStep) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors that exist before the step, by storage name; at the end they and the RNG state are restored.

    Meanwhile, copies of the tensors that the step writes into are in the swap space, and so are the gradients of the
    parameters, which a run frees.
    """
    tensors = _existing_tensors(step)
    device = step.device
    space = devices.space_of(device)
    written = {name for op in step.graph.ops for name in op.mutates if name in tensors}
    kept = {name: tensors[name].untyped_storage() for name in sorted(written)}
    parked = _gradient_storages(step)
    for name, storage in kept.items():
        space.write(name, storage)
    with ExitStack() as undo:
        undo.enter_context(preserved(device))
        for name, storage in parked.items():
            size = storage.nbytes()
            devices.swap_out(space, name, storage)
            undo.callback(devices.swap_in, space, name, storage, size)
        for name, storage in kept.items():
            undo.callback(space.read, name, storage)
        yield tensors


def _existing_tensors(step: TracedStep) -> dict[str, torch.Tensor]:
    """The tensors of model, batch and optimizer; optimizer state that does not exist yet is zero."""
    tensors: dict[str, torch.Tensor] = {}
    bound = step.inputs()
    placeholders = step.fx_graph.find_nodes(op="placeholder")
    names = {id(slot.tensor): slot.name for slot in step.slots}
    state = state_tensors(step.optimizer, names) if step.optimizer is not None else {}
    for number, node in enumerate(placeholders):
        name, recorded = meta_of(node)["storage"], meta_of(node)["val"]
        if meta_of(node)["role"] is not Role.OPTIMIZER_STATE:
            tensors[name] = bound[number]
        elif name in state:
            tensors[name] = state[name]
        else:
            tensors[name] = torch.zeros(recorded.shape, dtype=recorded.dtype, device=recorded.device)
    return tensors


def _gradient_storages(step: TracedStep) -> dict[str, torch.UntypedStorage]:
    """The storages of the gradients that an earlier run left, which the next run frees first."""
    storages = {}
    for slot in step.slots:
        gradient = slot.tensor.grad if slot.role is Role.PARAMETER else None
        if gradient is not None and gradient.layout is torch.strided and gradient.untyped_storage().resizable():
            storage = gradient.untyped_storage()
            storages[storage_id(storage)] = (f"{slot.name}.grad", storage)
    return dict(storages.values())


class Swapper:
    """Moves storages out of the device's memory and back, and times both."""

    def __init__(self, space: SwapSpace, clock: Clock) -> None:
        self._space = space
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self.out_seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.in_seconds: defaultdict[str, list[float]] = defaultdict(list)

    def swap_out(self, name: str, storage: torch.UntypedStorage) -> None:
        """Move a storage out of the device's memory, timed."""
        self._sizes[name] = storage.nbytes()
        start = self._clock.mark()
        devices.swap_out(self._space, name, storage)
        self.out_seconds[name].append(self._clock.seconds(start, self._clock.mark()))

    def swap_in(self, name: str, storage: torch.UntypedStorage) -> None:
        """Bring a storage back into the device's memory, timed."""
        start = self._clock.mark()
        devices.swap_in(self._space, name, storage, self._sizes[name])
        self.in_seconds[name].append(self._clock.seconds(start, self._clock.mark()))

    def forget(self, name: str) -> None:
        """Release the swap space of a storage that is not read back again."""
        self._space.forget(name)


@dataclass(frozen=True, eq=False)
class OpCall:
    """An op with its FX node, and the values that appear and disappear with it.

    Attributes:
        results: the nodes of its result, or (with their positions) of parts of it, as far as they are used later.
        dying: the nodes whose value is used here for the last time.
        rule: its recompute rule, if it has one.
    """

    op: Op
    node: fx.Node
    results: tuple[tuple[fx.Node, int | None], ...]
    dying: tuple[fx.Node, ...]
    rule: RecomputeRule | None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op's kernel."""
        kernel: Any = self.node.target
        return kernel(*args, **kwargs)

    def made(self, result: Any) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """The storages of a result that the op made, by name."""
        for name in self.op.outputs:
            tensor = result[output_position(name)] if isinstance(result, (tuple, list)) else result
            yield name, tensor.untyped_storage()


def calls_of(step: TracedStep) -> tuple[OpCall, ...]:
    """The ops of a step in order, each with the values that are used later and those that are not."""
    (output,) = step.fx_graph.find_nodes(op="output")
    outputs, gradients, _ = step_outputs(step.fx_graph)
    tangents = [node for node in step.fx_graph.nodes if "tangent_of" in meta_of(node)]
    kept = {*outputs, *gradients, *tangents}
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
        OpCall(
            op,
            node,
            tuple(results[node]),
            tuple(dying[node]),
            rule_of(node.target, node.args) if op.rule_inputs else None,
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
                self._bound[node] = tensors[meta_of(node)["storage"]]
            elif node.op == "get_attr":
                self._bound[node] = step.constants[node.target]

    def run(self, execute: Execute, progress: "tqdm[Any] | None" = None) -> None:
        """Run all ops once, in order; `execute` runs and measures each of them."""
        values: dict[fx.Node, Any] = dict(self._bound)
        with below_autograd(self._device):
            for call in self.calls:
                arguments = MovedArguments(*fx.map_arg((call.node.args, call.node.kwargs), values.__getitem__))
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
    def _room_for(self, call: OpCall) -> Iterator[None]:
        """Turn an out-of-memory error into one that names the op and a remedy."""
        try:
            yield
        except RuntimeError as error:
            if not process_memory.is_out_of_memory(error):
                raise
            free = format_bytes(devices.available_bytes(self._device))
            raise AcwbError(
                f"There is not enough memory for {call.op.name} while profiling ({free} are free): {self.remedy}."
            ) from error

    def _before(self, call: OpCall) -> None:
        """A hook before each op."""

    def _after(self, call: OpCall, result: Any) -> None:
        """A hook after each op, with its result."""


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

    def _before(self, call: OpCall) -> None:
        for name in self._returning[call.op.name]:
            self._swapper.swap_in(name, self._storages[name])

    def _after(self, call: OpCall, result: Any) -> None:
        self._storages.update(call.made(result))
        for name in self._leaving[call.op.name]:
            self._swapper.swap_out(name, self._storages[name])
        for name in self._ending[call.op.name]:
            self._storages.pop(name).resize_(0)  # a gradient would otherwise stay
