"""Methods of running a training step, each a function with one signature: a subject in, its step out.

Eager, the captured step, our plans, and the alternatives: block-wise and selective checkpointing, `torch.compile`'s
memory budget. All are measured by the same code. A method may wrap the subject's model: pass a `twin` where the
model is needed unchanged.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as partitioner
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from acwb.capture.step import TracedStep
from acwb.capture.tracer import trace
from acwb.errors import AcwbError
from acwb.execution.block_checkpoint import blocks_of
from acwb.execution.rewriter import PlannedStep, rewrite
from acwb.planning.plan import Plan
from acwb.subject import Step, StepBuilder, Subject

AOT, INDUCTOR = "aot_eager_decomp_partition", "inductor"

# What the policy of the op-by-op method keeps. The overload has to be named: `aten.mm` alone would match nothing.
_ATEN = torch.ops.aten
HEAVY = {
    *(_ATEN.convolution.default, _ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default),
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


def eager(subject: Subject) -> Step:
    """The ordinary training loop, the reference for every other method."""
    return subject.eager_step


def captured(subject: Subject) -> Step:
    """The captured step without a plan, to separate the cost of capture from that of recomputation."""
    return trace(subject).run


def planned(subject: Subject, plan: Plan) -> Step:
    """The captured step, rewritten to follow `plan`."""
    return rewrite(trace(subject), plan).run


def per_block(subject: Subject, every: int = 1) -> Step:
    """`torch.utils.checkpoint` around every block, or every n-th, as it is usually written."""
    for block in _blocks(subject)[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return subject.eager_step


def op_policy(subject: Subject) -> Step:
    """Selective checkpointing of every block: convolutions, matrix products and attention are kept, the rest is not."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_heavy)
    for block in _blocks(subject):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return subject.eager_step


def _keep_heavy(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in HEAVY else CheckpointPolicy.PREFER_RECOMPUTE


def sqrt_n(subject: Subject) -> Step:
    """`checkpoint_sequential` over all blocks in √n segments: the first block runs them all, the others pass on."""
    blocks = _blocks(subject)
    forwards = [block.forward for block in blocks]
    blocks[0].forward = partial(_in_segments, forwards, round(math.sqrt(len(blocks))))
    for block in blocks[1:]:
        block.forward = _pass_on
    return subject.eager_step


def _in_segments(forwards: Sequence[Callable[..., Any]], segments: int, first: Any, *args: Any, **kwargs: Any) -> Any:
    functions = [partial(_first_result, forward, args, kwargs) for forward in forwards]
    return checkpoint_sequential(functions, segments, first, use_reentrant=False)


def _first_result(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
    result = forward(value, *args, **kwargs)
    return result[0] if isinstance(result, tuple) else result


def _pass_on(value: Any, *_args: Any, **_kwargs: Any) -> Any:
    return value


def memory_budget(subject: Subject, share: float, backend: str = AOT) -> Step:
    """`torch.compile` with `activation_memory_budget`: `share` 1 keeps what its partitioner likes, 0 nothing."""
    compiled = torch.compile(subject.model, backend=_Backend(share, backend))

    def step() -> torch.Tensor:
        subject.free_gradients()
        loss = subject.loss_fn(compiled, subject.batch)  # type: ignore[arg-type]  # callable like the model
        loss.backward()
        if subject.optimizer is not None:
            subject.optimizer.step()
        return loss.detach()

    return step


class _Backend:
    """A backend with a memory budget of its own: torch compiles again for another one only if the backend differs."""

    def __init__(self, share: float, name: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend  # takes seconds to import

        self._share = share
        self._compile = lookup_backend(name)

    def __call__(self, module: Any, inputs: Any, **options: Any) -> Any:
        with partitioner.patch(activation_memory_budget=self._share):
            return self._compile(module, inputs, **options)


def _blocks(subject: Subject) -> list[nn.Module]:
    blocks = list(blocks_of(subject.model))
    if not blocks:
        raise AcwbError(
            f"{type(subject.model).__name__} has no blocks to checkpoint: no two modules of one class, with parts of "
            "their own, in an nn.Sequential or nn.ModuleList."
        )
    return blocks


def builder_of(step: TracedStep) -> StepBuilder:
    """The method that builds such a step from its subject: captured, or with its plan."""
    return partial(planned, plan=step.plan) if isinstance(step, PlannedStep) else captured
