"""Values from files are what their annotations and names say."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, nan

import pytest

from acwb.core.graph import Role
from acwb.value_checks import check_fields


@dataclass(frozen=True)
class Part:
    name: str
    peak_bytes: int
    role: Role = Role.OTHER


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    seconds: Mapping[str, float]
    budget_bytes: int | None = None
    pair: tuple[str, int] = ("", 0)
    done: bool = True
    gradient_error: float = 0.0


def whole(**changes: object) -> Whole:
    return Whole(**{"parts": (Part("one", 1),), "seconds": {"one": 0.5}, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "right", [{}, {"budget_bytes": 3}, {"seconds": {"one": 1}}, {"pair": ("a", -1)}, {"gradient_error": nan}]
)
def test_right_values_are_accepted(right: dict[str, object]) -> None:
    check_fields(whole(**right))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"parts": [Part("one", 1)]}, "parts is .*, not a list"),
        ({"parts": ("one",)}, "parts is 'one', not a Part"),
        ({"parts": (Part(1, 1),)}, "name is 1, not of type str"),  # type: ignore[arg-type]
        ({"parts": (Part("one", -1),)}, "peak_bytes is -1, not 0 or more"),
        ({"parts": (Part("one", 1.5),)}, "peak_bytes is 1.5, not a whole number"),  # type: ignore[arg-type]
        ({"parts": (Part("one", 2**63),)}, "peak_bytes is .*, not a number of this world"),
        ({"parts": (Part("one", 1, "other"),)}, "role is 'other', not of type Role"),  # type: ignore[arg-type]
        ({"seconds": {"one": nan}}, "seconds is nan, not a number of this world"),
        ({"seconds": {"one": inf}}, "seconds is inf"),
        ({"seconds": {"one": -0.5}}, "seconds is -0.5, not 0 or more"),
        ({"seconds": {"one": True}}, "seconds is True, not a number"),
        ({"seconds": {1: 0.5}}, "a key of seconds is 1"),
        ({"seconds": [0.5]}, "seconds is .*, not a mapping"),
        ({"budget_bytes": "3"}, "budget_bytes is '3', not a whole number"),
        ({"pair": ("a",)}, "pair is .*, not a list of 2"),
        ({"done": 1}, "done is 1, not of type bool"),
    ],
)
def test_wrong_values_are_refused_with_their_name(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_fields(whole(**wrong))
