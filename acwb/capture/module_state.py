"""The state of a model's modules that a captured step depends on: mode, settings, hooks, attributes.

A captured step has the settings of its capture built in; a run compares them with the model's and refuses a difference.
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

from acwb.errors import CaptureError, ChangedStepError


def refuse_leaked_tensors(model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a forward pass that leaves a tensor with a gradient in an attribute; `tensors` are the model's own."""
    expected = {id(tensor) for tensor in tensors}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            left = [each for each in _values_inside(value) if isinstance(each, torch.Tensor) and each.requires_grad]
            if key not in _MODULE_TABLES and any(id(each) not in expected for each in left):
                raise CaptureError(
                    f"The forward pass leaves a tensor that requires grad in {f'{path}.{key}' if path else key}, where "
                    "a planned model does not put it: return it with the output.",
                    path,
                )


def _values_inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else [value]


_PLAIN = (bool, int, float, str)
_MODULE_TABLES = frozenset(nn.Module().__dict__)
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class ModuleState:
    """A module with the settings and hooks that must not change between capture and run."""

    path: str
    module: nn.Module
    settings: Settings
    hooks: tuple[int, ...]


def module_states(model: nn.Module) -> tuple[ModuleState, ...]:
    """The settings and hooks of every module of `model`, as they are now."""
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
    """Identifiers of the forward and backward hooks that are registered on a module."""
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return tuple(key for table in tables for key in table)


def check_unchanged(model: nn.Module, captured: Sequence[ModuleState]) -> None:
    """Raise `ChangedStepError` if a module, its settings or its hooks changed since the capture."""
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
def restore_attributes(model: nn.Module) -> Iterator[None]:
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
