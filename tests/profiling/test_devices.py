"""The CPU's clock, allocation meter, swap file and process counters, against what is known by hand."""

import os
import time

import pytest
import torch

import acwb
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.profiling import devices, process_memory
from acwb.profiling.devices import CpuAllocationMeter, CpuClock, FileSwapSpace
from acwb.profiling.process_memory import cap_memory

CPU = torch.device("cpu")


def test_the_clock_measures_what_passes_between_two_marks() -> None:
    clock = devices.clock_of(CPU)
    assert isinstance(clock, CpuClock)
    start = clock.mark()
    time.sleep(0.02)
    assert 0.02 <= clock.seconds(start, clock.mark()) < 1


def test_the_meter_sees_what_is_held_at_one_moment_of_each_watch() -> None:
    with CpuAllocationMeter() as meter:
        kept = torch.empty(500, dtype=torch.uint8)
        with meter.watch("two at once"):
            first, second = torch.empty(1000, dtype=torch.uint8), torch.empty(2000, dtype=torch.uint8)
            del first, second
        with meter.watch("one after the other"):
            for size in (1000, 2000):
                torch.empty(size, dtype=torch.uint8)
        with meter.watch("given back"):
            del kept
        with meter.watch("nothing"):
            pass
    assert meter.growth() == {"two at once": 3000, "one after the other": 2000, "given back": 0, "nothing": 0}


def test_the_meter_leaves_the_standard_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with CpuAllocationMeter():
        torch.empty(10)
    assert capfd.readouterr().err == ""


def test_swapping_gives_memory_back_and_returns_the_same_bits() -> None:
    space = FileSwapSpace()
    tensor = torch.randn(1000)
    view, before = tensor.view(10, 100)[3], tensor.clone()
    devices.swap_out(space, "tensor", tensor.untyped_storage())
    assert tensor.untyped_storage().nbytes() == 0
    space.write("another", torch.ones(7).untyped_storage())
    devices.swap_in(space, "tensor", tensor.untyped_storage(), 4000)
    assert torch.equal(tensor, before)
    assert torch.equal(view, before.view(10, 100)[3])


def test_the_swap_file_reuses_released_space() -> None:
    space = FileSwapSpace()
    values = {name: torch.full((1000,), number, dtype=torch.uint8) for number, name in enumerate("abc")}
    for name in "ab":
        space.write(name, values[name].untyped_storage())
    space.forget("a")
    space.write("c", values["c"].untyped_storage())
    for name in "bc":
        found = torch.zeros(1000, dtype=torch.uint8)
        space.read(name, found.untyped_storage())
        assert torch.equal(found, values[name])
        space.forget(name)
    for name in "abc":
        space.write(name, values[name].untyped_storage())
        space.forget(name)
    assert os.fstat(space._file.fileno()).st_size == 3000


def test_a_swap_file_that_cannot_grow_is_reported_in_a_sentence() -> None:
    with pytest.raises(acwb.AcwbError, match=r"Cannot swap tensor to a file in .*Set TMPDIR to a folder with room"):
        run_in_fresh_process(_swap_beyond_the_limit)


def _swap_beyond_the_limit() -> None:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    space, block = FileSwapSpace(), torch.zeros(1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        space.write("tensor", block.untyped_storage())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # or the error itself could not be sent back


def test_the_process_peak_counts_what_is_touched_since_it_was_reset() -> None:
    held, given_back = run_in_fresh_process(_peaks_around_a_block, 50_000_000)
    assert 45e6 < held < 60e6
    assert given_back < 20e6


def _peaks_around_a_block(size: int) -> tuple[int, int]:
    process_memory.reset_peak_resident()
    before = process_memory.peak_resident_bytes()
    block = torch.ones(size, dtype=torch.uint8)
    held = process_memory.peak_resident_bytes() - before
    del block
    process_memory.reset_peak_resident()
    return held, process_memory.peak_resident_bytes() - before


def test_a_cap_on_the_process_bounds_what_is_available_and_what_torch_gets() -> None:
    available, message = run_in_fresh_process(_allocate_under_a_cap, 100 * 2**20)
    assert 80 * 2**20 < available <= 100 * 2**20
    assert "can't allocate memory" in message


def _allocate_under_a_cap(size: int) -> tuple[int, str]:
    torch.ones(10)
    cap_memory(size)
    available = devices.available_bytes(CPU)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2 * size, dtype=torch.uint8)
    assert process_memory.is_out_of_memory(caught.value)
    return available, str(caught.value)
