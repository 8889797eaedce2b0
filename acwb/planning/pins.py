"""Reads pins: which activations a person wants kept or recomputed, by op name, module path or regular expression."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from acwb.core.graph import StepGraph
from acwb.errors import AcwbError


@dataclass(frozen=True)
class Pins:
    """The activations that must be kept, and those that must be made again; by storage name."""

    keep: frozenset[str] = frozenset()
    recompute: frozenset[str] = frozenset()


NO_PINS = Pins()


def resolve_pins(graph: StepGraph, keep: str | Iterable[str] = (), recompute: str | Iterable[str] = ()) -> Pins:
    """The activations that the names speak of; a name that fits none is refused, and so is one that is in both."""
    found = Pins(_resolve(graph, keep, "keep"), _resolve(graph, recompute, "recompute"))
    both = found.keep & found.recompute
    if both:
        raise AcwbError(f"{sorted(both)[0]} is to be kept and to be recomputed: take it out of one of the two.")
    return found


def _resolve(graph: StepGraph, names: str | Iterable[str], kind: str) -> frozenset[str]:
    listed = [names] if isinstance(names, str) else list(names)
    return frozenset(storage for name in listed for storage in _matching(graph, name, kind))


def _matching(graph: StepGraph, name: str, kind: str) -> set[str]:
    if not isinstance(name, str):
        raise AcwbError(f"{kind} holds {name!r}: give op names, module paths or regular expressions as text.")
    exact = {each.name for each in graph.activations if name in (each.name, each.op, each.module)}
    inside = {each.name for each in graph.activations if each.module.startswith(f"{name}.")}
    if exact | inside:
        return exact | inside
    try:
        pattern = re.compile(name)
    except re.error as error:
        raise AcwbError(f"{kind} holds {name!r}, which is neither a name nor a regular expression: {error}.") from error
    found = {
        each.name
        for each in graph.activations
        if any(pattern.fullmatch(text) for text in (each.name, each.op, each.module))
    }
    if not found:
        raise AcwbError(
            f"{kind} holds {name!r}, which fits no activation of this step by name, module or regular expression: "
            "profile.activations lists them."
        )
    return found
