"""Budget-oblivious heuristics: keep everything, recompute everything, √n segments, or all inside each block.

None of them considers sizes, times or the budget, against which their plan is only checked. Each discards a set of
activations, which are recomputed just in time. √n segments: Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost".
"""

import math

from acwb.core.graph import Activation, Phase, StepGraph
from acwb.core.profile import Profile
from acwb.core.schedule import just_in_time
from acwb.core.simulator import simulate
from acwb.planning.plan import Plan


def keep_all(profile: Profile, budget_bytes: int | None = None) -> Plan:
    """The plan that recomputes nothing: the step as captured."""
    return _plan_discarding(profile, "keep_all", set(), budget_bytes)


def recompute_all(profile: Profile, budget_bytes: int | None = None) -> Plan:
    """The plan that recomputes every activation, from the inputs of the step."""
    everything = {activation.name for activation in profile.graph.activations}
    return _plan_discarding(profile, "recompute_all", everything, budget_bytes)


def sqrt_n(profile: Profile, budget_bytes: int | None = None) -> Plan:
    """The plan that cuts the forward phase into √n segments of equally many ops and keeps only what crosses a cut."""
    graph = profile.graph
    forward = [rank for rank, op in enumerate(graph.ops) if op.phase is Phase.FORWARD and op.outputs]
    length = max(1, math.ceil(len(forward) / max(1, math.isqrt(len(forward)))))
    segment = {rank: position // length for position, rank in enumerate(forward)}
    inside = set()
    for activation in graph.activations:
        own = segment[activation.creation_rank]
        if all(segment.get(rank, own) == own for rank in _forward_readers(graph, activation)):
            inside.add(activation.name)
    return _plan_discarding(profile, "sqrt_n", inside, budget_bytes)


def per_block(profile: Profile, budget_bytes: int | None = None) -> Plan:
    """The plan of wrapping every block in a checkpoint: only what leaves a block is kept."""
    graph = profile.graph
    inside = set()
    for activation in graph.activations:
        block = block_of(activation.module)
        readers = _forward_readers(graph, activation)
        if block and all(block_of(graph.ops[rank].module) == block for rank in readers):
            inside.add(activation.name)
    return _plan_discarding(profile, "per_block", inside, budget_bytes)


def block_of(module: str) -> str:
    """The block that a module belongs to: its path up to the last number ("layer3.4" of "layer3.4.conv2"), or ""."""
    parts = module.split(".")
    numbered = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else ""


def _forward_readers(graph: StepGraph, activation: Activation) -> list[int]:
    """The ranks of the forward ops that read an activation."""
    return [rank for rank in graph.users[activation.name] if graph.ops[rank].phase is Phase.FORWARD]


def _plan_discarding(profile: Profile, name: str, discard: set[str], budget_bytes: int | None) -> Plan:
    schedule = just_in_time(profile.graph, discard)
    return Plan(profile, schedule, name, budget_bytes, simulate(profile, schedule).peak_bytes)
