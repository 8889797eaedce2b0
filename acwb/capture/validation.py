"""Checks the arguments of `trace`, and refuses in one sentence what cannot become a training step."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from acwb.capture.slots import Slot
from acwb.capture.tensor_specs import BatchSpec, TensorSpec
from acwb.core.graph import Role
from acwb.errors import AcwbError, CaptureError, warn_user


def check_modules(model: nn.Module) -> None:
    """Refuse modules that are not plain ones, or that cannot be captured by their settings."""
    for path, module in model.named_modules():
        where = f"Module {path}" if path else "The model"
        if isinstance(module, torch.jit.ScriptModule):
            raise AcwbError(f"{where} is TorchScript, which cannot be captured: pass the module that it was made from.")
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise AcwbError(f"{where} is compiled with torch.compile: pass the module that it was made from.")
        if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise AcwbError(f"{where} has parameters without a shape yet: run the model once before trace.")
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None and module.training:
            raise AcwbError(
                f"{where} is a {type(module).__name__} with momentum=None, which reads its count of batches in every "
                "step and cannot be captured: give it a momentum, 0.1 for one."
            )


def check_batch(batch: BatchSpec, slots: Sequence[Slot]) -> None:
    """Refuse a batch that is empty, on another device, or asks for gradients of its own."""
    if not batch.tensors:
        raise AcwbError("The batch holds no tensor: pass the tensors that the model is called with.")
    for name, leaf in zip(batch.names, batch.leaves, strict=True):
        if not isinstance(leaf, (torch.Tensor, bool, int, float, complex, str, type(None))):
            raise AcwbError(f"{name} is {describe_value(leaf)}: a batch holds tensors, numbers, strings and None.")
    device = slots[0].tensor.device if slots else batch.tensors[0].device
    for slot in slots:
        if slot.role is Role.PARAMETER and slot.tensor.device != device:
            raise AcwbError(
                f"{slot.name} is on {slot.tensor.device}, but {slots[0].name} is on {device}: put the model on one "
                "device."
            )
    for name, tensor in zip(batch.tensor_names, batch.tensors, strict=True):
        if tensor.device != device:
            raise AcwbError(
                f"{name} is on {tensor.device}, but the model is on {device}: move it with .to({str(device)!r})."
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise AcwbError(f"{name} is not a plain tensor ({tensor.layout}): pass a dense one.")
        if tensor.numel() == 0:
            raise AcwbError(f"{name} is empty (shape {tuple(tensor.shape)}): pass a batch with at least one element.")
        if tensor.requires_grad:
            raise AcwbError(f"{name} requires grad, but a step has gradients for parameters only: detach it.")


def check_optimizer(optimizer: torch.optim.Optimizer, slots: Sequence[Slot]) -> None:
    """Refuse an optimizer that was not built for this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AcwbError(f"The optimizer is {optimizer!r}, not a torch.optim.Optimizer: pass one built for the model.")
    known = {id(slot.tensor): slot for slot in slots if slot.role is Role.PARAMETER}
    held: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            held.add(id(parameter))
            if id(parameter) not in known:
                raise AcwbError(
                    f"The optimizer holds a parameter that the model does not have (group {number}, position "
                    f"{position}, {TensorSpec.of(parameter)}): build it from model.parameters()."
                )
    missing = [slot.name for key, slot in known.items() if key not in held and slot.tensor.requires_grad]
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise AcwbError(
            f"The optimizer lacks {names}, which require grad: add them to it, or freeze them with "
            "requires_grad_(False)."
        )


def check_modes(model: nn.Module) -> None:
    """Refuse surroundings in which nothing can be trained, and warn of normalization in eval mode."""
    if torch.is_inference_mode_enabled():
        raise AcwbError("trace was called inside torch.inference_mode, where nothing can be trained: leave it first.")
    normalizations = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats and not module.training
    ]
    if normalizations:
        warn_user(
            f"{len(normalizations)} normalization layers (first: {normalizations[0]}) are in eval mode: the step uses "
            "their running statistics and does not update them. For ordinary training call model.train() before trace."
        )


def check_loss(loss: object) -> None:
    """Refuse a loss that is not a differentiable real scalar."""
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"loss_fn returned {describe_value(loss)}: return one scalar tensor.")
    if math.prod(loss.shape) != 1:
        raise CaptureError(f"The loss has shape {tuple(loss.shape)}, not one value: reduce it, with .mean() for one.")
    if not loss.dtype.is_floating_point:
        raise CaptureError(f"The loss is {loss.dtype}: return a real floating-point scalar.")
    if not loss.requires_grad:
        raise CaptureError(
            "The loss does not require grad, so there is nothing to train: check that some parameters require grad and "
            "that loss_fn does not detach or run under no_grad."
        )


def describe_value(value: object) -> str:
    """Describe a value that a model or a loss function returned, for error messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {TensorSpec.of(value)}"
    if isinstance(value, dict):
        return f"{type(value).__name__} with keys {', '.join(map(repr, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"
