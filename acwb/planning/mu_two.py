"""The planner of μ-TWO (Purandare et al., MLSys 2023, appendix A, algorithms B to G), as published.

It chooses activations one by one, by the longest idle time for swapping and by bytes per second for recomputation,
whichever costs less, until its own simulation of memory is below the limit. That simulation ignores what recomputations
need while they run: `Plan.claimed_peak_bytes` is the paper's own estimate, `Plan.timeline` the exact simulation.
Swapping is simulation only: `acwb.plan` does not offer it, and the rewriter refuses it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from acwb.core.graph import StepGraph
from acwb.core.profile import Profile
from acwb.core.schedule import Entry, Run, Schedule, SwapIn, SwapOut, just_in_time
from acwb.planning.plan import Plan


@dataclass
class Candidate:
    """An activation with the attributes of the paper.

    Attributes:
        last_forward: the rank of its last forward use; `first_backward` and `last_backward` likewise.
        inactive: the seconds for which it is idle.
        swap: the seconds to swap it in.
        sources: the activations from which it is recomputed.
        recompute: the seconds to recompute it once.
        total: the seconds of all recomputations that it causes.
    """

    name: str
    size: int
    last_forward: int
    first_backward: int
    last_backward: int
    inactive: float
    swap: float
    sources: set[str]
    recompute: float
    total: float

    @property
    def ratio(self) -> float:
        """Bytes for each second of recomputation."""
        return self.size / self.total if self.total else float("inf")


@dataclass(frozen=True)
class Prefetch:
    """A swap-in: the rank of the op before which it starts, and the seconds that the computation waits for it."""

    tensor: Candidate
    prompt: int
    stall: float


def mu_two(
    profile: Profile, budget_bytes: int | None = None, swap: bool = False, bytes_per_second: float | None = None
) -> Plan:
    """The plan of μ-TWO for a budget.

    Args:
        profile: the result of `acwb.profile`.
        budget_bytes: the limit on the peak; without one, every activation is chosen.
        swap: whether activations may be swapped; such a plan can be simulated, but not executed.
        bytes_per_second: the bandwidth of swapping; by default as measured in the profile.
    """
    policy = MuTwoPolicy(profile, budget_bytes or 0, swap, bytes_per_second)
    policy.run()
    return Plan(profile, policy.schedule(), "mu_two", budget_bytes, policy.peak())


def discard_sets(profile: Profile) -> Iterator[tuple[str, ...]]:
    """The activations that μ-TWO recomputes without swapping, for smaller and smaller budgets."""
    policy = MuTwoPolicy(profile, 0, False, None)
    policy.run()
    names = tuple(policy.recomputed)
    for count in range(1, len(names) + 1):
        yield names[:count]


class MuTwoPolicy:
    """Algorithm B, and the state that it updates; the methods are named with the letters of the algorithms."""

    def __init__(self, profile: Profile, limit: int, swap: bool, bytes_per_second: float | None) -> None:
        self.profile = profile
        self.graph = profile.graph
        self.limit = limit
        self.swap = swap
        self.candidates = {candidate.name: candidate for candidate in candidates_of(profile, bytes_per_second)}
        self.recomputed: dict[str, Candidate] = {}
        self.swapped: dict[str, Prefetch] = {}
        self.seconds = [profile.seconds[op.name] for op in self.graph.ops]
        self.active = active_bytes(profile)

    def run(self) -> None:
        """B: choose activations until the estimated peak is below the limit, or none is left."""
        while self.candidates and self.peak() >= self.limit:
            chosen = max(self.candidates.values(), key=lambda item: (item.ratio, -item.last_forward))
            prefetch = None
            if self.swap:
                idle = max(self.candidates.values(), key=lambda item: (item.inactive, -item.last_forward))
                offer = self.swap_overhead(idle)
                if offer.stall < chosen.total:
                    chosen, prefetch = idle, offer
            del self.candidates[chosen.name]
            count = self.update_recomputed(chosen)
            if prefetch is None:
                self.recomputed[chosen.name] = chosen
            else:
                self.swapped[chosen.name] = prefetch
            self.update_candidates(chosen, count)
            self.swapped = {name: self.swap_overhead(each.tensor, name) for name, each in self.swapped.items()}

    def swap_overhead(self, tensor: Candidate, own: str = "") -> Prefetch:
        """C: how far the swap-in can be hidden behind the ops before the first backward use."""
        use = tensor.first_backward
        recomputing = self.recompute_seconds_at()
        left = tensor.swap - recomputing.get(use, 0.0)
        memory = self.memory()
        others = [each for name, each in self.swapped.items() if name != own]
        last = min((each.prompt for each in others), default=len(self.seconds))
        if memory[use] > self.limit:  # inside the peak interval, where nothing can be swapped in ahead
            if use < last:
                return Prefetch(tensor, use, max(0.0, left))
            return Prefetch(tensor, use, max(0.0, left) + max((each.stall for each in others), default=0.0))
        rank = min(use, last)
        while left > 0 and rank > tensor.last_forward + 1:
            if memory[rank - 1] > self.limit:
                return Prefetch(tensor, rank, left)
            rank -= 1
            left -= self.seconds[rank] + recomputing.get(rank, 0.0)
        return Prefetch(tensor, rank, max(0.0, left))

    def recompute_seconds_at(self) -> dict[int, float]:
        """The seconds of recomputation before each op."""
        seconds: dict[int, float] = {}
        for chosen in self.recomputed.values():
            seconds[chosen.first_backward] = seconds.get(chosen.first_backward, 0.0) + chosen.recompute
        return seconds

    def update_recomputed(self, chosen: Candidate) -> int:
        """E: in earlier choices that have the new one as a source, replace it by its own sources."""
        count = 1
        for each in self.recomputed.values():
            if chosen.name in each.sources:
                each.sources = (each.sources - {chosen.name}) | chosen.sources
                each.recompute += chosen.recompute
                count += 1
        return count

    def update_candidates(self, chosen: Candidate, count: int) -> None:
        """F: replace it in candidates, too, unless it is alive when they are needed; and charge its own sources."""
        for each in self.candidates.values():
            alive = chosen.first_backward <= each.first_backward <= chosen.last_backward
            if chosen.name in each.sources and not alive:
                each.sources = (each.sources - {chosen.name}) | chosen.sources
                each.recompute += chosen.recompute
                users = sum(each.name in other.sources for other in self.recomputed.values())
                each.total = each.recompute * (1 + users)
            if each.name in chosen.sources:
                each.total = count * each.recompute

    def memory(self) -> list[int]:
        """G: the paper's estimate of the memory at every op."""
        change = [0] * (len(self.active) + 1)
        for activation in self.graph.activations:
            if activation.name not in self.recomputed and activation.name not in self.swapped:
                change[activation.last_forward_rank + 1] += activation.bytes
                change[activation.first_backward_rank] -= activation.bytes
        for prefetch in self.swapped.values():
            change[prefetch.prompt] += prefetch.tensor.size
            change[prefetch.tensor.first_backward] -= prefetch.tensor.size
        total, idle = [], 0
        for rank, active in enumerate(self.active):
            idle += change[rank]
            total.append(active + idle)
        return total

    def peak(self) -> int:
        """The paper's estimate of the peak."""
        return max(self.memory())

    def schedule(self) -> Schedule:
        """The choices as a schedule: recomputation just in time, swaps around it."""
        entries: list[Entry] = list(just_in_time(self.graph, self.recomputed.keys()).entries)
        for prefetch in self.swapped.values():
            _insert_swap(self.graph, entries, prefetch)
        return Schedule(tuple(entries))


def _insert_swap(graph: StepGraph, entries: list[Entry], prefetch: Prefetch) -> None:
    """Swap a storage out after its last forward use, and in at its prompt, or before an op that reads it sooner."""
    name, tensor = prefetch.tensor.name, prefetch.tensor
    out = entries.index(Run(graph.ops[tensor.last_forward].name)) + 1
    back = out
    while True:
        entry = entries[back]
        if isinstance(entry, Run):
            op = graph.op(entry.op)
            prompted = not entry.copy and graph.rank[entry.op] >= prefetch.prompt
            if prompted or name in op.inputs:
                break
        back += 1
    entries.insert(back, SwapIn(name, stall=prefetch.stall))
    entries.insert(out, SwapOut(name))


def candidates_of(profile: Profile, bytes_per_second: float | None = None) -> list[Candidate]:
    """All activations as candidates, with the sources and times from which the algorithm starts."""
    graph = profile.graph
    activations = {activation.name for activation in graph.activations}
    found = []
    for activation in graph.activations:
        ops = [graph.op(name) for name in graph.recomputation(activation.name)]
        read = {name for op in ops for name in op.inputs}
        made = {name for op in ops for name in op.outputs}
        seconds = sum(profile.seconds[op.name] for op in ops)
        measured = profile.swap_in_seconds[activation.name]
        found.append(
            Candidate(
                name=activation.name,
                size=activation.bytes,
                last_forward=activation.last_forward_rank,
                first_backward=activation.first_backward_rank,
                last_backward=activation.last_backward_rank,
                inactive=profile.inactive_seconds(activation),
                swap=activation.bytes / bytes_per_second if bytes_per_second else measured,
                sources=(read & activations) - made,
                recompute=seconds,
                total=seconds,
            )
        )
    return found


def active_bytes(profile: Profile) -> list[int]:
    """The memory of each op without the activations that are idle while it runs."""
    graph = profile.graph
    change = [0] * (len(graph.ops) + 1)
    for activation in graph.activations:
        change[activation.last_forward_rank + 1] -= activation.bytes
        change[activation.first_backward_rank] += activation.bytes
    active, change_so_far = [], 0
    for rank, op in enumerate(graph.ops):
        change_so_far += change[rank]
        active.append(graph.live_bytes[rank] + profile.workspace_bytes[op.name] + change_so_far)
    return active
