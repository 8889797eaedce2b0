"""Measures what runs: time as ratios of interleaved rounds with an interval, memory in three ways.

The peak of a step is that of live storages (exact), of what the allocator gave out (with workspaces), or of a process.
"""

import gc
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from acwb.capture.step import TracedStep
from acwb.evaluation.baselines import Contender
from acwb.evaluation.fresh_process import PLAIN_MEMORY, launch, together
from acwb.models import Subject
from acwb.profiling.devices import (
    available_bytes,
    meter_of,
    peak_resident_bytes,
    reset_peak_resident,
    resident_bytes,
    trim_memory,
)

Action = Callable[[], object]
FEWEST = 6  # rounds that may exclude chance: all of them on one side happens by chance less than once in twenty


@dataclass(frozen=True)
class Ratio:
    """A time relative to a reference, with a bootstrap 95 % interval.

    Attributes:
        median: of the means of any two rounds (Hodges and Lehmann): as deaf to outliers as need be here, and with less
            spread than the median of the rounds themselves, so that fewer of them do.
    """

    median: float
    low: float
    high: float
    rounds: int

    @property
    def is_noise(self) -> bool:
        """Whether a ratio of 1 is within the interval, or the rounds are too few to say so: then nothing is claimed."""
        return self.rounds < FEWEST or self.low <= 1 <= self.high

    def __str__(self) -> str:
        return f"×{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleave(actions: Mapping[str, Action], rounds: int = 11, warm_up: bool = True) -> dict[str, list[float]]:
    """The seconds of each action in each round: after one warm-up, all actions in turn, in alternating order."""
    for action in actions.values() if warm_up else ():
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
    one, two = numpy.triu_indices(len(ratios))  # every pair of rounds, and each with itself

    def middle(rounds: numpy.ndarray) -> float:
        return float(numpy.median((rounds[one] + rounds[two]) / 2))

    samples = [middle(chosen) for chosen in numpy.random.default_rng(0).choice(ratios, (5_000, len(ratios)))]
    low, high = numpy.percentile(samples, [2.5, 97.5])
    return Ratio(middle(ratios), float(low), float(high), len(ratios))


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


def peak_live_bytes(action: Action, warm_up: bool = True) -> int:
    """The peak of the bytes of the storages that `action` makes, after one run to reach the steady state."""
    if warm_up:
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
    return step.graph.static_bytes + allocated_growth(step.run, step.device)


@dataclass(frozen=True)
class Peaks:
    """The peaks of a steady-state iteration, what exists before it included, in bytes.

    Attributes:
        static_bytes: what exists before it: parameters, buffers, the batch, the optimizer's state.
        tensors: of live storages; None where they cannot be followed, in compiled code.
        allocator: of what torch's allocator gave out, with what kernels use and free again.
        process: of the memory of a process that does nothing else.
    """

    static_bytes: int
    tensors: int | None
    allocator: int
    process: int


def peaks_of(make: Callable[[], Subject], contender: Contender, is_compiled: bool = False) -> Peaks:
    """The peaks of a contender, from a fresh process."""
    return launch(_peaks, make, contender, is_compiled, environment=PLAIN_MEMORY)


def peaks_of_each(
    make: Callable[[], Subject], contenders: Mapping[str, Contender], needed: Mapping[str, int], device: torch.device
) -> dict[str, Peaks]:
    """The peaks of contenders, each from a fresh process; all at once where twice the bytes that they need are free."""
    calls = {name: partial(peaks_of, make, contender) for name, contender in contenders.items()}
    if 2 * sum(needed[name] for name in calls) < available_bytes(device):
        return together(calls)
    return {name: call() for name, call in calls.items()}


def _peaks(make: Callable[[], Subject], contender: Contender, is_compiled: bool) -> Peaks:
    subject = make()
    step = contender(subject)
    step()
    subject.free_gradients()
    static = subject.static_bytes
    live = LiveBytes()
    with nullcontext() if is_compiled else live:
        step()
    subject.free_gradients()  # libraries keep buffers from their first calls: the process is read in the third one
    process = _resident_growth(step)
    subject.free_gradients()
    allocator = allocated_growth(step, _device_of(subject))
    return Peaks(static, None if is_compiled else static + live.peak, static + allocator, static + process)


def _resident_growth(action: Action) -> int:
    gc.collect()
    trim_memory()
    before = resident_bytes()
    reset_peak_resident()
    action()
    return peak_resident_bytes() - before


def allocated_growth(action: Action, device: torch.device) -> int:
    """What torch's allocator gives out while `action` runs, at its peak."""
    meter = meter_of(device)
    with meter, meter.watch("step"):
        action()
    return meter.growth()["step"]


def _device_of(subject: Subject) -> torch.device:
    return next(tensor.device for tensor in subject.tensors)
