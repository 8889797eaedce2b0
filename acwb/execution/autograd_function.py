"""Forward and backward of a model by one plan, as autograd calls them.

The forward half hands its values over in a list, which the backward half empties as it goes; autograd itself saves
nothing. Every call has its own random states. What the model updates is written when the forward half is over.
"""

from collections.abc import Callable, Sequence
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
from acwb.execution.rewriter import rewrite, state_name
from acwb.execution.tangent_layouts import Layout, same_forward_plan, strides_of
from acwb.planning.plan import Plan
from acwb.rollback import defer_signals, rollback_on_error

Arguments = dict[int | str, Any]  # of one call: positional ones by number, keyword ones by name


class PlannedCall:
    """Forward and backward of a model by one plan, for arguments of one spec and tangents of one layout.

    Tangents of another layout get a backward of their own, from the values that this forward saved; `capture_again`
    captures the step for them.
    """

    def __init__(
        self,
        step: TracedStep,
        chosen: Plan,
        tree: OutputTree,
        capture_again: Callable[[Layout], TracedStep],
    ) -> None:
        self.plan = chosen
        self._capture_again = capture_again
        self._other_layouts: dict[Layout, PartitionedStep] = {}
        self.tree = tree
        self.step = step
        self.state_bytes = chosen.profile.graph.environment.random_state_bytes
        self.parts = _partitioned(step, chosen)
        self.layout = strides_of(self.parts.tangents)
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

    def parts_for(self, layout: Layout) -> PartitionedStep:
        """The phases for tangents of this layout; their forward phase saves nothing that this plan's does not save."""
        if layout == self.layout:
            return self.parts
        if layout not in self._other_layouts:
            with torch.enable_grad():
                step = self._capture_again(layout)
            chosen = same_forward_plan(self.plan, step)
            parts = _partitioned(rewrite(step, chosen), chosen)
            for needed, have in ((parts.saved, self.parts.saved), (parts.read, self.parts.read)):
                if not set(needed) <= set(have):
                    raise AcwbError(
                        f"The tangents of the model's outputs have strides {dict(layout)}, not those that were planned "
                        f"for ({dict(self.layout)}), and need values that were not saved: pass to checkpoint the "
                        "loss_fn that tells their layout."
                    )
            self._other_layouts[layout] = parts
        return self._other_layouts[layout]


def _partitioned(step: TracedStep, chosen: Plan) -> PartitionedStep:
    return partition(step, [state_name(name) for name in chosen.schedule.replayed(chosen.profile.graph)])


class _PlannedFunction(torch.autograd.Function):
    """The two parts of a program, as autograd calls them."""

    @staticmethod
    def forward(ctx: Any, program: PlannedCall, inputs: list[torch.Tensor], *_trained: torch.Tensor) -> Any:
        parts, device = program.parts, program.step.device
        states = [torch.empty(program.state_bytes, dtype=torch.uint8) for _ in parts.states]
        with defer_signals() as signals:
            with rollback_on_error(device, program.draws):
                with below_autograd(device), signals.admit():
                    outputs, saved, updates = parts.forward(*inputs, *states)
                former = {position: inputs[position].clone() for position in parts.stale}
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
        program = ctx.program
        if ctx.saved is None:
            raise RuntimeError(
                "backward was called twice, but what it reads is given up by the first: use retain_graph=True there."
            )
        _check_tangents(program, tangents)
        _check_versions(ctx)
        given = {at: tangents[at].resolve_conj().resolve_neg() for at in program.parts.tangents}
        parts = program.parts_for(strides_of(given))
        saved = _pick(parts.saved, program.parts.saved, ctx.saved)
        read = _pick(parts.read, program.parts.read, ctx.read)
        states = _pick(parts.states, program.parts.states, ctx.states)
        if not keeps_graph():
            ctx.saved = ctx.read = ctx.states = None
        device = program.step.device
        with (
            defer_signals() as signals,
            rollback_on_error(device, program.draws),
            below_autograd(device),
            signals.admit(),
        ):
            gradients = parts.backward(saved, *read, *states, *(given[at] for at in parts.tangents))
        return (None, None, *(gradients[number] for _, number in program.trained))


def _check_tangents(program: PlannedCall, tangents: tuple[torch.Tensor | None, ...]) -> None:
    """Refuse tangents of other outputs than those that the plan is made for."""
    for name, at, tangent in zip(program.tree.names, range(len(tangents)), tangents, strict=True):
        if (tangent is None) == (at in program.parts.tangents):
            what = "is not computed from" if tangent is None else "is also computed from"
            raise AcwbError(
                f"The loss {what} {name}, other than planned: pass to checkpoint the loss_fn that tells what the loss "
                "is computed from."
            )


def _versions(ctx: Any) -> list[tuple[int, int]]:
    """Version counters and addresses of what the backward pass reads, without what the model itself updates.

    The address tells that `.data` was set, which counts as no change for autograd; a change in place through `.data`
    cannot be told.
    """
    parts, updated = ctx.program.parts, ctx.program.step.updated
    read = [tensor for position, tensor in zip(parts.read, ctx.read, strict=True) if position not in updated]
    return [(version(tensor), tensor.data_ptr()) for tensor in (*read, *ctx.saved)]


def _check_versions(ctx: Any) -> None:
    """Raise, as autograd does, if a tensor that the backward pass reads was modified in place."""
    if ctx.versions != _versions(ctx):
        raise RuntimeError(
            "A parameter, an input or an output that the backward pass needs was modified in place, or had its .data "
            "set, after the forward pass: modify a copy, or call backward before."
        )


def _pick(wanted: Sequence[Any], names: Sequence[Any], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `values`, which have these `names`, that are wanted, in their order."""
    by_name = dict(zip(names, values, strict=True))
    return [by_name[name] for name in wanted]


def as_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Positional and keyword arguments of a call as one mapping, by position or name."""
    arguments: Arguments = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments
