"""A plan: a schedule for a profiled step with its cost, as an immutable value, without torch.

The schedule is the single truth: timeline, decisions, tables and explanations are read off it. A plan is saved with the
fingerprint of its graph, and loaded only for a profile of that very graph.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
from acwb import files
from acwb.core.graph import Activation
from acwb.core.profile import Profile
from acwb.core.schedule import Entry, Free, Run, Schedule, SwapIn, SwapOut
from acwb.core.simulator import Timeline, simulate
from acwb.errors import AcwbError
from acwb.planning import plan_tables
from acwb.planning.bounds import lower_bound
from acwb.planning.explain import explain_kept, explain_recomputed, explain_swapped, find_activation
from acwb.units import format_bytes, format_seconds
from acwb.value_checks import check_fields


class Decision(StrEnum):
    """What happens to an activation between its forward and its backward use."""

    RETAINED = "RETAINED"
    RECOMPUTE = "RECOMPUTE"
    SWAP = "SWAP"


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule for a profiled step.

    Attributes:
        budget_bytes: the limit on the peak; None for a planner without a budget.
        claimed_peak_bytes: the planner's own estimate of its peak; `timeline.peak_bytes` is the exact one.
        proven_seconds: a proven lower bound on the extra seconds for this budget, if the planner provides one.
    """

    profile: Profile
    schedule: Schedule
    planner: str
    budget_bytes: int | None
    claimed_peak_bytes: int
    proven_seconds: float | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """Memory after every entry of the schedule, and the time of the whole, by exact simulation."""
        return simulate(self.profile, self.schedule)

    @property
    def fits(self) -> bool:
        """Whether the exact peak is within the budget."""
        return self.budget_bytes is None or self.timeline.peak_bytes <= self.budget_bytes

    @property
    def extra_seconds(self) -> float:
        """Seconds that the plan adds to the step."""
        return self.timeline.seconds - self.profile.step_seconds

    @property
    def overhead(self) -> float:
        """Extra seconds as a fraction of the step without a plan: 0.05 is 5 % more time."""
        return self.extra_seconds / self.profile.step_seconds

    @cached_property
    def lower_bound_seconds(self) -> float:
        """Lower bound on the extra seconds of any plan within the budget (or, without a budget, within this peak)."""
        if self.proven_seconds is not None:
            return self.proven_seconds
        return lower_bound(self.profile, self.timeline.peak_bytes if self.budget_bytes is None else self.budget_bytes)

    @cached_property
    def decisions(self) -> Mapping[str, Decision]:
        """Whether each activation is kept, recomputed or swapped, by storage name."""
        recomputed = {
            storage for run in self._recomputations for storage in self.profile.graph.op(run.op).results(run.by_rule)
        }
        swapped = {entry.storage for entry in self.schedule.entries if isinstance(entry, SwapOut)}
        return {
            activation.name: Decision.SWAP
            if activation.name in swapped
            else Decision.RECOMPUTE
            if activation.name in recomputed and not self._survives(activation)
            else Decision.RETAINED
            for activation in self.profile.graph.activations
        }

    @cached_property
    def _recomputations(self) -> tuple[Run, ...]:
        return tuple(entry for entry in self.schedule.entries if isinstance(entry, Run) and entry.copy)

    def _survives(self, activation: Activation) -> bool:
        """Whether the first copy of an activation lives until its first use in the backward phase."""
        return self._freed.get(activation.name, len(self.schedule)) > self._positions[activation.first_backward_rank]

    @cached_property
    def _freed(self) -> dict[str, int]:
        """The position at which the first copy of each storage is freed or swapped out."""
        entries = enumerate(self.schedule.entries)
        return {
            entry.storage: position
            for position, entry in entries
            if isinstance(entry, (Free, SwapOut)) and not entry.copy
        }

    @cached_property
    def _positions(self) -> list[int]:
        """The position at which each op of the step first runs, by rank."""
        return [
            position
            for position, entry in enumerate(self.schedule.entries)
            if isinstance(entry, Run) and not entry.copy
        ]

    def why(self, name: str) -> str:
        """Explain why an activation is kept or dropped: its size, its cost, and what the opposite would change.

        Args:
            name: the activation, or the op that makes it.
        """
        activation = find_activation(self.profile.graph, name)
        decision = self.decisions[activation.name]
        if decision is Decision.SWAP:
            return explain_swapped(activation)
        if decision is Decision.RETAINED:
            return explain_kept(self.profile, self.schedule, activation)
        return explain_recomputed(self.profile, self.schedule, activation, self.budget_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, bound to its graph; the file appears whole or not at all."""
        content = {
            "fingerprint": self.profile.graph.fingerprint,
            "planner": self.planner,
            "budget_bytes": self.budget_bytes,
            "claimed_peak_bytes": self.claimed_peak_bytes,
            "proved_seconds": self.proven_seconds,
            "entries": [_entry_to_json(entry) for entry in self.schedule.entries],
        }
        files.write_saved(path, "Plan", content)

    @classmethod
    def load(cls, path: str | os.PathLike[str], profile: Profile) -> "Plan":
        """Read a plan that `save` wrote, for a profile of the graph that it was made for."""
        with files.open_saved(path, "Plan") as content:
            stamp = content["fingerprint"]
            entries = tuple(_entry_from_json(item) for item in content["entries"])
            if stamp != profile.graph.fingerprint:
                environment = profile.graph.environment
                raise AcwbError(
                    f"{path} is a plan for another graph than that of this profile ({profile.graph.title}, "
                    f"{', '.join(environment.batch)}): plan this one."
                )
            plan = cls(
                profile,
                Schedule(entries),
                content["planner"],
                content["budget_bytes"],
                content["claimed_peak_bytes"],
                content["proved_seconds"],
            )
            check_fields(plan)
            runs = [entry.op for entry in entries if isinstance(entry, Run) and not entry.copy]
            if runs != [op.name for op in profile.graph.ops]:
                raise ValueError("its schedule does not run every op of the step once, in order")
            if any(entry.copy > len(entries) for entry in entries):
                raise ValueError("its schedule has more copies than entries")
            simulate(profile, plan.schedule)  # refuses one that cannot be followed
        return plan

    def to_csv(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write decisions and ops as two CSV files into `folder`, both or neither, and return their paths."""
        return plan_tables.write_csv(folder, self.decisions_frame, self.ops_frame)

    @cached_property
    def clock(self) -> tuple[float, ...]:
        """When each entry of the schedule starts, in seconds from the start of the step."""
        return plan_tables.start_times(self.profile, self.schedule)

    @cached_property
    def decisions_frame(self) -> "pandas.DataFrame":
        """One row per activation: its decision, size and recomputation time."""
        return plan_tables.decisions_frame(self.profile, self.decisions)

    @cached_property
    def ops_frame(self) -> "pandas.DataFrame":
        """One row per op: what is recomputed before it, and what is freed, swapped out or swapped in around it."""
        return plan_tables.ops_frame(self.profile, self.schedule, self.timeline)

    @cached_property
    def timeline_frame(self) -> "pandas.DataFrame":
        """One row per run: when it starts, which copy it is, and the bytes of each role while it runs."""
        return plan_tables.timeline_frame(self.profile, self.schedule, self.timeline, self.clock)

    @property
    def peak_row(self) -> "pandas.Series[Any]":
        """The row of `timeline_frame` at the peak."""
        return plan_tables.peak_row(self.timeline_frame)

    def report(self) -> str:
        """The printed form with the lower bound on the overhead, which takes some linear programs to compute."""
        return self._describe(self.lower_bound_seconds)

    def __repr__(self) -> str:  # for debuggers and logs, too: it solves nothing
        is_known = self.proven_seconds is not None or "lower_bound_seconds" in self.__dict__
        return self._describe(self.lower_bound_seconds if is_known else None)

    def _describe(self, bound_seconds: float | None) -> str:
        timeline, static = self.timeline, self.profile.graph.static_bytes
        baseline = self.profile.peak_bytes
        saved = 1 - (timeline.peak_bytes - static) / (baseline - static)
        counts = {kind: sum(decision is kind for decision in self.decisions.values()) for kind in Decision}
        budget = f"budget {format_bytes(self.budget_bytes)}, " if self.budget_bytes is not None else ""
        at = timeline.peak_entry.op if isinstance(timeline.peak_entry, Run) else str(timeline.peak_entry)
        lines = [
            f"Plan: {self.planner}, {budget}{'fits' if self.fits else 'DOES NOT FIT'}",
            f"  peak  {format_bytes(timeline.peak_bytes)} at {at}, without a plan {format_bytes(baseline)} "
            f"(above static −{saved:.1%})",
            f"  step  {format_seconds(timeline.seconds)}, without a plan {format_seconds(self.profile.step_seconds)} "
            f"(+{self.overhead:.1%}{self._describe_bound(bound_seconds)})",
            f"  {counts[Decision.RETAINED]:,} activations kept, {counts[Decision.RECOMPUTE]:,} recomputed in "
            f"{len(self._recomputations):,} runs"
            + (f", {counts[Decision.SWAP]:,} swapped" if counts[Decision.SWAP] else ""),
        ]
        if self.claimed_peak_bytes != timeline.peak_bytes:
            lines.append(f"  the planner claims a peak of {format_bytes(self.claimed_peak_bytes)}")
        return "\n".join(lines)

    def _describe_bound(self, seconds: float | None) -> str:
        if seconds is None:
            return ""
        return (
            "; no plan fits this budget"
            if isinf(seconds)
            else f"; lower bound +{seconds / self.profile.step_seconds:.1%}"
        )


def _entry_to_json(entry: Entry) -> list[Any]:
    if isinstance(entry, Run):
        return ["run", entry.op, entry.copy, entry.by_rule]
    if isinstance(entry, Free):
        return ["free", entry.storage, entry.copy]
    if isinstance(entry, SwapOut):
        return ["swap out", entry.storage, entry.copy]
    return ["swap in", entry.storage, entry.copy, entry.stall]


def _entry_from_json(item: list[Any]) -> Entry:
    kinds: dict[str, type[Run] | type[Free] | type[SwapOut] | type[SwapIn]] = {
        "run": Run,
        "free": Free,
        "swap out": SwapOut,
        "swap in": SwapIn,
    }
    return kinds[item[0]](*item[1:])
