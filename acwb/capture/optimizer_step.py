"""Records an optimizer's ops: what its own `step()` runs, on stand-ins, appended to a step's graph.

What is recorded is the steady state: the second step (the first one makes the optimizer's state) or, where later steps
run other ops, as RAdam's and ASGD's do, the one that needs the most memory. The constants of that step (bias
corrections, learning rate) are in the recorded ops, which are there for sizes and times; a run calls the optimizer's
own `step()`. Its hooks are not recorded.
"""

import operator
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import fx

from acwb._torch import DispatchMode, pytree, storage_id
from acwb.capture.joint_graph import placeholder
from acwb.capture.node_meta import meta_of, set_meta
from acwb.core.graph import Phase, Role
from acwb.errors import CaptureError


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter, by name, with the nodes of its placeholder and (where it has one) its gradient."""

    name: str
    tensor: torch.Tensor
    node: fx.Node
    gradient: fx.Node | None


def record_optimizer_step(
    graph: fx.Graph, optimizer: torch.optim.Optimizer, parameters: Sequence[TrainedParameter]
) -> dict[str, torch.Tensor]:
    """Append the ops of the optimizer's steady state to `graph`, and return the constants that they refer to."""
    stand_ins = {id(parameter.tensor): meta_of(parameter.node)["val"].detach() for parameter in parameters}
    nodes: dict[int, fx.Node] = {}
    for parameter in parameters:
        stand_in = stand_ins[id(parameter.tensor)]
        nodes[id(stand_in)] = parameter.node
        if parameter.gradient is not None:
            stand_in.grad = meta_of(parameter.gradient)["val"].detach()
            nodes[id(stand_in.grad)] = parameter.gradient
    copy = _on_stand_ins(optimizer, stand_ins)
    names = {id(stand_ins[id(parameter.tensor)]): parameter.name for parameter in parameters}
    with _Explanation(type(optimizer).__name__):
        worst = _Recorder(graph, copy, names, nodes).record(_distinct_steps(optimizer, stand_ins))
    return worst.constants


# Numbers of steps after which an optimizer may go on otherwise: RAdam does after the fifth, ASGD after a million.
FIRST_STEPS = 8
LATER_STEPS = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)


def _distinct_steps(optimizer: torch.optim.Optimizer, stand_ins: dict[int, torch.Tensor]) -> list[int]:
    """The numbers of steps, from 2 on, each the first that runs its sequence of ops; tried on one parameter a group."""
    probe = _on_stand_ins(optimizer, stand_ins)
    for group in probe.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        group["params"] = sorted(trained, key=torch.Tensor.numel)[:1]
    probe.state = defaultdict(dict)
    first: dict[tuple[str, ...], int] = {}
    number = 0
    for later in (*range(1, FIRST_STEPS + 1), *(later + more for later in LATER_STEPS for more in (0, 1, 2))):
        _skip_steps(probe, later - number - 1)
        ops = _OpNames()
        with ops:
            type(probe).step(probe)
        number = later
        if number > 1:
            first.setdefault(tuple(ops.names), number)
    return list(first.values())


def _skip_steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Have an optimizer count more steps than it did."""
    for state in optimizer.state.values() if count else ():
        if "step" in state:
            state["step"] = state["step"] + count


class _OpNames(DispatchMode):
    """Dispatch mode that lists the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class _Recorder:
    """Records steps of an optimizer on stand-ins, and leaves in the graph the one that needs the most memory."""

    def __init__(
        self, graph: fx.Graph, optimizer: torch.optim.Optimizer, names: dict[int, str], nodes: dict[int, fx.Node]
    ) -> None:
        self._graph = graph
        self._optimizer = optimizer
        self._names = names
        self._nodes = nodes
        self._state: dict[str, fx.Node] = {}

    def record(self, numbers: Sequence[int]) -> "_Recording":
        """Record the steps of these numbers, ascending, and keep the one with the largest peak."""
        worst: _Recording | None = None
        done = 0
        for number in numbers:
            while done < number - 1:
                if done >= FIRST_STEPS and done < number - 3:
                    _skip_steps(self._optimizer, number - 3 - done)
                    done = number - 3
                type(self._optimizer).step(self._optimizer)
                done += 1
            recording = self._record_next()
            done = number
            if worst is None or recording.peak_bytes > worst.peak_bytes:
                worst, recording = recording, worst
            if recording is not None:
                recording.erase()
        if worst is None:
            raise CaptureError("The optimizer has no step to record.")
        return worst

    def _record_next(self) -> "_Recording":
        recording = _Recording(self._graph, self._nodes | self._state_nodes())
        with recording:
            type(self._optimizer).step(self._optimizer)
        recording.end()
        return recording

    def _state_nodes(self) -> dict[int, fx.Node]:
        """The placeholders of all tensors of the optimizer's state and settings, by identity of the tensor."""
        nodes: dict[int, fx.Node] = {}
        first_op = next(node for node in self._graph.nodes if node.op != "placeholder")
        with self._graph.inserting_before(first_op):
            for name, tensor in state_tensors(self._optimizer, self._names).items():
                if name not in self._state:
                    module = name.rpartition(":")[0].rpartition(".")[0]
                    self._state[name] = placeholder(self._graph, name, Role.OPTIMIZER_STATE, tensor, module)
                nodes[id(tensor)] = self._state[name]
        return nodes


@dataclass(frozen=True)
class _Explanation:
    """Turns an error while the optimizer is recorded into a `CaptureError` of one sentence."""

    optimizer: str

    def __enter__(self) -> None:
        """Begin to turn errors of the recording into `CaptureError`s."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            reason = str(error).strip().split("\n")[0].rstrip(".") or "no message"
            raise CaptureError(
                f"{self.optimizer}.step() cannot be recorded ({type(error).__name__}: {reason}): capture the step "
                "without an optimizer and call it yourself."
            ) from error


def _on_stand_ins(optimizer: torch.optim.Optimizer, stand_ins: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """A copy of the optimizer on stand-in parameters, without hooks.

    Its state is empty but for parameters without a gradient: what an optimizer made for these beforehand, as Adagrad
    does, stays as it is.
    """
    inner = [key for key, value in optimizer.__dict__.items() if isinstance(value, torch.optim.Optimizer)]
    if inner:
        raise CaptureError(
            f"{type(optimizer).__name__} wraps another optimizer ({inner[0]}), which cannot be recorded: capture the "
            "step without an optimizer and call it yourself."
        )
    copy = object.__new__(type(optimizer))
    for key, value in optimizer.__dict__.items():
        copy.__dict__[key] = type(value)(value) if type(value) in (list, dict, set) else value
    copy.__dict__.pop("step", None)  # a learning-rate schedule wraps it to count calls
    for key in [key for key in copy.__dict__ if key.endswith("_hooks")]:
        copy.__dict__[key] = type(copy.__dict__[key])()
    copy.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        stand_in = stand_ins.get(id(parameter))
        if stand_in is not None and stand_in.grad is None:
            copy.state[stand_in] = {key: _stand_in_for(value, stand_in) for key, value in state.items()}
    copy.param_groups = [
        {
            **{key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()},
            "params": [stand_ins[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return copy


def _stand_in_for(value: object, beside: Any) -> object:
    """A tensor without data for one of an optimizer's state, in the same fake mode as a parameter's stand-in."""
    return beside.fake_mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value


def state_tensors(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Every tensor of an optimizer's state and settings, by name; `names` are those of its parameters, by identity."""
    found: dict[str, torch.Tensor] = {}
    for parameter, state in optimizer.state.items():
        found |= {
            f"{names[id(parameter)]}:{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)
        }
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"group {number}:{key}": value for key, value in group.items() if isinstance(value, torch.Tensor)}
    return found


class _Recording(DispatchMode):
    """Dispatch mode that appends every op of the optimizer step to an FX graph."""

    def __init__(self, graph: fx.Graph, nodes: dict[int, fx.Node]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.graph = graph
        self.nodes = nodes
        self.constants: dict[str, torch.Tensor] = {}
        self.last: fx.Node | None = None
        self.aliases: Counter[int] = Counter()  # living tensors of each storage that an op made
        self.peak_bytes = 0
        self._live_bytes = 0
        self._sizes: dict[int, int] = {}  # of the living storages that an op made
        self._before = set(graph.nodes)
        self._own: list[fx.Node] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("prim", "profiler"):  # asks for a device, marks a region: nothing is computed
            return result
        sources, options = pytree.tree_map_only(torch.Tensor, self._node, (args, kwargs or {}))
        name = function.overloadpacket.__name__
        node = self.graph.create_node("call_function", function, sources, options, name)
        first = node.args[0] if node.args else None
        module = meta_of(first)["module"] if isinstance(first, fx.Node) else ""
        # Aliases without the optimizer's own references: a storage is alive while its code holds a tensor of it.
        kept = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        set_meta(node, val=kept, phase=Phase.OPTIMIZER, module=module, holds=[])
        self.last = node
        self._remember(node, result)
        return result

    def end(self) -> None:
        """Stop noting which storages are freed: what is left is the optimizer's state."""
        self.last = None
        self._own = [node for node in self.graph.nodes if node not in self._before]

    def erase(self) -> None:
        """Take the recorded ops out of the graph again."""
        for node in reversed(self._own):
            self.graph.erase_node(node)

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:  # made by the step from a number, without an op
            name = f"_optimizer_constant{len(self.constants)}"
            self.constants[name] = tensor
            node = self.graph.get_attr(name)
            set_meta(node, val=tensor, phase=Phase.OPTIMIZER, module="")
            self.nodes[id(tensor)] = node
        return self.nodes[id(tensor)]

    def _remember(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._follow(result, node)
        elif isinstance(result, (tuple, list)):
            for position, value in enumerate(result):
                if isinstance(value, torch.Tensor):
                    item = self.graph.call_function(operator.getitem, (node, position))
                    item.meta = {**node.meta, "val": meta_of(node)["val"][position]}
                    self._follow(value, item)

    def _follow(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Map a tensor to its node while it is alive, and note the op after which its storage is freed."""
        if id(tensor) not in self.nodes:
            self.aliases[storage_id(tensor)] += 1
            if storage_id(tensor) not in self._sizes:
                self._sizes[storage_id(tensor)] = tensor.untyped_storage().nbytes()
                self._live_bytes += self._sizes[storage_id(tensor)]
                self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            weakref.finalize(tensor, self._died, id(tensor), storage_id(tensor)).atexit = False
        self.nodes[id(tensor)] = node

    def _died(self, tensor: int, storage: int) -> None:
        del self.nodes[tensor]
        self.aliases[storage] -= 1
        if not self.aliases[storage]:
            self._live_bytes -= self._sizes.pop(storage)
            if self.last is not None:
                meta_of(self.last)["holds"].append(storage)
