"""A schedule says exactly what a step does, in order; a timeline says what that costs. Both are values, without torch.

The captured step is the schedule that runs every op once and frees every storage after its last use. Recomputing an op
is one more `Run` with the next copy number, which makes new storages under the same names; swapping is a pair of
entries. An op reads the newest copy of what it needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from acwb.core.graph import Role, StepGraph
from acwb.units import gibibytes


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op; copy 0 is the op itself, higher ones recompute it: `short` ones by its shortcut, its first output."""

    op: str
    copy: int = 0
    short: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Give a storage's memory back."""

    storage: str
    copy: int = 0


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Move a storage out of the device's memory, beside the computation."""

    storage: str
    copy: int = 0


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring a storage back; `stall` is the time in seconds that the computation waits for it."""

    storage: str
    copy: int = 0
    stall: float = 0.0


Entry = Run | Free | SwapOut | SwapIn


@dataclass(frozen=True, repr=False)
class Schedule:
    """Everything that a step does, in order."""

    entries: tuple[Entry, ...]

    def __len__(self) -> int:
        return len(self.entries)

    def replayed(self, graph: StepGraph) -> tuple[str, ...]:
        """The random ops that run again with the numbers of their first run, for which a random state is kept."""
        again = dict.fromkeys(run.op for run in self.entries if isinstance(run, Run) and run.copy and not run.short)
        return tuple(name for name in again if graph.ops[graph.rank[name]].random)

    def __repr__(self) -> str:
        runs = [entry for entry in self.entries if isinstance(entry, Run)]
        again = sum(run.copy > 0 for run in runs)
        swaps = sum(isinstance(entry, SwapOut) for entry in self.entries)
        return f"Schedule({len(runs):,} runs, {again:,} of them recomputations, {swaps:,} swaps)"


@dataclass(frozen=True, repr=False)
class Timeline:
    """What a schedule costs. Positions count the schedule's entries; bytes are those after an entry.

    Attributes:
        tensor_bytes: live storages. For a `Run`, when it has made its outputs and still has its inputs. The random
            states that are kept for random ops that run again count as there from the start.
        total_bytes: the same with the running op's workspace, which is what a budget bounds. Where random ops run
            again, it has room for one more random state: that of the stream, which waits meanwhile.
        by_role: `tensor_bytes` of each role.
        alive_at_peak: the storages (with their copy) that are alive at the peak of `total_bytes`, the largest first.
        peak_entry: what runs there.
    """

    tensor_bytes: tuple[int, ...]
    total_bytes: tuple[int, ...]
    by_role: Mapping[Role, tuple[int, ...]]
    seconds: float
    peak_step: int
    peak_entry: Entry
    alive_at_peak: tuple[tuple[str, int], ...]

    @property
    def peak_bytes(self) -> int:
        """The peak of live storages and workspace."""
        return self.total_bytes[self.peak_step]

    @property
    def tensor_peak_bytes(self) -> int:
        """The peak of live storages alone."""
        return max(self.tensor_bytes)

    def __repr__(self) -> str:
        at = self.peak_entry.op if isinstance(self.peak_entry, Run) else self.peak_entry
        parts = sorted(((sizes[self.peak_step], role) for role, sizes in self.by_role.items()), reverse=True)
        lines = [
            f"Timeline: {self.seconds * 1e3:,.1f} ms, peak {gibibytes(self.peak_bytes)} at {at} "
            f"(tensors {gibibytes(self.tensor_peak_bytes)})",
            *(f"  {role:<16}{gibibytes(size):>14}" for size, role in parts if size),
        ]
        return "\n".join(lines)
