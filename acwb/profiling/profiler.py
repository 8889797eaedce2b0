"""Measures every op of a captured step: its time, the workspace of its kernel, and the swap times of activations.

The step is replayed op by op on the live tensors, which are restored afterwards. A first pass, which also warms up,
reads the allocator and swaps activations; then every op is timed, `repeats` times. A step that does not fit is
replayed with storages swapped out between the phases that use them (μ-TWO, Algorithm A): beside static memory, little
more than the inputs, outputs and workspace of one op must fit at a time.
"""

from functools import partial
from statistics import median

import torch
from tqdm.auto import tqdm

from acwb.capture.step import TracedStep
from acwb.core.graph import StepGraph, output_name
from acwb.core.profile import Conditions, Profile
from acwb.errors import AcwbError, check_count
from acwb.profiling import devices, process_memory
from acwb.profiling.instruments import BlockPolicy, OpTimer, WorkspaceMeter, blocks_kept, rule_label
from acwb.profiling.replay import Replay, Swapper, SwappingReplay, state_preserved
from acwb.rollback import defer_signals

# Workspaces are unknown before the step is profiled: it fits if its storages, times this factor, do.
WORKSPACE_FACTOR = 1.1


def profile(step: TracedStep, repeats: int = 3, swap: bool | None = None) -> Profile:
    """Measure every op of a captured step; model, optimizer, batch and RNG state stay unchanged.

    Args:
        step: the result of `acwb.trace`.
        repeats: how often each op is timed, after one warm-up; the median counts.
        swap: whether to replay with storages swapped out; by default only if the step does not fit in memory.

    Example:
        >>> profile = acwb.profile(step)
        >>> profile.activations.nlargest(3, "median_mem_size_bytes")
    """
    if not isinstance(step, TracedStep):
        raise AcwbError(f"profile takes the step that acwb.trace gives, not {type(step).__name__}.")
    check_count("repeats", repeats)
    device = step.device
    clock, meter = devices.clock_of(device), devices.meter_of(device)
    with defer_signals() as signals, state_preserved(step) as tensors, signals.admit():
        swapped = not fits(step.graph, device) if swap is None else swap
        swapper = Swapper(devices.space_of(device), clock)
        replay = SwappingReplay(step, tensors, swapper) if swapped else Replay(step, tensors)
        timer = OpTimer(clock)
        returning: BlockPolicy = partial(process_memory.return_freed_blocks, device) if swapped else blocks_kept
        with tqdm(total=len(replay.calls) * (1 + repeats), desc="profiling", unit="op", leave=False) as progress:
            workspaces = WorkspaceMeter(meter, clock, None if swapped else swapper, step.graph, repeats, returning)
            with meter, returning(process_memory.ALL_BLOCKS):
                replay.run(workspaces, progress)
            with returning(process_memory.TIMED_BLOCKS):
                for _ in range(repeats):
                    replay.run(timer, progress)
    growth = meter.growth()
    output_bytes = {op.name: sum(step.graph.storage[name].bytes for name in op.outputs) for op in step.graph.ops}
    return Profile(
        graph=step.graph,
        seconds=timer.medians(),
        workspace_bytes={name: max(0, growth[name] - size) for name, size in output_bytes.items()},
        swap_out_seconds={each.name: median(swapper.out_seconds[each.name]) for each in step.graph.activations},
        swap_in_seconds={each.name: median(swapper.in_seconds[each.name]) for each in step.graph.activations},
        rules={
            name: (seconds, max(0, growth[rule_label(name)] - step.graph.storage[output_name(name, 0)].bytes))
            for name, seconds in workspaces.rule_seconds.items()
        },
        conditions=Conditions(devices.describe_device(device), torch.get_num_threads(), repeats, swapped),
    )


def fits(graph: StepGraph, device: torch.device) -> bool:
    """Whether the storages that a step makes fit into the available memory, with room for workspaces."""
    return WORKSPACE_FACTOR * (max(graph.live_bytes) - graph.static_bytes) <= devices.available_bytes(device)
