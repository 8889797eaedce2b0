"""Plans a profiled step for a budget with any of the planners; what does not fit is refused, not returned."""

from collections.abc import Callable, Iterable

from acwb.core.profile import Profile
from acwb.errors import AcwbError
from acwb.planning.frontier import explore
from acwb.planning.heuristics import keep_all, per_block, recompute_all, sqrt_n
from acwb.planning.mu_two import mu_two
from acwb.planning.optimal import optimal
from acwb.planning.pins import resolve_pins
from acwb.planning.plan import Plan
from acwb.units import format_bytes, parse_bytes

# Beside the frontier, which alone listens to pins. Those of the second line know no budget.
PLANNERS: dict[str, Callable[[Profile, int], Plan]] = {
    "mu_two": mu_two,
    "optimal": optimal,
    "keep_all": keep_all,
    "recompute_all": recompute_all,
    "sqrt_n": sqrt_n,
    "per_block": per_block,
}


def plan(
    profile: Profile,
    budget: int | float | str,
    planner: str = "frontier",
    keep: str | Iterable[str] = (),
    recompute: str | Iterable[str] = (),
) -> Plan:
    """Decide what to keep and what to recompute, so that the step's peak is within `budget`.

    Args:
        profile: what `acwb.profile` gave, or a file of it.
        budget: the peak of the whole step: bytes, "1.5GiB", or "60%" of the peak without a plan.
        planner: "frontier"; "mu_two", the paper's; "optimal", for small steps; or a habit: "keep_all", "recompute_all",
            "sqrt_n", "per_block".
        keep: activations that are never dropped, by op name, module path or regular expression.
        recompute: activations that are always dropped and made again.

    Example:
        >>> plan = acwb.plan(profile, budget="1.5GiB")
        >>> plan.timeline.peak_bytes
    """
    if planner != "frontier" and planner not in PLANNERS:
        raise AcwbError(f"There is no planner {planner!r}: choose one of frontier, {', '.join(PLANNERS)}.")
    size = parse_bytes(budget, profile.peak_bytes)
    pinned = resolve_pins(profile.graph, keep, recompute)
    if planner == "frontier":
        return explore(profile, pinned).at(size)
    if pinned.keep or pinned.recompute:
        raise AcwbError(
            f"The planner {planner} does not listen to pins: use frontier, or leave keep and recompute out."
        )
    found = PLANNERS[planner](profile, size)
    if not found.fits:
        raise AcwbError(
            f"The plan of {planner} needs {format_bytes(found.timeline.peak_bytes)}, more than the budget of "
            f"{format_bytes(size)} (it claims {format_bytes(found.claimed_peak_bytes)}): use frontier."
        )
    return found
