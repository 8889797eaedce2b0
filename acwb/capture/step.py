"""A captured training step that can be run: the FX graph of a whole iteration, bound to a live model and optimizer.

`TracedStep.run` does what a plain loop does (zero_grad, forward, backward, step) from the graph's generated code, which
drops each value at its last use. `.grad` is freed first; buffers, inputs and parameters are written last.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from acwb.capture.slots import ModuleState, Slot, check_unchanged, refuse_hooks
from acwb.core.graph import Phase, Role, StepGraph
from acwb.errors import AcwbError, ChangedStepError
from acwb.rollback import interrupts_deferred, undone_on_error


@dataclass(frozen=True)
class Form:
    """What must stay the same about a tensor between capture and run."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    strides: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """The form that `tensor` has now."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device, tensor.stride(), tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def difference(self, now: torch.Tensor) -> str:
        """What is different about `now`, or "" where nothing is."""
        if now.shape != self.shape:
            return f"has shape {tuple(now.shape)}, but the step was captured with {self.shape}"
        if now.dtype != self.dtype:
            return f"is {now.dtype}, but the step was captured with {self.dtype}"
        if now.device != self.device:
            return f"is on {now.device}, but the step was captured on {self.device}"
        if now.requires_grad != self.requires_grad:
            return f"has requires_grad={now.requires_grad}, but the step was captured with {self.requires_grad}"
        if now.stride() != self.strides:
            return f"has strides {now.stride()}, but the step was captured with {self.strides}"
        return ""


def flatten_batch(batch: object) -> tuple[tuple[str, ...], tuple[Any, ...], pytree.TreeSpec]:
    """The leaves of a batch with a name for each (`batch[0]`, `batch['labels']`), and its structure."""
    if isinstance(batch, Mapping):
        batch = dict(batch)
    if not isinstance(batch, (tuple, list, dict)):
        raise AcwbError(
            f"A batch is a tuple of positional inputs or a dict of keyword inputs, not {type(batch).__name__}: "
            "write (x,) for one tensor."
        )
    paths, spec = pytree.tree_flatten_with_path(batch)
    return tuple(f"batch{pytree.keystr(path)}" for path, _ in paths), tuple(leaf for _, leaf in paths), spec


@dataclass(frozen=True, eq=False)
class CapturedBatch:
    """The batch that a step was captured with, and the form that every later one must have."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    forms: tuple[Form | None, ...]

    @classmethod
    def of(cls, batch: object) -> "CapturedBatch":
        """Take apart the batch that a step is captured with."""
        names, leaves, spec = flatten_batch(batch)
        forms = tuple(Form.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
        return cls(names, leaves, spec, forms)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def without_tensors(self) -> "CapturedBatch":
        """Its form alone."""
        pairs = zip(self.leaves, self.forms, strict=True)
        return replace(self, leaves=tuple(None if form else leaf for leaf, form in pairs))

    @property
    def tensor_names(self) -> list[str]:
        """A name for each of its tensors."""
        return [name for name, form in zip(self.names, self.forms, strict=True) if form]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """This batch with other tensors in it."""
        source = iter(tensors)
        return self.spec.unflatten(
            [next(source) if form else leaf for leaf, form in zip(self.leaves, self.forms, strict=True)]
        )

    def tensors_of(self, batch: object) -> list[torch.Tensor]:
        """The tensors of another batch of the same form."""
        names, leaves, spec = flatten_batch(batch)
        if spec != self.spec:
            raise ChangedStepError(
                f"The batch holds {', '.join(names)}, but the step was captured with {', '.join(self.names)}: "
                "pass the same structure, or trace again.",
                "batch",
            )
        for name, form, leaf, captured in zip(names, self.forms, leaves, self.leaves, strict=True):
            _check_leaf(name, form, leaf, captured)
        return [leaf for leaf, form in zip(leaves, self.forms, strict=True) if form]


def _check_leaf(name: str, form: Form | None, leaf: object, captured: object) -> None:
    if form is None:
        if type(leaf) is not type(captured) or (leaf is not captured and leaf != captured):
            raise ChangedStepError(
                f"{name} is {leaf!r}, but the step was captured with {captured!r}, which is fixed in it: trace again.",
                name,
            )
    elif not isinstance(leaf, torch.Tensor):
        raise ChangedStepError(f"{name} is {type(leaf).__name__}, but the step was captured with a tensor.", name)
    elif difference := form.difference(leaf):
        raise ChangedStepError(f"{name} {difference}: pass such a batch, or trace the model again with this one.", name)


@dataclass(frozen=True, eq=False, repr=False)
class TracedStep:
    """One training iteration, captured; `run` does it.

    Attributes:
        graph: the step as ops and storages, without torch.
        fx_graph: the same ops as FX nodes, in the same order and under the same names. Its output is the loss (in a
            list), a gradient (or None) for each parameter slot, and the new value of each slot and input in `updated`.
        slots: the model's tensors, in the order of the graph's first placeholders; the batch's tensors come next.
        updated: positions among those placeholders of what the step writes back (running statistics and the like).
        loss_fn: what computes the loss of a model and a batch in plain PyTorch; None where it is computed outside.
    """

    graph: StepGraph
    fx_graph: fx.Graph
    constants: Mapping[str, torch.Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    slots: tuple[Slot, ...]
    forms: tuple[Form, ...]
    batch: CapturedBatch
    updated: tuple[int, ...]
    modules: tuple[ModuleState, ...]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None

    def run(self, batch: object = None) -> torch.Tensor:
        """Do one iteration on `batch` (by default the captured one) and return the detached loss.

        Frees `.grad`, runs forward and backward, sets `.grad` on every trainable parameter (None where eager PyTorch
        leaves None), writes back buffers and mutated inputs, and calls the optimizer's own `step()`. An error or an
        interrupt before that leaves everything as it was, but for `.grad`, which is None; an interrupt after that waits
        for the end of the step.

        Example:
            >>> for batch in loader:
            ...     loss = step.run(batch)
            ...     scheduler.step()
        """
        inputs = self.inputs(batch)
        parameters = [tensor for slot, tensor in zip(self.slots, inputs, strict=False) if slot.role is Role.PARAMETER]
        self.free_gradients()
        with ExitStack() as writing:
            with undone_on_error(self.device, self._draws):
                with kernels_only(self.device):
                    (loss,), gradients, updates = self._compute.forward(*inputs)
                writing.enter_context(interrupts_deferred())
            if self.updated:
                with torch.no_grad():
                    torch._foreach_copy_([inputs[position] for position in self.updated], updates)
            del updates
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient
            del gradients
            if self.optimizer is not None:
                self.optimizer.step()
        result: torch.Tensor = loss
        return result

    def free_gradients(self) -> None:
        """Give up the gradients that the last run left, as every run does first."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for slot in self.slots:
            if slot.role is Role.PARAMETER and slot.tensor.requires_grad:
                slot.tensor.grad = None

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self.slots[0].tensor.device if self.slots else self.batch.tensors[0].device

    @cached_property
    def _draws(self) -> bool:
        """Whether the step draws random numbers."""
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
        for slot, form, tensor in zip(self.slots, self.forms, tensors, strict=True):
            if difference := form.difference(tensor):
                raise ChangedStepError(f"{slot.name} {difference}: trace the model again.", slot.name)
            if not hooks:
                refuse_hooks(slot.name, tensor)
        inputs = self.batch.tensors if batch is None else self.batch.tensors_of(batch)
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        if len(storages) < len(inputs) and any(position >= len(self.slots) for position in self.updated):
            raise ChangedStepError(
                "Tensors of the batch share memory, and the step writes into it: pass copies.", "batch"
            )
        return tensors + inputs

    def __repr__(self) -> str:
        return repr(self.graph).replace("StepGraph", "TracedStep", 1)


@contextmanager
def kernels_only(device: torch.device) -> Iterator[None]:
    """Run ops as recorded: below autograd, but with gradients enabled as in eager, which recurrent layers ask for."""
    no_autocast = torch.autocast(device.type, enabled=False)
    with no_autocast, torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def compute_graph(graph: fx.Graph) -> fx.Graph:
    """The part of a step's graph that its generated code runs: forward and backward, without the final writing back."""
    computed = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"] is Role.OPTIMIZER_STATE:
            continue
        if node.meta.get("phase") is Phase.OPTIMIZER or node.meta.get("writes_back"):
            continue
        copies[node] = computed.node_copy(node, copies.__getitem__)
    computed.lint()
    return computed
