"""The comparison of methods on a small subject: matching plans, the table, the figure and its files."""

import csv
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

import acwb
from acwb import plots, subject
from acwb.evaluation import baselines
from acwb.evaluation.comparison import EAGER, MethodComparison, MethodResult, compare_methods
from acwb.results import figures

FEW: Mapping[str, subject.StepBuilder] = {
    "captured, no plan": baselines.captured,
    "per block": baselines.per_block,
    "every second block": partial(baselines.per_block, every=2),
}


@pytest.fixture(scope="module")
def found() -> MethodComparison:
    return compare_methods(acwb.models.resnet18, 8, {"image_size": 96}, FEW, 3)


def test_every_method_has_a_matching_plan_that_needs_no_more_memory(found: MethodComparison) -> None:
    assert [row.name for row in found.rows][:4] == [EAGER, *FEW]
    assert found.share(EAGER) == 1
    assert {"per block", "every second block"} <= found.matching_plans.keys()
    for name, ours in found.matching_plans.items():
        assert found.row(ours).peak_bytes <= found.row(name).peak_bytes * 1.005
    assert all(len(row.seconds) == 3 for row in found.rows)


def test_gradients_and_buffers_that_differ_from_eager_are_reported(found: MethodComparison) -> None:
    assert found.row("per block").wrong_buffers > 0
    assert found.row("per block").wrong_gradients == 0
    for row in found.rows:
        if row.predicted_overhead is not None or row.name in (EAGER, "captured, no plan"):
            assert (row.wrong_gradients, row.wrong_buffers, row.gradient_error) == (0, 0, 0)
    assert "buffers" in repr(found)
    assert "nothing, bitwise" in repr(found)


def test_a_comparison_is_saved_and_loaded(found: MethodComparison, tmp_path: Path) -> None:
    found.save(tmp_path / "comparison.json")
    assert MethodComparison.load(tmp_path / "comparison.json") == found


def test_the_figure_states_the_finding_and_is_written_in_all_formats(found: MethodComparison, tmp_path: Path) -> None:
    figure = plots.method_comparison(found)
    assert "per block takes" in figure.layout.title.text or "every second block takes" in figure.layout.title.text
    paths = figures.save_figure(figure, "comparison", found.records, tmp_path)
    assert {path.name for path in paths} == {f"comparison.{kind}" for kind in ("html", "csv", "svg", "pdf", "png")}
    assert all(path.stat().st_size > 1000 for path in paths if path.suffix != ".csv")
    with (tmp_path / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [row.name for row in found.rows]
    assert int(rows[0]["peak_bytes"]) == found.row(EAGER).peak_bytes
    assert {path.name for path in tmp_path.iterdir()} == {*(path.name for path in paths), figures.SCRIPT}


def test_the_table_gives_the_cost_of_our_plan_as_a_part_of_the_methods_cost() -> None:
    def row(name: str, peak: int, time: float, predicted: float | None = None) -> MethodResult:
        return MethodResult(name, peak, 0.0, 0.0, 0, 0, (time,) * 6, predicted)

    rows = (row(EAGER, 200, 1.0), row("theirs", 150, 1.4), row("free", 150, 1.0), row("ours", 150, 1.1, 0.09))
    found = MethodComparison("tiny", 2, {}, 100, rows, {"theirs": "ours", "free": "ours"}, ())
    table = {line.split()[0]: line for line in repr(found).splitlines()[2:]}
    assert "50.0%  ×1.400 [1.400, 1.400]   ×1.100 [1.100, 1.100]   25% " in table["theirs"]
    assert "×1.100 [1.100, 1.100]   noise " in table["free"]
    assert "×1.100 [1.100, 1.100]   predicted ×1.090" in table["ours"]
    assert table["eager"].endswith("nothing, bitwise")
