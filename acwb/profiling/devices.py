"""What depends on the device: a clock, a meter of what kernels allocate, a place to swap to, and how much fits.

On CPU: a monotonic clock, the allocator's own events, a temporary file, the kernel's counts of this process. On an
accelerator: its events and counters through `torch.accelerator`, and pinned host memory; that part was never run.
"""

import ctypes
import os
import platform
import resource
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, record_function

from acwb.errors import AcwbError
from acwb.profiling.process_memory import data_bytes, kernel_table_bytes


class Clock(Protocol):
    """Marks moments on a device; the time between two of them is asked for later, so that marking stays cheap."""

    def mark(self) -> Any:
        """This moment."""

    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two marks."""


class AllocationMeter(Protocol):
    """While entered, watches what an allocator gives out."""

    def watch(self, name: str) -> AbstractContextManager[None]:
        """Watch what happens inside under this name."""

    def growth(self) -> Mapping[str, int]:
        """Once left: the most bytes held at one moment of each watch beyond what was held at its start."""


class SwapSpace(Protocol):
    """Memory outside of the device, that storages are moved to and back from."""

    def write(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy a storage's bytes out under a name, replacing what was there."""

    def read(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy them back into a storage of the same size."""

    def forget(self, name: str) -> None:
        """Let others have the room of a name that is not read again."""


def clock_of(device: torch.device) -> Clock:
    """The device's clock."""
    return CpuClock() if device.type == "cpu" else AcceleratorClock()


def meter_of(device: torch.device) -> "CpuAllocationMeter | AcceleratorAllocationMeter":
    """The device's meter of allocations, to be entered."""
    return CpuAllocationMeter() if device.type == "cpu" else AcceleratorAllocationMeter()


def space_of(device: torch.device) -> SwapSpace:
    """Where storages of the device are swapped to."""
    return FileSwapSpace() if device.type == "cpu" else HostSwapSpace()


def swap_out(space: SwapSpace, name: str, storage: torch.UntypedStorage) -> None:
    """Move a storage's bytes out and give its memory back; its tensors stay, but must not be read."""
    space.write(name, storage)
    storage.resize_(0)


def swap_in(space: SwapSpace, name: str, storage: torch.UntypedStorage, size: int) -> None:
    """Bring a storage's `size` bytes back."""
    storage.resize_(size)
    space.read(name, storage)


def available_bytes(device: torch.device) -> int:
    """How much more this process can allocate on the device."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0])
    limits = [kernel_table_bytes("/proc/meminfo", "MemAvailable")]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - data_bytes())
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()) != "max":
        limits.append(int(most) - int((group / "memory.current").read_text()))
    return max(0, min(limits))


def describe_device(device: torch.device) -> str:
    """What a person calls the device."""
    if device.type != "cpu":
        return str(torch.accelerator.current_accelerator())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


class CpuClock:
    """The process's monotonic clock."""

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        """The time between two marks."""
        return stop - start


class AcceleratorClock:
    """Events on the accelerator's current stream."""

    def mark(self) -> torch.Event:
        """This moment, as the stream reaches it."""
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.Event, stop: torch.Event) -> float:
        """The time between two marks; waits until the second was reached."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


class CpuAllocationMeter:
    """Torch's CPU allocator reports each of its events to the profiler; a watch is a region of the profiler's."""

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
        """Watch what happens inside under this name."""
        return record_function(f"acwb:{name}")

    def growth(self) -> dict[str, int]:
        """The most bytes held at one moment of each watch beyond what was held at its start."""
        results = self._profiler.profiler.kineto_results
        memory, watches = [], []
        for event in results.events():
            name = event.name()
            if name == "[memory]":
                memory.append((event.start_ns(), event.nbytes()))
            elif name.startswith("acwb:"):
                watches.append((event.start_ns(), event.start_ns() + event.duration_ns(), name.removeprefix("acwb:")))
        memory.sort(key=lambda event: event[0])
        found = {}
        events = iter(memory)
        event = next(events, None)
        for start, stop, name in sorted(watches):
            held = most = 0
            while event is not None and event[0] <= stop:
                if event[0] >= start:
                    held += event[1]
                    most = max(most, held)
                event = next(events, None)
            found[name] = most
        return found


class AcceleratorAllocationMeter:
    """The accelerator's allocator counts for itself."""

    def __init__(self) -> None:
        self._growth: dict[str, int] = {}

    def __enter__(self) -> "AcceleratorAllocationMeter":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Watch what happens inside under this name."""
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        yield
        self._growth[name] = torch.accelerator.max_memory_allocated() - before

    def growth(self) -> dict[str, int]:
        """The most bytes held at one moment of each watch beyond what was held at its start."""
        return self._growth


class FileSwapSpace:
    """A temporary file, written and read (not mapped, which would count as memory), that vanishes with its last use."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="acwb-")  # noqa: SIM115  # lives as long as this object
        weakref.finalize(self, self._file.close)
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0

    def write(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy a storage's bytes out under a name, replacing what was there."""
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
        """Copy them back into a storage of the same size."""
        place, size = self._places[name]
        view, done = _view(storage), 0
        while done < size:
            count = os.preadv(self._file.fileno(), [view[done:]], place + done)
            if count == 0:
                raise AcwbError(f"The file that {name} was swapped to ends early.")
            done += count

    def forget(self, name: str) -> None:
        """Let others have the room of a name that is not read again.

        Where nothing is left, the file is begun anew, so that the system does not write it to its disk meanwhile, on a
        processor that is being timed.
        """
        del self._places[name]
        if not self._places:
            self._end = 0


class HostSwapSpace:
    """Pinned host memory."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def write(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy a storage's bytes out under a name, replacing what was there."""
        if name not in self._copies:
            self._copies[name] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self._copies[name].copy_(_bytes(storage))

    def read(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy them back into a storage of the same size."""
        _bytes(storage).copy_(self._copies[name])

    def forget(self, name: str) -> None:
        """Let others have the room of a name that is not read again."""
        del self._copies[name]


def _view(storage: torch.UntypedStorage) -> memoryview:
    """A CPU storage's bytes in place; `numpy()` would do, but it fixes the storage's size for ever."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence a line that torch's profiler writes to the standard error when it starts and stops, whatever one sets."""
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
