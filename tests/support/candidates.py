"""The plans with which every real architecture is run."""

import acwb
from acwb.planning.mu_two import mu_two
from acwb.planning.planner import PLANNERS


def nine_plans(profile: acwb.Profile, frontier: acwb.Frontier) -> list[acwb.Plan]:
    """The frontier's and the paper's a quarter, half and three quarters of the way up from the floor; three habits'."""
    floor, baseline = frontier.floor_bytes, frontier.baseline_bytes
    budgets = [int(floor + share * (baseline - floor)) for share in (0.25, 0.5, 0.75)]
    plans = [frontier.at(budget) for budget in budgets] + [mu_two(profile, budget) for budget in budgets]
    return plans + [PLANNERS[habit](profile, baseline) for habit in ("recompute_all", "sqrt_n", "per_block")]
