"""Prints the tables that the README and the notes quote, and leaves them under results/.

`make bench` and `make bench-inductor` for the comparison with other methods; `make captured`, `make predictions`,
`make overheads`, `make largest`, `make capped` and `make tradeoff` for our own steps.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import numpy
import torch

import acwb
from acwb import models, plots
from acwb.capture.step import TracedStep
from acwb.core.schedule import just_in_time
from acwb.core.simulator import simulate
from acwb.evaluation import baselines
from acwb.evaluation.comparison import ALTERNATIVES, COMPILED, MethodComparison
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.evaluation.memory import allocated_peak_bytes, peak_live_bytes, peaks_of, tensor_peak_bytes
from acwb.evaluation.memory_cap import train_within
from acwb.evaluation.timing import Ratio, interleave, ratio
from acwb.profiling.devices import clock_of
from acwb.profiling.instruments import OpTimer
from acwb.profiling.process_memory import peak_resident_bytes
from acwb.profiling.replay import Replay, state_preserved
from acwb.results.cache import cached_comparison
from acwb.results.figures import save_figure, save_table
from acwb.subject import Action, StepBuilder

Row = dict[str, Any]
OPTIMIZERS = {"sgd": models.sgd, "adamw": models.adamw}

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
MAX_INTERVAL = 0.06  # of an interval of a time ratio
LEAST_ROUNDS = 11
MOST_ROUNDS = 59

# Subject, batch size, options, whether it is timed: otherwise only what goes wrong is looked at.
CONTESTS: tuple[tuple[str, int, dict[str, Any], bool], ...] = (
    ("resnet152", 8, {}, True),
    ("bert", 8, {"dropout": 0.0}, True),
    ("bert", 8, {"dropout": 0.1}, False),
)
LARGEST = (("resnet152", "1.5GiB"), ("resnet152", "4GiB"), ("bert", "4GiB"))  # subject, memory
CAPPED = (("resnet152", 8), ("bert", 8))  # subject, batch size
ITERATIONS = 10
RESULTS = Path("results/full")


def captured_beside_eager(name: str, batch_size: int) -> Row:
    """Seconds to capture, time of a captured step as a ratio of eager's, peaks of live bytes above static."""
    make = partial(models.maker(name), batch_size=batch_size)
    eager, captured = make(), make()
    start = time.perf_counter()
    step = acwb.trace(captured)
    capture_seconds = time.perf_counter() - start
    seconds = interleave({"eager": eager.eager_step, "captured": step.run}, ROUNDS)
    return {
        "subject": models.title(name),
        "batch_size": batch_size,
        "capture_seconds": capture_seconds,
        **_columns("time", ratio(seconds["captured"], seconds["eager"])),
        "rounds": ROUNDS,
        "tensors_above_static": peak_live_bytes(step.run),
        "eager_tensors_above_static": peak_live_bytes(eager.eager_step),
    }


def captured_beyond_memory(batch_size: int) -> Row:
    """The capture of a ResNet-152 step far beyond this machine. Run in a process of its own."""
    subject = acwb.models.resnet152(batch_size=batch_size)
    start = time.perf_counter()
    step = acwb.trace(subject)
    return {
        "subject": subject.name,
        "batch_size": batch_size,
        "capture_seconds": time.perf_counter() - start,
        "activation_bytes": sum(activation.bytes for activation in step.graph.activations),
        "capturing_process_bytes": peak_resident_bytes(),
    }


def predicted_beside_measured(name: str, batch_size: int, optimizer: str, rounds: int) -> Row:
    """Peaks above static memory and step time, with predicted ÷ measured of each."""
    make = partial(models.maker(name), batch_size=batch_size, optimizer=OPTIMIZERS[optimizer])
    subject = make()
    step = acwb.trace(subject)
    profile = acwb.profile(step)
    timeline = simulate(profile, just_in_time(step.graph))
    static = step.graph.static_bytes
    tensors, total = timeline.tensor_peak_bytes - static, timeline.peak_bytes - static
    step_milliseconds, relative, together = sum_of_ops_beside_step(step, rounds)
    return {
        "subject": models.title(name),
        "batch_size": batch_size,
        "optimizer": optimizer,
        "peak_above_static": total,
        "phase": str(step.graph.ops[profile.peak_rank].phase),
        "tensors": tensors / (tensor_peak_bytes(step) - static),
        "allocator": total / (allocated_peak_bytes(step) - static),
        "process": total / (peaks_of(make, baselines.captured).process_bytes - static),
        "step_ms": step_milliseconds,
        **_columns("op_medians", relative),
        **_columns("ops_of_a_round", together),
        "rounds": rounds,
    }


def sum_of_ops_beside_step(step: TracedStep, rounds: int) -> tuple[float, Ratio, Ratio]:
    """The median step; two ratios to it: of the sum of the medians of all ops, and of the sum of all ops in a round.

    A machine that is slow now and then slows few runs of an op, but something in every step: then the first ratio falls
    below one, and the second does not.
    """
    timed = OpTimer(clock_of(step.device))
    with state_preserved(step) as tensors:
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


def planned_beside_eager(name: str, batch_size: int, wanted: tuple[float, ...]) -> Iterator[Row]:
    """A row for each reduction: its plan's time and peaks, also predicted."""
    make = partial(models.maker(name), batch_size=batch_size)
    subject = make()
    step = acwb.trace(subject)
    profile = acwb.profile(step)
    frontier = acwb.frontier(profile)
    plans = {f"{part:.0%}": frontier.at(profile.budget(part)) for part in wanted}
    steps = {part: acwb.rewrite(step, plan) for part, plan in plans.items()}
    seconds = _timed_until_narrow(name, subject.eager_step, steps)
    rounds = len(seconds["eager"])
    for part, plan in plans.items():
        time = ratio(seconds[part], seconds["eager"])
        budget = plan.budget_bytes or 0
        process = peaks_of(make, partial(baselines.planned, plan=plan)).process_bytes
        yield {
            "subject": models.title(name),
            "batch_size": batch_size,
            "reduction": part,
            "predicted": 1 + plan.overhead,
            **_columns("time", time),
            "rounds": rounds,
            "eager_seconds": float(numpy.median(seconds["eager"])),
            "budget_bytes": budget,
            "tensors_over_predicted": tensor_peak_bytes(steps[part]) / plan.timeline.tensor_peak_bytes,
            "allocator_over_budget": allocated_peak_bytes(steps[part]) / budget,
            "process_over_budget": process / budget,
        }


def _timed_until_narrow(name: str, eager: Action, steps: Mapping[str, TracedStep]) -> dict[str, list[float]]:
    """The seconds of all in each round, with as many rounds as it takes for narrow intervals; all are kept."""
    actions = {"eager": eager, **{part: step.run for part, step in steps.items()}}
    seconds = interleave(actions, LEAST_ROUNDS)
    _keep_rounds(name, seconds)
    while len(seconds["eager"]) < MOST_ROUNDS and any(
        _width(ratio(seconds[part], seconds["eager"])) > MAX_INTERVAL for part in steps
    ):
        for action, more in interleave(actions, 2, warm_up=False).items():
            seconds[action] += more
        _keep_rounds(name, seconds)
    return seconds


def _keep_rounds(name: str, seconds: Mapping[str, list[float]]) -> None:
    rounds = zip(*seconds.values(), strict=True)
    save_table(f"overheads_{name}_seconds", [dict(zip(seconds, each, strict=True)) for each in rounds], RESULTS)


def _width(relative: Ratio) -> float:
    return relative.high - relative.low


def overheads() -> None:
    """Predicted and measured overheads and peaks of plans of the real subjects."""
    _print_and_save(
        "overheads", (row for name, batch, wanted in PLANNED for row in planned_beside_eager(name, batch, wanted))
    )


def bench() -> None:
    """Measure our plans and the other methods on the real subjects, in the same rounds."""
    for name, batch_size, options, is_timed in CONTESTS:
        _compare("comparison", name, batch_size, options, ALTERNATIVES, ROUNDS_OF_CONTEST if is_timed else 0)


def bench_inductor() -> None:
    """Measure `torch.compile` with inductor at several memory budgets, relative to its own budget of 1."""
    for name, batch_size, options, is_timed in CONTESTS:
        if is_timed:
            found = _compare("inductor", name, batch_size, options, COMPILED, ROUNDS_OF_CONTEST)
            for label in COMPILED:
                relative, first = found.time(label, next(iter(COMPILED))), found.row(label).first_seconds
                sys.stdout.write(f"  {label}: {relative} of its own budget 1.0; first step {first:,.0f} s\n")
            sys.stdout.flush()


def _compare(
    kind: str, name: str, batch_size: int, options: dict[str, Any], methods: Mapping[str, StepBuilder], rounds: int
) -> MethodComparison:
    """Measure a comparison, print and save it; notebook 7 loads it from the same folder."""
    found, _ = cached_comparison(models.maker(name), batch_size, options, methods, rounds, RESULTS, kind, refresh=True)
    sys.stdout.write(f"{found}\n")
    sys.stdout.flush()
    label = "_".join(["07", name, *(["inductor"] if kind == "inductor" else []), *([] if rounds else ["dropout"])])
    if rounds:
        save_figure(plots.method_comparison(found), label, found.records, RESULTS)
    else:
        save_table(label, found.records, RESULTS)
    return found


def largest() -> None:
    """The largest batches of the real subjects in several memory sizes, confirmed under a hard cap."""
    _print_and_save("largest", starmap(largest_within, LARGEST))


def largest_within(name: str, memory: str) -> Row:
    """The largest batch of a subject, with and without a plan."""
    found = acwb.largest_batch(models.maker(name), memory)
    row = {"subject": models.title(name), "memory": memory, "eager": found.eager, "planned": found.planned}
    return {**row, "predicted_overhead": found.plan.overhead, "search_seconds": found.search_seconds}


def capped() -> None:
    """Trainings under a hard cap in which eager does not fit; a fresh process for each row."""
    _print_and_save("capped", starmap(partial(run_in_fresh_process, trained_under_a_cap), CAPPED))


def trained_under_a_cap(name: str, batch_size: int) -> Row:
    """Half-way between the floor and what the step needs: whether either fits, and whose losses are equal."""
    make = partial(models.maker(name), batch_size=batch_size)
    subject = make()
    step = acwb.trace(subject)
    frontier = acwb.frontier(acwb.profile(step, repeats=1))
    memory = (frontier.floor_bytes + frontier.baseline_bytes) // 2
    plan = frontier.at(int(0.99 * memory))
    torch.manual_seed(0)
    losses = [float(subject.eager_step()) for _ in range(ITERATIONS)]
    under = train_within(make, partial(baselines.planned, plan=plan), memory, iterations=ITERATIONS, seed=0)
    try:
        train_within(make, baselines.eager, memory)
    except acwb.DoesNotFitError:
        eager = "does not fit"
    else:
        eager = "fits"
    return {
        "subject": models.title(name),
        "batch_size": batch_size,
        "memory_bytes": memory,
        "needed_bytes": frontier.baseline_bytes,
        "eager": eager,
        "iterations": len(under),
        "equal_losses": sum(one == other for one, other in zip(losses, under, strict=True)),
        "different_losses_of_eager": len(set(losses)),
        "predicted_overhead": plan.overhead,
    }


def captured() -> None:
    """The captured step beside eager, and a capture far beyond memory; a fresh process for each row."""
    beside = (run_in_fresh_process(captured_beside_eager, name, 4) for name in ("resnet152", "bert"))
    _print_and_save(
        "captured", chain(beside, (run_in_fresh_process(captured_beyond_memory, batch) for batch in (1024,)))
    )


def predictions() -> None:
    """Predictions beside measurements; a fresh process for each row."""
    _print_and_save(
        "predictions",
        (
            run_in_fresh_process(predicted_beside_measured, name, batch_size, optimizer, rounds)
            for name, batch_size, rounds in PREDICTED
            for optimizer in ("sgd", "adamw")
        ),
    )


def _print_and_save(name: str, measured: Iterable[Row]) -> None:
    """Print each row as soon as it is measured, and keep the table once it is whole."""
    rows: list[Row] = []
    for row in measured:
        rows.append(row)
        told = (f"{key} {value:,.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        sys.stdout.write(", ".join(told) + "\n")
        sys.stdout.flush()
    save_table(name, rows, RESULTS)


def _columns(name: str, found: Ratio) -> Row:
    return {name: found.median, f"{name}_low": found.low, f"{name}_high": found.high}
