"""Plans a profiled step for a budget with any of the planners; a plan that does not fit is refused, not returned.

To add a planner, write a function of a profile and a budget in bytes, and add it to `PLANNERS`.
"""

from collections.abc import Callable, Iterable

from acwb.core.profile import Profile
from acwb.errors import AcwbError, check_type
from acwb.planning.frontier import explore
from acwb.planning.heuristics import keep_all, per_block, recompute_all, sqrt_n
from acwb.planning.mu_two import mu_two
from acwb.planning.optimal import optimal
from acwb.planning.pins import resolve_pins
from acwb.planning.plan import Plan
from acwb.units import format_bytes, parse_bytes

# Beside the frontier, which alone supports pins. The heuristics from keep_all on ignore the budget.
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
        profile: the result of `acwb.profile`, or of `Profile.load`.
        budget: the peak of the whole step: bytes, "1.5GiB", or "60%" of the peak without a plan.
        planner: "frontier"; "mu_two", as published; "optimal", for small steps; or a heuristic: "keep_all",
            "recompute_all", "sqrt_n", "per_block".
        keep: activations that are never dropped, by op name, module path or regular expression.
        recompute: activations that are always dropped and recomputed.

    Example:
        >>> plan = acwb.plan(profile, budget="1.5GiB")
        >>> plan.timeline.peak_bytes
    """
    check_type("plan", profile, Profile, "acwb.profile")
    if not isinstance(planner, str) or (planner != "frontier" and planner not in PLANNERS):
        raise AcwbError(f"There is no planner {planner!r}: choose one of frontier, {', '.join(PLANNERS)}.")
    size = parse_bytes(budget, profile.peak_bytes)
    pins = resolve_pins(profile.graph, keep, recompute)
    if planner == "frontier":
        return explore(profile, pins).at(size)
    if pins.keep or pins.recompute:
        raise AcwbError(f"The planner {planner} does not support pins: use frontier, or leave keep and recompute out.")
    candidate = PLANNERS[planner](profile, size)
    if not candidate.fits:
        raise AcwbError(
            f"The plan of {planner} needs {format_bytes(candidate.timeline.peak_bytes)}, more than the budget of "
            f"{format_bytes(size)} (it claims {format_bytes(candidate.claimed_peak_bytes)}): use frontier."
        )
    return candidate
