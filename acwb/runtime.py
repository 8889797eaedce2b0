"""A planned model as a drop-in for any training loop: `checkpoint(model, example_inputs, budget)`.

The model's forward and backward are captured, planned and rewritten as a whole, then split where the loop computes its
loss. The result is a module with the model's own parameters, buffers and submodules under the same names. Inputs of
another form, another mode or another precision get a plan of their own, within the same budget.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from acwb import kernels
from acwb.checker import described
from acwb.costs import Profile
from acwb.device import meter_of
from acwb.errors import AcwbError, CaptureError, ChangedStepError
from acwb.graph import Role, StepGraph, Storage
from acwb.planner import plan
from acwb.planners.budgets import budget_bytes
from acwb.plans import Plan
from acwb.profiler import profile
from acwb.rewriter import rewrite, state_name
from acwb.splitter import Halves, former_inputs, split
from acwb.step import Form, TracedStep, kernels_only
from acwb.tracer import LossFunction, capture
from acwb.transaction import interrupts_deferred, undone_on_error
from acwb.units import gibibytes

REPLAN, ERROR = "replan", "error"
SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")

Arguments = dict[int | str, Any]  # of one call: positional ones by number, keyword ones by name


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
    """The model with its activations planned for a budget: train it as before, with the same results to the bit.

    Args:
        model: in the mode in which it is trained; its parameters, buffers and submodules are used, not copied.
        example_inputs: a tuple of positional inputs or a dict of keyword inputs; with `loss_fn`, the batch for that.
        budget: the peak of a step: bytes, "1.5GiB", or "60%" of the peak without a plan. It counts what it is told of.
        loss_fn: `loss_fn(model, batch)`, as the loop computes the loss: counts what that needs, and tells which outputs
            it is computed from. Without it, that is the output's `.loss`, or else all of them.
        optimizer: counts its state and what its step needs.
        accumulate: counts the gradients of earlier batches, which stay in `.grad`.
        on_new_shape: what to do with inputs of another form: "replan", or "error".
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
    options = Options(loss_fn, optimizer, accumulate, on_new_shape, planner, keep, recompute, repeats)
    planned = Checkpointed(model, options)
    if loss_fn is None:
        planned.prepare(_as_arguments(example_inputs), budget)
    else:
        planned.prepare(_arguments_in(loss_fn, model, example_inputs), budget, example_inputs)
    return planned


@dataclass(frozen=True)
class Options:
    """What stays the same for all plans of a model."""

    loss_fn: LossFunction | None
    optimizer: torch.optim.Optimizer | None
    accumulate: bool
    on_new_shape: str
    planner: str
    keep: str | Iterable[str]
    recompute: str | Iterable[str]
    repeats: int


class Checkpointed(nn.Module):
    """A model whose forward and backward follow plans; parameters, buffers and submodules are the model's own.

    Without gradients it calls the model itself.

    Attributes:
        unplanned: the model.
        budget_bytes: what every plan answers to.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__()
        self.__dict__.update({table: model.__dict__[table] for table in SHARED})
        self.__dict__["unplanned"] = model
        self.training = model.training
        self.budget_bytes = 0
        self._options = options
        self._programs = Programs()
        self._loss_bytes = 0
        self._loss_reads: tuple[int, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["unplanned"], name)

    def train(self, mode: bool = True) -> "Checkpointed":
        """Set the mode of the model and all its modules."""
        self.unplanned.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.unplanned.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own."""
        return self.unplanned.load_state_dict(*args, **kwargs)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that were made, one for each form of inputs."""
        return tuple(program.plan for program in self._programs.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in self.parameters()):
            return self.unplanned(*args, **kwargs)
        arguments = _arguments(args, kwargs)
        program = self._programs.get(self._key(arguments))
        if program is None:
            self._refuse_new(arguments)
            program = self.prepare(arguments, self.budget_bytes)
        return program(arguments)

    def prepare(self, arguments: Arguments, budget: int | float | str, batch: object = None) -> "Program":
        """Capture, profile and plan the model for arguments of this form; `batch` is one for the loss function."""
        options = self._options
        step, tree = _captured(self.unplanned, arguments, self._loss_reads, options.optimizer)
        if options.loss_fn is not None and batch is not None:
            self._loss_bytes, self._loss_reads = _loss_needs(options.loss_fn, self.unplanned, batch, tree, step)
            if self._loss_reads != tree.differentiable:
                step, tree = _captured(self.unplanned, arguments, self._loss_reads, options.optimizer)
        step = replace(step, graph=_with_more(step, options.accumulate))
        costs = _with_loss(profile(step, repeats=options.repeats), step, self._loss_bytes)
        self.budget_bytes = budget_bytes(budget, costs.peak_bytes)
        chosen = plan(costs, self.budget_bytes, options.planner, options.keep, options.recompute)
        program = self._programs[self._key(arguments)] = Program(rewrite(step, chosen), chosen, tree)
        return program

    def _key(self, arguments: Arguments) -> Hashable:
        """What a plan is made for."""
        leaves, spec = pytree.tree_flatten(arguments)
        model = self.unplanned
        tensors = (*model.parameters(), *model.buffers())
        return (
            str(spec),
            tuple(Form.of(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf)) for leaf in leaves),
            tuple(module.training for module in model.modules()),
            tuple((tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors),
            _autocast(_device_of(leaves)),
        )

    def _refuse_new(self, arguments: Arguments) -> None:
        if self._options.on_new_shape == ERROR:
            forms = ", ".join(
                f"{key}: {Form.of(value) if isinstance(value, torch.Tensor) else described(value)}"
                for key, value in arguments.items()
            )
            known = "; ".join(", ".join(each.profile.graph.environment.batch) for each in self.plans)
            raise ChangedStepError(
                f"There is no plan for inputs {forms} in this mode and precision, only for {known}: pass such inputs, "
                'or use on_new_shape="replan".',
                "batch",
            )

    def extra_repr(self) -> str:
        """What is planned, and what the budget counts."""
        counted = ["parameters, buffers, inputs, activations, gradients, outputs and their derivatives, workspaces"]
        left_out = ["memory that the C library or the allocator holds without using it"]
        options = self._options
        (counted if options.optimizer else left_out).append("the optimizer's state and step")
        (counted if options.loss_fn else left_out).append("what the loss function needs")
        (counted if options.accumulate else left_out).append("gradients of earlier batches")
        lines = [
            f"budget {gibibytes(self.budget_bytes)}",
            *(_told(each) for each in self.plans),
            f"counted: {'; '.join(counted)}",
            f"not counted: {'; '.join(left_out)}",
        ]
        return "\n".join(lines)


def _told(chosen: Plan) -> str:
    inputs = ", ".join(chosen.profile.graph.environment.batch)
    peak, plain = gibibytes(chosen.timeline.peak_bytes), gibibytes(chosen.profile.peak_bytes)
    return f"{inputs}: peak {peak} instead of {plain}, {chosen.overhead:+.1%} time"


class Program:
    """Forward and backward of a model by one plan, for arguments of one form."""

    def __init__(self, step: TracedStep, chosen: Plan, tree: "Tree") -> None:
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
                with kernels_only(device):
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
        ctx.versions = [tensor._version for tensor in (*ctx.read, *handed)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for at, each in enumerate(given) if at not in halves.derived))
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
        given = [
            _laid_out(derivatives[at], form) for at, form in zip(halves.derived, program.tree.derived, strict=True)
        ]
        with undone_on_error(program.step.device, program.draws), kernels_only(program.step.device):
            gradients = halves.backward(handed, *read, *states, *given)
        return (None, None, *(gradients[number] for _, number in program.trained))


def _check_derivatives(program: Program, derivatives: tuple[torch.Tensor | None, ...]) -> None:
    missing = [program.tree.names[at] for at in program.halves.derived if derivatives[at] is None]
    if missing:
        raise AcwbError(
            f"The loss is not computed from {', '.join(missing)}, which the plan takes into account: pass loss_fn to "
            "checkpoint, which tells what the loss is computed from."
        )


def _check_versions(ctx: Any) -> None:
    """As autograd does: refuse to go on with what was changed since the forward pass."""
    if ctx.versions != [tensor._version for tensor in (*ctx.read, *ctx.handed)]:
        raise RuntimeError(
            "A parameter, an input or an output that the backward pass needs was modified in place after the forward "
            "pass: modify a copy, or call backward before."
        )


def _laid_out(derivative: Any, form: Form) -> torch.Tensor:
    """A derivative in its output's layout, as it was recorded."""
    if derivative.stride() == form.strides:
        result: torch.Tensor = derivative
        return result
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=form.device).copy_(derivative)


@dataclass(frozen=True)
class Tree:
    """What a model gives: tensors, and what stands around them.

    Attributes:
        leaves: what it gives besides tensors; in the place of a tensor, its position among them.
        names: of the tensors.
        forms: of the tensors.
        differentiable: the positions of those that a loss is computed from.
    """

    spec: pytree.TreeSpec
    leaves: tuple["int | Constant", ...]
    names: tuple[str, ...]
    forms: tuple[Form, ...]
    differentiable: tuple[int, ...]

    @property
    def derived(self) -> tuple[Form, ...]:
        """The forms of the outputs that have derivatives."""
        return tuple(self.forms[position] for position in self.differentiable)

    def filled(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """What the model gives, with these tensors."""
        return self.spec.unflatten(
            [leaf.value if isinstance(leaf, Constant) else tensors[leaf] for leaf in self.leaves]
        )


@dataclass(frozen=True)
class Constant:
    """A number, a text or None in what a model gives."""

    value: object


def _tree(output: Any, reads: tuple[int, ...] | None) -> tuple[Tree, tuple[torch.Tensor, ...]]:
    """Take apart what a model gives; `reads` are the tensors from which the loss is computed, if that is known."""
    paths, spec = pytree.tree_flatten_with_path(output)
    leaves: list[int | Constant] = []
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    for path, leaf in paths:
        name = f"output{pytree.keystr(path)}"
        if isinstance(leaf, torch.Tensor):
            leaves.append(len(tensors))
            tensors.append(leaf)
            names.append(name)
        elif isinstance(leaf, (bool, int, float, str, type(None))):
            leaves.append(Constant(leaf))
        else:
            raise CaptureError(
                f"The model gives {described(leaf)} ({name}), which a plan cannot give again: return tensors, in "
                "tuples or dicts (in transformers, set use_cache=False)."
            )
    wanted = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
    if reads is None:
        losses = [position for position in wanted if names[position] in ("output['loss']", "output.loss")]
        reads = tuple(losses or wanted)
    if not set(reads) & set(wanted):
        raise CaptureError(f"The model gives {described(output)}, of which nothing requires grad: nothing to train.")
    tree = Tree(spec, tuple(leaves), tuple(names), tuple(Form.of(tensor) for tensor in tensors), tuple(reads))
    return tree, tuple(tensors)


def _captured(
    model: nn.Module, arguments: Arguments, reads: tuple[int, ...] | None, optimizer: torch.optim.Optimizer | None
) -> tuple[TracedStep, Tree]:
    """The step of a model whose loss is computed outside, and what the model gives."""
    found: list[Tree] = []
    device = _device_of(pytree.tree_leaves(arguments))
    settings = _autocast(device)

    def call(model: nn.Module, batch: Arguments) -> tuple[torch.Tensor, ...]:
        with torch.autocast(device.type, dtype=settings) if settings else nullcontext():
            output = _call(model, batch)
        tree, tensors = _tree(output, reads)
        found.append(tree)
        return tuple(
            tensor if position in tree.differentiable else tensor.detach() for position, tensor in enumerate(tensors)
        )

    with torch.autocast(device.type, enabled=False):
        step = capture(model, arguments, call, optimizer, is_open=True)
    return step, found[-1]


def _call(model: Callable[..., Any], arguments: Mapping[int | str, Any]) -> Any:
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    return model(*positional, **{key: value for key, value in arguments.items() if isinstance(key, str)})


def _device_of(leaves: Iterable[Any]) -> torch.device:
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


def _autocast(device: torch.device) -> torch.dtype | None:
    """The precision of autocast around the call, if there is one."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    arguments: Arguments = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments


def _as_arguments(example: object) -> Arguments:
    if isinstance(example, Mapping):
        return dict(example)
    if isinstance(example, (tuple, list)):
        return dict(enumerate(example))
    raise AcwbError(
        f"example_inputs is {described(example)}: give a tuple of positional inputs or a dict of keyword inputs, (x,) "
        "for one tensor."
    )


class _Called(BaseException):
    """Carries the arguments of a call out of a loss function."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments


class _StandIn(nn.Module):
    """Looks like the model to a loss function, but answers otherwise."""

    def __init__(self, model: nn.Module, answer: Callable[[Arguments], Any]) -> None:
        super().__init__()
        self.__dict__.update(model=model, answer=answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["answer"](_arguments(args, kwargs))


def _arguments_in(loss_fn: LossFunction, model: nn.Module, batch: object) -> Arguments:
    """What a loss function calls the model with."""

    def tell(arguments: Arguments) -> None:
        raise _Called(arguments)

    try:
        loss_fn(_StandIn(model, tell), batch)
    except _Called as called:
        return called.arguments
    raise AcwbError("loss_fn does not call the model: call the module that it gets as its first argument.")


def _loss_needs(
    loss_fn: LossFunction, model: nn.Module, batch: object, tree: Tree, step: TracedStep
) -> tuple[int, tuple[int, ...]]:
    """The memory that a loss takes from outputs to derivatives, and which outputs it is computed from."""
    outputs = [
        torch.zeros(form.shape, dtype=form.dtype, device=form.device, requires_grad=position in tree.differentiable)
        for position, form in enumerate(tree.forms)
    ]
    device = step.device
    state = kernels.random_state(device)
    meter = meter_of(device)
    with torch.enable_grad(), meter, meter.watch("loss"):
        loss = loss_fn(_StandIn(model, lambda _: tree.filled(tuple(outputs))), batch)
        loss.backward()
    kernels.set_random_state(device, state)
    return meter.growth()["loss"], tuple(at for at, output in enumerate(outputs) if output.grad is not None)


def _with_loss(costs: Profile, step: TracedStep, size: int) -> Profile:
    """A profile in which the loss has its memory where its derivatives are made."""
    graph = step.graph
    derivatives = [node.name for node in step.fx_graph.nodes if "derivative_of" in node.meta]
    more = max(0, size - sum(graph.storage[name].bytes for name in derivatives))
    return replace(costs, workspace_bytes={**costs.workspace_bytes, derivatives[0]: more})


def _with_more(step: TracedStep, accumulate: bool) -> StepGraph:
    """The step's graph with what else is there: former values of what is written back, gradients of earlier batches."""
    graph = step.graph
    placeholders = step.fx_graph.find_nodes(op="placeholder")
    former = [placeholders[position].meta["storage"] for position in former_inputs(step)]
    more = [Storage(f"{name}, former value", graph.storage[name].bytes, Role.OTHER) for name in former]
    if accumulate:
        for parameter, gradient in graph.gradients:
            more.append(Storage(f"{parameter}.grad", graph.storage[gradient].bytes, Role.GRADIENT))
    return replace(graph, storages=(*graph.storages, *more))
