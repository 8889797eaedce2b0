"""The README's code runs and prints what the README shows; its figures are those of the files they come from."""

import csv
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from acwb.contest import COMPILED, EAGER, Contest
from acwb.sweeper import Point, Sweep
from acwb.units import gibibytes

README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "results" / "full"
MODELS = {"resnet152": "ResNet-152", "bert": "BERT-base"}


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


def sweep_line(point: Point) -> str:
    """A batch size with and without a plan, as the README has it."""
    plain, planned, time = point.plain, point.planned, point.time
    assert plain.peaks is not None
    step, again = (
        f"{statistics.median(side.seconds) * 1e3:,.0f} ms" if side.seconds else "" for side in (plain, planned)
    )
    known = [str(point.batch_size), gibibytes(plain.peaks.process)]
    assert planned.peaks is not None
    assert time is not None
    assert planned.predicted_bytes is not None
    assert point.saved is not None
    assert point.predicted_overhead is not None
    beside = f"{gibibytes(planned.peaks.process)} ({planned.predicted_bytes / planned.peaks.process:.3f})"
    relative = f"{time}".removeprefix("×") + (", noise" if time.is_noise else "")
    saved = f"{-point.saved * 100:+.1f} %".replace("-", "−") + (", floor" if point.at_floor else "")
    columns = [beside, saved, step, again, relative, f"{1 + point.predicted_overhead:.3f}"]
    return f"| {' | '.join([*known, *columns])} |"


def test_the_table_of_batch_sizes_is_what_was_measured() -> None:
    sweep = Sweep.load(RESULTS / "sweep_resnet152.json")
    assert [point.batch_size for point in sweep.points] == [4, 8, 16, 32]
    for point in sweep.points:
        assert sweep_line(point) in README.read_text()


def capped_sentence(row: dict[str, str]) -> str:
    """A training under a cap, as the README tells it."""
    memory, needed = (gibibytes(int(row[key])) for key in ("memory_bytes", "needed_bytes"))
    return (
        f"{MODELS[row['subject']]} at batch {row['batch_size']}, which needs {needed} without a plan, {row['plain']} "
        f"in {memory} in plain PyTorch, and trains there with one: {row['equal_losses']} of {row['iterations']} losses "
        "are those of plain PyTorch without a cap, to the bit"
    )


def test_what_trains_under_a_cap_is_what_was_tried() -> None:
    text = " ".join(README.read_text().split())
    for row in rows_of("capped"):
        assert capped_sentence(row) in text


def test_the_errors_of_gradients_are_what_was_measured() -> None:
    text = " ".join(README.read_text().split())
    errors = {row["contender"]: float(row["gradient_error"]) for row in rows_of("07_bert_dropout")}
    told = " and ".join(f"{errors[f'memory budget {share}']:.2f} (budget {share})" for share in ("0.7", "0.3"))
    assert f"a relative error of {told}" in text
    rows = {name: {row["contender"]: row for row in rows_of(f"07_{name}_inductor")} for name in MODELS}
    parts = []
    for found in rows.values():
        parts += [f"{float(found[label]['gradient_error']):.0e}".replace("e-0", "e-") for label in COMPILED]
    told = f"{parts[0]} and {parts[1]} (ResNet-152, budgets 1.0 and 0.5) and {parts[2]} and {parts[3]} (BERT)"
    assert f"relative error over all of them of {told}" in text


@pytest.mark.parametrize("name", ["resnet152", "bert"])
def test_the_table_of_overheads_is_what_was_measured(name: str) -> None:
    text = README.read_text()
    rows = [row for row in rows_of("overheads") if row["subject"] == name]
    assert len(rows) == 3
    for row in rows:
        predicted, allocator, process = (
            f"{float(row[column]):.3f}" for column in ("predicted", "allocator_over_budget", "process_over_budget")
        )
        reduction = f"−{row['reduction'].rstrip('%')} %"
        assert f"| {reduction} | {predicted} | {interval(row)} | {allocator} | {process} |" in text


def test_the_table_of_largest_batches_is_what_was_confirmed() -> None:
    rows = rows_of("largest")
    assert len(rows) == 3
    for row in rows:
        eager, planned = int(row["eager"]), int(row["planned"])
        more = f"{planned / eager:.1f}× | +{float(row['predicted_overhead']):.0%}".replace("%", " %")
        assert f"| {row['memory'].replace('GiB', ' GiB')} | {eager} | {planned} | {more} |" in README.read_text()


@pytest.mark.parametrize("name", ["07_resnet152", "07_bert"])
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


@pytest.mark.parametrize(("name", "model"), MODELS.items())
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
