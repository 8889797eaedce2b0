"""A profile's derived values by hand, its frames, files and report, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import pandas
import pytest
from hypothesis import given

import acwb
from acwb.core.graph import StepGraph
from acwb.core.profile import ACTIVATION_FILE, NODE_FILE, Profile
from acwb.core.schedule import Run, just_in_time
from acwb.core.simulator import simulate
from support.saved_files import without_checksum
from support.toy_graphs import Line, draw, profiled, steps

NODE_COLUMNS = "rank name target gtype module run_time_ms peak_mem_bytes active_mem_bytes workspace_bytes"
ACTIVATION_COLUMNS = (
    "activation_name module median_mem_size_bytes creation_rank last_fw_use_rank first_bw_use_rank last_bw_use_rank "
    "inactive_time_ms swap_out_ms swap_in_ms recomp_time_ms recompute_ratio"
)


def drawn() -> Profile:
    """a and d are read in the backward phase; b and c, between them, are not."""
    lines: list[Line] = [
        ("F", "a", "x w", 10), ("F", "b", "a", 20), ("F", "c", "b a", 40), ("F", "d", "c", 5), ("F", "loss", "d", 1),
        ("B", "one", "", 1), ("B", "gd", "one d", 5), ("B", "ga", "gd a", 7),
    ]  # fmt: skip
    graph = draw({"x": 2, "w": 7}, lines, "loss", {"w": "ga"})
    seconds = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0, "loss": 16.0, "one": 32.0, "gd": 64.0, "ga": 128.0}
    swaps = {"a": 0.5, "d": 0.25}
    return dataclasses.replace(
        profiled(graph, {"c": 100}), seconds=seconds, swap_out_seconds=swaps, swap_in_seconds=swaps
    )


def test_activations_by_hand() -> None:
    frame = drawn().activations
    assert list(frame.columns) == ACTIVATION_COLUMNS.split()
    rows = frame.drop(columns="module").to_dict("split")["data"]
    # d is recomputed from a: b, c, d, 14 s. It is idle while `one` runs, a while d, loss, one and gd run.
    assert rows == [
        ["a", 10, 0, 2, 7, 7, 120_000.0, 500.0, 500.0, 1000.0, 10.0],
        ["d", 5, 3, 4, 6, 6, 32_000.0, 250.0, 250.0, 14_000.0, 5 / 14],
    ]


def test_nodes_by_hand() -> None:
    frame = drawn().nodes
    assert list(frame.columns) == [*NODE_COLUMNS.split(), "new_bytes"]
    live = [19, 39, 79, 64, 25, 26, 31, 32]
    assert list(frame.peak_mem_bytes) == [19, 39, 179, 64, 25, 26, 31, 32]
    assert list(drawn().graph.live_bytes) == live
    assert list(frame.active_mem_bytes) == [19, 30, 170, 45, 6, 1, 11, 22]
    assert list(frame.new_bytes) == [10, 20, 40, 5, 1, 1, 5, 7]
    assert list(frame.run_time_ms) == [1e3, 2e3, 4e3, 8e3, 16e3, 32e3, 64e3, 128e3]
    assert list(frame.gtype) == ["forward"] * 5 + ["backward"] * 3


def test_the_report_has_time_by_phase_the_peak_and_the_largest_activations() -> None:
    lines = repr(drawn()).splitlines()
    assert "step  255,000.0 ms: forward 31,000.0 ms, backward 224,000.0 ms, optimizer 0.0 ms" in lines[2]
    assert "in the forward phase at c" in lines[3]
    assert [line.split()[0] for line in lines if "recompute " in line] == ["a", "d"]


@given(steps())
def test_live_bytes_from_lifetimes_are_those_of_the_simulator(graph: StepGraph) -> None:
    schedule = just_in_time(graph)
    timeline = simulate(profiled(graph), schedule)
    pairs = zip(schedule.entries, timeline.tensor_bytes, strict=True)
    assert graph.live_bytes == tuple(size for entry, size in pairs if isinstance(entry, Run))


@given(steps())
def test_a_recomputation_has_the_ops_that_just_in_time_recomputes(graph: StepGraph) -> None:
    for activation in graph.activations:
        schedule = just_in_time(graph, {activation.name})
        again = {entry.op for entry in schedule.entries if isinstance(entry, Run) and entry.copy}
        more = again ^ set(graph.recomputation(activation.name))
        assert all(graph.op(name).view for name in more)  # of the activation, for who reads it so


def test_a_profile_goes_to_a_file_and_back_unchanged(tmp_path: Path) -> None:
    profile = drawn()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert Profile.load(tmp_path / "profile.json", profile.graph) == profile


def test_both_csv_files_have_their_columns(tmp_path: Path) -> None:
    paths = drawn().to_csv(tmp_path)
    assert [path.name for path in paths] == [NODE_FILE, ACTIVATION_FILE]
    nodes, activations = (pandas.read_csv(path) for path in paths)
    assert list(nodes.columns) == NODE_COLUMNS.split()
    assert list(activations.columns) == ACTIVATION_COLUMNS.split()
    assert (len(nodes), len(activations)) == (8, 2)


def test_a_profile_of_another_graph_is_refused(tmp_path: Path) -> None:
    drawn().save(tmp_path / "profile.json")
    other = draw({"x": 2, "w": 7}, [("F", "loss", "x w", 1), ("B", "one", "loss", 7)], "loss", {"w": "one"})
    with pytest.raises(acwb.AcwbError, match=r"measured of another graph .*: profile this step"):
        Profile.load(tmp_path / "profile.json", other)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    drawn().save(path)
    text = without_checksum(path)
    content = json.loads(text)
    del content["seconds"]["a"]
    damaged = {
        text[: len(text) // 2]: "not a whole JSON file",
        text.replace('"version": 1', '"version": 99'): "format version 99",
        text.replace('"bytes": 10', '"bytes": 11'): "changed after it was saved",
        text.replace('"conditions"', '"circumstances"'): "not a Profile that this acwb can read",
        text.replace('"kind": "Profile"', '"kind": "StepGraph"'): "holds StepGraph, not a Profile",
        json.dumps(content): "seconds do not fit its graph: a is in one of them only",
    }
    for written, message in damaged.items():
        path.write_text(written)
        with pytest.raises(acwb.AcwbError, match=message):
            Profile.load(path)


def test_a_failed_save_leaves_no_files_behind(tmp_path: Path) -> None:
    with pytest.raises(acwb.AcwbError, match="Choose a folder that exists"):
        drawn().to_csv(tmp_path / "missing")
    with pytest.raises(acwb.AcwbError, match="Choose a folder that exists"):
        drawn().save(tmp_path / "missing" / "profile.json")
    (tmp_path / ACTIVATION_FILE).mkdir()  # the second table cannot replace a folder
    with pytest.raises(acwb.AcwbError, match=f"Cannot write .*{ACTIVATION_FILE}"):
        drawn().to_csv(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ACTIVATION_FILE]
