"""A planned model as a drop-in for any training loop: `checkpoint(model, example_inputs, budget)`.

The model's forward and backward are captured, planned and rewritten as a whole, then split where the loop computes its
loss. The result is a module with the model's own parameters, buffers and submodules under the same names. Inputs of
another spec, another mode or another precision get a plan of their own, within the same budget.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from acwb._torch import pytree
from acwb.capture.module_state import settings_of
from acwb.capture.node_meta import meta_of
from acwb.capture.step import TracedStep
from acwb.capture.tensor_specs import TensorSpec
from acwb.capture.tracer import LossFunction, capture
from acwb.capture.validation import describe_value
from acwb.core.graph import Role, StepGraph, Storage
from acwb.core.profile import Profile
from acwb.errors import AcwbError, ChangedStepError
from acwb.execution.autograd_function import Arguments, PlannedCall, as_arguments
from acwb.execution.loss_probe import arguments_of_call, probe_loss
from acwb.execution.output_tree import LossInputs, OutputTree, flatten_output
from acwb.execution.partition import inputs_overwritten_before_backward
from acwb.execution.plan_cache import PlanCache
from acwb.execution.rewriter import rewrite
from acwb.execution.shared_module import SharedModule
from acwb.execution.tangent_layouts import Layout, strides_for, strides_of
from acwb.planning.plan import Plan
from acwb.planning.planner import plan
from acwb.profiling.profiler import profile
from acwb.units import format_bytes, parse_bytes

REPLAN, ERROR = "replan", "error"
OWN_ATTRIBUTES = frozenset(nn.Module().__dict__) | {"budget_bytes", "_options", "_programs", "_loss_share", "_loss"}


def checkpoint(
    model: nn.Module,
    example_inputs: object,
    budget: int | float | str,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    on_new_shape: str = REPLAN,
    planner: str = "frontier",
    keep: str | Iterable[str] = (),
    recompute: str | Iterable[str] = (),
    repeats: int = 3,
) -> "Checkpointed":
    """The model with its activations planned for a budget: train it as before, with bitwise the same results.

    Args:
        model: in the mode in which it is trained; its parameters, buffers and submodules are used, not copied.
        example_inputs: a tuple of positional inputs or a dict of keyword inputs; with `loss_fn`, the batch for that.
        budget: the peak of a step: bytes, "1.5GiB", or "60%" of the peak without a plan. It counts what it is told of.
        loss_fn: `loss_fn(model, batch)`, as the loop computes the loss: counts what that needs, and tells which outputs
            it is computed from. Without it, that is the output's `.loss`, or else all of them.
        optimizer: counts its state and what its step needs.
        accumulate: counts the gradients of earlier batches, which stay in `.grad`.
        on_new_shape: what to do with inputs of another spec: "replan", or "error".
        planner: as in `acwb.plan`.
        keep: as in `acwb.plan`.
        recompute: as in `acwb.plan`.
        repeats: as in `acwb.profile`.

    Example:
        >>> model = acwb.checkpoint(model, (images,), "1.5GiB", optimizer=optimizer)
        >>> loss = criterion(model(images), labels)
        >>> loss.backward()
    """
    if isinstance(model, Checkpointed):
        raise AcwbError("The model has a plan already: pass the one that it was made from, which is its .unplanned.")
    if not isinstance(model, nn.Module):
        raise AcwbError(f"checkpoint needs an nn.Module, not {type(model).__name__}: pass the model itself.")
    if on_new_shape not in (REPLAN, ERROR):
        raise AcwbError(f"on_new_shape is {on_new_shape!r}: give {REPLAN!r} or {ERROR!r}.")
    options = DropinOptions(loss_fn, optimizer, accumulate, on_new_shape, planner, keep, recompute, repeats)
    planned = Checkpointed(model, options)
    if loss_fn is None:
        planned.prepare(_as_arguments(example_inputs), budget)
    else:
        planned.prepare(arguments_of_call(loss_fn, model, example_inputs), budget, example_inputs)
    return planned


@dataclass(frozen=True)
class DropinOptions:
    """The arguments of `checkpoint` that apply to all plans of a model."""

    loss_fn: LossFunction | None
    optimizer: torch.optim.Optimizer | None
    accumulate: bool
    on_new_shape: str
    planner: str
    keep: str | Iterable[str]
    recompute: str | Iterable[str]
    repeats: int


class Checkpointed(SharedModule):
    """A model whose forward and backward follow plans; parameters, buffers and submodules are the model's own.

    Without gradients it calls the model itself.

    Attributes:
        unplanned: the model.
        budget_bytes: what every plan answers to.
    """

    def __init__(self, model: nn.Module, options: DropinOptions) -> None:
        super().__init__(model)
        self.budget_bytes = 0
        self._options = options
        self._programs = PlanCache()
        self._loss_share = 0.0  # what the loss needs, as a multiple of the tangents that it gives
        self._loss: LossInputs | None = None  # what the loss function reads, once that is known

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN_ATTRIBUTES:
            super().__setattr__(name, value)
        else:
            setattr(self.unplanned, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.unplanned, name)

    def train(self, mode: bool = True) -> "Checkpointed":
        """Set the mode of the model and all its modules."""
        self.unplanned.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The `state_dict` of the wrapped model, under its own names."""
        return self.unplanned.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a `state_dict` of the wrapped model, under its own names."""
        return self.unplanned.load_state_dict(*args, **kwargs)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that were made, one for each spec of inputs."""
        return tuple(program.plan for program in self._programs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, by the plan for these inputs; without gradients, by the model itself."""
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in self.parameters()):
            return self.unplanned(*args, **kwargs)
        arguments = as_arguments(args, kwargs)
        spec = self._spec(arguments)
        program = self._programs.get(spec)
        if program is None:
            if self._programs.expected(spec) is None:
                self._refuse_new(arguments)
            program = self.prepare(arguments, self.budget_bytes)
        return program(arguments)

    def prepare(self, arguments: Arguments, budget: int | float | str, batch: object = None) -> PlannedCall:
        """Capture, profile and plan the model for arguments of this spec; `batch` is one for the loss function."""
        options = self._options
        for name, leaf in pytree.tree_leaves_with_path(arguments):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise AcwbError(
                    f"Input {pytree.keystr(name)} requires grad, but a planned model has gradients for its parameters "
                    "only: plan the whole model, from what it is given to what the loss is computed from."
                )
        spec = self._spec(arguments)
        precision = _autocast(_device_of(pytree.tree_leaves(arguments)))
        step, tree = self._capture(arguments, precision)
        if options.loss_fn is not None and batch is not None:
            self._loss_share, tangents = probe_loss(options.loss_fn, self.unplanned, batch, tree, step)
            self._loss = LossInputs(tree.names, tangents)
        layout = self._programs.expected(spec) or _expected_layout(tree, self._loss)
        if layout is not None and layout != _layout_of(step):
            step, tree = self._capture(arguments, precision, _tangents(tree, layout))
        costs = _with_loss(profile(step, repeats=options.repeats), step, self._loss_share)
        self.budget_bytes = parse_bytes(budget, costs.peak_bytes)
        chosen = plan(costs, self.budget_bytes, options.planner, options.keep, options.recompute)
        light = replace(step, batch=step.batch.without_tensors())  # or every plan would keep a batch

        def capture_again(layout: Layout) -> TracedStep:
            self._programs.expect(spec, layout)
            like = light.batch.with_tensors([each.filled(1) for each in light.batch.specs if each is not None])
            again, _ = self._capture(like, precision, _tangents(tree, layout))
            return replace(again, batch=again.batch.without_tensors())

        program = PlannedCall(rewrite(light, chosen), chosen, tree, capture_again)
        self._programs.put(spec, program)
        return program

    def _capture(
        self, arguments: Arguments, precision: torch.dtype | None, tangents: Mapping[int, TensorSpec] | None = None
    ) -> tuple[TracedStep, OutputTree]:
        """The step with an external loss and the structure of the output; with `tangents` of these specs, if given."""
        step, tree = _capture(self.unplanned, arguments, precision, self._loss, self._options.optimizer, tangents or {})
        return replace(step, graph=_with_more(step, self._options.accumulate)), tree

    def _spec(self, arguments: Arguments) -> Hashable:
        """Cache key of a plan: specs of inputs, parameters and buffers, modules' settings, autocast, kernels."""
        leaves, structure = pytree.tree_flatten(arguments)
        model, known = self.unplanned, dict[tuple[int, int], Any]()
        settings = [(id(module), *settings_of(module, known).items()) for module in model.modules()]
        return (
            str(structure),
            tuple(
                TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf)) for leaf in leaves
            ),
            tuple(settings),
            tuple(TensorSpec.of(tensor) for tensor in (*model.parameters(), *model.buffers())),
            _autocast(_device_of(leaves)),
            torch.is_autocast_cache_enabled(),
            _attention_kernels(),
        )

    def _refuse_new(self, arguments: Arguments) -> None:
        if self._options.on_new_shape == ERROR:
            specs = ", ".join(
                f"{key}: {TensorSpec.of(value) if isinstance(value, torch.Tensor) else describe_value(value)}"
                for key, value in arguments.items()
            )
            known = "; ".join(", ".join(each.profile.graph.environment.batch) for each in self.plans)
            raise ChangedStepError(
                f"There is no plan for inputs {specs} in this mode and precision, only for {known}: pass such inputs, "
                'or use on_new_shape="replan".',
                "batch",
            )

    def extra_repr(self) -> str:
        """The budget, the plans, and what the budget covers, for `print(model)`."""
        counted = ["parameters, buffers, inputs, activations, gradients, outputs and their tangents, workspaces"]
        left_out = ["memory that the C library or the allocator holds without using it"]
        options = self._options
        (counted if options.optimizer else left_out).append("the optimizer's state and step")
        (counted if options.loss_fn else left_out).append("what the loss function needs")
        (counted if options.accumulate else left_out).append("gradients of earlier batches")
        lines = [
            f"budget {format_bytes(self.budget_bytes)}",
            *(_describe_plan(each) for each in self.plans),
            f"counted: {'; '.join(counted)}",
            f"not counted: {'; '.join(left_out)}",
        ]
        return "\n".join(lines)


def _describe_plan(chosen: Plan) -> str:
    inputs = ", ".join(chosen.profile.graph.environment.batch)
    peak, plain = format_bytes(chosen.timeline.peak_bytes), format_bytes(chosen.profile.peak_bytes)
    return f"{inputs}: peak {peak} instead of {plain}, {chosen.overhead:+.1%} time"


def _expected_layout(tree: OutputTree, loss: LossInputs | None) -> Layout | None:
    """The layout of the tangents that the loss function gave for another output of the same structure."""
    if loss is None or loss.names != tree.names:
        return None
    strides = {at: strides_for(tree.specs[at].shape, tangent) for at, tangent in loss.tangents.items()}
    return tuple((at, each or tree.specs[at].strides) for at, each in sorted(strides.items()))


def _tangents(tree: OutputTree, layout: Layout) -> dict[int, TensorSpec]:
    return {at: replace(tree.specs[at], strides=strides, requires_grad=False) for at, strides in layout}


def _layout_of(step: TracedStep) -> Layout:
    """The layout of the tangents with which a step was captured."""
    metas = [meta_of(node) for node in step.fx_graph.nodes if "tangent_of" in meta_of(node)]
    return strides_of({meta["tangent_of"]: meta["val"] for meta in metas})


def _capture(
    model: nn.Module,
    arguments: Arguments,
    precision: torch.dtype | None,
    known: LossInputs | None,
    optimizer: torch.optim.Optimizer | None,
    tangents: Mapping[int, TensorSpec],
) -> tuple[TracedStep, OutputTree]:
    """Capture the step of a model with an external loss, and the structure of the model's output."""
    found: list[OutputTree] = []
    device = _device_of(pytree.tree_leaves(arguments))

    def call(model: nn.Module, batch: Arguments) -> tuple[torch.Tensor, ...]:
        with torch.autocast(device.type, dtype=precision) if precision else nullcontext():
            output = _call(model, batch)
        tree, tensors = flatten_output(output, known)
        found.append(tree)
        return tuple(tensor if position in tree.read else tensor.detach() for position, tensor in enumerate(tensors))

    with torch.autocast(device.type, enabled=False):
        step = capture(model, arguments, call, optimizer, external_loss=True, tangents=tangents)
    return step, found[-1]


def _call(model: Callable[..., Any], arguments: Mapping[int | str, Any]) -> Any:
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    return model(*positional, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def _device_of(leaves: Iterable[Any]) -> torch.device:
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


def _autocast(device: torch.device) -> torch.dtype | None:
    """The precision of autocast around the call, if there is one."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _attention_kernels() -> tuple[bool, ...]:
    """Which kernels of scaled dot product attention are enabled: flash, memory-efficient, math."""
    kinds = torch.backends.cuda
    return (kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.math_sdp_enabled())


def _as_arguments(example: object) -> Arguments:
    if isinstance(example, Mapping):
        return dict(example)
    if isinstance(example, (tuple, list)):
        return dict(enumerate(example))
    raise AcwbError(
        f"example_inputs is {describe_value(example)}: give a tuple of positional inputs or a dict of keyword inputs, "
        "(x,) for one tensor."
    )


def _with_loss(costs: Profile, step: TracedStep, share: float) -> Profile:
    """A profile in which the loss has its memory where its tangents are made."""
    tangents = [node for node in step.fx_graph.nodes if "tangent_of" in meta_of(node)]
    elements = sum(meta_of(node)["val"].nbytes for node in tangents)
    own = step.graph.storage[tangents[0].name].bytes  # in the graph, the others are made after it
    more = max(0, round(share * elements) - own)
    return replace(costs, workspace_bytes={**costs.workspace_bytes, tangents[0].name: more})


def _with_more(step: TracedStep, accumulate: bool) -> StepGraph:
    """The step's graph with what else is there: former values of what is written back, gradients of earlier batches."""
    graph = step.graph
    placeholders = step.fx_graph.find_nodes(op="placeholder")
    former = [meta_of(placeholders[position])["storage"] for position in inputs_overwritten_before_backward(step)]
    more = [Storage(f"{name}, former value", graph.storage[name].bytes, Role.OTHER) for name in former]
    if accumulate:
        for parameter, gradient in graph.gradients:
            more.append(Storage(f"{parameter}.grad", graph.storage[gradient].bytes, Role.GRADIENT))
    return replace(graph, storages=(*graph.storages, *more))
