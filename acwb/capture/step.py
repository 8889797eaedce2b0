"""A captured training step that can be run: the FX graph of a whole iteration, bound to a live model and optimizer.

`TracedStep.run` does what a plain loop does (zero_grad, forward, backward, step) from the graph's generated code, which
drops each value at its last use. `.grad` is freed first; buffers, inputs and parameters are written last.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from acwb._torch import below_autograd, foreach_copy, storage_id
from acwb.capture.module_state import ModuleState, check_unchanged
from acwb.capture.node_meta import meta_of
from acwb.capture.slots import Slot, refuse_hooks
from acwb.capture.tensor_specs import BatchSpec, TensorSpec
from acwb.core.graph import Phase, Role, StepGraph
from acwb.errors import AcwbError, ChangedStepError
from acwb.rollback import defer_signals, rollback_on_error
from acwb.subject import Subject


@dataclass(frozen=True, eq=False, repr=False)
class TracedStep:
    """One training iteration, captured; `run` does it.

    Attributes:
        graph: the step as ops and storages, without torch.
        fx_graph: the same ops as FX nodes, in the same order and under the same names. Its output is the loss (in a
            list), a gradient (or None) for each parameter slot, and the new value of each slot and input in `updated`.
        slots: the model's tensors, in the order of the graph's first placeholders; the batch's tensors come next.
        updated: positions among those placeholders of what the step writes back (running statistics and the like).
        loss_fn: computes the loss of a model and a batch in eager; None where it is computed outside.
    """

    graph: StepGraph
    fx_graph: fx.Graph
    constants: Mapping[str, torch.Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    slots: tuple[Slot, ...]
    specs: tuple[TensorSpec, ...]
    batch: BatchSpec
    updated: tuple[int, ...]
    modules: tuple[ModuleState, ...]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None

    def run(self, batch: object = None) -> torch.Tensor:
        """Do one iteration on `batch` (by default the captured one) and return the detached loss.

        Frees `.grad`, runs forward and backward, sets `.grad` on every trainable parameter (None where eager
        leaves None), writes back buffers and mutated inputs, and calls the optimizer's own `step()`. An error or an
        interrupt before that leaves everything as it was, but for `.grad`, which is None; an interrupt after that waits
        for the end of the step.

        Example:
            >>> for batch in loader:
            ...     loss = step.run(batch)
            ...     scheduler.step()
        """
        if torch.is_autocast_enabled(self.device.type):
            raise AcwbError(
                "run was called inside torch.autocast, which does not reach a captured step: call it outside; enter "
                "autocast in loss_fn before trace."
            )
        inputs = self.inputs(batch)
        parameters = [tensor for slot, tensor in zip(self.slots, inputs, strict=False) if slot.role is Role.PARAMETER]
        with defer_signals() as signals:
            self.free_gradients()
            with rollback_on_error(self.device, self._draws), below_autograd(self.device), signals.admit():
                (loss,), gradients, updates = self._compute.forward(*inputs)
            if self.updated:
                with torch.no_grad():
                    foreach_copy([inputs[position] for position in self.updated], updates)
            del updates
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient
            del gradients
            if self.optimizer is not None:
                self.optimizer.step()
        result: torch.Tensor = loss
        return result

    @property
    def subject(self) -> Subject:
        """The workload that the step was captured from, with the captured batch."""
        if self.loss_fn is None:
            raise AcwbError("This step's loss is computed outside of it: use one that acwb.trace gave.")
        batch = self.batch.with_tensors(self.batch.tensors)
        return Subject(self.graph.title, self.model, batch, self.loss_fn, self.optimizer)

    def free_gradients(self) -> None:
        """Set all gradients to None, as every run does first."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for slot in self.slots:
            if slot.role is Role.PARAMETER and slot.tensor.requires_grad:
                slot.tensor.grad = None

    @property
    def device(self) -> torch.device:
        """The device on which the step runs."""
        return self.slots[0].tensor.device if self.slots else self.batch.tensors[0].device

    @cached_property
    def _draws(self) -> bool:
        """Whether any op of the step draws random numbers."""
        return any(op.random for op in self.graph.ops)

    @cached_property
    def _compute(self) -> fx.GraphModule:
        """Forward and backward as generated code; writing back and the optimizer are done by `run`."""
        return fx.GraphModule(dict(self.constants), compute_graph(self.fx_graph))

    def inputs(self, batch: object = None, hooks: bool = False) -> list[torch.Tensor]:
        """The tensors that a run on `batch` starts from, in the order of the graph's placeholders, checked.

        Parameters may have `hooks` on their gradients only where autograd sets these.
        """
        if torch.is_inference_mode_enabled():
            raise AcwbError("run was called inside torch.inference_mode, where nothing can be trained: leave it first.")
        check_unchanged(self.model, self.modules)
        tensors = [slot.tensor for slot in self.slots]
        self._refuse_new_ties(tensors)
        for slot, spec, tensor in zip(self.slots, self.specs, tensors, strict=True):
            if difference := spec.difference(tensor):
                raise ChangedStepError(f"{slot.name} {difference}: trace the model again.", slot.name)
            if not hooks:
                refuse_hooks(slot.name, tensor)
        inputs = self.batch.tensors if batch is None else self.batch.tensors_of(batch)
        storages = {storage_id(tensor) for tensor in inputs}
        if len(storages) < len(inputs) and any(position >= len(self.slots) for position in self.updated):
            raise ChangedStepError(
                "Tensors of the batch share memory, and the step writes into it: pass copies.", "batch"
            )
        return tensors + inputs

    def _refuse_new_ties(self, tensors: list[torch.Tensor]) -> None:
        first = dict(zip(map(id, reversed(tensors)), reversed(self.slots), strict=True))
        if len(first) < len(tensors):
            tied = next(
                (slot, first[id(tensor)])
                for slot, tensor in zip(self.slots, tensors, strict=True)
                if first[id(tensor)] is not slot
            )
            raise ChangedStepError(
                f"{tied[1].name} and {tied[0].name} are one tensor now and were two at capture: untie them, or trace "
                "the model again.",
                tied[0].name,
            )

    def __repr__(self) -> str:
        return self.graph.report("TracedStep")


def compute_graph(graph: fx.Graph) -> fx.Graph:
    """The part of a step's graph that its generated code runs: forward and backward, without the final writing back."""
    computed = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and meta_of(node)["role"] is Role.OPTIMIZER_STATE:
            continue
        if meta_of(node).get("phase") is Phase.OPTIMIZER or meta_of(node).get("writes_back"):
            continue
        copies[node] = computed.node_copy(node, copies.__getitem__)
    computed.lint()
    return computed
