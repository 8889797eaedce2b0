"""A model's output as a tree: tensors in tuples and dicts, flattened and unflattened."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from acwb._torch import pytree
from acwb.capture.tensor_specs import TensorSpec
from acwb.capture.validation import describe_value
from acwb.errors import CaptureError


@dataclass(frozen=True)
class OutputTree:
    """The structure of a model's output: its tensors' specs, and the constants around them.

    Attributes:
        leaves: the constants of the output; in the place of a tensor, its position among the tensors.
        names: of the tensors.
        specs: of the tensors, as the model returns them.
        read: the positions of the tensors from which the loss is computed.
    """

    structure: pytree.TreeSpec
    leaves: tuple["int | Constant", ...]
    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    read: tuple[int, ...]

    def filled(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Unflatten: the model's output with `tensors` in their places."""
        leaves = [leaf.value if isinstance(leaf, Constant) else tensors[leaf] for leaf in self.leaves]
        return self.structure.unflatten(leaves)


@dataclass(frozen=True)
class Constant:
    """A number, a string or None in a model's output."""

    value: object


@dataclass(frozen=True)
class LossInputs:
    """The tensors of a model's output from which the loss is computed.

    Attributes:
        names: of all tensors of the output.
        tangents: the specs of the tangents that the loss gives, by the positions of those that it is computed from.
    """

    names: tuple[str, ...]
    tangents: Mapping[int, TensorSpec]


def flatten_output(output: Any, known: LossInputs | None) -> tuple[OutputTree, tuple[torch.Tensor, ...]]:
    """Flatten a model's output; `known` says, if given, which of its tensors the loss reads."""
    paths, structure = pytree.tree_flatten_with_path(output)
    leaves: list[int | Constant] = []
    tensors: dict[int, torch.Tensor] = {}
    names: list[str] = []
    for path, leaf in paths:
        name = f"output{pytree.keystr(path)}"
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in tensors:
                tensors[id(leaf)] = leaf
                names.append(name)
            leaves.append(list(tensors).index(id(leaf)))
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            leaves.append(Constant(leaf))
        else:
            raise CaptureError(
                f"The model gives {describe_value(leaf)} ({name}), which a plan cannot give again: return tensors, in "
                "tuples or dicts (in transformers, set use_cache=False)."
            )
    specs = tuple(TensorSpec.of(tensor) for tensor in tensors.values())
    wanted = [position for position, spec in enumerate(specs) if spec.requires_grad]
    if not wanted:
        raise CaptureError(
            f"The model gives {describe_value(output)}, of which nothing requires grad: nothing to train."
        )
    losses = [position for position in wanted if names[position] in ("output['loss']", "output.loss")]
    read = tuple(known.tangents) if known is not None and known.names == tuple(names) else tuple(losses or wanted)
    return OutputTree(structure, tuple(leaves), tuple(names), specs, read), tuple(tensors.values())
