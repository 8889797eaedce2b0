"""Trains under a hard memory cap, so that "does not fit" is observed, not predicted.

The cap is on the data of a fresh process (RLIMIT_DATA, on CPU), set when it has run once: what the interpreter, the
libraries and the capture hold by then is not part of it, but everything that belongs to the training is, from its
parameters to workspaces.
"""

from collections.abc import Callable

import torch

from acwb.errors import DoesNotFitError, ProcessDiedError
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.profiling.process_memory import MALLOC_RETURNS_MEMORY, cap_memory, is_out_of_memory, resident_growth
from acwb.subject import StepBuilder, Subject
from acwb.units import format_bytes

OUT_OF_MEMORY = ("bad_alloc", "allocate memory")


def train_within(
    make: Callable[[], Subject], method: StepBuilder, memory: int, iterations: int = 2, seed: int = 0
) -> list[float]:
    """The losses of a training under a hard cap of `memory` bytes; `DoesNotFitError` if that is too little.

    Args:
        make: builds the subject, in the fresh process.
        method: builds the subject's step.
        memory: for parameters, buffers, the batch, the optimizer's state, gradients, activations and workspaces.
        iterations: how many losses; the optimizer's state exists from the second on.
        seed: of the random state from which the first iteration draws.
    """
    try:
        return run_in_fresh_process(_train, make, method, memory, iterations, seed, environment=MALLOC_RETURNS_MEMORY)
    except ProcessDiedError as error:
        if not any(word in str(error) for word in OUT_OF_MEMORY):
            raise
        raise DoesNotFitError(f"The step does not fit in {format_bytes(memory)}: the process was ended.") from error


def _train(make: Callable[[], Subject], method: StepBuilder, memory: int, iterations: int, seed: int) -> list[float]:
    _warm_up(make, method)
    subject = make()
    step = method(subject)
    left = memory - subject.static_bytes
    if left <= 0:
        raise DoesNotFitError(
            f"{format_bytes(subject.static_bytes)} of parameters, buffers and inputs do not fit in "
            f"{format_bytes(memory)}."
        )
    torch.manual_seed(seed)
    losses: list[float] = []

    def train() -> None:
        cap_memory(left)
        losses.extend(float(step()) for _ in range(iterations))

    try:
        grown = resident_growth(train)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        raise DoesNotFitError(f"The step does not fit in {format_bytes(memory)}: {error}") from error
    if grown > left:
        raise DoesNotFitError(
            f"The step does not fit in {format_bytes(memory)}: beside what existed before it, the process grew by "
            f"{format_bytes(grown)}, where {format_bytes(left)} were left; it used what the C library still held."
        )
    return losses


def _warm_up(make: Callable[[], Subject], method: StepBuilder) -> None:
    """Run once and throw it away: threads, kernels and buffers that libraries make and keep are not the training's."""
    method(make())()
