"""Measures every op of a captured step: its time, what its kernel allocates, and what swapping an activation costs.

The step is replayed op by op on the live tensors, in the order and with the lifetimes of a run; whatever it writes into
is put back afterwards. A first pass, which also warms up, reads the allocator and swaps activations; then every op is
timed, `repeats` times. A step that does not fit in memory is replayed with storages swapped out between the phases that
use them (μ-TWO, Algorithm A): besides what exists before the step, little more than one op's inputs, outputs and
workspace must fit at a time.
"""

from functools import partial
from statistics import median

import torch
from tqdm.auto import tqdm

from acwb.capture.step import TracedStep
from acwb.core.graph import StepGraph
from acwb.core.profile import Conditions, Profile
from acwb.errors import AcwbError
from acwb.profiling import devices, process_memory
from acwb.profiling.instruments import BlockPolicy, OpTimer, WorkspaceMeter, blocks_kept, rule_label
from acwb.profiling.replay import Replay, Swapper, SwappingReplay, state_preserved

# Workspaces are not known before the step was profiled: a step fits when its storages leave this much room for them.
ROOM_FOR_WORKSPACE = 1.1


def profile(step: TracedStep, repeats: int = 3, swap: bool | None = None) -> Profile:
    """Measure a captured step; model, optimizer, batch and random state stay as they are.

    Args:
        step: what `acwb.trace` gave.
        repeats: how often each op is timed, after one warm-up; the median counts.
        swap: replay op by op with storages swapped out; by default only where the step does not fit in memory.

    Example:
        >>> profile = acwb.profile(step)
        >>> profile.activations.nlargest(3, "median_mem_size_bytes")
    """
    if not isinstance(step, TracedStep):
        raise AcwbError(f"profile takes the step that acwb.trace gives, not {type(step).__name__}.")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise AcwbError(f"repeats is {repeats!r}: each op must be timed at least once, so give a whole number from 1.")
    device = step.device
    clock, meter = devices.clock_of(device), devices.meter_of(device)
    with state_preserved(step) as tensors:
        swapped = not fits(step.graph, device) if swap is None else swap
        swapper = Swapper(devices.space_of(device), clock)
        replay = SwappingReplay(step, tensors, swapper) if swapped else Replay(step, tensors)
        timed = OpTimer(clock)
        returning: BlockPolicy = partial(process_memory.return_freed_blocks, device) if swapped else blocks_kept
        with tqdm(total=len(replay.calls) * (1 + repeats), desc="profiling", unit="op", leave=False) as progress:
            watched = WorkspaceMeter(meter, clock, None if swapped else swapper, step.graph, repeats, returning)
            with meter, returning(process_memory.ALL_BLOCKS):
                replay.run(watched, progress)
            with returning(process_memory.TIMED_BLOCKS):
                for _ in range(repeats):
                    replay.run(timed, progress)
    growth = meter.growth()
    made = {op.name: sum(step.graph.storage[name].bytes for name in op.outputs) for op in step.graph.ops}
    return Profile(
        graph=step.graph,
        seconds=timed.medians(),
        workspace_bytes={name: max(0, growth[name] - size) for name, size in made.items()},
        swap_out_seconds={each.name: median(swapper.out_seconds[each.name]) for each in step.graph.activations},
        swap_in_seconds={each.name: median(swapper.in_seconds[each.name]) for each in step.graph.activations},
        rules={
            name: (seconds, max(0, growth[rule_label(name)] - step.graph.storage[f"{name}:0"].bytes))
            for name, seconds in watched.rule_seconds.items()
        },
        conditions=Conditions(devices.describe_device(device), torch.get_num_threads(), repeats, swapped),
    )


def fits(graph: StepGraph, device: torch.device) -> bool:
    """Whether the storages that the step makes fit beside what exists, with room for workspaces."""
    return ROOM_FOR_WORKSPACE * (max(graph.live_bytes) - graph.static_bytes) <= devices.available_bytes(device)
