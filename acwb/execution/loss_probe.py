"""Probes a user's loss function: how it calls the model, which outputs it reads, and the memory it needs.

A stand-in takes the model's place, so that the loss function runs without the model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from acwb import rng
from acwb.capture.step import TracedStep
from acwb.capture.tensor_specs import TensorSpec
from acwb.capture.tracer import LossFunction
from acwb.errors import AcwbError
from acwb.execution.autograd_function import Arguments, as_arguments
from acwb.execution.output_tree import OutputTree
from acwb.execution.shared_module import SharedModule
from acwb.profiling.devices import meter_of


class _Called(BaseException):
    """Carries the arguments of a call out of a loss function, also through an `except Exception` in it."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments


class _StandIn(SharedModule):
    """Module that takes the model's place in a loss function and returns `answer(arguments)`."""

    def __init__(self, model: nn.Module, answer: Callable[[Arguments], Any]) -> None:
        super().__init__(model)
        self.__dict__["answer"] = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["answer"](as_arguments(args, kwargs))


def arguments_of_call(loss_fn: LossFunction, model: nn.Module, batch: object) -> Arguments:
    """The arguments with which a loss function calls the model."""

    def tell(arguments: Arguments) -> None:
        raise _Called(arguments)

    try:
        loss_fn(_StandIn(model, tell), batch)
    except _Called as called:
        return called.arguments
    raise AcwbError("loss_fn does not call the model: call the module that it gets as its first argument.")


def probe_loss(
    loss_fn: LossFunction, model: nn.Module, batch: object, tree: OutputTree, step: TracedStep
) -> tuple[float, dict[int, TensorSpec]]:
    """The memory that a loss takes, as a multiple of its tangents' elements, and the specs of these.

    They are by the positions of the outputs that the loss is computed from.
    """
    outputs = tuple(spec.filled(1).requires_grad_(spec.requires_grad) for spec in tree.specs)
    wanted = [position for position, spec in enumerate(tree.specs) if spec.requires_grad]
    device = step.device
    meter = meter_of(device)
    with rng.preserved(device), torch.enable_grad(), meter, meter.watch("loss"):
        loss = loss_fn(_StandIn(model, lambda _: tree.filled(outputs)), batch)
        tangents = torch.autograd.grad(loss, [outputs[position] for position in wanted], allow_unused=True)
    read = {at: tangent for at, tangent in zip(wanted, tangents, strict=True) if tangent is not None}
    if not read:
        raise AcwbError("loss_fn does not compute the loss from what the model gives, so nothing would be trained.")
    share = meter.growth()["loss"] / sum(tangent.nbytes for tangent in read.values())
    return share, {at: TensorSpec.of(tangent) for at, tangent in read.items()}
