"""The README's code runs and prints what the README shows; its figures are those of the files they come from."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from acwb.contest import COMPILED, EAGER, Contest

README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "results" / "full"


@pytest.mark.slow
def test_the_first_code_block_prints_the_block_after_it() -> None:
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README.read_text(), re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == printed


def test_every_module_is_in_the_readme() -> None:
    table = README.read_text().split("## Where things are")[1].split("## Limits")[0]
    modules = {path.stem for path in (README.parent / "acwb").glob("*.py")} - {
        "__init__",
        "errors",
        "units",
        "archive",
        "compatibility",
    }
    assert {module for module in modules if f"`{module}`" not in table} == set()


def rows_of(name: str) -> list[dict[str, str]]:
    """A table of the results, as the README quotes it."""
    with (RESULTS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def interval(row: dict[str, str]) -> str:
    """A time ratio with its interval."""
    time, low, high = (f"{float(row[column]):.3f}" for column in ("time", "time_low", "time_high"))
    return f"{time} [{low}, {high}]"


@pytest.mark.parametrize("name", ["resnet152", "bert"])
def test_the_table_of_overheads_is_what_was_measured(name: str) -> None:
    text = README.read_text()
    rows = rows_of(f"overheads_{name}")
    assert len(rows) == 3
    for row in rows:
        predicted, allocator, process = (
            f"{float(row[column]):.3f}" for column in ("predicted", "allocator_over_budget", "process_over_budget")
        )
        reduction = f"−{row['reduction'].rstrip('%')} %"
        assert f"| {reduction} | {predicted} | {interval(row)} | {allocator} | {process} |" in text


def test_the_table_of_largest_batches_is_what_was_confirmed() -> None:
    rows = rows_of("largest_batches")
    assert len(rows) == 3
    for row in rows:
        eager, planned = int(row["eager"]), int(row["planned"])
        more = f"{planned / eager:.1f}× | +{float(row['predicted_overhead']):.0%}".replace("%", " %")
        assert f"| {row['memory'].replace('GiB', ' GiB')} | {eager} | {planned} | {more} |" in README.read_text()


@pytest.mark.parametrize("name", ["contest_resnet152", "contest_bert_dropout_0.0"])
def test_the_side_by_side_is_what_was_measured(name: str) -> None:
    rows = {row["contender"]: row for row in rows_of(name)}
    others = [row for row in rows.values() if not row["predicted_overhead"] and row["contender"] != "eager"]
    assert len(others) == 7
    for row in others:
        ours = interval(rows[row["ours"]]) if row["ours"] else ""
        wrong = [f"{row[f'wrong_{kind}']} {kind}" for kind in ("gradients", "buffers") if row[f"wrong_{kind}"] != "0"]
        peak = f"{float(row['peak_above_static']) * 100:.1f} %"
        line = f"| {row['contender']} | {peak} | {interval(row)} | {ours} | {', '.join(wrong) or 'nothing'} |"
        assert line.replace("  ", " ") in README.read_text()


@pytest.mark.parametrize(("name", "model"), [("resnet152", "ResNet-152"), ("bert", "BERT-base")])
def test_the_table_of_compiled_kernels_is_what_was_measured(name: str, model: str) -> None:
    (path,) = RESULTS.glob(f"inductor_{name}_*.json")
    found = Contest.load(path)
    for label in COMPILED:
        time, own = (str(found.time(label, other)).removeprefix("×") for other in (EAGER, next(iter(COMPILED))))
        columns = [
            f"{model}, {label}",
            f"{found.share(label) * 100:.1f} %",
            time,
            own if own != "1.000 [1.000, 1.000]" else "",
            f"{found.row(label).first_seconds:.0f} s",
        ]
        assert f"| {' | '.join(columns)} |".replace("  ", " ") in README.read_text()


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    assert [link for link in links if "://" not in link and not (README.parent / link).exists()] == []
