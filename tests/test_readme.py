"""The README's code runs and prints what the README shows; its figures are those of the files they come from."""

import csv
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acwb.evaluation.batch_sweep import Sweep, SweepPoint
from acwb.evaluation.comparison import COMPILED, EAGER, MethodComparison
from acwb.units import format_bytes

README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "results" / "full"
MODELS = {"resnet152": "ResNet-152", "bert": "BERT-base"}


@pytest.mark.slow
def test_the_first_code_block_prints_the_block_after_it() -> None:
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README.read_text(), re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == printed


def rows_of(name: str) -> list[dict[str, str]]:
    """A table of the results, as the README quotes it."""
    with (RESULTS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def line(*columns: str) -> str:
    """A row of a table in the README."""
    return " ".join(f"| {' | '.join(columns)} |".split())


def interval(row: dict[str, str]) -> str:
    """A time ratio with its interval."""
    time, low, high = (f"{float(row[column]):.3f}" for column in ("time", "time_low", "time_high"))
    return f"{time} [{low}, {high}]"


def batch_line(point: SweepPoint) -> str:
    """A batch size with and without a plan."""
    plain, planned, time = point.plain, point.planned, point.time
    assert plain.peaks is not None
    assert planned.peaks is not None
    assert planned.predicted_bytes is not None
    assert time is not None
    assert point.saved is not None
    assert point.predicted_overhead is not None
    step, again = (f"{statistics.median(side.seconds) * 1e3:,.0f} ms" for side in (plain, planned))
    return line(
        str(point.batch_size),
        format_bytes(plain.peaks.process_bytes),
        f"{format_bytes(planned.peaks.process_bytes)} ({planned.predicted_bytes / planned.peaks.process_bytes:.3f})",
        f"{-point.saved * 100:+.1f} %".replace("-", "−") + (", floor" if point.at_floor else ""),
        step,
        again,
        f"{time}".removeprefix("×") + (", noise" if time.is_noise else ""),
        f"{1 + point.predicted_overhead:.3f}",
    )


def batches() -> Iterator[str]:
    """Both sweeps over batch sizes."""
    for name in MODELS:
        points = Sweep.load(RESULTS / f"sweep_{name}.json").points
        assert [point.batch_size for point in points] == [4, 8, 16, 32, 64]
        yield from map(batch_line, points)


def overheads() -> Iterator[str]:
    """Batch 16 at three budgets."""
    for row in rows_of("overheads"):
        parts = (f"{float(row[column]):.3f}" for column in ("allocator_over_budget", "process_over_budget"))
        reduction = f"−{row['reduction'].rstrip('%')} %"
        yield line(reduction, f"{float(row['predicted']):.3f}", interval(row), *parts)
        yield f"{row['rounds']} rounds"


def largest() -> Iterator[str]:
    """The largest batches in given memories."""
    for row in rows_of("largest"):
        eager, planned = int(row["eager"]), int(row["planned"])
        overhead = f"{float(row['predicted_overhead']):+.0%}".replace("%", " %")
        memory = row["memory"].replace("GiB", " GiB")
        yield line(memory, str(eager), str(planned), f"{planned / eager:.1f}×", overhead)


def capped() -> Iterator[str]:
    """What trains under a cap."""
    for row in rows_of("capped"):
        memory, needed = (format_bytes(int(row[key])) for key in ("memory_bytes", "needed_bytes"))
        yield (
            f"{MODELS[row['subject']]} at batch {row['batch_size']}, which needs {needed} without a plan, "
            f"{row['plain']} in {memory} in plain PyTorch, and trains there with one: {row['equal_losses']} of "
            f"{row['iterations']} losses are those of plain PyTorch without a cap, to the bit"
        )


def comparisons() -> Iterator[str]:
    """The side-by-side with what people use."""
    for name in MODELS:
        rows = {row["method"]: row for row in rows_of(f"07_{name}")}
        others = [row for row in rows.values() if not row["predicted_overhead"] and row["method"] != "eager"]
        assert len(others) == 7
        for row in others:
            wrong = [
                f"{row[f'wrong_{kind}']} {kind}" for kind in ("gradients", "buffers") if row[f"wrong_{kind}"] != "0"
            ]
            peak = f"{float(row['peak_above_static']) * 100:.1f} %"
            ours = interval(rows[row["ours"]]) if row["ours"] else ""
            yield line(row["method"], peak, interval(row), ours, ", ".join(wrong) or "nothing")


def gradient_errors() -> Iterator[str]:
    """By how much the gradients of `torch.compile` are off."""
    errors = {row["method"]: float(row["gradient_error"]) for row in rows_of("07_bert_dropout")}
    told = " and ".join(f"{errors[f'memory budget {share}']:.2f} (budget {share})" for share in ("0.7", "0.3"))
    yield f"a relative error of {told}"
    parts = []
    for name in MODELS:
        rows = {row["method"]: row for row in rows_of(f"07_{name}_inductor")}
        parts += [f"{float(rows[label]['gradient_error']):.0e}".replace("e-0", "e-") for label in COMPILED]
    one, two, three, four = parts
    yield f"relative error over all of them of {one} and {two} (ResNet-152, budgets 1.0 and 0.5) and {three} and {four}"


def compiled() -> Iterator[str]:
    """The side-by-side with compiled kernels."""
    for name, model in MODELS.items():
        (path,) = RESULTS.glob(f"inductor_{name}_*.json")
        found = MethodComparison.load(path)
        for label in COMPILED:
            time, own = (str(found.time(label, other)).removeprefix("×") for other in (EAGER, next(iter(COMPILED))))
            yield line(
                f"{model}, {label}",
                f"{found.share(label) * 100:.1f} %",
                time,
                own if own != "1.000 [1.000, 1.000]" else "",
                f"{found.row(label).first_seconds:.0f} s",
            )


def captured() -> Iterator[str]:
    """What a capture takes, and what the captured step does beside eager."""
    *beside, huge = rows_of("captured")
    for row in beside:
        name, seconds = MODELS[row["subject"]], f"{float(row['capture_seconds']):.1f} s"
        yield f"{name} is captured in {seconds}, and its captured step takes {interval(row)} of eager's time"
    held, process = (format_bytes(int(huge[key])) for key in ("activation_bytes", "capturing_process_bytes"))
    seconds = f"{float(huge['capture_seconds']):.1f} s"
    yield f"at batch {int(huge['batch_size']):,}, whose activations are {held}, in {seconds} by a process of {process}"


def predictions() -> Iterator[str]:
    """Predicted ÷ measured over all steps."""
    rows = rows_of("predictions")
    yield f"over {len(rows)} steps"
    for column in ("tensors", "allocator", "process"):
        values = [float(row[column]) for row in rows]
        yield f"{min(values):.4f} to {max(values):.4f} ({column})"


def trade_offs() -> Iterator[str]:
    """What the frontier costs beside what is proved, the worst of several profiles."""
    for row in rows_of("tradeoff"):
        costs = (f"{float(row[column]):+.1%}".replace("%", " %") for column in ("total", "least"))
        yield line(f"−{float(row['part']):.0%}".replace("%", " %"), *costs)


QUOTED = (
    *(batches, overheads, largest, capped, comparisons, gradient_errors, compiled),
    *(captured, predictions, trade_offs),
)


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_is_what_was_measured(quoted: Callable[[], Iterator[str]]) -> None:
    text = " ".join(README.read_text().split())
    assert [each for each in quoted() if each not in text] == []


def test_nothing_is_quoted_that_no_file_gives() -> None:
    text = " ".join(README.read_text().split("## What was measured")[1].split("## How to use it")[0].split())
    for each in sorted((each for quoted in QUOTED for each in quoted()), key=len, reverse=True):
        text = text.replace(each, "")
    assert re.findall(r"\d\.\d\d+|[+−]\d+|\d(?:×(?!\d)|e-\d)|[\d,]+ (?:ms|s|minutes|rounds|GiB)\b", text) == []


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    assert [link for link in links if "://" not in link and not (README.parent / link).exists()] == []


def test_the_results_stay_small() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*")) < 25e6
