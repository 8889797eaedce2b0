"""Specs of tensors and batches: the dtype, shape, strides and device that every later run must have again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from acwb._torch import pytree
from acwb.errors import AcwbError, ChangedStepError


@dataclass(frozen=True)
class TensorSpec:
    """The properties of a tensor that must not change between capture and run."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    strides: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """Read the spec of `tensor`."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device, tensor.stride(), tensor.requires_grad)

    def filled(self, value: float) -> torch.Tensor:
        """A new tensor of this spec, which does not require grad; its elements may share memory."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        size = 0 if 0 in self.shape else span
        return torch.full((size,), value, dtype=self.dtype, device=self.device).as_strided(self.shape, self.strides)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def difference(self, now: torch.Tensor) -> str:
        """How the tensor `now` deviates from this spec, as part of a sentence; "" if it matches."""
        if now.shape != self.shape:
            return f"has shape {tuple(now.shape)}, but the step was captured with {self.shape}"
        if now.dtype != self.dtype:
            return f"is {now.dtype}, but the step was captured with {self.dtype}"
        if now.device != self.device:
            return f"is on {now.device}, but the step was captured on {self.device}"
        if now.requires_grad != self.requires_grad:
            return f"has requires_grad={now.requires_grad}, but the step was captured with {self.requires_grad}"
        if now.stride() != self.strides:
            return f"has strides {now.stride()}, but the step was captured with {self.strides}"
        return ""


def flatten_batch(batch: object) -> tuple[tuple[str, ...], tuple[Any, ...], pytree.TreeSpec]:
    """The leaves of a batch with a name for each (`batch[0]`, `batch['labels']`), and its structure."""
    if isinstance(batch, Mapping):
        batch = dict(batch)
    if not isinstance(batch, (tuple, list, dict)):
        raise AcwbError(
            f"A batch is a tuple of positional inputs or a dict of keyword inputs, not {type(batch).__name__}: "
            "write (x,) for one tensor."
        )
    paths, structure = pytree.tree_flatten_with_path(batch)
    return tuple(f"batch{pytree.keystr(path)}" for path, _ in paths), tuple(leaf for _, leaf in paths), structure


@dataclass(frozen=True, eq=False)
class BatchSpec:
    """The batch that a step was captured with, and the spec that every later one must have."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    specs: tuple[TensorSpec | None, ...]

    @classmethod
    def of(cls, batch: object) -> "BatchSpec":
        """Take apart the batch that a step is captured with."""
        names, leaves, structure = flatten_batch(batch)
        specs = tuple(TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        return cls(names, leaves, structure, specs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the captured batch, in the order of its leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def without_tensors(self) -> "BatchSpec":
        """A copy that keeps the specs but not the tensors, which would stay in memory."""
        pairs = zip(self.leaves, self.specs, strict=True)
        return replace(self, leaves=tuple(None if spec else leaf for leaf, spec in pairs))

    @property
    def tensor_names(self) -> list[str]:
        """The names of the batch's tensors (`batch[0]`), in the order of `tensors`."""
        return [name for name, spec in zip(self.names, self.specs, strict=True) if spec]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A batch of the same structure that holds `tensors` instead."""
        source = iter(tensors)
        return self.structure.unflatten(
            [next(source) if spec else leaf for leaf, spec in zip(self.leaves, self.specs, strict=True)]
        )

    def tensors_of(self, batch: object) -> list[torch.Tensor]:
        """The tensors of another batch of the same spec."""
        names, leaves, structure = flatten_batch(batch)
        if structure != self.structure:
            raise ChangedStepError(
                f"The batch holds {', '.join(names)}, but the step was captured with {', '.join(self.names)}: "
                "pass the same structure, or trace again.",
                "batch",
            )
        for name, spec, leaf, captured in zip(names, self.specs, leaves, self.leaves, strict=True):
            _check_leaf(name, spec, leaf, captured)
        return [leaf for leaf, spec in zip(leaves, self.specs, strict=True) if spec]


def _check_leaf(name: str, spec: TensorSpec | None, leaf: object, captured: object) -> None:
    if spec is None:
        if type(leaf) is not type(captured) or (leaf is not captured and leaf != captured):
            raise ChangedStepError(
                f"{name} is {leaf!r}, but the step was captured with {captured!r}, which is fixed in it: trace again.",
                name,
            )
    elif not isinstance(leaf, torch.Tensor):
        raise ChangedStepError(f"{name} is {type(leaf).__name__}, but the step was captured with a tensor.", name)
    elif difference := spec.difference(leaf):
        raise ChangedStepError(f"{name} {difference}: pass such a batch, or trace the model again with this one.", name)
