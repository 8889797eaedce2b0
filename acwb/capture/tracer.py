"""Captures a training step: `trace(model, batch, loss_fn, optimizer)` returns one graph of the whole iteration.

AOTAutograd's joint export records forward and backward on fake tensors: nothing is allocated, in-place ops become
values, and every input and output says what it is. `eager_parity` makes the recording follow eager bitwise,
`joint_graph` and `optimizer_step` make the step's graph from it.
"""

import contextlib
import logging
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback

from acwb import files, rng
from acwb.capture import custom_ops, eager_parity, joint_graph, optimizer_step, validation
from acwb.capture.module_state import Written, module_states, refuse_leaked_tensors, restore_attributes
from acwb.capture.side_effects import SideEffectWatch, ValueQuestion, watch_side_effects
from acwb.capture.slots import Slot, rebound_slots, refuse_hooks, slots_of, substitute_tensors
from acwb.capture.step import TracedStep
from acwb.capture.storage_analysis import describe_graph
from acwb.capture.tensor_specs import BatchSpec, TensorSpec
from acwb.core.graph import Environment, Role
from acwb.errors import AcwbError, CaptureError
from acwb.rollback import defer_signals
from acwb.subject import Subject

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
OutputFunction = Callable[[nn.Module, Any], tuple[torch.Tensor, ...]]

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(files.__file__).parent))  # torch and all of acwb
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def trace(
    model: nn.Module | Subject,
    batch: object = None,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> TracedStep:
    """Capture one training iteration of `model` as a graph that can be studied, planned and run.

    Args:
        model: on one device, in the mode (train or eval) that it will be run in; or a `Subject`, which brings the rest.
        batch: a tuple of positional inputs or a dict of keyword inputs.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss; by default the model's own output, or its `.loss`.
        optimizer: its `step()` becomes part of the graph, recorded for the steady state (after a first step).

    Example:
        >>> step = acwb.trace(model, (images, labels), lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
        >>> loss = step.run()
    """
    name = ""
    if isinstance(model, Subject):
        if batch is not None or loss_fn is not None or optimizer is not None:
            raise AcwbError("trace was given a Subject and more: it brings its own batch, loss_fn and optimizer.")
        name, batch, loss_fn, optimizer = model.name, model.batch, model.loss_fn, model.optimizer
        model = model.model
    if not isinstance(model, nn.Module):
        raise AcwbError(f"trace needs an nn.Module, not {type(model).__name__}: pass the model itself.")
    if batch is None:
        raise AcwbError("trace was given no batch: pass a tuple of positional inputs or a dict of keyword inputs.")
    if any(torch.is_autocast_enabled(device) for device in {"cpu", eager_parity.accelerator_type()}):
        raise AcwbError(
            "trace was called inside torch.autocast: enter autocast inside loss_fn, around the model's call."
        )
    loss_of = loss_fn or _own_loss

    def call(model: nn.Module, batch: Any) -> tuple[torch.Tensor]:
        loss = loss_of(model, batch)
        validation.check_loss(loss)
        return (loss,)

    return replace(capture(model, batch, call, optimizer, name=name), loss_fn=loss_of)


def capture(
    model: nn.Module,
    batch: object,
    call: OutputFunction,
    optimizer: torch.optim.Optimizer | None,
    external_loss: bool = False,
    name: str = "",
    tangents: Mapping[int, TensorSpec] = MappingProxyType({}),
) -> TracedStep:
    """Capture an iteration that starts with `call(model, batch)`, which returns the loss.

    With an `external_loss`, it returns outputs; the loss is computed from them outside of the step, and so are
    their tangents; autograd then calls the hooks on parameters. `tangents` are their specs, by the position of the
    output, where they are known: kernels of the backward pass, and so its bits, depend on strides.
    """
    validation.check_modules(model)
    captured = BatchSpec.of(batch)
    slots = slots_of(model)
    for slot in slots if not external_loss else ():
        refuse_hooks(slot.name, slot.tensor)
    validation.check_batch(captured, slots)
    if optimizer is not None:
        validation.check_optimizer(optimizer, slots)
    validation.check_modes(model)
    joint, constants, written = _record(model, slots, captured, call, external_loss, tangents)
    inputs = dict(zip(captured.tensor_names, captured.tensors, strict=True))
    assembly = joint_graph.draft_step(joint, slots, inputs, external_loss)
    if optimizer is not None:
        constants |= optimizer_step.record_optimizer_step(assembly.graph, optimizer, _trained_parameters(assembly))
    graph = joint_graph.finish_graph(assembly)
    return TracedStep(
        graph=describe_graph(graph, _environment(model, captured, optimizer), name),
        fx_graph=graph,
        constants=constants,
        model=model,
        optimizer=optimizer,
        slots=slots,
        specs=tuple(TensorSpec.of(slot.tensor) for slot in slots),
        batch=captured,
        updated=tuple(assembly.updates),
        modules=module_states(model, written),
    )


def _record(
    model: nn.Module,
    slots: tuple[Slot, ...],
    batch: BatchSpec,
    call: OutputFunction,
    external_loss: bool,
    tangents: Mapping[int, TensorSpec],
) -> tuple[fx.Graph, dict[str, torch.Tensor], Written]:
    """Record with `torch.compiler.is_compiling()` false, as in eager; true only if the model asks for values.

    Returns:
        The joint graph, its constants, and the attributes that the forward pass writes.
    """
    recording = _Capture(model, slots, batch, call, external_loss, tangents)
    try:
        return *recording.run(), frozenset(recording.written)
    except CaptureError as error:
        if not isinstance(error.__cause__, ValueQuestion):
            raise
    recording = _Capture(model, slots, batch, call, external_loss, tangents)
    return *recording.run(announced=True), frozenset(recording.written)


def _trained_parameters(assembly: joint_graph.StepDraft) -> list[optimizer_step.TrainedParameter]:
    return [
        optimizer_step.TrainedParameter(
            slot.name, slot.tensor, assembly.placeholders[position], assembly.gradients[position]
        )
        for position, slot in enumerate(assembly.slots)
        if slot.role is Role.PARAMETER
    ]


def _environment(model: nn.Module, batch: BatchSpec, optimizer: torch.optim.Optimizer | None) -> Environment:
    return Environment(
        torch=torch.__version__,
        device=str(batch.tensors[0].device),
        model=type(model).__name__,
        optimizer=type(optimizer).__name__ if optimizer else "no optimizer",
        dtype=", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})),
        batch=tuple(f"{name}: {spec}" for name, spec in zip(batch.names, batch.specs, strict=True) if spec),
        random_state_bytes=rng.get_state(batch.tensors[0].device).nbytes,
    )


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CaptureError(
            f"The model returns {validation.describe_value(output)}, which is neither a scalar loss nor has one in "
            ".loss: pass loss_fn=lambda model, batch: ... that computes the loss."
        )
    return loss


class _ExportedModule(nn.Module):
    """Every distinct tensor of a model exactly once, for the export.

    The export lists a tied weight under each of its names, and no order of summing the partial gradients gives eager's
    bits; with one name there is one gradient, summed by autograd itself.
    """

    def __init__(
        self, slots: Sequence[Slot], stand_ins: Sequence[torch.Tensor], call: Callable[..., tuple[torch.Tensor, ...]]
    ) -> None:
        super().__init__()
        self.call = call
        self.names = joint_graph.slot_names(slots)
        for name, slot, tensor in zip(self.names, slots, stand_ins, strict=True):
            if slot.role is Role.PARAMETER:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=slot.tensor.requires_grad))
            else:
                self.register_buffer(name, tensor)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.call([getattr(self, name) for name in self.names], inputs)


class _TangentFromOutside(torch.autograd.Function):
    """Identity whose backward starts from a tangent of its own, in a given layout and in memory of its own."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, position: int, strides: tuple[int, ...]) -> torch.Tensor:
        ctx.arguments = (position, list(output.shape), list(strides))
        ctx.options = {"dtype": output.dtype, "device": output.device}
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *_of_the_export: torch.Tensor) -> Any:
        return custom_ops.tangent(*ctx.arguments, **ctx.options), None, None


class _Capture:
    """One capture. It knows where in the model it is: ops get module paths, and errors name a module and a line."""

    def __init__(
        self,
        model: nn.Module,
        slots: tuple[Slot, ...],
        batch: BatchSpec,
        call: OutputFunction,
        external_loss: bool,
        tangents: Mapping[int, TensorSpec],
    ) -> None:
        self.tangents = tangents
        self.model = model
        self.slots = slots
        self.batch = batch
        self.call = call
        self.external_loss = external_loss
        self.cache_casts = torch.is_autocast_cache_enabled()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.inside: list[nn.Module] = []
        self.returned = ""
        self.rebound: list[Slot] = []
        self.written: set[tuple[int, str]] = set()
        self.earlier: SideEffectWatch | None = None

    def run(self, announced: bool = False) -> tuple[fx.Graph, dict[str, torch.Tensor]]:
        """The joint graph of forward and backward, and the constants that it refers to."""
        # Tensors that the forward pass finds elsewhere (in a closure, in a list) become constants of the graph.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # An LSTM's two biases have one gradient when it is first recorded, but two from torch's cache of recordings.
        fake.cache_enabled = not any(isinstance(module, nn.RNNBase) for module in self.model.modules())
        stand_ins = [fake.from_tensor(slot.tensor.detach()) for slot in self.slots]
        inputs = tuple(fake.from_tensor(tensor.detach()) for tensor in self.batch.tensors)
        with defer_signals() as signals, contextlib.ExitStack() as stack:
            stack.enter_context(self)
            stack.enter_context(restore_attributes(self.model, self.written))
            stack.enter_context(eager_parity.as_in_eager(announced))
            # An error is reported as one sentence; torch would log its traceback besides.
            stack.enter_context(eager_parity.patched(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True))
            # Checkpoints work by hooks on saved tensors, which a recording ignores.
            hooks = torch.autograd.graph.saved_tensors_hooks
            stack.enter_context(eager_parity.patched(hooks, __enter__=self._refuse_checkpoint))
            stack.enter_context(fx_traceback.preserve_node_meta())
            stack.callback(nn.modules.module.register_module_forward_pre_hook(self._enter_module).remove)
            stack.callback(nn.modules.module.register_module_forward_hook(self._leave_module).remove)
            with signals.admit():
                export = aot_export_joint_with_descriptors(
                    stack, _ExportedModule(self.slots, stand_ins, self._forward), inputs
                )
        graph: fx.Graph = export.graph_module.graph
        self._refuse_lost_state(graph)
        return graph, _constants(export.graph_module)

    def _forward(self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with (
            defer_signals() as signals,
            substitute_tensors(self.slots, tensors),
            eager_parity.cast_cache(tensors, self.cache_casts),
            watch_side_effects() as guard,
            signals.admit(),
        ):
            outputs = self.call(self.model, self.batch.with_tensors(inputs))
            self.rebound = rebound_slots(self.slots, tensors)
            if self.external_loss:
                refuse_leaked_tensors(self.model, tensors)
        if self.earlier is not None:
            guard.refuse_differences(self.earlier)
        self.earlier = guard
        known = {id(tensor) for tensor in (*tensors, *inputs)}
        return tuple(self._apart(position, output, known) for position, output in enumerate(outputs))

    def _apart(self, position: int, output: torch.Tensor, given: set[int]) -> torch.Tensor:
        """An output for the export, which treats differentiable views and inputs specially, and recorded tangents."""
        if id(output) in given or (output._base is not None and id(output._base) in given):
            copy = output.clone()
            if self.external_loss and copy.stride() != output.stride():
                raise CaptureError(
                    "The model returns a part of an input or of a parameter as it lies in memory, which a planned "
                    "model cannot: return a copy of it, with .contiguous()."
                )
            output = copy
        if self.external_loss and output.requires_grad:
            spec = self.tangents.get(position)
            strides = spec.strides if spec is not None else torch.empty_like(output).stride()
            result: torch.Tensor = _TangentFromOutside.apply(output, position, strides)  # type: ignore[no-untyped-call]
            return result
        return output.clone() if output.requires_grad and output._is_view() else output

    def _enter_module(self, module: nn.Module, _arguments: object) -> None:
        if id(module) in self.paths:
            self.inside.append(module)
            self._annotate()

    def _leave_module(self, module: nn.Module, _arguments: object, output: object) -> None:
        if id(module) not in self.paths:
            return
        while self.inside.pop() is not module:  # where the model itself caught an exception from a submodule
            pass
        self._annotate()
        if module is self.model:
            self.returned = validation.describe_value(output)

    def _annotate(self) -> None:
        """Have the ops that are recorded from here on, and their backward ops, carry the module's path."""
        path = self.paths[id(self.inside[-1])] if self.inside else ""
        fx_traceback.current_meta["custom"] = {"module": path}

    def _refuse_checkpoint(self) -> None:
        path = self.paths[id(self.inside[-1])] if self.inside else ""
        raise CaptureError(
            f"{f'Module {path}' if path else 'The model'} already decides what to keep (torch.utils.checkpoint or "
            "other hooks on saved tensors): switch that off (in transformers, activation_checkpointing_disable()).",
            path,
        )

    def _refuse_lost_state(self, graph: fx.Graph) -> None:
        """Refuse a model that carries state from step to step by assigning a tensor instead of writing into it."""
        read = {getattr(node.meta["desc"], "target", None) for node in graph.find_nodes(op="placeholder") if node.users}
        for name, slot in zip(joint_graph.slot_names(self.slots), self.slots, strict=True):
            is_attribute = all(place.table == "__dict__" for place in slot.places)
            if slot in self.rebound and (name in read or not is_attribute):
                raise CaptureError(
                    f"The forward pass assigns a new tensor to {slot.name}, which a captured step cannot keep: write "
                    f"into it with {slot.name.rpartition('.')[2]}.copy_(...)."
                )

    def __enter__(self) -> None:
        """Begin to turn errors of the capture into `CaptureError`s."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> None:
        """Turn an error of the capture into a `CaptureError` that names the module and the line."""
        if not isinstance(error, Exception) or isinstance(error, AcwbError):
            return
        frame = _users_frame(error)
        location = f"{frame.filename}:{frame.lineno}" if frame else ""
        at = f" at {location} ({textwrap.shorten(frame.line or '', 90)})" if frame else ""
        module = self.inside[-1] if self.inside else None
        path = self.paths[id(module)] if module else ""
        where = f"{f'module {path}' if path else 'the model'} ({type(module).__name__})" if module else "loss_fn"
        raise CaptureError(self._sentence(error, where, at), path, location) from error

    def _sentence(self, error: Exception, where: str, at: str) -> str:
        if isinstance(error, ValueQuestion):
            return (
                f"What {where} does depends on the values of a tensor{at}: {error.func} cannot be captured, because a "
                "captured step runs the same ops for every batch. Use torch.where or a mask instead, or compute the "
                "value before the step and pass it in the batch as a number."
            )
        reason = str(error).strip().split("\n")[0].replace("FunctionalTensor", "Tensor") or "no message"
        if isinstance(error, SyntaxError):
            line = textwrap.shorten(error.text or "", 90)
            return (
                f"The step has an op that cannot be written as code ({line}), as in-place random numbers between two "
                "bounds: use torch.randint_like."
            )
        if "share storage" in reason:
            slots = [self.slots[int(number)].name for number in re.findall(rf"'{joint_graph.SLOT}(\d+)'", reason)]
            if slots:
                return (
                    f"{' and '.join(slots)} share memory, and the model writes into it, which cannot be captured: give "
                    "each memory of its own, with .clone(), or make them one tensor."
                )
            return f"The model writes into tensors of the batch that share memory: pass copies of them ({reason})"
        if "entirely functional graph" in reason:
            return (
                f"The step writes into a tensor that the model does not hold: make it a buffer of the model ({reason})"
            )
        if "Unexpected fake" in reason:
            return f"The model makes a tensor on first use and keeps it: run the model once before trace ({reason})"
        if "numpy()" in reason:
            return f"A tensor's data is asked for in {where}{at}, but a capture has none: compute this before the step."
        returned = f" The model returned {self.returned}." if where == "loss_fn" and self.returned else ""
        return f"{type(error).__name__} in {where}{at}: {reason}{'' if reason.endswith('.') else '.'}{returned}"


def _users_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost line that belongs neither to torch nor to acwb."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (frame for frame in reversed(frames) if frame.line and not frame.filename.startswith(_NOT_THE_USERS))
    return next((frame for frame in own if Path(frame.filename).parent != Path(_STANDARD_LIBRARY)), None)


def _constants(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    constants: dict[str, torch.Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"The step uses an object of type {type(value).__name__}, which cannot be captured.")
        if value.requires_grad:
            raise CaptureError(
                f"The step uses a tensor ({TensorSpec.of(value)}) that requires grad and is not a parameter of the "
                "model: make it one, or detach it."
            )
        constants[node.target] = value
    return constants
