"""Memory of this process, as Linux and the C library tell it: resident, peak, data; caps, trimming, malloc thresholds.

On Linux only. `RLIMIT_DATA` bounds private writable memory, whether it was touched or not.
"""

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from acwb.subject import Action

# The C library then maps every block of 64 KiB or more by itself and gives it back when it is freed, so that the
# process's memory follows its tensors. It makes allocation slower: times are never measured so. Two such processes may
# run at the same time: their threads sleep while they wait, instead of keeping the cores from each other.
MALLOC_RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_WAIT_POLICY": "passive"}


def cap_memory(size: int) -> None:
    """From now on, let this process allocate `size` bytes more than it holds, and not a byte beyond that.

    Mapped libraries do not count; what the C library holds without using it stays there to be used. What torch cannot
    get, it reports as an error.
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


# The C library's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, and the most that it raises the first to by itself.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_DEFAULT_THRESHOLD = 32 * 2**20
# Blocks from this size on are given back when they are freed. Fresh pages take as long as many an op, so times are
# measured with the larger size; what lies between small blocks that stay is lost, so the smaller one is for the rest.
TIMED_BLOCKS, ALL_BLOCKS = 8 * 2**20, 64 * 2**10


@contextmanager
def return_freed_blocks(device: torch.device, blocks: int, afterwards: int = _DEFAULT_THRESHOLD) -> Iterator[None]:
    """Let the C library give blocks from this size on back when they are freed, instead of keeping them for later.

    Args:
        device: nothing happens on any other than the CPU.
        blocks: `TIMED_BLOCKS` or `ALL_BLOCKS`.
        afterwards: the size that holds from then on; by default the one that the library reaches by itself.
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
    """Let the C library give back what it holds but nobody uses, or a step would grow into it unseen."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that the device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def kernel_table_bytes(path: str, field: str) -> int:
    """One field of a table of the Linux kernel, in bytes."""
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def resident_bytes() -> int:
    """This process's memory that is really there now (Linux)."""
    return kernel_table_bytes("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """The peak of it, since the process began or since `reset_peak_resident`."""
    return kernel_table_bytes("/proc/self/status", "VmHWM")


def reset_peak_resident() -> None:
    """Begin to count the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def data_bytes() -> int:
    """What RLIMIT_DATA bounds: the process's private writable memory, whether it was touched yet or not."""
    return kernel_table_bytes("/proc/self/status", "VmData")
