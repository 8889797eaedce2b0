"""Prints the tables that the README and the notes quote, and leaves the contests' under results/.

`make bench` and `make bench-inductor` for the side-by-side with what people use; `make captured`, `make predictions`,
`make overheads` and `make largest` for our own steps.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy

import acwb
from acwb import archive, contenders, plots
from acwb.contenders import Contender
from acwb.contest import ALTERNATIVES, COMPILED, Contest, hold
from acwb.device import clock_of, peak_resident_bytes
from acwb.keeper import contest_path
from acwb.launcher import launch
from acwb.meters import (
    Action,
    Ratio,
    allocated_peak_bytes,
    interleave,
    peak_live_bytes,
    peaks_of,
    ratio,
    tensor_peak_bytes,
)
from acwb.models import Subject
from acwb.profiler import Replay, Timed, unchanged
from acwb.results import save_figure
from acwb.scheduler import just_in_time
from acwb.simulator import simulate
from acwb.step import TracedStep
from acwb.units import gibibytes

ROUNDS = 15
ROUNDS_OF_CONTEST = 11

# What is predicted and measured: subject, batch size, rounds.
PREDICTED = (
    *(("resnet18", 8, 15), ("encoder", 8, 11)),
    *(("resnet152", 2, 11), ("resnet152", 4, 11), ("resnet152", 8, 5)),
    *(("bert", 2, 11), ("bert", 4, 11), ("bert", 8, 5)),
)


# What is planned and run: subject, batch size, reductions of the peak above static.
PLANNED = (("resnet152", 16, (0.3, 0.5, 0.7)), ("bert", 16, (0.3, 0.5, 0.6)))
WIDEST = 0.06  # of an interval of a time ratio
LEAST_ROUNDS = 11
MOST_ROUNDS = 59

# Subject, batch size, options, whether it is timed: otherwise only what goes wrong is looked at.
CONTESTS: tuple[tuple[str, int, dict[str, Any], bool], ...] = (
    ("resnet152", 8, {}, True),
    ("bert", 8, {"dropout": 0.0}, True),
    ("bert", 8, {"dropout": 0.1}, False),
)
LARGEST = (("resnet152", "1.5GiB"), ("resnet152", "4GiB"), ("bert", "4GiB"))  # subject, memory
RESULTS = Path("results/full")


def captured_beside_eager(make: Callable[..., Subject], batch_size: int) -> str:
    """One row: seconds to capture, time of a captured step as a ratio of eager's, peak of live bytes above static."""
    eager, captured = make(batch_size=batch_size), make(batch_size=batch_size)
    start = time.perf_counter()
    step = acwb.trace(captured.model, captured.batch, captured.loss_fn, captured.optimizer)
    capture_seconds = time.perf_counter() - start
    seconds = interleave({"eager": eager.eager_step, "captured": step.run}, ROUNDS)
    plain, ours = peak_live_bytes(eager.eager_step), peak_live_bytes(step.run)
    relative = ratio(seconds["captured"], seconds["eager"])
    return (
        f"{eager.name:<10}{batch_size:>6}{capture_seconds:>10.1f} s   {relative!s:<24}"
        f"{gibibytes(ours):>12}{gibibytes(plain):>12}   ×{ours / plain:.4f}"
    )


def captured_beyond_memory(batch_size: int) -> str:
    """One row: the capture of a ResNet-152 step far beyond this machine. Run in a process of its own."""
    subject = acwb.models.resnet152(batch_size=batch_size)
    start = time.perf_counter()
    step = acwb.trace(subject.model, subject.batch, subject.loss_fn, subject.optimizer)
    seconds = time.perf_counter() - start
    held = sum(activation.bytes for activation in step.graph.activations)
    return (
        f"resnet152 at batch {batch_size}: captured in {seconds:.1f} s, "
        f"process peak {gibibytes(peak_resident_bytes())}; its activations alone take {gibibytes(held)}"
    )


def predicted_beside_measured(name: str, batch_size: int, optimizer: str, rounds: int) -> str:
    """One row: predicted peaks (above what exists before the step) and time, each as a ratio to what is measured."""
    make = partial(getattr(acwb.models, name), batch_size=batch_size, optimizer=getattr(acwb.models, optimizer))
    subject = make()
    step = acwb.trace(subject.model, subject.batch, subject.loss_fn, subject.optimizer)
    profile = acwb.profile(step)
    timeline = simulate(profile, just_in_time(step.graph))
    static = step.graph.static_bytes
    tensors, total = timeline.tensor_peak_bytes - static, timeline.peak_bytes - static
    peaks = [
        tensors / (tensor_peak_bytes(step) - static),
        total / (allocated_peak_bytes(step) - static),
        total / (peaks_of(make, contenders.captured).process - static),
    ]
    milliseconds, relative, together = sum_of_ops_beside_step(step, rounds)
    phase = step.graph.ops[profile.peak_rank].phase
    return (
        f"{name:<10}{batch_size:>6} {optimizer:<7}"
        f"{gibibytes(static):>10}{gibibytes(tensors):>11}{gibibytes(total):>11} {phase:<10}"
        f"{peaks[0]:>10.4f}{peaks[1]:>10.4f}{peaks[2]:>10.4f}{milliseconds:>10,.0f} ms  {relative!s:<24}{together}"
    )


def sum_of_ops_beside_step(step: TracedStep, rounds: int) -> tuple[float, Ratio, Ratio]:
    """The median step; two ratios to it: of the sum of the medians of all ops, and of the sum of all ops in a round.

    A machine that is slow now and then slows few runs of an op, but something in every step: then the first ratio falls
    below one, and the second does not.
    """
    timed = Timed(clock_of(step.device))
    with unchanged(step) as tensors:
        replay = Replay(step, tensors)
        seconds = interleave({"step": step.run, "replay": partial(replay.run, timed)}, rounds)
    ops = numpy.array(list(timed.seconds().values()))[:, 1:]  # without the warm-up
    steps = numpy.array(seconds["step"])

    def compare(chosen: numpy.ndarray) -> float:
        return float(numpy.median(ops[:, chosen], axis=1).sum() / numpy.median(steps[chosen]))

    everything = numpy.arange(rounds)
    samples = [compare(chosen) for chosen in numpy.random.default_rng(0).choice(everything, (500, rounds))]
    low, high = numpy.percentile(samples, [2.5, 97.5])
    together = ratio(ops.sum(axis=0).tolist(), steps.tolist())
    return float(numpy.median(steps)) * 1e3, Ratio(compare(everything), float(low), float(high), rounds), together


def planned_beside_eager(name: str, batch_size: int, wanted: tuple[float, ...]) -> Iterator[str]:
    """First a line with the measured step; then one for each reduction: its plan's time and peaks, also predicted."""
    make = partial(getattr(acwb.models, name), batch_size=batch_size)
    subject = make()
    step = acwb.trace(subject.model, subject.batch, subject.loss_fn, subject.optimizer)
    profile = acwb.profile(step)
    frontier = acwb.frontier(profile)
    plans = {f"{part:.0%}": frontier.at(profile.budget(part)) for part in wanted}
    steps = {part: acwb.rewrite(step, plan) for part, plan in plans.items()}
    seconds = _timed_until_narrow(name, subject.eager_step, steps)
    rounds = len(seconds["eager"])
    yield f"{name} at batch {batch_size}: eager {numpy.median(seconds['eager']) * 1e3:,.0f} ms, {rounds} rounds"
    rows = []
    for part, plan in plans.items():
        time = ratio(seconds[part], seconds["eager"])
        budget = plan.budget_bytes or 0
        process = peaks_of(make, partial(contenders.planned, plan=plan)).process
        row = {
            "subject": name,
            "batch_size": batch_size,
            "reduction": part,
            "predicted": 1 + plan.overhead,
            "time": time.median,
            "time_low": time.low,
            "time_high": time.high,
            "rounds": rounds,
            "budget_bytes": budget,
            "tensors_over_predicted": tensor_peak_bytes(steps[part]) / plan.timeline.tensor_peak_bytes,
            "allocator_over_budget": allocated_peak_bytes(steps[part]) / budget,
            "process_over_budget": process / budget,
        }
        rows.append(row)
        yield (
            f"  −{part}: predicted ×{row['predicted']:.3f}, measured {time}; budget {gibibytes(budget)}, tensors ÷ "
            f"predicted {row['tensors_over_predicted']:.5f}; ÷ budget: allocator {row['allocator_over_budget']:.5f}, "
            f"process {row['process_over_budget']:.5f}"
        )
    _keep(f"overheads_{name}", rows)


def _timed_until_narrow(name: str, eager: Action, steps: Mapping[str, TracedStep]) -> dict[str, list[float]]:
    """The seconds of all in each round, with as many rounds as it takes for narrow intervals; all are kept."""
    actions = {"eager": eager, **{part: step.run for part, step in steps.items()}}
    seconds = interleave(actions, LEAST_ROUNDS)
    _keep_rounds(name, seconds)
    while len(seconds["eager"]) < MOST_ROUNDS and any(
        _width(ratio(seconds[part], seconds["eager"])) > WIDEST for part in steps
    ):
        for action, more in interleave(actions, 2, warm_up=False).items():
            seconds[action] += more
        _keep_rounds(name, seconds)
    return seconds


def _keep_rounds(name: str, seconds: Mapping[str, list[float]]) -> None:
    rounds = zip(*seconds.values(), strict=True)
    _keep(f"overheads_{name}_seconds", [dict(zip(seconds, each, strict=True)) for each in rounds])


def _keep(name: str, rows: list[dict[str, Any]]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    archive.write_texts({RESULTS / f"{name}.csv": archive.rows_as_csv(rows)})


def _width(relative: Ratio) -> float:
    return relative.high - relative.low


def overheads() -> None:
    """Print plans of the real subjects beside their runs."""
    sys.stdout.write("planned steps, by how much the peak above static is reduced: time and peaks\n")
    for name, batch_size, wanted in PLANNED:
        for row in planned_beside_eager(name, batch_size, wanted):
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()


def bench() -> None:
    """Hold the contests with what people use."""
    for name, batch_size, options, is_timed in CONTESTS:
        _hold("contest", name, batch_size, options, ALTERNATIVES, ROUNDS_OF_CONTEST if is_timed else 0)


def bench_inductor() -> None:
    """Hold those with compiled kernels, each to be seen against its own budget of 1."""
    for name, batch_size, options, is_timed in CONTESTS:
        if is_timed:
            found = _hold("inductor", name, batch_size, options, COMPILED, ROUNDS_OF_CONTEST)
            for label in COMPILED:
                relative, first = found.time(label, next(iter(COMPILED))), found.row(label).first_seconds
                sys.stdout.write(f"  {label}: {relative} of its own budget 1.0; first step {first:,.0f} s\n")
            sys.stdout.flush()


def _hold(
    kind: str, name: str, batch_size: int, options: dict[str, Any], all_of_them: Mapping[str, Contender], rounds: int
) -> Contest:
    """Hold a contest anew; notebook 7 reads it where it finds it."""
    found = launch(hold, name, batch_size, options, all_of_them, rounds, shows_progress=True)
    sys.stdout.write(f"{found}\n")
    sys.stdout.flush()
    RESULTS.mkdir(parents=True, exist_ok=True)
    found.save(contest_path(name, batch_size, options, rounds, RESULTS, kind))
    label = "_".join([kind, name, *(f"{key}_{value}" for key, value in options.items())])
    if rounds:
        save_figure(plots.contest(found), label, found.records, RESULTS)
    else:
        _keep(label, found.records)
    return found


def largest() -> None:
    """Print the largest batches that train in a given memory, confirmed under a hard cap."""
    rows = []
    for name, memory in LARGEST:
        found = acwb.largest_batch(getattr(acwb.models, name), memory)
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()
        row = {"subject": name, "memory": memory, "eager": found.eager, "planned": found.planned}
        rows.append({**row, "predicted_overhead": found.plan.overhead, "search_seconds": found.search_seconds})
    _keep("largest_batches", rows)


def captured() -> None:
    """Print the captured step beside eager."""
    write = sys.stdout.write
    write("captured step beside eager (time ratio: median and 95 % interval; peak of live tensor bytes above static)\n")
    write(f"{'subject':<10}{'batch':>6}{'capture':>12}   {'time':<24}{'captured':>12}{'eager':>12}   peak\n")
    for make in (acwb.models.resnet152, acwb.models.bert):
        write(captured_beside_eager(make, 4) + "\n")
    write(launch(captured_beyond_memory, 1024) + "\n")


def predictions() -> None:
    """Print predictions beside measurements, a fresh process for each row."""
    write = sys.stdout.write
    write(
        "peaks above static: storages alone, with workspace, and where; predicted ÷ measured of storages, allocator,\n"
    )
    write(
        "process; the measured step; ÷ step: the sum of op medians, the sum of ops in a round (with 95 % intervals)\n"
    )
    write(
        f"{'subject':<10}{'batch':>6} {'with':<7}{'static':>10}{'tensors':>11}{'peak':>11} {'phase':<10}"
        f"{'tensors':>10}{'allocator':>10}{'process':>10}{'step':>13}  {'op medians':<24}ops of a round\n"
    )
    for name, batch_size, rounds in PREDICTED:
        for optimizer in ("sgd", "adamw"):
            write(launch(predicted_beside_measured, name, batch_size, optimizer, rounds) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    from acwb import bench as this  # under its own name, by which fresh processes find its functions

    tables = {
        "bench": this.bench,
        "bench-inductor": this.bench_inductor,
        "captured": this.captured,
        "largest": this.largest,
        "predictions": this.predictions,
        "overheads": this.overheads,
    }
    tables[sys.argv[1]]()
