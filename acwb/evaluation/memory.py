"""Peaks of a step, measured three ways: live tensors (exact), torch's allocator (with workspaces), the process.

Each is read in a fresh process that does nothing else.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from acwb._torch import DispatchMode, pytree, storage_id
from acwb.capture.optimizer_step import state_tensors
from acwb.capture.step import TracedStep
from acwb.evaluation.fresh_process import run_concurrently, run_in_fresh_process
from acwb.profiling.devices import available_bytes, meter_of
from acwb.profiling.process_memory import MALLOC_RETURNS_MEMORY, resident_growth
from acwb.subject import Action, StepBuilder, Subject


class LiveBytesMeter(DispatchMode):
    """While entered, follows the bytes of all storages that ops make, to the moment when each is freed.

    What exists before is not counted, nor is what an op's kernel uses and frees again. `curve` has every op with the
    bytes that are live when it has made its outputs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.live = 0
        self.peak = 0
        self.curve: list[tuple[str, int]] = []
        self._followed: dict[int, Any] = {}  # the finalizer of each storage, by its id

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        existing = {storage_id(tensor) for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage_id(storage) not in self._followed and storage_id(storage) not in existing:
                self.live += storage.nbytes()
                finalizer = weakref.finalize(storage, self._freed, storage_id(storage), storage.nbytes())
                finalizer.atexit = False
                self._followed[storage_id(storage)] = finalizer
        self.peak = max(self.peak, self.live)
        if function.namespace not in ("prim", "profiler"):  # asks for a device, marks a region: nothing is computed
            self.curve.append((str(function), self.live))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # of torch
        for finalizer in self._followed.values():
            finalizer.detach()
        self._followed.clear()

    def _freed(self, storage: int, size: int) -> None:
        del self._followed[storage]
        self.live -= size


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def peak_live_bytes(action: Action, warm_up: bool = True) -> int:
    """The peak of the bytes of the storages that `action` makes, after one run to reach the steady state."""
    if warm_up:
        action()
    meter = LiveBytesMeter()
    with meter:
        action()
    return meter.peak


def tensor_peak_bytes(step: TracedStep) -> int:
    """Peak of live storages in a steady-state run of the step, static memory included."""
    step.run()
    return static_bytes(step) + peak_live_bytes(step.run, warm_up=False)


def static_bytes(step: TracedStep) -> int:
    """Bytes of the tensors that exist before a run of the step, as they are now; views count once."""
    names = {id(slot.tensor): slot.name for slot in step.slots}
    state = state_tensors(step.optimizer, names).values() if step.optimizer is not None else ()
    tensors = [*(slot.tensor for slot in step.slots), *step.batch.tensors, *state, *step.constants.values()]
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def allocated_peak_bytes(step: TracedStep) -> int:
    """Peak of torch's allocator in a steady-state run of the step: static memory and kernels' workspaces included."""
    step.run()
    step.free_gradients()
    return static_bytes(step) + allocated_growth(step.run, step.device)


@dataclass(frozen=True)
class Peaks:
    """The peaks of a steady-state iteration, what exists before it included, in bytes.

    Attributes:
        static_bytes: what exists before it: parameters, buffers, the batch, the optimizer's state.
        tensor_bytes: of live storages; None where they cannot be followed, in compiled code.
        allocator_bytes: of what torch's allocator gave out, with what kernels use and free again.
        process_bytes: of the memory of a process that does nothing else.
    """

    static_bytes: int
    tensor_bytes: int | None
    allocator_bytes: int
    process_bytes: int

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Peaks":
        """The peaks that a file holds; older ones call them tensors, allocator and process."""
        older = {"tensors": "tensor_bytes", "allocator": "allocator_bytes", "process": "process_bytes"}
        return cls(**{older.get(name, name): size for name, size in content.items()})


def peaks_of(make: Callable[[], Subject], method: StepBuilder, is_compiled: bool = False) -> Peaks:
    """The peaks of a steady-state iteration of one method, measured in a fresh process."""
    return run_in_fresh_process(_measure_peaks, make, method, is_compiled, environment=MALLOC_RETURNS_MEMORY)


def peaks_of_each(
    make: Callable[[], Subject], methods: Mapping[str, StepBuilder], needed: Mapping[str, int], device: torch.device
) -> dict[str, Peaks]:
    """The peaks of methods, each from a fresh process; all at once where twice the bytes that they need are free."""
    calls = {name: partial(peaks_of, make, method) for name, method in methods.items()}
    if 2 * sum(needed[name] for name in calls) < available_bytes(device):
        return run_concurrently(calls)
    return {name: call() for name, call in calls.items()}


def _measure_peaks(make: Callable[[], Subject], method: StepBuilder, is_compiled: bool) -> Peaks:
    subject = make()
    step = method(subject)
    step()
    subject.free_gradients()
    static = subject.static_bytes
    live = LiveBytesMeter()
    with nullcontext() if is_compiled else live:
        step()
    subject.free_gradients()  # libraries keep buffers from their first calls: the process is read in the third one
    process = resident_growth(step)
    subject.free_gradients()
    allocator = allocated_growth(step, subject.device)
    return Peaks(static, None if is_compiled else static + live.peak, static + allocator, static + process)


def allocated_growth(action: Action, device: torch.device) -> int:
    """Growth of torch's allocated memory while `action` runs, at its peak, in bytes."""
    meter = meter_of(device)
    with meter, meter.watch("step"):
        action()
    return meter.growth()["step"]
