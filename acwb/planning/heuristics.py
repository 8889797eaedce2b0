"""What people do without a planner: keep everything, recompute everything, every √n-th op, or all inside each block.

None of them looks at sizes, times or a budget. Each discards a set of activations, which are made again just in time.
"""

import math

from acwb.core.graph import Activation, Phase, StepGraph
from acwb.core.profile import Profile
from acwb.core.schedule import just_in_time
from acwb.core.simulator import simulate
from acwb.planning.plan import Plan


def keep_all(profile: Profile, budget_bytes: int | None = None) -> Plan:
    """The step as captured."""
    return _plan_discarding(profile, "keep_all", set(), budget_bytes)


def recompute_all(profile: Profile, budget_bytes: int | None = None) -> Plan:
    """Every activation is made again from the inputs."""
    return _plan_discarding(profile, "recompute_all", {each.name for each in profile.graph.activations}, budget_bytes)


def sqrt_n(profile: Profile, budget_bytes: int | None = None) -> Plan:
    """The forward phase in √n parts of equally many ops; only what crosses from one part to another is kept."""
    graph = profile.graph
    forward = [rank for rank, op in enumerate(graph.ops) if op.phase is Phase.FORWARD and op.outputs]
    length = max(1, math.ceil(len(forward) / max(1, math.isqrt(len(forward)))))
    part = {rank: position // length for position, rank in enumerate(forward)}
    inside = {
        each.name
        for each in graph.activations
        if all(
            part.get(rank, part[each.creation_rank]) == part[each.creation_rank]
            for rank in _forward_readers(graph, each)
        )
    }
    return _plan_discarding(profile, "sqrt_n", inside, budget_bytes)


def per_block(profile: Profile, budget_bytes: int | None = None) -> Plan:
    """What one gets by wrapping every block: only what leaves a block is kept."""
    graph = profile.graph
    inside = set()
    for each in graph.activations:
        block = block_of(each.module)
        if block and all(block_of(graph.ops[rank].module) == block for rank in _forward_readers(graph, each)):
            inside.add(each.name)
    return _plan_discarding(profile, "per_block", inside, budget_bytes)


def block_of(module: str) -> str:
    """The repeated part that a module belongs to: its path up to the last number ("layer3.4" of "layer3.4.conv2")."""
    parts = module.split(".")
    numbered = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else ""


def _forward_readers(graph: StepGraph, activation: Activation) -> list[int]:
    """The ranks of the forward ops that read an activation."""
    return [rank for rank in graph.users[activation.name] if graph.ops[rank].phase is Phase.FORWARD]


def _plan_discarding(profile: Profile, name: str, discard: set[str], budget_bytes: int | None) -> Plan:
    schedule = just_in_time(profile.graph, discard)
    return Plan(profile, schedule, name, budget_bytes, simulate(profile, schedule).peak_bytes)
