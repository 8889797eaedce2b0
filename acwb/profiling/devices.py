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

# The C library's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, and the most that it raises the first to by itself.
_MAPPED_FROM, _TRIMMED_FROM = -3, -1
_BY_ITSELF = 32 * 2**20
# Blocks from this size on are given back when they are freed. Fresh pages take as long as many an op, so times are
# measured with the larger size; what lies between small blocks that stay is lost, so the smaller one is for the rest.
TIMED_BLOCKS, ALL_BLOCKS = 8 * 2**20, 64 * 2**10


class Clock(Protocol):
    """Marks moments on a device; the time between two of them is asked for later, so that marking stays cheap."""

    def mark(self) -> Any:
        """This moment."""

    def seconds(self, start: Any, stop: Any) -> float:
        """The time between two marks."""


class Meter(Protocol):
    """While entered, watches what an allocator gives out."""

    def watch(self, name: str) -> AbstractContextManager[None]:
        """Watch what happens inside under this name."""

    def growth(self) -> Mapping[str, int]:
        """Once left: the most bytes held at one moment of each watch beyond what was held at its start."""


class Space(Protocol):
    """Memory outside of the device, that storages are moved to and back from."""

    def write(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy a storage's bytes out under a name, replacing what was there."""

    def read(self, name: str, storage: torch.UntypedStorage) -> None:
        """Copy them back into a storage of the same size."""

    def forget(self, name: str) -> None:
        """Let others have the room of a name that is not read again."""


def clock_of(device: torch.device) -> Clock:
    """The device's clock."""
    return ProcessorClock() if device.type == "cpu" else AcceleratorClock()


def meter_of(device: torch.device) -> "ProcessorMeter | AcceleratorMeter":
    """The device's meter of allocations, to be entered."""
    return ProcessorMeter() if device.type == "cpu" else AcceleratorMeter()


def space_of(device: torch.device) -> Space:
    """Where storages of the device are swapped to."""
    return FileSpace() if device.type == "cpu" else HostSpace()


def swap_out(space: Space, name: str, storage: torch.UntypedStorage) -> None:
    """Move a storage's bytes out and give its memory back; its tensors stay, but must not be read."""
    space.write(name, storage)
    storage.resize_(0)


def swap_in(space: Space, name: str, storage: torch.UntypedStorage, size: int) -> None:
    """Bring a storage's `size` bytes back."""
    storage.resize_(size)
    space.read(name, storage)


def available_bytes(device: torch.device) -> int:
    """How much more this process can allocate on the device."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0])
    limits = [_kibibytes("/proc/meminfo", "MemAvailable")]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - data_bytes())
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()) != "max":
        limits.append(int(most) - int((group / "memory.current").read_text()))
    return max(0, min(limits))


@contextmanager
def returning_memory(device: torch.device, blocks: int, afterwards: int = _BY_ITSELF) -> Iterator[None]:
    """Let the C library give blocks from this size on back when they are freed, instead of keeping them for later.

    Args:
        device: nothing happens on any other than the CPU.
        blocks: `TIMED_BLOCKS` or `ALL_BLOCKS`.
        afterwards: the size that holds from then on; by default the one that the library reaches by itself.
    """
    library = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(library, "mallopt"):
        _return_from(library, blocks)
        try:
            yield
        finally:
            _return_from(library, afterwards)
    else:
        yield


def _return_from(library: ctypes.CDLL, blocks: int) -> None:
    library.mallopt(_MAPPED_FROM, blocks)
    library.mallopt(_TRIMMED_FROM, 2 * blocks)  # the library's own proportion


def trim_memory() -> None:
    """Let the C library give back what it holds but nobody uses, or a step would grow into it unseen."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that the device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def description(device: torch.device) -> str:
    """What a person calls the device."""
    if device.type != "cpu":
        return str(torch.accelerator.current_accelerator())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


class ProcessorClock:
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


class ProcessorMeter:
    """Torch's CPU allocator reports each of its events to the profiler; a watch is a region of the profiler's."""

    def __init__(self) -> None:
        self._profiler: Any = torch.profiler.profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> "ProcessorMeter":
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


class AcceleratorMeter:
    """The accelerator's allocator counts for itself."""

    def __init__(self) -> None:
        self._growth: dict[str, int] = {}

    def __enter__(self) -> "AcceleratorMeter":
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


class FileSpace:
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


class HostSpace:
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


def _kibibytes(path: str, field: str) -> int:
    """One field of a table of the Linux kernel, in bytes."""
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def resident_bytes() -> int:
    """This process's memory that is really there now (Linux)."""
    return _kibibytes("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """The peak of it, since the process began or since `reset_peak_resident`."""
    return _kibibytes("/proc/self/status", "VmHWM")


def reset_peak_resident() -> None:
    """Begin to count the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def data_bytes() -> int:
    """What RLIMIT_DATA bounds: the process's private writable memory, whether it was touched yet or not."""
    return _kibibytes("/proc/self/status", "VmData")
