"""Forward and backward of a model by one plan, as autograd calls them.

The forward half hands its values over in a list, which the backward half empties as it goes; autograd itself saves
nothing. Every call has its own random states. What the model updates is written when the forward half is over.
"""

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from acwb._torch import below_autograd, foreach_copy, keeps_graph, version
from acwb.capture.node_meta import step_outputs
from acwb.capture.step import TracedStep
from acwb.core.graph import Role
from acwb.errors import AcwbError
from acwb.execution.output_tree import OutputTree
from acwb.execution.partition import PartitionedStep, partition
from acwb.execution.rewriter import state_name
from acwb.planning.plan import Plan
from acwb.rollback import defer_signals, rollback_on_error

Arguments = dict[int | str, Any]  # of one call: positional ones by number, keyword ones by name


class PlannedCall:
    """Forward and backward of a model by one plan, for arguments of one spec."""

    def __init__(self, step: TracedStep, chosen: Plan, tree: OutputTree) -> None:
        self.plan = chosen
        self.tree = tree
        self.step = step
        states = [state_name(name) for name in chosen.schedule.replayed(chosen.profile.graph)]
        self.state_bytes = chosen.profile.graph.environment.random_state_bytes
        self.parts: PartitionedStep = partition(step, states)
        self.draws = any(op.random for op in step.graph.ops)
        parameters = [position for position, slot in enumerate(step.slots) if slot.role is Role.PARAMETER]
        self.trained = tuple(
            (position, number)
            for number, (position, gradient) in enumerate(
                zip(parameters, step_outputs(step.fx_graph).gradients, strict=True)
            )
            if gradient is not None
        )

    def __call__(self, arguments: Arguments) -> Any:
        """Run the planned forward phase and return the model's output, connected to the planned backward."""
        inputs = self.step.inputs(arguments, hooks=True)
        apply: Callable[..., Any] = _PlannedFunction.apply
        outputs = apply(self, inputs, *(inputs[position] for position, _ in self.trained))
        return self.tree.filled(outputs)


class PlanCache(dict[Hashable, PlannedCall]):
    """The programs of a model. A copy of the model has none: they are for the very tensors that they were made with."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlanCache":
        return PlanCache()

    def __reduce__(self) -> tuple[type["PlanCache"], tuple[()]]:
        return PlanCache, ()


class _PlannedFunction(torch.autograd.Function):
    """The two parts of a program, as autograd calls them."""

    @staticmethod
    def forward(ctx: Any, program: PlannedCall, inputs: list[torch.Tensor], *_trained: torch.Tensor) -> Any:
        parts, device = program.parts, program.step.device
        states = [torch.empty(program.state_bytes, dtype=torch.uint8) for _ in parts.states]
        with ExitStack() as writing:
            with rollback_on_error(device, program.draws):
                with below_autograd(device):
                    outputs, saved, updates = parts.forward(*inputs, *states)
                former = {position: inputs[position].clone() for position in parts.stale}
                writing.enter_context(defer_signals())
            if program.step.updated:
                foreach_copy([inputs[position] for position in program.step.updated], updates)
        del updates
        # Other tensors for what is saved for backward as well, or outputs and node would hold one another.
        given = tuple(output.detach() for output in outputs)
        ctx.program, ctx.saved, ctx.states = program, saved, states
        ctx.read = [former.get(position, inputs[position]) for position in parts.read]
        ctx.versions = _versions(ctx)
        ctx.set_materialize_grads(False)
        fixed = [each for each, spec in zip(given, program.tree.specs, strict=True) if not spec.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        program, parts = ctx.program, ctx.program.parts
        if ctx.saved is None:
            raise RuntimeError(
                "backward was called twice, but what it reads is given up by the first: use retain_graph=True there."
            )
        _check_tangents(program, tangents)
        _check_versions(ctx)
        saved, read, states = ctx.saved, ctx.read, ctx.states
        if keeps_graph():
            saved = list(saved)
        else:
            ctx.saved = ctx.read = ctx.states = None
        given = [_laid_out(tangents[at], strides) for at, strides in parts.tangent_strides.items()]
        with rollback_on_error(program.step.device, program.draws), below_autograd(program.step.device):
            gradients = parts.backward(saved, *read, *states, *given)
        return (None, None, *(gradients[number] for _, number in program.trained))


def _check_tangents(program: PlannedCall, tangents: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse tangents of other outputs than those that the plan is made for."""
    for name, at, tangent in zip(program.tree.names, range(len(tangents)), tangents, strict=True):
        if (tangent is None) == (at in program.parts.tangent_strides):
            what = "is not computed from" if tangent is None else "is also computed from"
            raise AcwbError(
                f"The loss {what} {name}, other than planned: pass to checkpoint the loss_fn that tells what the loss "
                "is computed from."
            )


def _versions(ctx: Any) -> list[int]:
    """Version counters of the tensors that the backward pass reads, without those that the model itself updates."""
    parts, updated = ctx.program.parts, ctx.program.step.updated
    read = [tensor for position, tensor in zip(parts.read, ctx.read, strict=True) if position not in updated]
    return [version(tensor) for tensor in (*read, *ctx.saved)]


def _check_versions(ctx: Any) -> None:
    """Raise, as autograd does, if a tensor that the backward pass reads was modified in place."""
    if ctx.versions != _versions(ctx):
        raise RuntimeError(
            "A parameter, an input or an output that the backward pass needs was modified in place after the forward "
            "pass: modify a copy, or call backward before."
        )


def _laid_out(tangent: Any, strides: tuple[int, ...]) -> torch.Tensor:
    """A tangent in the layout in which it was recorded."""
    if tangent.stride() == strides:
        result: torch.Tensor = tangent
        return result
    empty = torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device)
    return empty.copy_(tangent)


def as_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Positional and keyword arguments of a call as one mapping, by position or name."""
    arguments: Arguments = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments
