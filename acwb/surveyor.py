"""Surveys an FX graph of a step: which storages there are, who makes and reads them, and what each is for.

Which values share memory is read off the fake tensors that were recorded (`node.meta["val"]`): a view has the storage
of its base. `getitem` nodes are not ops of their own; they name the outputs of the op before them.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from acwb.graph import Environment, Op, Phase, Role, StepGraph, Storage

aten = torch.ops.aten

# Their kernels copy the whole storage behind the first argument, also where it is only a part of it.
_COPY_WHOLE_STORAGE = {
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}


def storage_of(value: torch.Tensor) -> int:
    """What identifies the memory behind a recorded tensor."""
    return int(value.untyped_storage()._cdata)


def survey(graph: fx.Graph, environment: Environment) -> StepGraph:
    """The torch-free description of a step's FX graph: same ops, same order, same names."""
    return _Survey(graph).result(environment)


class _Survey:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.name_of: dict[int, str] = {}
        self.bytes_of: dict[str, int] = {}
        self.role_of: dict[str, Role] = {}
        self.phase_made: dict[str, Phase] = {}
        self.ops: list[Op] = []

    def result(self, environment: Environment) -> StepGraph:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._add_existing(node)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self.ops.append(self._op(node))
        loss, gradients, updates = self._output()
        self._assign_roles({gradient for _, gradient in gradients}, updates, loss)
        return StepGraph(
            ops=tuple(self.ops),
            storages=tuple(Storage(name, size, self.role_of[name]) for name, size in self.bytes_of.items()),
            loss=loss,
            gradients=gradients,
            environment=environment,
        )

    def _name(self, node: fx.Node) -> str:
        return self.name_of[storage_of(node.meta["val"])]

    def _add(self, value: torch.Tensor, name: str, size: int) -> bool:
        """Give a storage its name and size when it is first seen."""
        if storage_of(value) in self.name_of:
            return False
        self.name_of[storage_of(value)] = name
        self.bytes_of[name] = size
        return True

    def _size(self, node: fx.Node, value: torch.Tensor) -> int:
        first = node.args[0] if node.args else None
        if node.target in _COPY_WHOLE_STORAGE and isinstance(first, fx.Node) and 0 not in first.meta["val"].stride():
            return self.bytes_of[self._name(first)]
        return value.untyped_storage().nbytes()

    def _add_existing(self, node: fx.Node) -> None:
        name, value = node.meta.get("storage", node.name), node.meta["val"]
        if self._add(value, name, value.untyped_storage().nbytes()):
            self.role_of[name] = node.meta.get("role", Role.OTHER)

    def _op(self, node: fx.Node) -> Op:
        inputs = tuple(dict.fromkeys(self.name_of[storage_of(value)] for value in _tensors_read(node)))
        several = isinstance(node.meta["val"], (tuple, list))
        outputs = []
        for position, value in enumerate(node.meta["val"] if several else [node.meta["val"]]):
            name = f"{node.name}:{position}" if several else node.name
            if isinstance(value, torch.Tensor) and self._add(value, name, self._size(node, value)):
                outputs.append(name)
                self.phase_made[name] = node.meta["phase"]
        mutates = tuple(dict.fromkeys(self.name_of[storage_of(value)] for value in _tensors_written(node)))
        return Op(
            name=node.name,
            target=_target(node.target),
            phase=node.meta["phase"],
            module=node.meta["module"],
            needs=tuple(
                dict.fromkeys(
                    _maker(source).name for source in node.all_input_nodes if _maker(source).op == "call_function"
                )
            ),
            inputs=inputs,
            outputs=tuple(outputs),
            mutates=mutates,
            random=torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()),
            view=not outputs
            and not mutates
            and any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(node.meta["val"])),
        )

    def _output(self) -> tuple[str, tuple[tuple[str, str], ...], set[str]]:
        (output,) = self.graph.find_nodes(op="output")
        loss, gradients, updates = output.args[0]
        parameters = [node for node in self.graph.find_nodes(op="placeholder") if node.meta["role"] is Role.PARAMETER]
        return (
            self._name(loss),
            tuple(
                (self._name(node), self._name(gradient))
                for node, gradient in zip(parameters, gradients, strict=True)
                if gradient is not None
            ),
            {self._name(node) for node in updates},
        )

    def _assign_roles(self, gradients: set[str], updates: set[str], loss: str) -> None:
        read_backward = {name for op in self.ops if op.phase is Phase.BACKWARD for name in op.inputs}
        for name, phase in self.phase_made.items():
            if name in gradients:
                role = Role.GRADIENT
            elif name in updates:
                role = Role.BUFFER
            elif phase is Phase.FORWARD and name in read_backward and name != loss:
                role = Role.ACTIVATION
            else:
                role = Role.OTHER
            self.role_of[name] = role


def _maker(node: fx.Node) -> fx.Node:
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _tensors_read(node: fx.Node) -> Iterator[torch.Tensor]:
    for source in node.all_input_nodes:
        for value in pytree.tree_leaves(source.meta["val"]):
            if isinstance(value, torch.Tensor):
                yield value


def _tensors_written(node: fx.Node) -> Iterator[torch.Tensor]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    arguments = node.target._schema.arguments
    given: dict[str, Any] = {
        **{argument.name: value for argument, value in zip(arguments, node.args, strict=False)},
        **node.kwargs,
    }
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for source in pytree.tree_leaves(given.get(argument.name)):
                if isinstance(source, fx.Node):
                    yield source.meta["val"]


def _target(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"{target.__module__}.{target.__qualname__}"
