"""Forward and backward of a model by one plan, as autograd calls them.

The forward half hands its values over in a list, which the backward half empties as it goes; autograd itself saves
nothing. Every call has its own random states. What the model updates is written when the forward half is over.
"""

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from acwb._torch import below_autograd
from acwb.capture.step import TracedStep
from acwb.core.graph import Role
from acwb.errors import AcwbError
from acwb.execution.output_tree import Tree
from acwb.execution.partition import Halves, split
from acwb.execution.rewriter import state_name
from acwb.planning.plan import Plan
from acwb.rollback import interrupts_deferred, undone_on_error

Arguments = dict[int | str, Any]  # of one call: positional ones by number, keyword ones by name


class Program:
    """Forward and backward of a model by one plan, for arguments of one form."""

    def __init__(self, step: TracedStep, chosen: Plan, tree: Tree) -> None:
        self.plan = chosen
        self.tree = tree
        self.step = step
        states = [state_name(name) for name in chosen.schedule.replayed(chosen.profile.graph)]
        self.state_bytes = chosen.profile.graph.environment.random_state_bytes
        self.halves: Halves = split(step, states)
        self.draws = any(op.random for op in step.graph.ops)
        parameters = [position for position, slot in enumerate(step.slots) if slot.role is Role.PARAMETER]
        (output,) = step.fx_graph.find_nodes(op="output")
        self.trained = tuple(
            (position, number)
            for number, (position, gradient) in enumerate(zip(parameters, output.args[0][1], strict=True))
            if gradient is not None
        )

    def __call__(self, arguments: Arguments) -> Any:
        """What the model gives for these arguments."""
        inputs = self.step.inputs(arguments, hooks=True)
        apply: Callable[..., Any] = _Planned.apply
        outputs = apply(self, inputs, *(inputs[position] for position, _ in self.trained))
        return self.tree.filled(outputs)


class Programs(dict[Hashable, Program]):
    """The programs of a model. A copy of the model has none: they are for the very tensors that they were made with."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Programs":
        return Programs()

    def __reduce__(self) -> tuple[type["Programs"], tuple[()]]:
        return Programs, ()


class _Planned(torch.autograd.Function):
    """The two halves of a program, as autograd calls them."""

    @staticmethod
    def forward(ctx: Any, program: Program, inputs: list[torch.Tensor], *_trained: torch.Tensor) -> Any:
        halves, device = program.halves, program.step.device
        states = [torch.empty(program.state_bytes, dtype=torch.uint8) for _ in halves.states]
        with ExitStack() as writing:
            with undone_on_error(device, program.draws):
                with below_autograd(device):
                    outputs, handed, updates = halves.forward(*inputs, *states)
                former = {position: inputs[position].clone() for position in halves.stale}
                writing.enter_context(interrupts_deferred())
            if program.step.updated:
                torch._foreach_copy_([inputs[position] for position in program.step.updated], updates)
        del updates
        # Other tensors for what is handed over as well, or outputs and node would hold one another.
        given = tuple(output.detach() for output in outputs)
        ctx.program, ctx.handed, ctx.states = program, handed, states
        ctx.read = [former.get(position, inputs[position]) for position in halves.read]
        ctx.versions = _versions(ctx)
        ctx.set_materialize_grads(False)
        fixed = [each for each, form in zip(given, program.tree.forms, strict=True) if not form.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *derivatives: torch.Tensor | None) -> Any:
        program, halves = ctx.program, ctx.program.halves
        if ctx.handed is None:
            raise RuntimeError(
                "backward was called twice, but what it reads is given up by the first: use retain_graph=True there."
            )
        _check_derivatives(program, derivatives)
        _check_versions(ctx)
        handed, read, states = ctx.handed, ctx.read, ctx.states
        if torch._C._autograd._get_current_graph_task_keep_graph():
            handed = list(handed)
        else:
            ctx.handed = ctx.read = ctx.states = None
        given = [_laid_out(derivatives[at], strides) for at, strides in halves.derived.items()]
        with undone_on_error(program.step.device, program.draws), below_autograd(program.step.device):
            gradients = halves.backward(handed, *read, *states, *given)
        return (None, None, *(gradients[number] for _, number in program.trained))


def _check_derivatives(program: Program, derivatives: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse derivatives of other outputs than those that the plan is made for."""
    for name, at, derivative in zip(program.tree.names, range(len(derivatives)), derivatives, strict=True):
        if (derivative is None) == (at in program.halves.derived):
            what = "is not computed from" if derivative is None else "is also computed from"
            raise AcwbError(
                f"The loss {what} {name}, other than planned: pass to checkpoint the loss_fn that tells what the loss "
                "is computed from."
            )


def _versions(ctx: Any) -> list[int]:
    """What shows whether a value that the backward pass reads was changed; what the model itself updates may be."""
    halves, updated = ctx.program.halves, ctx.program.step.updated
    read = [tensor for position, tensor in zip(halves.read, ctx.read, strict=True) if position not in updated]
    return [tensor._version for tensor in (*read, *ctx.handed)]


def _check_versions(ctx: Any) -> None:
    """As autograd does: refuse to go on with what was changed since the forward pass."""
    if ctx.versions != _versions(ctx):
        raise RuntimeError(
            "A parameter, an input or an output that the backward pass needs was modified in place after the forward "
            "pass: modify a copy, or call backward before."
        )


def _laid_out(derivative: Any, strides: tuple[int, ...]) -> torch.Tensor:
    """A derivative in the layout in which it was recorded."""
    if derivative.stride() == strides:
        result: torch.Tensor = derivative
        return result
    empty = torch.empty_strided(derivative.shape, strides, dtype=derivative.dtype, device=derivative.device)
    return empty.copy_(derivative)


def as_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of one call as one mapping."""
    arguments: Arguments = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments
