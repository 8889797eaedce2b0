"""A profile: the graph of a step with the measured times and workspaces of its ops, as a value without torch.

`acwb.profile` measures one; planners read it. A step that was measured on one machine can be planned on another.
pandas is imported only where a frame is asked for.
"""

import dataclasses
import hashlib
import json
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas
from acwb import files
from acwb.core.graph import Activation, Phase, Role, StepGraph
from acwb.errors import AcwbError, quoted
from acwb.units import format_bytes, format_seconds
from acwb.value_checks import check_fields

NODE_FILE = "profiler_stats_node_stats.csv"
ACTIVATION_FILE = "profiler_stats_activation_stats.csv"
LISTED_ACTIVATIONS = 10  # in the printed form


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a profile was measured.

    Attributes:
        processor: the name of the processor or accelerator.
        threads: the number of torch's threads.
        repeats: how often each op was timed.
        swapped: whether storages were swapped out between phases, because the step did not fit in memory.
    """

    processor: str
    threads: int
    repeats: int
    swapped: bool

    def __str__(self) -> str:
        how = ", storages swapped out (it does not fit)" if self.swapped else ""
        return f"{self.processor}, {self.threads} threads, median of {self.repeats}{how}"


@dataclass(frozen=True, repr=False)
class Profile:
    """The graph of a step with its measurements; bytes are `int`, times are seconds.

    Attributes:
        seconds: the time of each op.
        workspace_bytes: what each op's kernel allocates beyond its outputs, and frees before it returns.
        swap_out_seconds: the time to move each activation out of the device's memory.
        swap_in_seconds: the time to move each activation back into it.
        conditions: how it was measured.
        rules: the seconds and the workspace bytes of each recompute rule that proved bitwise equal to its op, by op.
    """

    graph: StepGraph
    seconds: Mapping[str, float]
    workspace_bytes: Mapping[str, int]
    swap_out_seconds: Mapping[str, float]
    swap_in_seconds: Mapping[str, float]
    conditions: Conditions
    rules: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        ops = {op.name for op in self.graph.ops}
        activations = {activation.name for activation in self.graph.activations}
        for field, names in {
            "seconds": ops,
            "workspace_bytes": ops,
            "swap_out_seconds": activations,
            "swap_in_seconds": activations,
        }.items():
            unmatched = names ^ getattr(self, field).keys()
            if unmatched:
                raise AcwbError(
                    f"The profile's {field} do not fit its graph: {sorted(unmatched)[0]} is in one of them only."
                )
        unknown = self.rules.keys() - {op.name for op in self.graph.ops if op.rule_inputs}
        if unknown:
            raise AcwbError(f"The profile has a recompute rule for {sorted(unknown)[0]}, but its graph has none.")

    @cached_property
    def step_seconds(self) -> float:
        """The time of the step: the sum over its ops."""
        return sum(self.seconds.values())

    @cached_property
    def peak_rank(self) -> int:
        """The rank of the op at which the captured step has its peak of storages and workspace."""
        total = [
            live + self.workspace_bytes[op.name] for live, op in zip(self.graph.live_bytes, self.graph.ops, strict=True)
        ]
        return max(range(len(total)), key=total.__getitem__)

    @cached_property
    def peak_bytes(self) -> int:
        """The peak memory of the captured step: live storages and workspace."""
        return self.graph.live_bytes[self.peak_rank] + self.workspace_bytes[self.graph.ops[self.peak_rank].name]

    @cached_property
    def digest(self) -> str:
        """Digest of the measured times and workspaces, on which plans depend beside the graph."""
        measured = [sorted(self.seconds.items()), sorted(self.workspace_bytes.items()), sorted(self.rules.items())]
        return hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:16]

    def budget(self, reduction: float) -> int:
        """The budget in bytes that reduces the peak above static memory by a fraction: 0.5 halves it."""
        if not isinstance(reduction, numbers.Real) or isinstance(reduction, bool) or not 0 <= reduction <= 1:
            raise AcwbError(
                f"A reduction of {quoted(reduction)} is not a part of the peak above static: give 0.5 for half."
            )
        return self.graph.static_bytes + int((1 - reduction) * (self.peak_bytes - self.graph.static_bytes))

    def inactive_seconds(self, activation: Activation) -> float:
        """How long an activation is idle, between its last forward and its first backward use."""
        return self._clock[activation.first_backward_rank] - self._clock[activation.last_forward_rank + 1]

    def recompute_seconds(self, activation: Activation) -> float:
        """The recomputation time of an activation, if all other activations are kept."""
        return sum(self.seconds[op] for op in self.graph.recomputation(activation.name))

    @cached_property
    def _clock(self) -> tuple[float, ...]:
        """The time at which each op starts, and the end of the step."""
        return tuple(accumulate((self.seconds[op.name] for op in self.graph.ops), initial=0.0))

    @cached_property
    def nodes(self) -> "pandas.DataFrame":
        """One row per op. Active memory is its working set: inputs, outputs and workspace."""
        import pandas

        size = {storage.name: storage.bytes for storage in self.graph.storages}
        rows = []
        for rank, op in enumerate(self.graph.ops):
            workspace = self.workspace_bytes[op.name]
            touched = dict.fromkeys(op.inputs + op.mutates + op.outputs)
            rows.append(
                {
                    "rank": rank,
                    "name": op.name,
                    "target": op.target,
                    "gtype": str(op.phase),
                    "module": op.module,
                    "run_time_ms": self.seconds[op.name] * 1e3,
                    "peak_mem_bytes": self.graph.live_bytes[rank] + workspace,
                    "active_mem_bytes": sum(size[name] for name in touched) + workspace,
                    "workspace_bytes": workspace,
                    "new_bytes": sum(size[name] for name in op.outputs),
                }
            )
        return pandas.DataFrame(rows)

    @cached_property
    def activations(self) -> "pandas.DataFrame":
        """One row per activation, in order of creation; the recompute ratio is bytes per second of recomputation."""
        import pandas

        rows = []
        for activation in self.graph.activations:
            seconds = self.recompute_seconds(activation)
            rows.append(
                {
                    "activation_name": activation.name,
                    "module": activation.module,
                    "median_mem_size_bytes": activation.bytes,
                    "creation_rank": activation.creation_rank,
                    "last_fw_use_rank": activation.last_forward_rank,
                    "first_bw_use_rank": activation.first_backward_rank,
                    "last_bw_use_rank": activation.last_backward_rank,
                    "inactive_time_ms": self.inactive_seconds(activation) * 1e3,
                    "swap_out_ms": self.swap_out_seconds[activation.name] * 1e3,
                    "swap_in_ms": self.swap_in_seconds[activation.name] * 1e3,
                    "recomp_time_ms": seconds * 1e3,
                    "recompute_ratio": activation.bytes / seconds if seconds else float("inf"),
                }
            )
        return pandas.DataFrame(rows)

    def to_csv(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write the two frames as CSV files into `folder`, both or neither, and return their paths."""
        nodes, activations = Path(folder) / NODE_FILE, Path(folder) / ACTIVATION_FILE
        files.write_frames({nodes: self.nodes.drop(columns="new_bytes"), activations: self.activations})
        return nodes, activations

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile with its graph as JSON; the file appears whole or not at all."""
        content = {
            "graph": self.graph.content(),
            "seconds": self.seconds,
            "workspace_bytes": self.workspace_bytes,
            "swap_out_seconds": self.swap_out_seconds,
            "swap_in_seconds": self.swap_in_seconds,
            "conditions": dataclasses.asdict(self.conditions),
            "shortcuts": self.rules,
            "fingerprint": self.graph.fingerprint,
        }
        files.write_saved(path, "Profile", content)

    @classmethod
    def load(cls, path: str | os.PathLike[str], graph: StepGraph | None = None) -> "Profile":
        """Read a profile that `save` wrote; with `graph`, refuse one that was taken of another graph."""
        with files.open_saved(path, "Profile") as content:
            own = StepGraph.of(content["graph"])
            profile = cls(
                graph=own if graph is None or graph.fingerprint != own.fingerprint else graph,  # which has a name
                seconds=content["seconds"],
                workspace_bytes=content["workspace_bytes"],
                swap_out_seconds=content["swap_out_seconds"],
                swap_in_seconds=content["swap_in_seconds"],
                conditions=Conditions(**content["conditions"]),
                rules={name: (seconds, size) for name, (seconds, size) in content["shortcuts"].items()},
            )
            check_fields(profile)
            stamp = content["fingerprint"]
        if own.fingerprint != stamp:
            raise AcwbError(f"{path} was changed after it was saved: its graph is not the one that was measured.")
        if graph is not None and graph.fingerprint != own.fingerprint:
            raise AcwbError(
                f"{path} was measured of another graph ({_describe(own)}), not of this one ({_describe(graph)}): "
                "profile this step."
            )
        return profile

    def __repr__(self) -> str:
        graph, environment = self.graph, self.graph.environment
        op = graph.ops[self.peak_rank]
        phases = {phase: sum(self.seconds[op.name] for op in graph.ops if op.phase is phase) for phase in Phase}
        live, workspace = self.graph.live_bytes[self.peak_rank], self.workspace_bytes[op.name]
        largest = sorted(graph.activations, key=lambda activation: -activation.bytes)[:LISTED_ACTIVATIONS]
        lines = [
            f"Profile: {graph.title}, {environment.optimizer}, {environment.device}, torch {environment.torch}",
            *(f"  {text}" for text in environment.batch),
            f"  measured on {self.conditions}",
            f"  step  {format_seconds(self.step_seconds)}: "
            + ", ".join(f"{phase} {format_seconds(seconds)}" for phase, seconds in phases.items()),
            f"  peak  {format_bytes(live + workspace)} in the {op.phase} phase at {op.name}"
            + (f" ({op.module})" if op.module else ""),
            *(f"    {role:<16}{format_bytes(size):>14}" for size, role in self._at_peak() if size),
            f"    {'workspace':<16}{format_bytes(workspace):>14}",
            f"  the {len(largest)} largest of {len(graph.activations):,} activations",
            *(self._line(activation) for activation in largest),
        ]
        return "\n".join(lines)

    def _at_peak(self) -> list[tuple[int, Role]]:
        """The bytes of each role that are alive at the peak, the largest first."""
        sizes = dict.fromkeys(Role, 0)
        for name, (first, last) in self.graph.lifetimes.items():
            if first <= self.peak_rank <= last:
                sizes[self.graph.storage[name].role] += self.graph.storage[name].bytes
        return sorted(((size, role) for role, size in sizes.items()), reverse=True)

    def _line(self, activation: Activation) -> str:
        return (
            f"    {activation.name:<32.32}{format_bytes(activation.bytes):>12}  "
            f"recompute {format_seconds(self.recompute_seconds(activation)):>10}, "
            f"idle {format_seconds(self.inactive_seconds(activation)):>12}  {activation.module}"
        )


def _describe(graph: StepGraph) -> str:
    environment = graph.environment
    return ", ".join((graph.title, environment.optimizer, *environment.batch))
