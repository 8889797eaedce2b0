"""Memory of this process on Linux: resident, peak, data and available bytes; caps, trimming, malloc thresholds.

The numbers come from /proc and the control group. `RLIMIT_DATA` bounds private writable memory, touched or not.
"""

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from acwb.subject import Action

# With these variables, malloc maps every block of 64 KiB or more separately and unmaps it when it is freed, so that the
# memory of the process follows its tensors. Allocation is slower, so times are never measured this way. Two such
# processes may run at the same time: their idle threads sleep instead of spinning.
MALLOC_RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_WAIT_POLICY": "passive"}


def cap_memory(size: int) -> None:
    """Limit this process, from now on, to `size` bytes more than it holds; beyond that, allocations fail.

    Mapped libraries do not count. Free memory that malloc holds can still be used. Torch reports a failed allocation as
    a RuntimeError.
    """
    limit = data_bytes() + size
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def resident_growth(action: Action) -> int:
    """Growth of the resident memory of this process while `action` runs, at its peak."""
    gc.collect()
    trim_memory()
    before = resident_bytes()
    reset_peak_resident()
    action()
    return peak_resident_bytes() - before


# glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, and the most that it raises the first to by itself.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_DEFAULT_THRESHOLD = 32 * 2**20
# Blocks from this size on are unmapped when they are freed. Page faults take as long as many an op, so times are
# measured with the larger size; the smaller one avoids fragmentation, for everything else.
TIMED_BLOCKS, ALL_BLOCKS = 8 * 2**20, 64 * 2**10


@contextmanager
def return_freed_blocks(device: torch.device, blocks: int, afterwards: int = _DEFAULT_THRESHOLD) -> Iterator[None]:
    """Make malloc return freed blocks of at least `blocks` bytes to the system, instead of keeping them for reuse.

    Args:
        device: nothing changes unless it is the CPU.
        blocks: `TIMED_BLOCKS` or `ALL_BLOCKS`.
        afterwards: the threshold from then on; by default the one that glibc reaches by itself.
    """
    library = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(library, "mallopt"):
        _set_thresholds(library, blocks)
        try:
            yield
        finally:
            _set_thresholds(library, afterwards)
    else:
        yield


def _set_thresholds(library: ctypes.CDLL, blocks: int) -> None:
    library.mallopt(_M_MMAP_THRESHOLD, blocks)
    library.mallopt(_M_TRIM_THRESHOLD, 2 * blocks)  # the library's own proportion


def trim_memory() -> None:
    """Make malloc return free memory to the system; a step would otherwise reuse it, and its growth be invisible."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that the device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _proc_bytes(path: str, field: str) -> int:
    """One field of a table in /proc, in bytes."""
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def available_bytes() -> int:
    """How much more this process can allocate: the least of free memory, RLIMIT_DATA and its control group's limit."""
    limits = [_proc_bytes("/proc/meminfo", "MemAvailable")]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - data_bytes())
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()) != "max":
        limits.append(int(most) - int((group / "memory.current").read_text()))
    return max(0, min(limits))


def resident_bytes() -> int:
    """The resident memory of this process."""
    return _proc_bytes("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """The peak resident memory of this process, since its start or since `reset_peak_resident`."""
    return _proc_bytes("/proc/self/status", "VmHWM")


def reset_peak_resident() -> None:
    """Reset the peak of `peak_resident_bytes` to the current resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def data_bytes() -> int:
    """The private writable memory of this process, touched or not, which RLIMIT_DATA bounds."""
    return _proc_bytes("/proc/self/status", "VmData")
