"""Builds the FX graph of a whole step from AOTAutograd's joint graph: forward, backward, writing back, optimizer.

What autograd does outside of the recorded ops is made explicit: the one that starts the backward pass, and the copy of
a gradient whose layout or memory is not its own. Every node has its phase, module and value as metadata.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._prims_common import is_non_overlapping_and_dense_or_false

from acwb._torch import storage_id
from acwb.capture import custom_ops
from acwb.capture.node_meta import meta_of, set_meta
from acwb.capture.slots import Slot
from acwb.core.graph import Phase, Role
from acwb.errors import CaptureError

aten = torch.ops.aten

SLOT = "slot_"


@dataclass
class StepDraft:
    """The FX graph of a step under construction.

    Attributes:
        placeholders: the model's tensors, in the order of its slots, then the batch's.
        external_loss: the loss is computed outside; the outputs' tangents come from there, and stay to the end.
        outputs: of the forward pass, by position: the loss, or the model's outputs where the loss is external.
        gradients: for each parameter slot the node of its gradient, or None.
        updates: positions among the placeholders of what the step writes back, with the node of the new value.
    """

    slots: tuple[Slot, ...]
    external_loss: bool = False
    graph: fx.Graph = field(default_factory=fx.Graph)
    placeholders: list[fx.Node] = field(default_factory=list)
    outputs: dict[int, fx.Node] = field(default_factory=dict)
    gradients: dict[int, fx.Node | None] = field(default_factory=dict)
    updates: dict[int, fx.Node] = field(default_factory=dict)


def slot_names(slots: Sequence[Slot]) -> list[str]:
    """The names under which the model's tensors are presented to the export."""
    return [f"{SLOT}{number}" for number in range(len(slots))]


def placeholder(graph: fx.Graph, name: str, role: Role, value: object, module: str = "") -> fx.Node:
    """Add a placeholder for what exists before the step; `name` is the one that a person knows it by."""
    identifier = re.sub(r"\W+", "_", name.rstrip("]'\""))
    node = graph.placeholder("self_" if identifier == "self" else identifier)
    node.target = node.name
    set_meta(node, val=value, role=role, storage=name, module=module)
    return node


def draft_step(
    joint: fx.Graph, slots: tuple[Slot, ...], inputs: Mapping[str, torch.Tensor], external_loss: bool = False
) -> StepDraft:
    """Make forward, backward and writing back from the joint graph of AOTAutograd."""
    assembly = StepDraft(slots, external_loss)
    copies = _copy_placeholders(assembly, joint, inputs)
    _copy_ops(assembly, joint, copies)
    _read_results(assembly, joint, copies)
    _outputs_in_forward(assembly)
    _own_gradients(assembly)
    _write_back(assembly)
    return assembly


def finish_graph(assembly: StepDraft) -> fx.Graph:
    """Close the graph: it returns the forward outputs, the gradients and the values to write back."""
    outputs = [node for _, node in sorted(assembly.outputs.items())]
    assembly.graph.output((outputs, list(assembly.gradients.values()), list(assembly.updates.values())))
    assembly.graph.lint()
    return assembly.graph


def _position(assembly: StepDraft, description: Any) -> int:
    """Position of the step's placeholder that a descriptor of the export refers to."""
    if isinstance(description, (ParamAOTInput, BufferAOTInput)):
        return int(description.target.removeprefix(SLOT))
    if isinstance(description, PlainAOTInput):
        return len(assembly.slots) + description.idx
    if "Token" in type(description).__name__:
        raise CaptureError(
            f"The step has an op with side effects (torch gives it a {description.expr()}), which cannot be captured."
        )
    raise CaptureError(
        f"The model writes into tensors that share memory with others ({description}), which cannot be captured: give "
        "it copies."
    )


def _copy_placeholders(
    assembly: StepDraft, joint: fx.Graph, inputs: Mapping[str, torch.Tensor]
) -> dict[fx.Node, fx.Node]:
    known = [(slot.name, slot.role, slot.name.rpartition(".")[0], slot.tensor) for slot in assembly.slots]
    known += [(name, Role.INPUT, "", tensor) for name, tensor in inputs.items()]
    recorded = {
        _position(assembly, node.meta["desc"]): node
        for node in joint.nodes
        if node.op == "placeholder" and not isinstance(node.meta["desc"], TangentAOTInput)
    }
    for position, (name, role, module, tensor) in enumerate(known):
        node = placeholder(assembly.graph, name, role, recorded[position].meta["val"], module)
        meta_of(node)["bytes"] = tensor.untyped_storage().nbytes()  # which may be more than this tensor of it
        assembly.placeholders.append(node)
    return {node: assembly.placeholders[position] for position, node in recorded.items()}


def _copy_ops(assembly: StepDraft, joint: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    graph, phase = assembly.graph, Phase.FORWARD
    constants: dict[int, fx.Node] = {}
    for node in [node for node in joint.nodes if node.op in ("call_function", "get_attr")]:
        if phase is Phase.FORWARD and node.meta.get("partitioner_tag") == "is_backward":
            phase = Phase.BACKWARD
            _start_backward(assembly, joint, copies)
        module = node.meta.get("custom", {}).get("module", "")
        _refuse(node, module)
        if node.target in (aten.detach.default, aten.alias.default):
            copies[node] = copies[node.args[0]]
            continue
        if node.op == "get_attr" and (known := constants.get(id(getattr(joint.owning_module, node.target)))):
            copies[node] = known  # one constant under two names
            continue
        if node.target is aten.mkldnn_rnn_layer_backward.default:
            _tell_biases_apart(node)
        copy = graph.node_copy(node, copies.__getitem__)
        if node.target is aten.bernoulli.p:
            copy.target = custom_ops.bernoulli
        set_meta(copy, val=node.meta.get("val"), phase=phase, module=module)
        if node.target is custom_ops.tangent:
            meta_of(copy)["tangent_of"] = node.args[0]
        copies[node] = copy
        if node.op == "get_attr":
            constants[id(getattr(joint.owning_module, node.target))] = copy
    if phase is Phase.FORWARD:
        _start_backward(assembly, joint, copies)


def _tell_biases_apart(node: fx.Node) -> None:
    """Torch records the gradients of an LSTM layer's two biases as one tensor, but its kernel makes two."""
    values = list(node.meta["val"])
    values[4] = values[4].clone()
    node.meta["val"] = tuple(values)
    for part in node.users:
        position: Any = part.args[1]
        part.meta["val"] = values[position]


def _refuse(node: fx.Node, module: str) -> None:
    """Refuse what was recorded otherwise than eager runs it."""
    where = f"Module {module}" if module else "The model"
    if node.target in (aten.prod.default, aten.prod.dim_int) and node.meta["val"].is_floating_point():
        raise CaptureError(
            f"{where} multiplies with torch.prod, whose backward is recorded otherwise than eager computes it: use "
            "torch.cumprod and take the last element.",
            module,
        )
    if node.target is aten._conj.default and not node.all_input_nodes:
        raise CaptureError(
            f"{where} computes with the complex number {node.args[0]!r}, whose conjugate the backward pass takes, and "
            "that is recorded as a number: make it a tensor, torch.tensor(1j) say, in a buffer.",
            module,
        )
    if node.target in (aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default):
        raise CaptureError(
            f"{where} computes in place on slices of a tensor ({node.target}, "
            "in recurrent cells and nn.GRU), which cannot be captured bitwise: use nn.LSTM in float32.",
            module,
        )


def _start_backward(assembly: StepDraft, joint: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    """Materialize the tangents that are placeholders of the joint graph.

    The loss's own is one. Those that come from outside are ops of the joint graph, but for one that nothing reads. The
    new value of a parameter that the model writes into has one too, which is zero.
    """
    from_outside = {node.args[0] for node in joint.nodes if node.target is custom_ops.tangent}
    for tangent in joint.find_nodes(op="placeholder"):
        if tangent in copies:
            continue
        value, of = tangent.meta["val"], tangent.meta["desc"].output
        options = {"dtype": value.dtype, "device": value.device}
        if not (assembly.external_loss and isinstance(of, PlainAOTOutput)):
            start = 1.0 if isinstance(of, PlainAOTOutput) else 0.0
            copies[tangent] = assembly.graph.call_function(aten.full.default, (list(value.shape), start), options)
            set_meta(copies[tangent], val=value, phase=Phase.BACKWARD, module="")
        elif of.idx not in from_outside:
            arguments = (of.idx, list(value.shape), list(value.stride()))
            node = assembly.graph.call_function(custom_ops.tangent, arguments, options)
            with value.fake_mode:
                set_meta(node, val=value.clone(), phase=Phase.BACKWARD, module="", tangent_of=of.idx)


def _read_results(assembly: StepDraft, joint: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    assembly.gradients = {position: None for position, slot in enumerate(assembly.slots) if slot.role is Role.PARAMETER}
    (output,) = joint.find_nodes(op="output")
    for node, description in zip(output.args[0], output.meta["desc"], strict=True):
        if node is None:  # no gradient
            continue
        if isinstance(description, PlainAOTOutput):
            assembly.outputs[description.idx] = copies[node]
        elif isinstance(description, InputMutationAOTOutput):
            assembly.updates[_position(assembly, description.mutated_input)] = copies[node]
        elif not isinstance(description, GradAOTOutput):
            raise CaptureError(
                f"The model changes the shape or memory of its inputs in place ({description}): give it copies."
            )
        else:
            assembly.gradients[_position(assembly, description.grad_of)] = copies[node]


def _outputs_in_forward(assembly: StepDraft) -> None:
    """Move the views that the forward pass returns into its phase: they are recorded last, after the backward pass."""
    first = next((node for node in assembly.graph.nodes if meta_of(node).get("phase") is Phase.BACKWARD), None)
    pending = [node for node in assembly.outputs.values() if meta_of(node).get("phase") is Phase.BACKWARD]
    late: list[fx.Node] = []
    while pending:
        node = pending.pop()
        late.append(node)
        pending += [source for source in node.all_input_nodes if meta_of(source).get("phase") is Phase.BACKWARD]
    for node in sorted(set(late)):
        meta_of(node)["phase"] = Phase.FORWARD
        if first is not None and node is not first:
            first.prepend(node)


def _own_gradients(assembly: StepDraft) -> None:
    """Copy each gradient that lacks its parameter's layout or its own memory, as autograd does when it sets `.grad`."""
    others = [*assembly.outputs.values(), *assembly.updates.values(), *assembly.graph.find_nodes(op="get_attr")]
    taken = {storage_id(node.meta["val"]) for node in (*assembly.placeholders, *others)}
    spans: dict[int, list[tuple[int, int]]] = {}
    for position, gradient in assembly.gradients.items():
        if gradient is None:
            continue
        parameter, value = assembly.placeholders[position].meta["val"], gradient.meta["val"]
        if value.layout is not torch.strided:
            raise CaptureError(
                f"The gradient of {assembly.slots[position].name} is {value.layout}, and only dense ones can be "
                "captured: use sparse=False."
            )
        span = (value.storage_offset(), value.storage_offset() + value.numel())
        beside = spans.setdefault(storage_id(value), [])
        shared = any(span[0] < end and start < span[1] for start, end in beside)
        if storage_id(value) in taken or shared or value.stride() != _gradient_strides(parameter, value):
            assembly.gradients[position] = _copy_gradient(assembly.graph, gradient, parameter)
        else:
            beside.append(span)


def _gradient_strides(parameter: torch.Tensor, gradient: torch.Tensor) -> tuple[int, ...]:
    """Strides of a parameter's gradient under autograd; those of a dimension of size 1 do not matter."""
    wanted = (
        parameter.stride()
        if is_non_overlapping_and_dense_or_false(parameter)
        else torch.empty(parameter.shape, device="meta").stride()
    )
    return tuple(
        have if size == 1 else want for size, have, want in zip(parameter.shape, gradient.stride(), wanted, strict=True)
    )


def _copy_gradient(graph: fx.Graph, gradient: fx.Node, parameter: torch.Tensor) -> fx.Node:
    value = gradient.meta["val"]
    arguments = (list(parameter.shape), list(_gradient_strides(parameter, parameter)))
    with graph.inserting_after(_last_beside(graph, gradient)), value.fake_mode:
        copy = graph.call_function(custom_ops.gradient_copy, (gradient, *arguments))
        copied = custom_ops.gradient_copy(value, *arguments)
    set_meta(copy, val=copied, phase=Phase.BACKWARD, module=meta_of(gradient)["module"])
    return copy


def _last_beside(graph: fx.Graph, gradient: fx.Node) -> fx.Node:
    """The node after which a gradient is complete: its op's last result, or the last node if no op computes it."""
    if meta_of(gradient).get("phase") is not Phase.BACKWARD:
        last: fx.Node = list(graph.nodes)[-1]
        return last
    return list(gradient.all_input_nodes[0].users)[-1] if gradient.target is operator.getitem else gradient


def _write_back(assembly: StepDraft) -> None:
    """Add the op that writes the new values into buffers and mutated inputs.

    It ends the backward phase, so that an interrupted step leaves nothing behind; or, where the loss is computed
    outside, the forward phase, after which they are there in eager.
    """
    if not assembly.updates:
        return
    backward = (node for node in assembly.graph.nodes if meta_of(node).get("phase") is Phase.BACKWARD)
    end = next(backward) if assembly.external_loss else assembly.graph._root
    phase = Phase.FORWARD if assembly.external_loss else Phase.BACKWARD
    with assembly.graph.inserting_before(end):
        _add_write_back(assembly, phase)


def _add_write_back(assembly: StepDraft, phase: Phase) -> None:
    existing = {storage_id(node.meta["val"]) for node in assembly.placeholders}
    for position, value in assembly.updates.items():
        if storage_id(value.meta["val"]) in existing:  # or an earlier copy could overwrite it
            copy = assembly.graph.call_function(aten.clone.default, (value,))
            set_meta(
                copy,
                val=aten.clone.default(value.meta["val"]),
                phase=phase,
                module=meta_of(value)["module"],
            )
            assembly.updates[position] = copy
    targets = [assembly.placeholders[position] for position in assembly.updates]
    arguments = (targets, list(assembly.updates.values()))
    node = assembly.graph.create_node("call_function", aten._foreach_copy_.default, arguments, name="write_back")
    set_meta(node, val=None, phase=phase, module="", writes_back=True)
