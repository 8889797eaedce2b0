"""The state of a model's modules that a captured step depends on: mode, settings, hooks, attributes.

A captured step has the settings of its capture built in; a run compares them with the model's and refuses a difference.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from enum import Enum
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


_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MODULE_TABLES = frozenset(nn.Module().__dict__)
_GLOBAL_HOOKS = (
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_backward_pre_hooks,
    nn.modules.module._global_backward_hooks,
)
OBJECTS_DEEP = 2  # attributes of an attribute, and of those: a configuration inside of a configuration
Settings = Mapping[str, Any]
Written = frozenset[tuple[int, str]]  # module, by identity, and attribute


class _Same:
    """A function, a class or another callable as a setting: equal only to itself."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return getattr(self._value, "__qualname__", type(self._value).__qualname__)


@dataclass(frozen=True)
class ModuleState:
    """A module with the settings and hooks that must not change between capture and run.

    Attributes:
        written: the attributes that the forward pass itself writes, which may change.
    """

    path: str
    module: nn.Module
    settings: Settings
    hooks: tuple[int, ...]
    written: frozenset[str] = frozenset()


def module_states(model: nn.Module, written: Written = frozenset()) -> tuple[ModuleState, ...]:
    """The settings and hooks of every module of `model`, as they are now, without what the forward pass writes."""
    known: dict[tuple[int, int], Any] = {}
    states = []
    for path, module in model.named_modules():
        settings = settings_of(module, known)
        kept = {key: value for key, value in settings.items() if (id(module), key) not in written}
        states.append(ModuleState(path, module, kept, hooks_of(module), frozenset(settings.keys() - kept.keys())))
    return tuple(states)


def settings_of(module: nn.Module, known: dict[tuple[int, int], Any] | None = None) -> Settings:
    """What a module's forward pass may depend on beside its tensors: mode, numbers, functions, which tensors it has.

    Also the values in its lists, tuples, dicts and configuration objects; `known` remembers these from module to
    module.
    """
    known = {} if known is None else known
    found: dict[str, Any] = {"training": module.training, "its class's forward": _Same(type(module).forward)}
    for table in ("_parameters", "_buffers"):
        found[table] = tuple(key for key, value in module.__dict__[table].items() if value is not None)
    for key, value in module.__dict__.items():
        if key not in _MODULE_TABLES:
            found[key] = "a tensor" if isinstance(value, torch.Tensor) else _setting(value, known, OBJECTS_DEEP)
    return found


def _setting(value: Any, known: dict[tuple[int, int], Any], objects: int) -> Any:
    """A value as a setting that can be compared and hashed; of other objects, their attributes, this many deep."""
    if isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH)):
        return value
    if isinstance(value, type):
        return _Same(value)
    if isinstance(value, (torch.Tensor, nn.Module)):
        return ()
    if (id(value), objects) not in known:
        known[id(value), objects] = ()  # where it holds itself
        known[id(value), objects] = _inner_settings(value, known, objects)
    return known[id(value), objects]


def _inner_settings(value: Any, known: dict[tuple[int, int], Any], objects: int) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(_setting(each, known, objects) for each in value)
    if isinstance(value, (set, frozenset)):
        return (frozenset(_setting(each, known, objects) for each in value),)
    own = (_Same(value),) if callable(value) else ()
    if isinstance(value, dict):
        inside = value
    elif objects:
        inside, objects = getattr(value, "__dict__", {}), objects - 1
    else:
        inside = {}
    pairs = [(_setting(key, known, 0), _setting(each, known, objects)) for key, each in inside.items()]
    return (*own, *pairs)


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """Identifiers of the forward and backward hooks that are registered on a module, or on all modules."""
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return tuple(key for table in (*tables, *_GLOBAL_HOOKS) for key in table)


def check_unchanged(model: nn.Module, captured: Sequence[ModuleState]) -> None:
    """Raise `ChangedStepError` if a module, its settings or its hooks changed since the capture."""
    now = list(model.named_modules())
    known: dict[tuple[int, int], Any] = {}
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
            _refuse_changed(state, where, {key: each for key, each in settings.items() if key not in state.written})
        if hooks_of(module) != state.hooks:
            raise ChangedStepError(f"{where} has other hooks than at capture, which would not run: trace again.", path)


def _refuse_changed(state: ModuleState, where: str, settings: Settings) -> None:
    absent = object()
    for key in {**state.settings, **settings}:
        then, now = state.settings.get(key, absent), settings.get(key, absent)
        if then != now:
            here = "no" if now is absent else f"{key} = {now!r}, not"
            was = f"{key} ({then!r})" if now is absent else repr(then) if then is not absent else "none"
            raise ChangedStepError(
                f"{where} has {here} {was}, with which the step was captured: put it back, or trace again.", state.path
            )


@contextmanager
def restore_attributes(model: nn.Module, written: set[tuple[int, str]]) -> Iterator[None]:
    """Undo what a forward pass on stand-ins leaves in attributes, and refuse what a captured step would freeze.

    Adds the attributes that it leaves changed to `written`.
    """
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
            changed = {**attributes, **module.__dict__}
            written |= {(id(module), key) for key in changed if changed[key] is not attributes.get(key, changed)}
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
