"""Records an optimizer's ops: what its own `step()` runs, on stand-ins, appended to a step's graph.

What is recorded is the steady state, the second step: the first one makes the optimizer's state. The constants of that
step (bias corrections, learning rate) are in the recorded ops, which are there for sizes and times; a run calls the
optimizer's own `step()`. Its hooks are not recorded.
"""

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from acwb.assembler import placeholder
from acwb.errors import CaptureError
from acwb.graph import Phase, Role


@dataclass(frozen=True)
class Trained:
    """A parameter, by name, with the nodes of its placeholder and (where it has one) its gradient."""

    name: str
    tensor: torch.Tensor
    node: fx.Node
    gradient: fx.Node | None


def record(graph: fx.Graph, optimizer: torch.optim.Optimizer, parameters: Sequence[Trained]) -> None:
    """Append the ops of the optimizer's second step to `graph`."""
    stand_ins = {id(parameter.tensor): parameter.node.meta["val"].detach() for parameter in parameters}
    nodes: dict[int, fx.Node] = {}
    for parameter in parameters:
        stand_in = stand_ins[id(parameter.tensor)]
        nodes[id(stand_in)] = parameter.node
        if parameter.gradient is not None:
            stand_in.grad = parameter.gradient.meta["val"].detach()
            nodes[id(stand_in.grad)] = parameter.gradient
    copy = _on_stand_ins(optimizer, stand_ins)
    step = type(copy).step
    try:
        step(copy)
    except TypeError as error:
        raise CaptureError(
            f"{type(optimizer).__name__}.step() cannot be called without arguments ({error}): capture the step without "
            "an optimizer and call it yourself."
        ) from error
    names = {id(stand_ins[id(parameter.tensor)]): parameter.name for parameter in parameters}
    _add_state(graph, copy, names, nodes)
    with _Recording(graph, nodes, type(optimizer).__name__):
        step(copy)


def _on_stand_ins(optimizer: torch.optim.Optimizer, stand_ins: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """A copy of the optimizer that holds stand-ins, has no state yet, and runs nobody's hooks."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a learning-rate schedule wraps it to count calls
    for key in [key for key in copy.__dict__ if key.endswith("_hooks")]:
        copy.__dict__[key] = type(copy.__dict__[key])()
    copy.state = defaultdict(dict)
    copy.param_groups = [
        {
            **{key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()},
            "params": [stand_ins[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return copy


def _add_state(
    graph: fx.Graph, optimizer: torch.optim.Optimizer, names: dict[int, str], nodes: dict[int, fx.Node]
) -> None:
    """Make a placeholder for every tensor of the optimizer's state and settings."""
    found: list[tuple[str, torch.Tensor]] = []
    for parameter, state in optimizer.state.items():
        found += [
            (f"{names[id(parameter)]}:{key}", value) for key, value in state.items() if isinstance(value, torch.Tensor)
        ]
    for number, group in enumerate(optimizer.param_groups):
        found += [(f"group {number}:{key}", value) for key, value in group.items() if isinstance(value, torch.Tensor)]
    first_op = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_op):
        for name, tensor in found:
            nodes[id(tensor)] = placeholder(
                graph, name, Role.OPTIMIZER_STATE, tensor, name.rpartition(":")[0].rpartition(".")[0]
            )


class _Recording(TorchDispatchMode):
    """Appends each op that runs to a graph."""

    def __init__(self, graph: fx.Graph, nodes: dict[int, fx.Node], optimizer: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.graph = graph
        self.nodes = nodes
        self.optimizer = optimizer
        self.alive: list[Any] = []  # a tensor's id means it only while it lives

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "profiler":  # marks a region, computes nothing
            return result
        sources, options = pytree.tree_map_only(torch.Tensor, self._node, (args, kwargs or {}))
        name = function.overloadpacket.__name__
        node = self.graph.create_node("call_function", function, sources, options, name)
        first = node.args[0] if node.args else None
        module = first.meta["module"] if isinstance(first, fx.Node) else ""
        node.meta = {"val": result, "phase": Phase.OPTIMIZER, "module": module}
        self._remember(node, result)
        return result

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:
            raise CaptureError(
                f"{self.optimizer}.step() uses a tensor of shape {tuple(tensor.shape)} that is neither in its state "
                "nor in its groups: capture the step without an optimizer and call it yourself."
            )
        return self.nodes[id(tensor)]

    def _remember(self, node: fx.Node, result: Any) -> None:
        self.alive.append(result)
        if isinstance(result, torch.Tensor):
            self.nodes[id(result)] = node
        elif isinstance(result, (tuple, list)):
            for position, value in enumerate(result):
                if isinstance(value, torch.Tensor):
                    item = self.graph.call_function(operator.getitem, (node, position))
                    item.meta = {**node.meta, "val": value}
                    self.nodes[id(value)] = item
