"""What depends on the device: its clock, its allocation meter, its swap space and its available memory.

On CPU: a monotonic clock, the allocator's events in torch's profiler, a temporary file, and /proc. On an accelerator:
events and counters through `torch.accelerator`, and pinned host memory; that part has never been run.
"""

import ctypes
import os
import platform
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, record_function

from acwb._torch import allocation_events
from acwb.errors import AcwbError
from acwb.profiling import process_memory


class Clock(Protocol):
    """Marks points in time on a device; the time between two marks is computed later, so that marking is cheap."""

    def mark(self) -> Any:
        """A mark of the current time."""

    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two marks."""


class AllocationMeter(Protocol):
    """Records, while entered, the allocations inside of named regions."""

    def watch(self, name: str) -> AbstractContextManager[None]:
        """A region with this name."""

    def growth(self) -> Mapping[str, int]:
        """For each region, the peak of its allocated bytes above those at its start; after the meter was left."""


class SwapSpace(Protocol):
    """Memory outside of the device, to which storages are swapped out."""

    def write(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy the bytes of a storage to the entry `name`, replacing an older one."""

    def read(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy the bytes of the entry `name` back into a storage of the same size."""

    def forget(self, name: str) -> None:
        """Release the space of the entry `name`."""


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CpuClock() if device.type == "cpu" else AcceleratorClock()


def meter_of(device: torch.device) -> "CpuAllocationMeter | AcceleratorAllocationMeter":
    """The allocation meter of a device, to be entered."""
    return CpuAllocationMeter() if device.type == "cpu" else AcceleratorAllocationMeter()


def space_of(device: torch.device) -> SwapSpace:
    """The swap space of a device."""
    return FileSwapSpace() if device.type == "cpu" else HostSwapSpace()


def swap_out(space: SwapSpace, name: str, storage: torch.UntypedStorage) -> None:
    """Move the bytes of a storage out and free its memory; its tensors exist, but must not be read."""
    space.write(name, storage)
    storage.resize_(0)


def swap_in(space: SwapSpace, name: str, storage: torch.UntypedStorage, size: int) -> None:
    """Bring the `size` bytes of a storage back."""
    storage.resize_(size)
    space.read(name, storage)


def available_bytes(device: torch.device) -> int:
    """How much more this process can allocate on the device."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0])
    return process_memory.available_bytes()


def describe_device(device: torch.device) -> str:
    """The name of the processor or accelerator."""
    if device.type != "cpu":
        return str(torch.accelerator.current_accelerator())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


class CpuClock:
    """The monotonic clock of the process."""

    def mark(self) -> float:
        """A mark of the current time."""
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        """The time between two marks."""
        return stop - start


class AcceleratorClock:
    """Events on the accelerator's current stream."""

    def mark(self) -> torch.Event:
        """An event at the current point of the stream."""
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.Event, stop: torch.Event) -> float:
        """The time between two marks; waits until the stream has reached the second."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


class CpuAllocationMeter:
    """Reads the events that torch's CPU allocator reports to the profiler; a region is one of the profiler's."""

    def __init__(self) -> None:
        self._profiler: Any = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> "CpuAllocationMeter":
        with _quiet():
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with _quiet():
            self._profiler.__exit__(*error)

    def watch(self, name: str) -> AbstractContextManager[None]:
        """A region with this name."""
        return record_function(f"acwb:{name}")

    def growth(self) -> dict[str, int]:
        """For each region, the peak of its allocated bytes above those at its start."""
        memory, watches = [], []
        for event in allocation_events(self._profiler):
            name = event.name()
            if name == "[memory]":
                memory.append((event.start_ns(), event.nbytes()))
            elif name.startswith("acwb:"):
                watches.append((event.start_ns(), event.start_ns() + event.duration_ns(), name.removeprefix("acwb:")))
        memory.sort(key=lambda event: event[0])
        growth = {}
        events = iter(memory)
        event = next(events, None)
        for start, stop, name in sorted(watches):
            held = most = 0
            while event is not None and event[0] <= stop:
                if event[0] >= start:
                    held += event[1]
                    most = max(most, held)
                event = next(events, None)
            growth[name] = most
        return growth


class AcceleratorAllocationMeter:
    """Reads the peak that the accelerator's allocator keeps itself."""

    def __init__(self) -> None:
        self._growth: dict[str, int] = {}

    def __enter__(self) -> "AcceleratorAllocationMeter":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to do: each region measures itself."""

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """A region with this name."""
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        yield
        self._growth[name] = torch.accelerator.max_memory_allocated() - before

    def growth(self) -> dict[str, int]:
        """For each region, the peak of its allocated bytes above those at its start."""
        return self._growth


class FileSwapSpace:
    """A temporary file, written and read (a mapped one would count as memory), which is deleted with this object."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="acwb-")  # noqa: SIM115  # lives as long as this object
        weakref.finalize(self, self._file.close)
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0

    def write(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy the bytes of a storage to the entry `name`, replacing an older one."""
        size = storage.nbytes()
        if self._places.get(name, (0, -1))[1] != size:
            self._places[name] = (self._end, size)
            self._end += size
        place, view, done = self._places[name][0], _view(storage), 0
        while done < size:
            try:
                done += os.pwrite(self._file.fileno(), view[done:], place + done)
            except OSError as error:
                raise AcwbError(
                    f"Cannot swap {name} to a file in {tempfile.gettempdir()}: {error.strerror}. Set TMPDIR to a "
                    "folder with room for it."
                ) from error

    def read(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy the bytes of the entry `name` back into a storage of the same size."""
        place, size = self._places[name]
        view, done = _view(storage), 0
        while done < size:
            count = os.preadv(self._file.fileno(), [view[done:]], place + done)
            if count == 0:
                raise AcwbError(f"The file that {name} was swapped to ends early.")
            done += count

    def forget(self, name: str) -> None:
        """Release the space of the entry `name`.

        Without entries, the file is written from its start again: a growing file would be flushed to disk by a
        processor whose time is being measured.
        """
        del self._places[name]
        if not self._places:
            self._end = 0


class HostSwapSpace:
    """Pinned host memory."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def write(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy the bytes of a storage to the entry `name`, replacing an older one."""
        if name not in self._copies:
            self._copies[name] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._copies[name].copy_(_bytes(storage))

    def read(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy the bytes of the entry `name` back into a storage of the same size."""
        _bytes(storage).copy_(self._copies[name])

    def forget(self, name: str) -> None:
        """Release the space of the entry `name`."""
        del self._copies[name]


def _view(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a CPU storage in place; `numpy()` would make the storage impossible to resize."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the line that torch's profiler writes to standard error when it starts and stops, whatever one sets.

    Not thread-safe: it redirects file descriptor 2 of the whole process, so that the errors of other threads are lost
    meanwhile.
    """
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of its bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
