"""Logic of the budget explorer, without widgets: pure functions from a state and a choice to the next state.

A state holds a plan that fits. What cannot be done leaves the state as it is, with a sentence that says why.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from acwb import files
from acwb.core.graph import Activation
from acwb.core.profile import Profile
from acwb.errors import AcwbError
from acwb.planning.frontier import Frontier, frontier
from acwb.planning.plan import Decision, Plan
from acwb.planning.planner import PLANNERS, plan
from acwb.units import format_bytes, format_seconds, parse_bytes

FRONTIER = "frontier"
CHOICES = (FRONTIER, *(name for name in PLANNERS if name != "optimal"))  # what answers within seconds for a real model
FILES = ("plan.json", "ac_decisions.csv", "checkpoint_plan.csv")


@dataclass(frozen=True, repr=False)
class ExplorerState:
    """State of the budget explorer: the Pareto frontier, the current plan and the pins.

    Attributes:
        frontier: the whole trade-off, with what is pinned.
        plan: the current one; it fits the budget.
        message: why the last choice was refused; "" if it was not.
        keep: pinned activations that are never dropped.
        recompute: pinned activations that are always recomputed.
    """

    frontier: Frontier
    plan: Plan
    message: str = ""
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    @property
    def profile(self) -> Profile:
        """The profile of the step that is planned."""
        return self.frontier.profile

    @property
    def budget_bytes(self) -> int:
        """The current plan's budget in bytes, or its peak if it has no budget."""
        return self.plan.budget_bytes or self.plan.timeline.peak_bytes


def start(profile: Profile, budget: int | float | str | None = None) -> ExplorerState:
    """The explorer at a budget; without one, halfway between the floor and the step without a plan."""
    found = frontier(profile)
    size = budget if budget is not None else (found.floor_bytes + found.baseline_bytes) // 2
    return ExplorerState(found, found.at(size))


def with_budget(now: ExplorerState, entry: int | float | str) -> ExplorerState:
    """The state after choosing a budget: bytes, or typed text, in which a bare number means GiB."""
    baseline = now.frontier.baseline_bytes
    return _try_change(now, lambda: replace(now, plan=_plan_at(now, parse_bytes(entry, baseline, default_unit="GiB"))))


def with_planner(now: ExplorerState, planner: str) -> ExplorerState:
    """The state after choosing another planner at the same budget."""
    return _try_change(now, lambda: replace(now, plan=_plan_at(now, now.budget_bytes, planner)))


def with_pins(now: ExplorerState, keep: Iterable[str], recompute: Iterable[str]) -> ExplorerState:
    """The state after changing the pins at the same budget; the frontier is computed for them."""
    kept, again = tuple(keep), tuple(recompute)

    def change() -> ExplorerState:
        found = frontier(now.profile, keep=kept, recompute=again)
        return ExplorerState(found, found.at(now.budget_bytes), keep=kept, recompute=again)

    return _try_change(now, change)


def with_pin(now: ExplorerState, name: str, how: str) -> ExplorerState:
    """One activation pinned ("keep", "recompute") or left to the planner again ("free")."""
    keep = [each for each in now.keep if each != name] + [name] * (how == "keep")
    again = [each for each in now.recompute if each != name] + [name] * (how == "recompute")
    return with_pins(now, keep, again)


def _try_change(now: ExplorerState, change: Callable[[], ExplorerState]) -> ExplorerState:
    """The state after a change; where that cannot be, this one, with the reason."""
    try:
        return replace(change(), message="")
    except AcwbError as error:
        return replace(now, message=str(error))


def _plan_at(now: ExplorerState, size: int, planner: str | None = None) -> Plan:
    name = planner or now.plan.planner
    if name == FRONTIER:
        return now.frontier.at(size)
    return plan(now.profile, size, planner=name, keep=now.keep, recompute=now.recompute)


def describe_floor(now: ExplorerState) -> str:
    """Explain the slider's lower end: the op at the minimum feasible peak and what is alive there."""
    lowest = now.frontier.plan(now.frontier.points[-1])
    at = lowest.peak_row
    sizes = now.profile.graph.storage
    largest = [name for name, _ in lowest.timeline.alive_at_peak if name in now.profile.graph.maker][:3]
    return (
        f"The floor is {format_bytes(now.frontier.floor_bytes)}: no plan was found below. There, {at['op']} runs "
        f"beside {format_bytes(now.profile.graph.static_bytes)} of static memory; the largest that the step makes are "
        + ", ".join(f"{name} ({format_bytes(sizes[name].bytes)})" for name in largest)
        + "."
    )


def key_figures(now: ExplorerState) -> dict[str, str]:
    """Key figures of the current plan (peak, time, activations), as text for the explorer."""
    plan, profile = now.plan, now.profile
    static = profile.graph.static_bytes
    peak = plan.timeline.peak_bytes
    saved = 1 - (peak - static) / (profile.peak_bytes - static)
    counts = {each: sum(decision is each for decision in plan.decisions.values()) for each in Decision}
    swapped = f", {counts[Decision.SWAP]:,} swapped" if counts[Decision.SWAP] else ""
    return {
        "peak": f"{format_bytes(peak)} of {format_bytes(profile.peak_bytes)} (above static −{saved:.1%})",
        "step": f"{format_seconds(plan.timeline.seconds)}, {plan.overhead:+.1%}",
        "lower bound": f"{now.frontier.lower_bound_seconds(now.budget_bytes) / profile.step_seconds:+.1%}",
        "activations": f"{counts[Decision.RETAINED]:,} kept, {counts[Decision.RECOMPUTE]:,} recomputed{swapped}",
        "planner": plan.planner,
    }


def table(now: ExplorerState) -> list[dict[str, str | float]]:
    """A row for each activation: what it is, what happens to it, and what that is worth."""
    pins = dict.fromkeys(now.keep, "keep") | dict.fromkeys(now.recompute, "recompute")
    return [_row(now, each, pins.get(each.name, "")) for each in now.profile.graph.activations]


def _row(now: ExplorerState, each: Activation, pin: str) -> dict[str, str | float]:
    return {
        "activation": each.name,
        "module": each.module,
        "MiB": round(each.bytes / 2**20, 3),
        "decision": str(now.plan.decisions[each.name]),
        "pin": pin,
        "idle ms": round(now.profile.inactive_seconds(each) * 1e3, 1),
        "recompute ms": round(now.profile.recompute_seconds(each) * 1e3, 3),
    }


def export_plan(now: ExplorerState, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write the current plan, its decisions and its list of ops into `folder`."""
    target = Path(folder)
    files.make_folder(target)
    now.plan.save(target / FILES[0])
    return target / FILES[0], *now.plan.to_csv(target)
