"""The page of results: every number comes from its file, and a file that is missing or double is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from acwb import AcwbError
from acwb.experiments import results_page
from acwb.experiments.__main__ import main
from acwb.experiments.notebooks import NOTEBOOKS
from acwb.experiments.results_page import END, START, headline, render, with_headline, write_pages

RESULTS = NOTEBOOKS.parent / "results" / "full"
README = f"# Title\n\nbefore\n\n{START}\nold\n{END}\n\nafter\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files that were measured, to be changed."""
    copy = tmp_path / "full"
    copy.mkdir()
    for kind in ("csv", "json"):
        for path in RESULTS.glob(f"*.{kind}"):
            shutil.copy(path, copy)
    return copy


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def changed_lines(before: str, after: str) -> list[tuple[str, str]]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    return [(old, new) for old, new in pairs if old != new]


@pytest.mark.parametrize(
    ("section", "name", "old", "new", "line"),
    [
        (
            results_page._overhead_by_budget,
            "overheads.csv",
            "1.040646,1.011943,1.06747",
            "1.5,1.25,1.75",
            "| ResNet-152 | 23 | −50 % | 1.049 | 1.500 [1.250, 1.750] | 0.991 | 0.993 |",
        ),
        (
            results_page._overhead_and_lower_bound,
            "tradeoff.csv",
            "0.1498733,0.1080647",
            "0.1498733,0.125",
            "| ResNet-152 | 16 | 3 | −70 % | +15.0 % | +12.5 % |",
        ),
        (
            results_page._largest_batch,
            "largest.csv",
            "1.5GiB,6,52",
            "1.5GiB,8,52",
            "| ResNet-152, 224×224 images, SGD with momentum | 1.5 GiB | 8 | 52 | 6.5× | +38 % |",
        ),
        (
            results_page._under_a_cap,
            "capped.csv",
            "does not fit,10,10,10,0.04464654",
            "does not fit,10,9,10,0.04464654",
            "| ResNet-152 | 8 | 1.825 GiB | 1.311 GiB | does not fit | 9 of 10 |",
        ),
        (
            results_page._captured_and_predicted,
            "predictions.csv",
            "0.9858736",
            "0.5",
            "| process | 0.5000 to 1.0002 |",
        ),
        (
            results_page._captured_and_predicted,
            "captured.csv",
            "4.865781",
            "7.25",
            "| ResNet-152 | 4 | 7.2 s | 1.021 [1.001, 1.044] |",
        ),
        (
            results_page._compared_with_other_methods,
            "07_bert_dropout.csv",
            "0.6935651",
            "0.5",
            "error of 0.50 (memory budget 0.7) and 0.68 (memory budget 0.3); those of the other 5 methods match eager "
            "bitwise.",
        ),
        (
            results_page._batch_sweeps,
            "sweep_bert.json",
            '"batch_size": 4,',
            '"batch_size": 5,',
            "| 5 | 1.830 GiB | 1.814 GiB (0.996) | −0.9 %, floor | 2,974 ms | 2,952 ms | 1.006 [0.965, 1.036], noise "
            "| 1.000 |",
        ),
    ],
)
def test_a_changed_file_changes_its_line(
    folder: Path, section: Callable[[Path], str], name: str, old: str, new: str, line: str
) -> None:
    before = section(folder)
    replace_once(folder / name, old, new)
    ((_, after),) = changed_lines(before, section(folder))
    assert after == line


@pytest.mark.parametrize("name", ["07_resnet152.csv", "07_bert.csv", "07_bert_dropout.csv"])
def test_both_names_of_the_column_of_methods_are_read(folder: Path, name: str) -> None:
    before = results_page._compared_with_other_methods(folder)
    header, _, rows = (folder / name).read_text().partition("\n")
    other = {"contender": "method", "method": "contender"}
    (folder / name).write_text(",".join(other.get(column, column) for column in header.split(",")) + "\n" + rows)
    assert results_page._compared_with_other_methods(folder) == before


def test_a_missing_file_is_refused_with_its_name(folder: Path) -> None:
    (folder / "largest.csv").unlink()
    with pytest.raises(AcwbError, match=r"Cannot read .*largest\.csv: No such file"):
        results_page._largest_batch(folder)


def test_two_comparisons_of_one_model_are_refused(folder: Path) -> None:
    (path,) = folder.glob("inductor_bert_*.json")
    shutil.copy(path, folder / "inductor_bert_0_11.json")
    with pytest.raises(AcwbError, match=r"holds 2 files inductor_bert"):
        results_page._compiled_kernels(folder)


def test_a_row_that_was_not_measured_is_refused(folder: Path) -> None:
    replace_once(folder / "largest.csv", "bert,4GiB", "bert,5GiB")
    with pytest.raises(AcwbError, match="No row has subject bert, memory 4GiB"):
        headline(folder)


def method(name: str, share: float, time: float, plan_time: str = "") -> dict[str, str]:
    row = {"method": name, "peak_above_static": str(share), "time": str(time), "predicted_overhead": ""}
    return {**row, "ours": "ours" if plan_time else "", "ours_time": plan_time}


def test_the_best_other_method_is_the_fastest_at_half_the_peak() -> None:
    plan = {**method("ours", 0.4, 1.01), "predicted_overhead": "0.01"}
    rows = [method("eager", 1, 1), method("a", 0.9, 1.05), method("b", 0.5, 1.3, "1.1"), method("c", 0.2, 1.4), plan]
    assert results_page._best_other_method(rows) == "b at −50 %: +30.0 %, our plan +10.0 %"


def test_where_no_other_method_reaches_half_the_peak_the_lowest_is_named() -> None:
    rows = [method("eager", 1, 1), method("captured, no plan", 0.5, 1), method("a", 0.6, 1.4), method("b", 0.6, 1.2)]
    assert results_page._best_other_method(rows) == "none reaches it; b at −40 %: +20.0 %"


def test_only_the_generated_part_of_the_readme_is_replaced() -> None:
    text = with_headline(README, RESULTS)
    assert text == f"# Title\n\nbefore\n\n{START}\n{headline(RESULTS)}\n{END}\n\nafter\n"
    assert with_headline(text, RESULTS) == text


@pytest.mark.parametrize("marker", [START, END])
def test_a_readme_without_its_markers_is_refused_and_nothing_is_written(tmp_path: Path, marker: str) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "page.md"
    readme.write_text(README.replace(marker, ""))
    with pytest.raises(AcwbError, match="has no generated part"):
        write_pages(RESULTS, page, readme)
    assert not page.exists()


def test_both_pages_are_written(tmp_path: Path) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "page.md"
    readme.write_text(README)
    write_pages(RESULTS, page, readme)
    assert page.read_text() == render(RESULTS)
    assert readme.read_text() == with_headline(README, RESULTS)


def test_the_command_writes_the_pages_of_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, ...]] = []
    monkeypatch.setattr("acwb.experiments.__main__.write_pages", lambda *paths: written.append(paths))
    assert main(["page"]) == 0
    root = NOTEBOOKS.parent
    assert written == [(root / "results" / "full", root / "results" / "README.md", root / "README.md")]
