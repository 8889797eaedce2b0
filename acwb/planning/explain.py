"""Explains the decision for one activation by trying its opposite.

What comes in is a profile, a schedule and the activation; what goes out is a sentence: what the activation holds, and
how time and peak would change if it were recomputed instead of kept, or kept instead of recomputed.
"""

from acwb.core.graph import Activation, StepGraph
from acwb.core.profile import Profile
from acwb.core.schedule import Schedule
from acwb.errors import AcwbError
from acwb.planning.problem import PlanningProblem
from acwb.planning.recompute_state import RecomputeState, sites_of_schedule
from acwb.units import format_bytes, format_seconds


def find_activation(graph: StepGraph, name: str) -> Activation:
    """The activation called `name`, or made by the op called `name`."""
    for activation in graph.activations:
        if name in (activation.name, activation.op):
            return activation
    raise AcwbError(f"{name!r} is not an activation of this step: profile.activations lists them.")


def explain_swapped(activation: Activation) -> str:
    """Say that an activation is swapped."""
    return f"{_describe(activation)} is swapped out between the phases."


def explain_kept(profile: Profile, schedule: Schedule, activation: Activation) -> str:
    """Say for how long a kept activation is idle, and what recomputing it would cost and save."""
    problem = PlanningProblem(profile)
    state = _state_of(problem, schedule)
    seconds, peak = state.seconds, state.peak()[1]
    chain = state.chain(problem.names.index(activation.name), activation.first_backward_rank)
    state.apply(chain)
    count = len(chain.added)
    return (
        f"{_describe(activation)} is kept, idle for {format_seconds(profile.inactive_seconds(activation))}: "
        f"recomputing it would run {'one op' if count == 1 else f'{count} ops'} in "
        f"{format_seconds(state.seconds - seconds)} and {compare_peaks(state.peak()[1], peak)}."
    )


def explain_recomputed(profile: Profile, schedule: Schedule, activation: Activation, budget_bytes: int | None) -> str:
    """Say where an activation is dropped and recomputed, and what keeping it would save and cost."""
    problem = PlanningProblem(profile)
    state = _state_of(problem, schedule)
    seconds, peak = state.seconds, state.peak()[1]
    maker = problem.maker[problem.names.index(activation.name)]
    sites = {rank: op for rank, chain in state.chains.items() for op in chain if problem.base_op(op) == maker}
    for rank, op in sites.items():
        state.restore(rank, op, 2 * peak + activation.bytes)  # a limit that nothing exceeds
    kept_peak, saved = state.peak()[1], seconds - state.seconds
    is_over = budget_bytes is not None and kept_peak > budget_bytes
    ops = profile.graph.ops
    return (
        f"{_describe(activation)} is dropped after {ops[activation.last_forward_rank].name} and recomputed before "
        f"{' and '.join(ops[rank].name for rank in sites)}: keeping it would save {format_seconds(saved)} and "
        f"{compare_peaks(kept_peak, peak)}{', over the budget' if is_over else ''}."
    )


def _describe(activation: Activation) -> str:
    where = f", {activation.module}" if activation.module else ""
    return f"{activation.name} ({format_bytes(activation.bytes)}{where})"


def _state_of(problem: PlanningProblem, schedule: Schedule) -> RecomputeState:
    state = RecomputeState(problem)
    state.load(sites_of_schedule(problem, schedule))
    return state


def compare_peaks(changed: int, now: int) -> str:
    """How a peak changes, in words: "raise the peak from 1.800 to 1.900 GiB"."""
    if changed == now:
        return f"leave the peak at {format_bytes(now)}"
    verb = "raise" if changed > now else "lower"
    if format_bytes(changed) == format_bytes(now):
        return f"{verb} the peak by {abs(changed - now):,} bytes"
    return f"{verb} the peak from {format_bytes(now).removesuffix(' GiB')} to {format_bytes(changed)}"
