"""Checks a value that came from a file against the annotations of its class: types, ranges, finiteness, as a whole.

A name tells the unit, and so the range: what ends in `bytes` or `seconds` is not negative.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from acwb.errors import quoted

MAX_INTEGER = 2**62  # sums and products of sizes stay within the 64 bits of numpy's integers
NOT_NEGATIVE = ("bytes", "seconds", "rules", "copy", "stall", "threads", "repeats", "batch_size", "iterations")
MAY_BE_INFINITE = ("error",)


def check_value(value: object, hint: Any, name: str) -> None:
    """Raise ValueError, with the name of the place, unless `value` is what `hint` and `name` say."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin in (Union, types.UnionType):
        _check_union(value, inner, name)
    elif origin is tuple:
        _check_tuple(value, inner, name)
    elif origin is not None and issubclass(origin, Mapping):
        _refuse_unless(isinstance(value, Mapping), value, name, "a mapping")
        for key, each in value.items():  # type: ignore[attr-defined]  # a mapping
            check_value(key, inner[0], f"a key of {name}")
            check_value(each, inner[1], name)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        _refuse_unless(isinstance(value, hint), value, name, f"a {hint.__name__}")
        check_fields(value)
    elif hint is int or hint is float:
        _check_number(value, hint, name)
    else:
        _refuse_unless(isinstance(value, hint), value, name, f"of type {hint.__name__}")


def check_fields(value: object) -> None:
    """Check every field of a dataclass, and what is inside of it."""
    kind: Any = type(value)
    for name, hint in _hints(kind):
        check_value(getattr(value, name), hint, name)


@cache
def _hints(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(kind))


def _check_union(value: object, options: tuple[Any, ...], name: str) -> None:
    if value is None and type(None) in options:
        return
    errors = []
    for option in options:
        if option is not type(None):
            try:
                check_value(value, option, name)
            except ValueError as error:
                errors.append(error)
            else:
                return
    raise errors[0]


def _check_tuple(value: object, inner: tuple[Any, ...], name: str) -> None:
    _refuse_unless(isinstance(value, tuple), value, name, "a list")
    values: tuple[object, ...] = value  # type: ignore[assignment]  # a tuple
    if len(inner) == 2 and inner[1] is Ellipsis:
        inner = (inner[0],) * len(values)
    _refuse_unless(len(values) == len(inner), value, name, f"a list of {len(inner)}")
    for each, hint in zip(values, inner, strict=True):
        check_value(each, hint, name)


def _check_number(value: object, hint: type, name: str) -> None:
    allowed = (int, float) if hint is float else (int,)
    what = "a number" if hint is float else "a whole number"
    _refuse_unless(isinstance(value, allowed) and not isinstance(value, (bool, Enum)), value, name, what)
    number: float = value  # type: ignore[assignment]  # a number
    if not name.endswith(MAY_BE_INFINITE):
        _refuse_unless(math.isfinite(number) and abs(number) < MAX_INTEGER, value, name, "a number of this world")
    if name.endswith(NOT_NEGATIVE):
        _refuse_unless(number >= 0, value, name, "0 or more")


def _refuse_unless(right: bool, value: object, name: str, wanted: str) -> None:
    if not right:
        raise ValueError(f"{name} is {quoted(value)}, not {wanted}")
