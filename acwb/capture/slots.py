"""Binds a model's tensors by name: each distinct parameter, buffer and tensor attribute, and each place that holds it.

Capture puts stand-ins into these places and takes them out again; a run reads the tensors that are in them now, so that
loading a checkpoint or moving data into a parameter is seen. A tied weight is one slot with several places.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from acwb.core.graph import Role
from acwb.errors import AcwbError, ChangedStepError

_TABLES = ("_parameters", "_buffers", "__dict__")


@dataclass(frozen=True)
class Place:
    """One entry of a module that holds a tensor: in its parameters, its buffers, or its plain attributes."""

    module: nn.Module
    table: str
    key: str
    name: str

    @property
    def entries(self) -> dict[str, Any]:
        """The module's dict that has the entry: its parameters, buffers or attributes."""
        entries: dict[str, Any] = getattr(self.module, self.table)
        return entries

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that the entry holds now; an error if it holds none."""
        tensor = self.entries.get(self.key)
        if not isinstance(tensor, torch.Tensor):
            raise ChangedStepError(
                f"{self.name} is {type(tensor).__name__} now, but was a tensor at capture: trace the model again.",
                self.name,
            )
        return tensor


@dataclass(frozen=True)
class Slot:
    """One distinct tensor of a model and every place that holds it."""

    role: Role
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        """The tensor's first name in the model; tied weights have several."""
        return self.places[0].name

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that all places hold now; an error if they are no longer tied."""
        tensor = self.places[0].tensor
        for place in self.places[1:]:
            if place.tensor is not tensor:
                raise ChangedStepError(
                    f"{self.name} and {place.name} were one tensor at capture and are two now: tie them again, or "
                    "trace the model again.",
                    place.name,
                )
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Store `tensor` in every place of the model that holds this slot."""
        for place in self.places:
            place.entries[place.key] = tensor


def slots_of(model: nn.Module) -> tuple[Slot, ...]:
    """Every distinct tensor that `model` holds, parameters first."""
    places: dict[int, list[Place]] = {}
    for path, module in model.named_modules():
        for table in _TABLES:
            for key, value in getattr(module, table).items():
                if isinstance(value, torch.Tensor) and not (table == "__dict__" and value.grad_fn is not None):
                    name = f"{path}.{key}" if path else key
                    places.setdefault(id(value), []).append(Place(module, table, key, name))
    slots = [_slot(tuple(found)) for found in places.values()]
    return tuple(sorted(slots, key=lambda slot: slot.role is not Role.PARAMETER))


def _slot(places: tuple[Place, ...]) -> Slot:
    is_parameter = any(place.table == "_parameters" for place in places)
    slot = Slot(Role.PARAMETER if is_parameter else Role.BUFFER, places)
    if slot.tensor.requires_grad and not is_parameter:
        raise AcwbError(f"{slot.name} requires grad but is not a parameter: make it an nn.Parameter, or detach it.")
    return slot


def refuse_hooks(name: str, tensor: torch.Tensor) -> None:
    """Refuse a parameter with hooks on its gradient, which a captured step would not call."""
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        raise ChangedStepError(
            f"{name} has hooks on its gradient, which a captured step does not call: remove them, or use hooks on the "
            "optimizer's step.",
            name,
        )


@contextmanager
def substitute_tensors(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put `tensors` into the places of `slots` for the duration, then the model's own tensors back."""
    originals = [slot.tensor for slot in slots]
    for slot, tensor in zip(slots, tensors, strict=True):
        slot.put(tensor)
    try:
        yield
    finally:
        for slot, original in zip(slots, originals, strict=True):
            slot.put(original)


def rebound_slots(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> list[Slot]:
    """The slots that no longer hold the tensor that was put there: the forward pass assigned another one."""
    return [
        slot
        for slot, tensor in zip(slots, tensors, strict=True)
        if any(place.entries.get(place.key) is not tensor for place in slot.places)
    ]
