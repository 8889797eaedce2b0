"""Replays a captured step op by op on the live tensors, in the order and with the lifetimes of a run.

Whatever the step writes into is restored afterwards. `SwappingReplay` swaps storages out between the phases that use
them, for a step that does not fit in memory (μ-TWO, Algorithm A).
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

from acwb._torch import below_autograd
from acwb.capture.optimizer_step import state_tensors
from acwb.capture.recompute_rules import RecomputeRule, rule_of
from acwb.capture.step import TracedStep
from acwb.core.graph import Op, Role
from acwb.errors import AcwbError
from acwb.profiling import devices, process_memory
from acwb.profiling.devices import Clock, SwapSpace
from acwb.rng import preserved
from acwb.units import format_bytes

Arguments = list[tuple[tuple[Any, ...], dict[str, Any]]]  # of one call; whoever runs it takes them out
Execute = Callable[["OpCall", Arguments], Any]


@contextmanager
def state_preserved(step: TracedStep) -> Iterator[dict[str, torch.Tensor]]:
    """Give the tensors that exist before the step, by storage name; at the end they and the random state are as before.

    What the step writes into is kept in a file meanwhile, and so are the parameters' gradients, which a run frees.
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


def _gradient_storages(step: TracedStep) -> dict[str, torch.UntypedStorage]:
    """The memory of the gradients that an earlier run left, which the next one frees first."""
    found = {}
    for slot in step.slots:
        gradient = slot.tensor.grad if slot.role is Role.PARAMETER else None
        if gradient is not None and gradient.layout is torch.strided and gradient.untyped_storage().resizable():
            storage = gradient.untyped_storage()
            found[storage._cdata] = (f"{slot.name}.grad", storage)
    return dict(found.values())


class Swapper:
    """Moves storages out of the device's memory and back, and notes how long that takes."""

    def __init__(self, space: SwapSpace, clock: Clock) -> None:
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
class OpCall:
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
    rule: RecomputeRule | None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op's kernel."""
        kernel: Any = self.node.target
        return kernel(*args, **kwargs)

    def made(self, result: Any) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """The storages of a result that the op made, by name."""
        for name in self.op.outputs:
            tensor = result[int(name.rpartition(":")[2])] if isinstance(result, (tuple, list)) else result
            yield name, tensor.untyped_storage()


def calls_of(step: TracedStep) -> tuple[OpCall, ...]:
    """The ops of a step in order, each with the nodes that live on after it and those that do not."""
    (output,) = step.fx_graph.find_nodes(op="output")
    outputs, gradients, _ = output.args[0]
    tangents = [node for node in step.fx_graph.nodes if "tangent_of" in node.meta]
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
                self._bound[node] = tensors[node.meta["storage"]]
            elif node.op == "get_attr":
                self._bound[node] = step.constants[node.target]

    def run(self, execute: Execute, progress: "tqdm[Any] | None" = None) -> None:
        """One pass over all ops; `execute` runs each, and measures what it is there to measure."""
        values: dict[fx.Node, Any] = dict(self._bound)
        with below_autograd(self._device):
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
    def _room_for(self, call: OpCall) -> Iterator[None]:
        """Say in a sentence where memory ran out."""
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
        """What happens before an op is called."""

    def _after(self, call: OpCall, result: Any) -> None:
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

    def _before(self, call: OpCall) -> None:
        for name in self._returning[call.op.name]:
            self._swapper.swap_in(name, self._storages[name])

    def _after(self, call: OpCall, result: Any) -> None:
        self._storages.update(call.made(result))
        for name in self._leaving[call.op.name]:
            self._swapper.swap_out(name, self._storages[name])
        for name in self._ending[call.op.name]:
            self._storages.pop(name).resize_(0)  # a gradient would otherwise stay
