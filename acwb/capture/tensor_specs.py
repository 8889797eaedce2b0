"""Specs of tensors and batches: the dtype, shape, strides and device that every later run must have again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from acwb.errors import AcwbError, ChangedStepError


@dataclass(frozen=True)
class Form:
    """What must stay the same about a tensor between capture and run."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    strides: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """The form that `tensor` has now."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device, tensor.stride(), tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def difference(self, now: torch.Tensor) -> str:
        """What is different about `now`, or "" where nothing is."""
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
    paths, spec = pytree.tree_flatten_with_path(batch)
    return tuple(f"batch{pytree.keystr(path)}" for path, _ in paths), tuple(leaf for _, leaf in paths), spec


@dataclass(frozen=True, eq=False)
class CapturedBatch:
    """The batch that a step was captured with, and the form that every later one must have."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    forms: tuple[Form | None, ...]

    @classmethod
    def of(cls, batch: object) -> "CapturedBatch":
        """Take apart the batch that a step is captured with."""
        names, leaves, spec = flatten_batch(batch)
        forms = tuple(Form.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        return cls(names, leaves, spec, forms)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def without_tensors(self) -> "CapturedBatch":
        """Its form alone."""
        pairs = zip(self.leaves, self.forms, strict=True)
        return replace(self, leaves=tuple(None if form else leaf for leaf, form in pairs))

    @property
    def tensor_names(self) -> list[str]:
        """A name for each of its tensors."""
        return [name for name, form in zip(self.names, self.forms, strict=True) if form]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """This batch with other tensors in it."""
        source = iter(tensors)
        return self.spec.unflatten(
            [next(source) if form else leaf for leaf, form in zip(self.leaves, self.forms, strict=True)]
        )

    def tensors_of(self, batch: object) -> list[torch.Tensor]:
        """The tensors of another batch of the same form."""
        names, leaves, spec = flatten_batch(batch)
        if spec != self.spec:
            raise ChangedStepError(
                f"The batch holds {', '.join(names)}, but the step was captured with {', '.join(self.names)}: "
                "pass the same structure, or trace again.",
                "batch",
            )
        for name, form, leaf, captured in zip(names, self.forms, leaves, self.leaves, strict=True):
            _check_leaf(name, form, leaf, captured)
        return [leaf for leaf, form in zip(leaves, self.forms, strict=True) if form]


def _check_leaf(name: str, form: Form | None, leaf: object, captured: object) -> None:
    if form is None:
        if type(leaf) is not type(captured) or (leaf is not captured and leaf != captured):
            raise ChangedStepError(
                f"{name} is {leaf!r}, but the step was captured with {captured!r}, which is fixed in it: trace again.",
                name,
            )
    elif not isinstance(leaf, torch.Tensor):
        raise ChangedStepError(f"{name} is {type(leaf).__name__}, but the step was captured with a tensor.", name)
    elif difference := form.difference(leaf):
        raise ChangedStepError(f"{name} {difference}: pass such a batch, or trace the model again with this one.", name)
