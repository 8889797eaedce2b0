"""Damaged files of every kind: a clear error or an equal value, never a raw exception, never a hang."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import acwb
from acwb.core.graph import StepGraph
from acwb.evaluation.verifier import Difference, Verification
from support.saved_files import content_of
from support.toy_graphs import network, profiled

DAMAGES = 60  # of each file, with and without a checksum
NESTED = 400
ODD = [None, True, -1, 0, 1.5, float("nan"), float("inf"), -1e300, 10**30, "", "x", "9" * 400, [], {}, [[]], {"a": 1}]


def deep() -> Any:
    value: Any = []
    for _ in range(NESTED):
        value = [value]
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def retyped(content: dict[str, Any], chance: random.Random) -> str:
    """With one value replaced, removed, doubled or cut."""
    container, key = chance.choice(list(places(content)))
    kind = chance.choice(["replace", "replace", "replace", "remove", "cut", "deep"])
    if kind == "remove":
        del container[key]
    elif kind == "cut" and isinstance(container[key], (list, str)):
        container[key] = container[key][: chance.randrange(len(container[key]) + 1)]
    else:
        container[key] = deep() if kind == "deep" else chance.choice(ODD)
    return json.dumps(content)


def damaged(text: str, chance: random.Random) -> bytes:
    """Cut, with a bit flipped, with a part removed or doubled."""
    data = bytearray(text.encode())
    at, to = sorted(chance.sample(range(len(data)), 2))
    kind = chance.choice(["cut", "flip", "remove", "double"])
    if kind == "cut":
        return bytes(data[:at])
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
        return bytes(data)
    return bytes(data[:at] + data[to:]) if kind == "remove" else bytes(data[:to] + data[at:])


PROFILE = profiled(network())
FRONTIER = acwb.frontier(PROFILE)
PLAN = FRONTIER.at(FRONTIER.floor_bytes)
VERIFICATION = Verification("model", 2, {"loss": 1}, (Difference(1, "loss", "", 1, 1, 0.5),), 0.25)
LOADERS: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    "graph": (PROFILE.graph, StepGraph.load),
    "profile": (PROFILE, acwb.Profile.load),
    "plan": (PLAN, lambda path: acwb.Plan.load(path, PROFILE)),
    "frontier": (FRONTIER, lambda path: acwb.Frontier.load(path, PROFILE)),
    "verification": (VERIFICATION, Verification.load),
}


def same(one: Any, other: Any) -> bool:
    return one.points == other.points if isinstance(one, acwb.Frontier) else one == other


def use(value: Any) -> None:
    """What people do next with it."""
    repr(value)
    if isinstance(value, acwb.Profile):
        acwb.frontier(value)
    elif isinstance(value, acwb.Plan):
        assert value.timeline.peak_bytes > 0
    elif isinstance(value, acwb.Frontier):
        value.at(value.floor_bytes)


def attempt(load: Callable[[Path], Any], path: Path) -> tuple[Any, str]:
    """What is loaded, or the sentence with which it is refused."""
    try:
        return load(path), ""
    except acwb.AcwbError as error:
        return None, str(error)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_damaged_file_is_refused_or_equal(kind: str, tmp_path: Path) -> None:
    chance, (value, load), path = random.Random(kind), LOADERS[kind], tmp_path / "file.json"
    value.save(path)
    text = path.read_text()
    for _ in range(DAMAGES):
        is_retyped = chance.random() < 0.5
        path.write_bytes(retyped(json.loads(text), chance).encode() if is_retyped else damaged(text, chance))
        loaded, sentence = attempt(load, path)
        assert "\n" not in sentence
        assert sentence or same(loaded, value)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_damaged_file_without_a_checksum_is_refused_or_can_be_used(kind: str, tmp_path: Path) -> None:
    chance, (value, load), path = random.Random(f"{kind} of old"), LOADERS[kind], tmp_path / "file.json"
    value.save(path)
    content = content_of(path)
    for _ in range(DAMAGES):
        path.write_text(retyped(json.loads(json.dumps(content)), chance))
        _, sentence = attempt(lambda path: use(load(path)), path)
        assert "\n" not in sentence
