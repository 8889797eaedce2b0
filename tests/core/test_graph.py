"""The vocabulary: a hand-drawn step, its derived values, its file, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import pytest

import acwb
from acwb.core.graph import Activation, Environment, Op, Phase, Role, StepGraph, Storage
from support.saved_files import content_of

ENVIRONMENT = Environment("2.13.0", "cpu", "Chain", "SGD", "float32", ("batch[0]: float32[1]",))


def chain() -> StepGraph:
    """x → a → b (a view of a) → loss; backward reads a; one gradient; one update in place."""
    return StepGraph(
        ops=(
            Op("a", "aten.mul.Tensor", Phase.FORWARD, "first", (), ("x", "w"), ("a",)),
            Op("b", "aten.view.default", Phase.FORWARD, "first", ("a",), ("a",), view=True),
            Op("loss", "aten.sum.default", Phase.FORWARD, "", ("b",), ("a",), ("loss",)),
            Op("one", "aten.full.default", Phase.BACKWARD, outputs=("one",)),
            Op("g", "aten.mul.Tensor", Phase.BACKWARD, "first", ("one", "b"), ("one", "a"), ("g",)),
            Op("step", "aten.add_.Tensor", Phase.OPTIMIZER, "", ("g",), ("w", "g"), mutates=("w",)),
        ),
        storages=(
            Storage("x", 8, Role.INPUT),
            Storage("w", 16, Role.PARAMETER),
            Storage("a", 32, Role.ACTIVATION),
            Storage("loss", 4, Role.OTHER),
            Storage("one", 4, Role.OTHER),
            Storage("g", 16, Role.GRADIENT),
        ),
        loss="loss",
        gradients=(("w", "g"),),
        environment=ENVIRONMENT,
    )


def test_users_makers_and_activations_of_a_hand_drawn_step() -> None:
    graph = chain()
    assert graph.activations == (Activation("a", 32, "a", "first", 0, 2, 4, 4),)
    assert graph.users["a"] == (1, 2, 4)
    assert graph.users["w"] == (0, 5)
    assert graph.maker == {"a": "a", "loss": "loss", "one": "one", "g": "g"}
    assert graph.kept == {"loss", "g"}
    assert graph.bytes_by_role[Role.OTHER] == 8
    assert sum(graph.bytes_by_role.values()) == 80


def test_the_report_names_phases_activations_and_roles() -> None:
    text = repr(chain())
    assert "3 forward, 2 backward, 1 optimizer" in text
    assert "1 storages" in text
    assert all(role in text for role in Role)


@pytest.mark.torch
def test_a_graph_goes_to_a_file_and_back_unchanged(tmp_path: Path) -> None:
    captured = acwb.models.tiny_bert()
    step = acwb.trace(captured)
    for graph in (chain(), step.graph):
        graph.save(tmp_path / "graph.json")
        assert StepGraph.load(tmp_path / "graph.json") == graph
    stamp = json.loads((tmp_path / "graph.json").read_text())["environment"]
    assert stamp["torch"] == step.graph.environment.torch
    assert (stamp["device"], stamp["dtype"]) == ("cpu", "float32")
    assert "batch['input_ids']: int64[2, 16]" in stamp["batch"]
    assert [path.name for path in tmp_path.iterdir()] == ["graph.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a whole JSON file"),
        ('{"kind": "StepGraph", "version": 1, "ops": [', "not a whole JSON file"),
        ("[1, 2]", "holds something else, not a StepGraph"),
        ('{"kind": "Plan", "version": 1}', "holds Plan, not a StepGraph"),
        ('{"kind": "StepGraph", "version": 0}', "format version 0"),
        ('{"kind": "StepGraph", "version": 1}', "save it again"),
    ],
)
def test_a_file_that_is_not_a_graph_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(acwb.AcwbError, match=message):
        StepGraph.load(path)


def test_a_tampered_file_is_refused(tmp_path: Path) -> None:
    chain().save(tmp_path / "graph.json")
    content = content_of(tmp_path / "graph.json")
    content["ops"][1]["phase"] = "sideways"
    (tmp_path / "graph.json").write_text(json.dumps(content))
    with pytest.raises(acwb.AcwbError, match="sideways"):
        StepGraph.load(tmp_path / "graph.json")


def test_a_failed_save_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(acwb.AcwbError, match="No such file or directory"):
        chain().save(tmp_path / "missing" / "graph.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(acwb.AcwbError, match="Cannot write"):
        chain().save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(acwb.AcwbError, match="Cannot read"):
        StepGraph.load(tmp_path / "missing.json")


def changed(position: int, **fields: object) -> StepGraph:
    graph = chain()
    ops = list(graph.ops)
    ops[position] = dataclasses.replace(ops[position], **fields)
    return dataclasses.replace(graph, ops=tuple(ops))


def test_an_inconsistent_graph_is_refused() -> None:
    for position, fields, message in [
        (1, {"name": "a"}, "op name 'a' is given 2 times"),
        (1, {"inputs": ("g",)}, "uses storage g, which no earlier op makes"),
        (1, {"needs": ("loss",)}, "needs op loss, which does not run before it"),
        (1, {"outputs": ("a",)}, "already made"),
        (3, {"phase": Phase.OPTIMIZER}, "comes after the optimizer phase"),
        (4, {"inputs": ("one",)}, "Storage a is an activation, but no backward op reads it"),
    ]:
        with pytest.raises(acwb.AcwbError, match=message):
            changed(position, **fields)
    with pytest.raises(acwb.AcwbError, match="Storage lost is the loss or a gradient"):
        dataclasses.replace(chain(), loss="lost")
    with pytest.raises(acwb.AcwbError, match="storage name 'x' is given 2 times"):
        dataclasses.replace(chain(), storages=(*chain().storages, Storage("x", 1, Role.INPUT)))
