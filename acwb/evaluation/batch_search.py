"""Finds the largest batch that trains in a given memory, with and without a plan: `largest_batch`.

Two small batches are profiled. Storages, workspaces and times of another batch are extrapolated linearly, so that
the search needs no memory and no run. The batch that it finds is captured for its exact sizes, its kernels are asked
for their workspaces, which follow no line, and its plan is confirmed by training it under a hard cap.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tqdm.auto import tqdm

from acwb.capture.tracer import trace
from acwb.core.graph import StepGraph
from acwb.core.profile import Profile
from acwb.errors import AcwbError, DoesNotFitError, check_maker
from acwb.evaluation.baselines import eager, planned
from acwb.evaluation.memory_cap import train_within
from acwb.planning.frontier import Frontier, explore, frontier
from acwb.planning.frontier_search import WITHOUT_RESTARTS
from acwb.planning.plan import Plan
from acwb.profiling.profiler import profile
from acwb.profiling.workspace_probe import probe_workspaces
from acwb.subject import SubjectMaker
from acwb.units import format_bytes, parse_bytes

PROFILED_BATCHES = (2, 4)
MAX_STEP_FACTOR = 100  # times what is known to fit: how far one guess goes
RESERVE = 0.005  # of the memory, for what a process holds beside torch's allocator
RETRY_FRACTION = 50  # a batch that did not fit is followed by one that is smaller by this part


@dataclass(frozen=True, repr=False)
class LargestBatch:
    """The largest batches that train in a given memory.

    Attributes:
        eager: the largest batch size of eager.
        planned: the largest batch size with a plan.
        plan: for the planned batch.
        confirmed: both were trained under a hard cap, and eager with one more did not fit.
        search_seconds: how long the search took, without the confirmation.
    """

    subject: str
    memory_bytes: int
    eager: int
    planned: int
    plan: Plan
    confirmed: bool
    search_seconds: float

    def __repr__(self) -> str:
        how = "confirmed under a hard cap" if self.confirmed else "predicted"
        factor = f", {self.planned / self.eager:.1f}×" if self.eager else ""
        return (
            f"LargestBatch: {self.subject} in {format_bytes(self.memory_bytes)}: {self.eager:,} eager, "
            f"{self.planned:,} with a plan{factor} ({how}); the plan takes {self.plan.overhead:+.1%} time, found in "
            f"{self.search_seconds:.0f} s"
        )


def largest_batch(
    make_subject: SubjectMaker,
    memory: int | float | str,
    small: tuple[int, int] = PROFILED_BATCHES,
    confirm: bool = True,
) -> LargestBatch:
    """The largest batch that trains in `memory`, with and without a plan.

    Args:
        make_subject: `make_subject(batch_size)` returns the subject; `acwb.models.resnet152`, say.
        memory: bytes, or "4GiB": for everything that the training holds, parameters and optimizer state included.
        small: two batch sizes to learn from, which have to fit into this machine.
        confirm: train with both under a hard cap of that memory.

    Example:
        >>> acwb.largest_batch(acwb.models.resnet152, "1.5GiB")
    """
    check_maker("largest_batch", make_subject)
    size = parse_bytes(memory)
    start = time.perf_counter()
    progress = partial(tqdm, desc="searching", leave=False)
    profiles = [_profile_batch(make_subject, batch) for batch in progress(small)]
    scale = BatchExtrapolation(small[0], profiles[0], small[1], profiles[1])
    usable = int(size * (1 - RESERVE))
    plain = largest_within(lambda batch: scale.at(batch).peak_bytes, usable, *small)
    found = largest_within(partial(_floor, scale), usable, *small)
    if found == 0:
        raise frontier(scale.at(1)).infeasible(size)
    found, plan = _search_exact(make_subject, scale, found, usable)
    seconds = time.perf_counter() - start
    if confirm:
        plain = _confirm_eager(make_subject, plain, size)
        found, plan = _confirm(make_subject, scale, found, plan, size, usable)
    return LargestBatch(make_subject(1).name, size, plain, found, plan, confirm, seconds)


def largest_within(peak_at: Callable[[int], int], memory: int, low: int, high: int) -> int:
    """The largest number whose peak is within `memory`, for a peak that grows with it; 0 where there is none."""
    known = {number: peak_at(number) for number in (low, high)}
    while True:
        fitting = max((number for number, peak in known.items() if peak <= memory), default=0)
        over = min((number for number, peak in known.items() if peak > memory and number > fitting), default=None)
        if over == fitting + 1:
            return fitting
        one, two = sorted(known, key=lambda number: abs(known[number] - memory))[:2]
        slope = (known[one] - known[two]) / (one - two)
        guess = one + int((memory - known[one]) / slope) if slope > 0 else 2 * fitting
        if over is not None and len(known) % 3 == 0:  # where the peak is no line, halving gets there all the same
            guess = (fitting + over) // 2
        guess = max(fitting + 1, min(guess, over - 1 if over is not None else MAX_STEP_FACTOR * fitting))
        known[guess] = peak_at(guess)


@dataclass(frozen=True)
class BatchExtrapolation:
    """The profile of any batch size, from those of two: every size and every time lies on a line."""

    small: int
    small_profile: Profile
    large: int
    large_profile: Profile

    def __post_init__(self) -> None:
        ours, theirs = self.small_profile.graph, self.large_profile.graph
        if [(op.name, op.target) for op in ours.ops] != [(op.name, op.target) for op in theirs.ops]:
            raise AcwbError(
                f"The step has other ops at batch {self.small} than at batch {self.large}, so that nothing can be said "
                "of other batches: give two sizes in `small` at which it has the same."
            )

    def at(self, batch: int, graph: StepGraph | None = None) -> Profile:
        """The profile at `batch`; with `graph`, that of the captured step, its sizes are those."""
        sizes = self._bytes
        known = graph or replace(
            self.small_profile.graph,
            storages=tuple(
                replace(storage, bytes=self._whole(*sizes[storage.name], batch))
                for storage in self.small_profile.graph.storages
            ),
        )
        if graph is not None and graph.rank.keys() != self.small_profile.graph.rank.keys():
            raise AcwbError(f"The step has other ops at batch {batch} than at batch {self.small}: profile it instead.")
        one, two = self.small_profile, self.large_profile
        activations = {activation.name for activation in known.activations}
        pairs = (one.swap_out_seconds, two.swap_out_seconds), (one.swap_in_seconds, two.swap_in_seconds)
        swaps = [
            {name: self._positive(left[name], right[name], batch) for name in activations} for left, right in pairs
        ]
        return Profile(
            known,
            {name: self._positive(each, two.seconds[name], batch) for name, each in one.seconds.items()},
            {name: self._whole(each, two.workspace_bytes[name], batch) for name, each in one.workspace_bytes.items()},
            swaps[0],
            swaps[1],
            one.conditions,
            {
                name: (
                    self._positive(one.rules[name][0], two.rules[name][0], batch),
                    self._whole(one.rules[name][1], two.rules[name][1], batch),
                )
                for name in one.rules.keys() & two.rules.keys()
            },
        )

    @cached_property
    def _bytes(self) -> Mapping[str, tuple[int, int]]:
        large = self.large_profile.graph.storage
        return {each.name: (each.bytes, large[each.name].bytes) for each in self.small_profile.graph.storages}

    def _whole(self, left: int, right: int, batch: int) -> int:
        """Linear extrapolation of bytes to another batch size, rounded up and never negative."""
        return max(0, left - (left - right) * (batch - self.small) // (self.large - self.small))

    def _positive(self, left: float, right: float, batch: int) -> float:
        """Linear extrapolation of seconds to another batch size, bounded below, since noise could make them vanish."""
        line = left + (right - left) * (batch - self.small) / (self.large - self.small)
        return max(line, left * 0.5 * batch / self.small if batch > self.small else left * 0.5)


def _search_exact(make_subject: SubjectMaker, scale: BatchExtrapolation, batch: int, usable: int) -> tuple[int, Plan]:
    """The largest batch that has a plan once its step is captured and its kernels are asked for their workspaces.

    What is learned at one batch corrects the guess for the next one, until there is none left between a batch that has
    a plan and one that has not.
    """
    best: tuple[int, Plan] | None = None
    over = None
    while True:
        trade_off: Frontier = frontier(_capture_profile(make_subject, scale, batch))
        if trade_off.floor_bytes <= usable:
            best = batch, trade_off.at(usable)
        elif batch == 1:
            raise trade_off.infeasible(usable)
        else:
            over = batch
        if batch > scale.small:
            scale = BatchExtrapolation(scale.small, scale.small_profile, batch, trade_off.profile)
        fitting = best[0] if best else 0
        batch = largest_within(partial(_floor, scale), usable, scale.small, scale.large)
        batch = max(1, min(batch, over - 1 if over is not None else batch))
        if best is not None and batch <= fitting:
            return best


def _capture_profile(make_subject: SubjectMaker, scale: BatchExtrapolation, batch: int) -> Profile:
    """The profile of a batch that is not run: sizes as captured, workspaces of its very kernels, times of the scale."""
    step = trace(make_subject(batch))
    scaled = scale.at(batch, step.graph)
    own, short = probe_workspaces(step)
    return replace(
        scaled,
        workspace_bytes={**scaled.workspace_bytes, **own},
        rules={name: (seconds, short.get(name, size)) for name, (seconds, size) in scaled.rules.items()},
    )


def _confirm(
    make_subject: SubjectMaker, scale: BatchExtrapolation, batch: int, plan: Plan, size: int, usable: int
) -> tuple[int, Plan]:
    """The batch and its plan, once it was trained within `size`; where it did not fit, a smaller one."""
    while True:
        try:
            train_within(partial(make_subject, batch), partial(planned, plan=plan), size)
        except DoesNotFitError:
            if batch == 1:
                raise
            batch -= max(1, batch // RETRY_FRACTION)
            plan = frontier(_capture_profile(make_subject, scale, batch)).at(usable)
        else:
            return batch, plan


def _profile_batch(make_subject: SubjectMaker, batch: int) -> Profile:
    return profile(trace(make_subject(batch)), repeats=1)


def _floor(scale: BatchExtrapolation, batch: int) -> int:
    return explore(scale.at(batch), effort=WITHOUT_RESTARTS).floor_bytes


def _confirm_eager(make_subject: SubjectMaker, batch: int, size: int) -> int:
    """The largest batch that eager trains within `size`, beginning with a guess."""
    outcomes = {0: True}
    candidate = max(1, batch)
    while True:
        outcomes[candidate] = _fits(make_subject, candidate, size)
        if outcomes[candidate] and outcomes.get(candidate + 1) is False:
            return candidate
        if not outcomes[candidate] and outcomes.get(candidate - 1):
            return candidate - 1
        candidate += 1 if outcomes[candidate] else -1


def _fits(make_subject: SubjectMaker, batch: int, size: int) -> bool:
    try:
        train_within(partial(make_subject, batch), eager, size)
    except DoesNotFitError:
        return False
    return True
