"""Measures what runs: time as ratios of interleaved rounds with an interval, memory in three ways.

The peak of a step is that of live storages (exact), of what the allocator gave out (with workspaces), or of a process.
"""

import gc
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from acwb.device import meter_of, peak_resident_bytes, reset_peak_resident, resident_bytes, trim_memory
from acwb.launcher import PLAIN_MEMORY, launch
from acwb.models import Subject
from acwb.plans import Plan
from acwb.rewriter import rewrite
from acwb.step import TracedStep
from acwb.tracer import trace

Action = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """A time relative to a reference: the median over rounds, with a bootstrap 95 % interval of that median."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"×{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleave(actions: Mapping[str, Action], rounds: int = 11) -> dict[str, list[float]]:
    """The seconds of each action in each round: after one warm-up, all actions in turn, in alternating order."""
    for action in actions.values():
        action()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in tqdm(range(rounds), desc="rounds", leave=False):
        names = list(actions) if number % 2 == 0 else list(actions)[::-1]
        for name in names:
            start = time.perf_counter()
            actions[name]()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: list[float], reference: list[float]) -> Ratio:
    """The time of one action relative to another that ran in the same rounds."""
    ratios = numpy.array(seconds) / numpy.array(reference)
    samples = numpy.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = numpy.percentile(numpy.median(samples, axis=1), [2.5, 97.5])
    return Ratio(float(numpy.median(ratios)), float(low), float(high), len(ratios))


class LiveBytes(TorchDispatchMode):
    """While entered, follows the bytes of all storages that ops make, to the moment when each is freed.

    What exists before is not counted, nor is what an op's kernel uses and frees again. `curve` has every op with the
    bytes that are live when it has made its outputs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.live = 0
        self.peak = 0
        self.curve: list[tuple[str, int]] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        existing = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in existing:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.live)
        if function.namespace not in ("prim", "profiler"):  # asks for a device, marks a region: nothing is computed
            self.curve.append((str(function), self.live))
        return result

    def _freed(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.live -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def peak_live_bytes(action: Action) -> int:
    """The peak of the bytes of the storages that `action` makes, after one run to reach the steady state."""
    action()
    meter = LiveBytes()
    with meter:
        action()
    return meter.peak


def tensor_peak_bytes(step: TracedStep) -> int:
    """The peak of live storages in a steady-state run of the step, those that exist before it included."""
    return step.graph.static_bytes + peak_live_bytes(step.run)


def allocated_peak_bytes(step: TracedStep) -> int:
    """The same as the allocator sees it: with what kernels use and free again."""
    step.run()
    step.free_gradients()
    meter = meter_of(step.device)
    with meter, meter.watch("step"):
        step.run()
    return step.graph.static_bytes + meter.growth()["step"]


def process_peak_bytes(make: Callable[[], Subject], plan: Plan | None = None) -> int:
    """The same as the operating system sees it: the growth of a fresh process in a step, and what exists before it."""
    return launch(_process_peak, make, plan, environment=PLAIN_MEMORY)


def _process_peak(make: Callable[[], Subject], plan: Plan | None) -> int:
    subject = make()
    step = trace(subject.model, subject.batch, subject.loss_fn, subject.optimizer)
    if plan is not None:
        step = rewrite(step, plan)
    for _ in range(2):  # libraries keep buffers from their first calls
        step.run()
    step.free_gradients()
    gc.collect()
    trim_memory()
    before = resident_bytes()
    reset_peak_resident()
    step.run()
    return step.graph.static_bytes + peak_resident_bytes() - before
