"""A plan: a schedule that answers to a budget, with what it costs and why. Decided once, never changed; without torch.

The schedule is the truth; decisions, tables and reasons are read off it. A plan is saved with the fingerprint of its
graph, and loaded only for a profile of that very graph, which gives it its timeline again.
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
from acwb.planning.bounds import lower_bound
from acwb.planning.problem import PlanningProblem
from acwb.planning.recompute_state import RecomputeState, sites_of_schedule
from acwb.units import format_bytes, format_seconds

DECISION_FILE = "ac_decisions.csv"
PLAN_FILE = "checkpoint_plan.csv"
LARGEST = 5


class Decision(StrEnum):
    """What happens to an activation between the phases."""

    RETAINED = "RETAINED"
    RECOMPUTE = "RECOMPUTE"
    SWAP = "SWAP"


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule for a profiled step.

    Attributes:
        budget_bytes: the peak that it answers to; None for a planner that knows no budget.
        claimed_peak_bytes: the planner's own word on its peak; `timeline.peak_bytes` is the exact one.
        proven_seconds: what the planner proved that no plan for the budget can do in less extra time, if it did.
    """

    profile: Profile
    schedule: Schedule
    planner: str
    budget_bytes: int | None
    claimed_peak_bytes: int
    proven_seconds: float | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """What the plan costs, at every point."""
        return simulate(self.profile, self.schedule)

    @property
    def fits(self) -> bool:
        """Whether the exact peak is within the budget."""
        return self.budget_bytes is None or self.timeline.peak_bytes <= self.budget_bytes

    @property
    def extra_seconds(self) -> float:
        """What the plan takes longer than the step without a plan."""
        return self.timeline.seconds - self.profile.step_seconds

    @property
    def overhead(self) -> float:
        """The same as a fraction of the step: 0.05 is 5 % more time."""
        return self.extra_seconds / self.profile.step_seconds

    @cached_property
    def lower_bound_seconds(self) -> float:
        """What every plan for the budget (without one: for this peak) takes longer than the step, at least: proved."""
        if self.proven_seconds is not None:
            return self.proven_seconds
        return lower_bound(self.profile, self.timeline.peak_bytes if self.budget_bytes is None else self.budget_bytes)

    @cached_property
    def decisions(self) -> Mapping[str, Decision]:
        """What happens to each activation."""
        again = {storage for run in self._again for storage in self._made(run)}
        swapped = {entry.storage for entry in self.schedule.entries if isinstance(entry, SwapOut)}
        return {
            activation.name: Decision.SWAP
            if activation.name in swapped
            else Decision.RECOMPUTE
            if activation.name in again and not self._survives(activation)
            else Decision.RETAINED
            for activation in self.profile.graph.activations
        }

    @cached_property
    def _again(self) -> tuple[Run, ...]:
        return tuple(entry for entry in self.schedule.entries if isinstance(entry, Run) and entry.copy)

    def _made(self, run: Run) -> tuple[str, ...]:
        op = self.profile.graph.op(run.op)
        return op.outputs[:1] if run.by_rule else op.outputs

    def _survives(self, activation: Activation) -> bool:
        """Whether the first copy of an activation is there until it is first read in the backward phase."""
        return self._freed.get(activation.name, len(self.schedule)) > self._positions[activation.first_backward_rank]

    @cached_property
    def _freed(self) -> dict[str, int]:
        """Where the first copy of each storage is given up."""
        entries = enumerate(self.schedule.entries)
        return {entry.storage: at for at, entry in entries if isinstance(entry, (Free, SwapOut)) and not entry.copy}

    @cached_property
    def _positions(self) -> list[int]:
        """Where each op of the step runs, by rank."""
        return [at for at, entry in enumerate(self.schedule.entries) if isinstance(entry, Run) and not entry.copy]

    def why(self, name: str) -> str:
        """Why an activation is kept or dropped, what it holds and costs, and what changes if it were the other way.

        Args:
            name: the activation, or the op that makes it.
        """
        activation = self._activation(name)
        decision = self.decisions[activation.name]
        where = f", {activation.module}" if activation.module else ""
        about = f"{activation.name} ({format_bytes(activation.bytes)}{where})"
        if decision is Decision.SWAP:
            return f"{about} is swapped out between the phases."
        problem = PlanningProblem(self.profile)
        state = RecomputeState(problem)
        state.load(sites_of_schedule(problem, self.schedule))
        each, seconds, (_, peak) = problem.names.index(activation.name), state.seconds, state.peak()
        ops = self.profile.graph.ops
        if decision is Decision.RETAINED:
            chain = state.chain(each, activation.first_backward_rank)
            state.apply(chain)
            return (
                f"{about} is kept, unused for {format_seconds(self.profile.inactive_seconds(activation))}: to make it "
                f"again would run {_ops(len(chain.added))} in {format_seconds(state.seconds - seconds)}, and the peak "
                f"would {_compare_peaks(state.peak()[1], peak)}."
            )
        maker = problem.maker[each]
        places = {rank: op for rank, chain in state.chains.items() for op in chain if op % problem.count == maker}
        for rank, op in places.items():
            state.restore(rank, op, 2 * peak + activation.bytes)  # whatever it takes
        kept, saved = state.peak()[1], seconds - state.seconds
        over = self.budget_bytes is not None and kept > self.budget_bytes
        return (
            f"{about} is dropped after {ops[activation.last_forward_rank].name} and made again before "
            f"{' and '.join(ops[rank].name for rank in places)}: kept instead, it would save {format_seconds(saved)}, "
            f"and the peak would {_compare_peaks(kept, peak)}{', over the budget' if over else ''}."
        )

    def _activation(self, name: str) -> Activation:
        for activation in self.profile.graph.activations:
            if name in (activation.name, activation.op):
                return activation
        raise AcwbError(f"{name!r} is not an activation of this step: profile.activations lists them.")

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
            plan = cls(
                profile,
                Schedule(entries),
                content["planner"],
                content["budget_bytes"],
                content["claimed_peak_bytes"],
                content["proved_seconds"],
            )
        if stamp != profile.graph.fingerprint:
            environment = profile.graph.environment
            raise AcwbError(
                f"{path} is a plan for another graph than that of this profile ({profile.graph.title}, "
                f"{', '.join(environment.batch)}): plan this one."
            )
        return plan

    def to_csv(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write the decisions and the plan op by op into `folder`, both or neither, and return where they are."""
        decisions, plan = Path(folder) / DECISION_FILE, Path(folder) / PLAN_FILE
        files.write_frames({decisions: self.decisions_frame, plan: self.ops_frame})
        return decisions, plan

    @cached_property
    def decisions_frame(self) -> "pandas.DataFrame":
        """A row for each activation."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    "activation_name": each.name,
                    "decision": str(self.decisions[each.name]),
                    "median_mem_size_bytes": each.bytes,
                    "recomp_time_s": self.profile.recompute_seconds(each),
                    "creation_rank": each.creation_rank,
                    "first_bw_use_rank": each.first_backward_rank,
                }
                for each in self.profile.graph.activations
            ]
        )

    @cached_property
    def clock(self) -> tuple[float, ...]:
        """When each entry of the schedule begins, in seconds from the step's start; only runs and stalls take time."""
        starts, now = [], 0.0
        for entry in self.schedule.entries:
            starts.append(now)
            if isinstance(entry, Run):
                now += self.profile.rules[entry.op][0] if entry.by_rule else self.profile.seconds[entry.op]
            elif isinstance(entry, SwapIn):
                now += entry.stall
        return tuple(starts)

    @cached_property
    def timeline_frame(self) -> "pandas.DataFrame":
        """A row for each run: when it begins, which copy it is, and the bytes of each role while it runs."""
        import pandas

        timeline, graph = self.timeline, self.profile.graph
        runs = [(at, entry) for at, entry in enumerate(self.schedule.entries) if isinstance(entry, Run)]
        phases: list[str] = []
        for _, run in reversed(runs):  # what runs again belongs to the op that it runs before
            own = graph.op(run.op).phase
            phases.append(str(own) if not run.copy or not phases else phases[-1])
        columns: dict[str, list[Any]] = {
            "start_ms": [self.clock[at] * 1e3 for at, _ in runs],
            "op": [run.op for _, run in runs],
            "copy": [run.copy for _, run in runs],
            "phase": phases[::-1],
        }
        for role, sizes in timeline.by_role.items():
            columns[bytes_column(role)] = [sizes[at] for at, _ in runs]
        columns[bytes_column("workspace")] = [timeline.total_bytes[at] - timeline.tensor_bytes[at] for at, _ in runs]
        columns["total_bytes"] = [timeline.total_bytes[at] for at, _ in runs]
        return pandas.DataFrame(columns)

    @property
    def peak_row(self) -> "pandas.Series[Any]":
        """The row of that problem at which the peak stands."""
        return self.timeline_frame.iloc[int(self.timeline_frame["total_bytes"].to_numpy().argmax())]

    @cached_property
    def ops_frame(self) -> "pandas.DataFrame":
        """A row for each op: what runs again before it, and what is given up, moved out or brought back around it."""
        import pandas

        rows: list[dict[str, Any]] = []
        nodes = self.profile.nodes.to_dict("records")
        before: list[str] = []
        fetched: list[str] = []
        for at, entry in enumerate(self.schedule.entries):
            if isinstance(entry, Run) and entry.copy:
                before.append(entry.op)
            elif isinstance(entry, SwapIn):
                fetched.append(entry.storage)
            elif isinstance(entry, Run):
                node = nodes[self.profile.graph.rank[entry.op]]
                columns = ("rank", "name", "gtype", "run_time_ms")
                rows.append(
                    {
                        **{name: node[name] for name in columns},
                        "peak_mem_bytes": self.timeline.total_bytes[at],
                        "active_mem_bytes": node["active_mem_bytes"],
                        "to_recompute": before,
                        "to_delete": [],
                        "to_offload": [],
                        "to_prefetch": fetched,
                    }
                )
                before, fetched = [], []
            elif rows:
                rows[-1]["to_delete" if isinstance(entry, Free) else "to_offload"].append(entry.storage)
        lists = ("to_recompute", "to_delete", "to_offload", "to_prefetch")
        return pandas.DataFrame([{**row, **{name: " ".join(row[name]) for name in lists}} for row in rows])

    def __repr__(self) -> str:
        timeline, static = self.timeline, self.profile.graph.static_bytes
        plain = self.profile.peak_bytes
        saved = 1 - (timeline.peak_bytes - static) / (plain - static)
        counts = {decision: sum(each is decision for each in self.decisions.values()) for decision in Decision}
        budget = f"budget {format_bytes(self.budget_bytes)}, " if self.budget_bytes is not None else ""
        least = self.lower_bound_seconds / self.profile.step_seconds
        best = "no plan fits this budget" if isinf(least) else f"no plan for this budget takes less than +{least:.1%}"
        at = timeline.peak_entry.op if isinstance(timeline.peak_entry, Run) else str(timeline.peak_entry)
        lines = [
            f"Plan: {self.planner}, {budget}{'fits' if self.fits else 'DOES NOT FIT'}",
            f"  peak  {format_bytes(timeline.peak_bytes)} at {at}, without a plan {format_bytes(plain)} "
            f"(above static −{saved:.1%})",
            f"  step  {format_seconds(timeline.seconds)}, without a plan {format_seconds(self.profile.step_seconds)} "
            f"(+{self.overhead:.1%}; {best})",
            f"  {counts[Decision.RETAINED]:,} activations kept, {counts[Decision.RECOMPUTE]:,} made again in "
            f"{len(self._again):,} runs" + (f", {counts[Decision.SWAP]:,} swapped" if counts[Decision.SWAP] else ""),
        ]
        if self.claimed_peak_bytes != timeline.peak_bytes:
            lines.append(f"  the planner claims a peak of {format_bytes(self.claimed_peak_bytes)}")
        return "\n".join(lines)


def bytes_column(name: str) -> str:
    """What the column of a role's bytes is called."""
    return f"{name.replace(' ', '_')}_bytes"


def _ops(count: int) -> str:
    return "one op" if count == 1 else f"{count} ops"


def _compare_peaks(changed: int, now: int) -> str:
    if changed == now:
        return f"stay at {format_bytes(now)}"
    if format_bytes(changed) == format_bytes(now):
        return f"be {abs(changed - now):,} bytes {'higher' if changed > now else 'lower'}"
    return f"be {format_bytes(changed)} instead of {format_bytes(now)}"


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
