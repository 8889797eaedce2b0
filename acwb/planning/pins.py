"""Pins: activations that a user wants kept or recomputed, given by op name, module path or regular expression."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from acwb.core.graph import StepGraph
from acwb.errors import AcwbError, quoted


@dataclass(frozen=True)
class Pins:
    """The activations that must be kept, and those that must be recomputed, by storage name."""

    keep: frozenset[str] = frozenset()
    recompute: frozenset[str] = frozenset()


NO_PINS = Pins()


def resolve_pins(graph: StepGraph, keep: str | Iterable[str] = (), recompute: str | Iterable[str] = ()) -> Pins:
    """The pinned activations; a name that fits none is refused, and so is an activation that is pinned both ways."""
    pins = Pins(_resolve(graph, keep, "keep"), _resolve(graph, recompute, "recompute"))
    both = pins.keep & pins.recompute
    if both:
        raise AcwbError(f"{sorted(both)[0]} is to be kept and to be recomputed: take it out of one of the two.")
    return pins


def _resolve(graph: StepGraph, names: str | Iterable[str], kind: str) -> frozenset[str]:
    if not isinstance(names, Iterable):
        raise AcwbError(f"{kind} is {quoted(names)}: give op names, module paths or regular expressions as text.")
    listed = [names] if isinstance(names, str) else list(names)
    return frozenset(storage for name in listed for storage in _matching(graph, name, kind))


def _matching(graph: StepGraph, name: str, kind: str) -> set[str]:
    if not isinstance(name, str):
        raise AcwbError(f"{kind} holds {name!r}: give op names, module paths or regular expressions as text.")
    activations = graph.activations
    exact = {item.name for item in activations if name in (item.name, item.op, item.module)}
    inside = {item.name for item in activations if item.module.startswith(f"{name}.")}
    if exact | inside:
        return exact | inside
    try:
        pattern = re.compile(name)
    except re.error as error:
        raise AcwbError(f"{kind} holds {name!r}, which is neither a name nor a regular expression: {error}.") from error
    matching = {
        item.name for item in activations if any(pattern.fullmatch(text) for text in (item.name, item.op, item.module))
    }
    if not matching:
        raise AcwbError(
            f"{kind} holds {name!r}, which fits no activation of this step by name, module or regular expression: "
            "profile.activations lists them."
        )
    return matching
