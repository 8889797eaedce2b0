"""A plan as tables: decisions per activation, one row per op, one row per run; as pandas frames and as CSV files.

What comes in is a profile with a schedule and its timeline. pandas is imported only where a frame is asked for.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
from acwb import files
from acwb.core.profile import Profile
from acwb.core.schedule import Free, Run, Schedule, SwapIn
from acwb.core.simulator import Timeline

DECISION_FILE = "ac_decisions.csv"
PLAN_FILE = "checkpoint_plan.csv"


def bytes_column(name: str) -> str:
    """The name of the column with the bytes of a role: "optimizer_state_bytes" for "optimizer state"."""
    return f"{name.replace(' ', '_')}_bytes"


def decisions_frame(profile: Profile, decisions: Mapping[str, str]) -> "pandas.DataFrame":
    """One row per activation: its decision, size, recomputation time and where it is made and first read again."""
    import pandas

    return pandas.DataFrame(
        [
            {
                "activation_name": activation.name,
                "decision": str(decisions[activation.name]),
                "median_mem_size_bytes": activation.bytes,
                "recomp_time_s": profile.recompute_seconds(activation),
                "creation_rank": activation.creation_rank,
                "first_bw_use_rank": activation.first_backward_rank,
            }
            for activation in profile.graph.activations
        ]
    )


def start_times(profile: Profile, schedule: Schedule) -> tuple[float, ...]:
    """When each entry of a schedule starts, in seconds from the start of the step; only runs and stalls take time."""
    starts, now = [], 0.0
    for entry in schedule.entries:
        starts.append(now)
        if isinstance(entry, Run):
            now += profile.rules[entry.op][0] if entry.by_rule else profile.seconds[entry.op]
        elif isinstance(entry, SwapIn):
            now += entry.stall
    return tuple(starts)


def timeline_frame(
    profile: Profile, schedule: Schedule, timeline: Timeline, starts: tuple[float, ...]
) -> "pandas.DataFrame":
    """One row per run: when it starts, which copy it is, and the bytes of each role while it runs."""
    import pandas

    runs = [(position, entry) for position, entry in enumerate(schedule.entries) if isinstance(entry, Run)]
    phases: list[str] = []
    for _, run in reversed(runs):  # a recomputation belongs to the phase of the op that it runs before
        own = profile.graph.op(run.op).phase
        phases.append(str(own) if not run.copy or not phases else phases[-1])
    columns: dict[str, list[Any]] = {
        "start_ms": [starts[position] * 1e3 for position, _ in runs],
        "op": [run.op for _, run in runs],
        "copy": [run.copy for _, run in runs],
        "phase": phases[::-1],
    }
    for role, sizes in timeline.by_role.items():
        columns[bytes_column(role)] = [sizes[position] for position, _ in runs]
    total, tensors = timeline.total_bytes, timeline.tensor_bytes
    columns[bytes_column("workspace")] = [total[position] - tensors[position] for position, _ in runs]
    columns["total_bytes"] = [total[position] for position, _ in runs]
    return pandas.DataFrame(columns)


def peak_row(frame: "pandas.DataFrame") -> "pandas.Series[Any]":
    """The row of a `timeline_frame` with the most bytes in total."""
    return frame.iloc[int(frame["total_bytes"].to_numpy().argmax())]


def ops_frame(profile: Profile, schedule: Schedule, timeline: Timeline) -> "pandas.DataFrame":
    """One row per op: what is recomputed before it, and what is freed, swapped out or swapped in around it."""
    import pandas

    rows: list[dict[str, Any]] = []
    nodes = profile.nodes.to_dict("records")
    recomputed: list[str] = []
    prefetched: list[str] = []
    for position, entry in enumerate(schedule.entries):
        if isinstance(entry, Run) and entry.copy:
            recomputed.append(entry.op)
        elif isinstance(entry, SwapIn):
            prefetched.append(entry.storage)
        elif isinstance(entry, Run):
            node = nodes[profile.graph.rank[entry.op]]
            rows.append(
                {
                    **{column: node[column] for column in ("rank", "name", "gtype", "run_time_ms")},
                    "peak_mem_bytes": timeline.total_bytes[position],
                    "active_mem_bytes": node["active_mem_bytes"],
                    "to_recompute": recomputed,
                    "to_delete": [],
                    "to_offload": [],
                    "to_prefetch": prefetched,
                }
            )
            recomputed, prefetched = [], []
        elif rows:
            rows[-1]["to_delete" if isinstance(entry, Free) else "to_offload"].append(entry.storage)
    lists = ("to_recompute", "to_delete", "to_offload", "to_prefetch")
    return pandas.DataFrame([{**row, **{column: " ".join(row[column]) for column in lists}} for row in rows])


def write_csv(
    folder: str | os.PathLike[str], decisions: "pandas.DataFrame", ops: "pandas.DataFrame"
) -> tuple[Path, Path]:
    """Write a plan's two tables into `folder`, both or neither, and return their paths."""
    decision_path, plan_path = Path(folder) / DECISION_FILE, Path(folder) / PLAN_FILE
    files.write_frames({decision_path: decisions, plan_path: ops})
    return decision_path, plan_path
