"""Binds a model's tensors by name: each distinct parameter, buffer and tensor attribute, and each place that holds it.

Capture puts stand-ins into these places and takes them out again; a run reads the tensors that are in them now, so that
loading a checkpoint or moving data into a parameter is seen. A tied weight is one slot with several places.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from acwb.core.graph import Role
from acwb.errors import AcwbError, CaptureError, ChangedStepError

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
        """The module's table that has the entry."""
        entries: dict[str, Any] = getattr(self.module, self.table)
        return entries

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
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
        """The first of its names."""
        return self.places[0].name

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is bound now."""
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
        """Bind `tensor` in every place."""
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
def standing_in(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put `tensors` into the places of `slots` for the duration, then the model's own tensors back."""
    originals = [slot.tensor for slot in slots]
    for slot, tensor in zip(slots, tensors, strict=True):
        slot.put(tensor)
    try:
        yield
    finally:
        for slot, original in zip(slots, originals, strict=True):
            slot.put(original)


def rebound(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> list[Slot]:
    """The slots that no longer hold the tensor that was put there: the forward pass assigned another one."""
    return [
        slot
        for slot, tensor in zip(slots, tensors, strict=True)
        if any(place.entries.get(place.key) is not tensor for place in slot.places)
    ]


def refuse_left_behind(model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a forward pass that leaves a tensor with a gradient in an attribute; `tensors` are the model's own."""
    expected = {id(tensor) for tensor in tensors}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            left = [each for each in _inside(value) if isinstance(each, torch.Tensor) and each.requires_grad]
            if key not in _MODULE_TABLES and any(id(each) not in expected for each in left):
                raise CaptureError(
                    f"The forward pass leaves a tensor that requires grad in {f'{path}.{key}' if path else key}, where "
                    "a planned model does not put it: return it with the output.",
                    path,
                )


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else [value]


_PLAIN = (bool, int, float, str)
_MODULE_TABLES = frozenset(nn.Module().__dict__)
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class ModuleState:
    """What must stay the same about a module between capture and run: itself, its settings, its hooks."""

    path: str
    module: nn.Module
    settings: Settings
    hooks: tuple[int, ...]


def states_of(model: nn.Module) -> tuple[ModuleState, ...]:
    """The state of every module of `model`."""
    known: dict[int, Any] = {}
    return tuple(
        ModuleState(path, module, settings_of(module, known), hooks_of(module))
        for path, module in model.named_modules()
    )


def settings_of(module: nn.Module, known: dict[int, Any] | None = None) -> Settings:
    """The plain values among a module's attributes: its mode, a dropout's probability, and the like.

    Also those in its lists, tuples, dicts and configuration objects; `known` remembers these from module to module.
    """
    known = {} if known is None else known
    found: dict[str, Any] = {}
    for key, value in module.__dict__.items():
        if isinstance(value, _PLAIN):
            found[key] = value
        elif key not in _MODULE_TABLES and (inner := _inner_settings(value, known)):
            found[key] = inner
    return found


def _inner_settings(value: object, known: dict[int, Any]) -> tuple[Any, ...]:
    if id(value) not in known:
        if isinstance(value, (list, tuple)):
            known[id(value)] = tuple(each for each in value if isinstance(each, _PLAIN))
        elif isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value):
            known[id(value)] = ()
        else:
            inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            known[id(value)] = tuple((key, each) for key, each in inside.items() if isinstance(each, _PLAIN))
    inner: tuple[Any, ...] = known[id(value)]
    return inner


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """What identifies the hooks on a module."""
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return tuple(key for table in tables for key in table)


def check_unchanged(model: nn.Module, captured: Sequence[ModuleState]) -> None:
    """Refuse to go on where a module was replaced, set otherwise, or given other hooks since the capture."""
    now = list(model.named_modules())
    known: dict[int, Any] = {}
    for state, (path, module) in zip_longest(captured, now, fillvalue=("", None)):
        if not isinstance(state, ModuleState) or state.module is not module:
            name = path or (state.path if isinstance(state, ModuleState) else "")
            raise ChangedStepError(
                f"Module {name} was added, removed or replaced since the capture: trace again.", name
            )
        where = f"Module {path}" if path else "The model"
        if module.training is not state.settings["training"]:
            now_in, then_in = ("train", "eval") if module.training else ("eval", "train")
            raise ChangedStepError(
                f"{where} is in {now_in} mode, but the step was captured in {then_in} mode: call .{then_in}() before "
                "running, or trace again.",
                path,
            )
        if (settings := settings_of(module, known)) != state.settings:
            key = next(key for key in {**settings, **state.settings} if settings.get(key) != state.settings.get(key))
            raise ChangedStepError(
                f"{where} has {key} = {settings.get(key)!r}, but the step was captured with "
                f"{state.settings.get(key)!r}: trace again.",
                path,
            )
        if hooks_of(module) != state.hooks:
            raise ChangedStepError(f"{where} has other hooks than at capture, which would not run: trace again.", path)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what a forward pass on stand-ins leaves in attributes, and refuse what a captured step would freeze."""
    modules = list(model.named_modules())
    before = [(module.__dict__, dict(module.__dict__)) for _, module in modules]
    contents = [
        (value, copy(value))
        for attributes, _ in before
        for value in attributes.values()
        if type(value) in (list, dict, set, OrderedDict)
    ]
    try:
        yield
        for (path, module), (_, attributes) in zip(modules, before, strict=True):
            _refuse_counters(path, attributes, module.__dict__)
    finally:
        for attributes, original in before:
            attributes.clear()
            attributes.update(original)
        for container, original in contents:
            container.clear()
            container.extend(original) if isinstance(container, list) else container.update(original)


def _refuse_counters(path: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for key, value in before.items():
        changed = after.get(key)
        if isinstance(value, (bool, int, float, str)) and changed is not value and changed != value:
            raise CaptureError(
                f"The forward of {f'module {path}' if path else 'the model'} changes its attribute {key!r} "
                f"({value!r} → {changed!r}), which a captured step would freeze: keep it in a buffer; if it is set "
                "only once, run the model once before tracing.",
                module=path,
            )
