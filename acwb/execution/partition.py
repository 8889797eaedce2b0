"""Splits a planned step at the end of its forward phase, for a loop in which the loss is computed outside.

What the backward phase reads of the forward phase is saved for backward in a list, from which the generated code of the
backward phase takes each value, so that it is the only one to hold it and drops it at its last use.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from acwb._torch import storage_id
from acwb.capture.node_meta import meta_of, step_outputs
from acwb.capture.step import TracedStep
from acwb.capture.tensor_specs import TensorSpec
from acwb.core.graph import Phase, Role

# They take running statistics, which in training have no part in what they give that is of use after the forward phase.
IGNORE_RUNNING_STATISTICS = (
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten.native_batch_norm_backward.default,
)


@dataclass(frozen=True, eq=False)
class PartitionedStep:
    """The two phases of a step as generated code.

    Attributes:
        forward: takes the step's inputs and the random states; returns the outputs, the list of values saved for
            backward, and the new values of what the step writes back.
        backward: takes that list (which it empties), the inputs that it reads, the random states, and the tangents
            of the outputs; returns a gradient, or None, for each parameter slot.
        read: the positions of the inputs that the backward phase reads.
        stale: those of them that are written back in between, so that it must be given their former values.
        states: the names of the random states that the forward phase keeps and the backward phase replays from.
        saved: the names of the values saved for backward, in the order of that list.
        tangents: the positions of the outputs whose tangents the backward phase takes, and the specs of these.
    """

    forward: Callable[..., tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]]
    backward: Callable[..., list[torch.Tensor | None]]
    read: tuple[int, ...]
    stale: tuple[int, ...]
    states: tuple[str, ...]
    saved: tuple[str, ...]
    tangents: dict[int, TensorSpec]


def pop_saved(values: list[Any]) -> Any:
    """Pop the next value from the list of those saved for backward."""
    return values.pop()


def partition(step: TracedStep, states: Sequence[str]) -> PartitionedStep:
    """The two phases of a step whose loss is computed outside.

    Args:
        step: captured open, and perhaps rewritten.
        states: its constants that hold random states; every call gets its own.
    """
    graph = step.fx_graph
    outputs, gradients, _ = step_outputs(graph)
    updates = next((node.args[1] for node in graph.nodes if meta_of(node).get("writes_back")), ())
    inputs = [node for node in graph.find_nodes(op="placeholder") if meta_of(node)["role"] is not Role.OPTIMIZER_STATE]
    ops = [node for node in graph.nodes if node.op == "call_function" and not meta_of(node).get("writes_back")]
    first = [node for node in ops if _phase(node) is Phase.FORWARD]
    tangents = [node for node in ops if "tangent_of" in meta_of(node)]
    second = [node for node in ops if _phase(node) is Phase.BACKWARD and node not in tangents]
    second = _views_of([inputs[position] for position in step.updated], first, second) + second
    used = {source for node in second for source in node.all_input_nodes} | {each for each in gradients if each}
    saved = [node for node in first if node in used and node not in second]
    read = tuple(position for position, node in enumerate(inputs) if node in used)
    constants = [node for node in graph.find_nodes(op="get_attr") if node.target not in states]
    kept = [node for node in graph.find_nodes(op="get_attr") if node.target in states]

    forward = _PartialGraph(step)
    forward.add_placeholders(inputs + kept)
    forward.add(constants + first)
    forward.close((list(outputs), saved, updates))

    backward = _PartialGraph(step)
    values = backward.graph.placeholder("saved_for_backward")
    backward.add_placeholders([inputs[position] for position in read] + kept + tangents)
    for node in reversed(saved):
        backward.copies[node] = backward.graph.create_node("call_function", pop_saved, (values,), name=node.name)
    backward.add(constants + second)
    backward.close(list(gradients))
    return PartitionedStep(
        forward.code(),
        backward.code(),
        read,
        stale=tuple(position for position in step.updated if _matters(inputs[position], second)),
        states=tuple(node.target for node in kept),
        tangents={meta_of(node)["tangent_of"]: TensorSpec.of(meta_of(node)["val"]) for node in tangents},
        saved=tuple(node.name for node in saved),
    )


def _views_of(written: Sequence[fx.Node], first: Sequence[fx.Node], second: Sequence[fx.Node]) -> list[fx.Node]:
    """The views, used in the backward phase, of inputs that are written back before it: they are taken again there."""
    storages = {storage_id(meta_of(node)["val"]) for node in written}
    used = {source for node in second for source in node.all_input_nodes}
    found: list[fx.Node] = []
    for node in reversed(first):
        value = meta_of(node)["val"]
        if node in used and isinstance(value, torch.Tensor) and storage_id(value) in storages:
            found.append(node)
            used.update(node.all_input_nodes)
    return found[::-1]


def inputs_overwritten_before_backward(step: TracedStep) -> list[int]:
    """Positions of inputs that the step overwrites although some plan's backward phase reads their old values."""
    inputs = step.fx_graph.find_nodes(op="placeholder")
    return [position for position in step.updated if _matters(inputs[position], list(inputs[position].users))]


def _matters(node: fx.Node, readers: Sequence[fx.Node]) -> bool:
    """Whether any of these ops depends on an input's value; normalization in training ignores running statistics."""
    readers = [
        reader
        for reader in readers
        if not meta_of(reader).get("writes_back") and reader.target not in IGNORE_RUNNING_STATISTICS
    ]
    return any(node in reader.all_input_nodes for reader in readers)


def _phase(node: fx.Node) -> Phase:
    """The phase of an op; that of its op for a node that names a part of its result."""
    source = node.args[0] if node.target is operator.getitem else None
    phase: Phase = _phase(source) if isinstance(source, fx.Node) else meta_of(node)["phase"]
    return phase


class _PartialGraph:
    """An FX graph under construction from copies of another graph's nodes."""

    def __init__(self, step: TracedStep) -> None:
        self.constants = dict(step.constants)
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}

    def add_placeholders(self, nodes: Sequence[fx.Node]) -> None:
        """Add a placeholder for each of these values."""
        for node in nodes:
            self.copies[node] = self.graph.placeholder(node.name)

    def add(self, nodes: Sequence[fx.Node]) -> None:
        """Add copies of these ops, reading the copies of their inputs."""
        for node in nodes:
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)

    def close(self, result: Any) -> None:
        """Return `result` from the graph, and erase unused attributes."""
        self.graph.output(fx.map_arg(result, self.copies.__getitem__))
        for node in self.graph.find_nodes(op="get_attr"):
            if not node.users:
                self.graph.erase_node(node)
        self.graph.lint()

    def code(self) -> Callable[..., Any]:
        """The generated code of the graph, as a callable."""
        return fx.GraphModule(self.constants, self.graph).forward
