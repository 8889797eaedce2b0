"""Typed metadata of the nodes of a step's FX graph, and the three parts of the graph's output.

`node.meta` is an untyped dict of FX. These are the keys that acwb writes and reads there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, Unpack, cast

from torch import fx

from acwb.core.graph import Phase, Role


class StepNodeMeta(TypedDict, total=False):
    """Metadata of a node of a step's graph.

    Attributes:
        val: the fake tensor, or tensors, that the node returns; FX's own key.
        phase: of an op, and of the nodes that name its results.
        module: path of the module that called the op, or whose backward it is.
        role: of a placeholder.
        storage: of a placeholder, the name of its storage.
        bytes: of a placeholder, the size of its storage, where that is more than the tensor's.
        holds: of an optimizer's op, identities of the storages that are freed after it.
        tangent_of: position of the output whose tangent the node stands for.
        writes_back: whether the op writes new values into buffers and mutated inputs.
        recomputes: name of the node that this one is a copy of.
    """

    val: Any
    phase: Phase
    module: str
    role: Role
    storage: str
    bytes: int
    holds: list[int]
    tangent_of: int
    writes_back: bool
    recomputes: str


class StepOutputs(NamedTuple):
    """The output of a step's graph: what forward returns, a gradient or None per parameter, and new values to write."""

    outputs: Sequence[fx.Node]
    gradients: Sequence[fx.Node | None]
    updates: Sequence[fx.Node]


def meta_of(node: fx.Node) -> StepNodeMeta:
    """The metadata of a node of a step's graph."""
    return cast("StepNodeMeta", node.meta)


def set_meta(node: fx.Node, **meta: Unpack[StepNodeMeta]) -> None:
    """Replace all metadata of a node of a step's graph."""
    node.meta = dict(meta)


def step_outputs(graph: fx.Graph) -> StepOutputs:
    """The output of a step's graph, by its parts."""
    (output,) = graph.find_nodes(op="output")
    return StepOutputs(*output.args[0])
