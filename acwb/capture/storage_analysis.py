"""Describes an FX graph of a step without torch: its storages, the ops that make and read them, their roles.

Which values share memory is read off the fake tensors that were recorded (`val` of the node's metadata): a view has the
storage of its base. `getitem` nodes are not ops of their own; they name the outputs of the op before them.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from acwb._torch import pytree, storage_id
from acwb.capture.node_meta import meta_of, step_outputs
from acwb.capture.recompute_rules import parts_of, rule_of
from acwb.capture.tensor_specs import TensorSpec
from acwb.core.graph import Environment, Op, Phase, Role, StepGraph, Storage, output_name

aten = torch.ops.aten

# Their kernels copy the whole storage behind the first argument, also where it is only a part of it.
_COPY_WHOLE_STORAGE = {
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}

# Their kernels resize a tensor that was as large as their first argument, and keep its memory where they need less.
_KEEP_INPUT_SIZE = {aten.im2col.default, aten.col2im.default}

# The statistics of a normalization have the type of its weight (this argument), also where its input has a lower one.
_STATISTICS = {aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1}

# Its statistics have the type of the running ones.
_BATCH_NORM = aten._native_batch_norm_legit_functional.default

# These losses give one number in the memory of all its terms.
_KEEP_TERMS = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
}

# Only a run of the kernel tells: the workspace of oneDNN's recurrent layers, the offsets of an embedding bag.
_MISDESCRIBED = {aten.mkldnn_rnn_layer.default, aten._embedding_bag.default}


def describe_graph(graph: fx.Graph, environment: Environment, name: str = "") -> StepGraph:
    """The torch-free description of a step's FX graph: same ops, same order, same names."""
    return _StorageAnalysis(graph).result(environment, name)


class _StorageAnalysis:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.name_of: dict[int, str] = {}
        self.bytes_of: dict[str, int] = {}
        self.role_of: dict[str, Role] = {}
        self.phase_made: dict[str, Phase] = {}
        self.ops: list[Op] = []

    def result(self, environment: Environment, name: str) -> StepGraph:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._add_existing(node)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self.ops.append(self._op(node))
        (loss, *others), gradients, updates = self._output()
        if any(op.once for op in self.ops):
            others = self._open([loss, *others])[1:]
        self._assign_roles({gradient for _, gradient in gradients}, updates, {loss, *others})
        return StepGraph(
            ops=tuple(self.ops),
            storages=tuple(Storage(each, size, self.role_of[each]) for each, size in self.bytes_of.items()),
            loss=loss,
            gradients=gradients,
            environment=environment,
            outputs=tuple(each for each in others if each in self.phase_made),
            name=name,
        )

    def _name(self, node: fx.Node) -> str:
        return self.name_of[storage_id(meta_of(node)["val"])]

    def _add(self, value: torch.Tensor, name: str, size: int) -> bool:
        """Register a storage with its name and size; False if it is known already."""
        if storage_id(value) in self.name_of:
            return False
        self.name_of[storage_id(value)] = name
        self.bytes_of[name] = size
        return True

    def _sizes(self, node: fx.Node, values: Sequence[Any]) -> list[int]:
        """The bytes behind each result of an op: as torch describes it, or (see above) as its kernel allocates them."""
        sizes = [value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0 for value in values]
        first = node.args[0] if node.args else None
        if (
            node.target in _COPY_WHOLE_STORAGE
            and isinstance(first, fx.Node)
            and 0 not in meta_of(first)["val"].stride()
        ):
            return [self.bytes_of[self._name(first)]]
        if node.target in _KEEP_TERMS and isinstance(first, fx.Node):
            return [meta_of(first)["val"].numel() * values[0].itemsize]
        if node.target in _KEEP_INPUT_SIZE and isinstance(first, fx.Node):
            return [max(sizes[0], meta_of(first)["val"].nbytes)]
        if node.target is _BATCH_NORM:
            mean, variance = (meta_of(argument)["val"] for argument in node.args[3:5] if isinstance(argument, fx.Node))
            return [sizes[0], mean.nbytes, variance.nbytes, mean.nbytes, variance.nbytes]
        if node.target is aten.native_group_norm_backward.default and isinstance(values[0], torch.Tensor):
            value: Any = node.args[1]
            return [values[0].numel() * meta_of(value)["val"].itemsize, *sizes[1:]]  # also where torch says float32
        if node.target in _STATISTICS and isinstance(weight := node.args[_STATISTICS[node.target]], fx.Node):
            return [sizes[0], *(value.numel() * meta_of(weight)["val"].itemsize for value in values[1:])]
        if node.target in _MISDESCRIBED:
            return _measured_sizes(node)
        return sizes

    def _add_existing(self, node: fx.Node) -> None:
        name, value = meta_of(node).get("storage", node.name), meta_of(node)["val"]
        if self._add(value, name, meta_of(node).get("bytes", value.untyped_storage().nbytes())):
            self.role_of[name] = meta_of(node).get("role", Role.OTHER)

    def _op(self, node: fx.Node) -> Op:
        inputs = tuple(dict.fromkeys(self.name_of[storage_id(value)] for value in _tensors_read(node)))
        several = isinstance(meta_of(node)["val"], (tuple, list))
        outputs = []
        values = _results(node) if several else [meta_of(node)["val"]]
        if _is_view(node):  # of a constant, whose views are recorded as if they had memory of their own
            self.name_of.update(
                {storage_id(value): inputs[0] for value in values if storage_id(value) not in self.name_of}
            )
        for position, (value, size) in enumerate(zip(values, self._sizes(node, values), strict=True)):
            name = output_name(node.name, position) if several else node.name
            if isinstance(value, torch.Tensor) and self._add(value, name, size):
                outputs.append(name)
                self.phase_made[name] = meta_of(node)["phase"]
        mutates = tuple(dict.fromkeys(self.name_of[storage_id(value)] for value in _tensors_written(node)))
        return Op(
            name=node.name,
            target=_target(node.target),
            phase=meta_of(node)["phase"],
            module=meta_of(node)["module"],
            needs=tuple(
                dict.fromkeys(
                    _producer(source).name for source in node.all_input_nodes if _producer(source).op == "call_function"
                )
            ),
            inputs=inputs,
            outputs=tuple(outputs),
            mutates=mutates,
            holds=tuple(self.name_of[storage] for storage in meta_of(node).get("holds", ()) if storage in self.name_of),
            random=torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()),
            view=not outputs
            and not mutates
            and any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(meta_of(node)["val"])),
            once="tangent_of" in meta_of(node),
            rule_inputs=self._rule_inputs(node, outputs) if meta_of(node)["phase"] is Phase.FORWARD else (),
        )

    def _rule_inputs(self, node: fx.Node, outputs: list[str]) -> tuple[str, ...]:
        rule = rule_of(node.target, node.args)
        if rule is None or not {0, *rule.results} <= parts_of(node).keys():  # what nobody names is gone at once
            return ()
        read: list[Any] = [node.args[position] for position in rule.arguments]
        return (
            *(self._name(argument) for argument in read),
            *(outputs[position] for position in rule.results),
        )

    def _output(self) -> tuple[list[str], tuple[tuple[str, str], ...], set[str]]:
        outputs, gradients, updates = step_outputs(self.graph)
        parameters = [
            node for node in self.graph.find_nodes(op="placeholder") if meta_of(node)["role"] is Role.PARAMETER
        ]
        return (
            list(dict.fromkeys(self._name(node) for node in outputs)),
            tuple(
                (self._name(node), self._name(gradient))
                for node, gradient in zip(parameters, gradients, strict=True)
                if gradient is not None
            ),
            {self._name(node) for node in updates},
        )

    def _open(self, outputs: list[str]) -> list[str]:
        """Storages that leave a step with an external loss: its outputs, and the other results of the same ops.

        Those ops are marked as not recomputable. Incoming tangents stay alive until the backward phase is over.
        """
        tangents = tuple(name for op in self.ops if op.once for name in op.outputs)
        last = max(rank for rank, op in enumerate(self.ops) if op.phase is Phase.BACKWARD)
        self.ops[last] = replace(self.ops[last], holds=self.ops[last].holds + tangents)
        self.ops = [replace(op, once=True) if set(outputs) & set(op.outputs) else op for op in self.ops]
        beside = [name for op in self.ops if op.once and op.phase is Phase.FORWARD for name in op.outputs]
        return list(dict.fromkeys(outputs + beside))

    def _assign_roles(self, gradients: set[str], updates: set[str], outputs: set[str]) -> None:
        read_backward = {name for op in self.ops if op.phase is Phase.BACKWARD for name in op.inputs}
        for name, phase in self.phase_made.items():
            if name in gradients:
                role = Role.GRADIENT
            elif name in updates:
                role = Role.BUFFER
            elif phase is Phase.FORWARD and name in read_backward and name not in outputs:
                role = Role.ACTIVATION
            else:
                role = Role.OTHER
            self.role_of[name] = role


def _measured_sizes(node: fx.Node) -> list[int]:
    """The bytes behind each result of an op, from running it on zeros."""

    def zeros(source: fx.Node) -> torch.Tensor:
        return TensorSpec.of(meta_of(source)["val"]).filled(0)

    args, kwargs = fx.map_arg((node.args, node.kwargs), zeros)
    kernel: Any = node.target
    with torch._C._AutoDispatchBelowAutograd():
        results = kernel(*args, **kwargs)
    return [result.untyped_storage().nbytes() for result in results]


def _is_view(node: fx.Node) -> bool:
    """Whether an op is a view by its schema: its results alias its first argument without writing to it."""
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else []
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _producer(node: fx.Node) -> fx.Node:
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _tensors_read(node: fx.Node) -> Iterator[torch.Tensor]:
    for source in node.all_input_nodes:
        for value in pytree.tree_leaves(meta_of(source)["val"]):
            if isinstance(value, torch.Tensor):
                yield value


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op's node by the names in its schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    named = {argument.name: value for argument, value in zip(node.target._schema.arguments, node.args, strict=False)}
    return {**named, **node.kwargs}


def _results(node: fx.Node) -> list[Any]:
    """The results of an op with several; those that its mask leaves out are recorded, but not made."""
    mask = _arguments(node).get("output_mask") or [True] * len(meta_of(node)["val"])
    results = [value if wanted else None for value, wanted in zip(meta_of(node)["val"], mask, strict=True)]
    if node.target is aten.convolution_backward.default and mask[2] and not mask[1] and _is_by_onednn(node):
        weight: Any = node.args[2]
        results[1] = torch.empty_like(meta_of(weight)["val"])  # it makes the gradients of weight and bias together
    return results


def _is_by_onednn(node: fx.Node) -> bool:
    """Whether oneDNN computes the backward of a convolution."""
    (_, value, weight, bias_sizes, *geometry, _), values = node.args, {}
    for name, source in (("input", value), ("weight", weight)):
        values[name] = meta_of(source)["val"] if isinstance(source, fx.Node) else None
    backend = torch._C._select_conv_backend(values["input"], values["weight"], None, *geometry, bias_sizes)
    return bool(backend == torch._C._ConvBackend.Mkldnn)  # type: ignore[attr-defined]  # which its stub does not have


def _tensors_written(node: fx.Node) -> Iterator[torch.Tensor]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    given = _arguments(node)
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for source in pytree.tree_leaves(given.get(argument.name)):
                if isinstance(source, fx.Node):
                    yield meta_of(source)["val"]


def _target(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"{target.__module__}.{target.__qualname__}"
