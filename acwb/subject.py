"""A training workload (model, batch, loss, optimizer), and the types of functions that build and run its step."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from acwb._torch import pytree, storage_id


@dataclass(frozen=True, eq=False)
class Subject:
    """A training workload: what `acwb.trace` captures, and what every method of training is compared on.

    Attributes:
        name: of the model in titles and tables, "ResNet-152"; not part of a fingerprint.
        batch: a tuple of positional inputs or a dict of keyword inputs.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss.
    """

    name: str
    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None

    def eager_step(self) -> torch.Tensor:
        """One iteration of an ordinary training loop: the reference for every captured or planned step."""
        self.free_gradients()
        loss = self.loss_fn(self.model, self.batch)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def free_gradients(self) -> None:
        """Free the gradients, as every iteration does first."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def twin(self) -> "Subject":
        """The same tensors and optimizer with a copy of the model's modules, which a method may wrap."""
        shared = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return replace(self, model=copy.deepcopy(self.model, shared))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that exists before an iteration: parameters, buffers, the batch, the optimizer's state."""
        state = self.optimizer.state.values() if self.optimizer is not None else ()
        leaves = pytree.tree_leaves(
            (list(self.model.parameters()), list(self.model.buffers()), self.batch, list(state))
        )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def static_bytes(self) -> int:
        """Bytes of all tensors that exist before an iteration; views count once."""
        storages = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in self.tensors}
        return sum(storages.values())

    @property
    def device(self) -> torch.device:
        """Where the subject is trained: the device of its first tensor."""
        return next((tensor.device for tensor in self.tensors), torch.device("cpu"))

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        optimizer = type(self.optimizer).__name__ if self.optimizer else "no optimizer"
        return f"Subject({self.name}, {parameters / 1e6:,.1f} M parameters, {optimizer})"


Step = Callable[[], torch.Tensor]  # one training iteration; returns the detached loss
StepBuilder = Callable[[Subject], Step]  # a method of training; it may wrap the subject's model
SubjectMaker = Callable[..., Subject]  # `maker(batch_size)` makes the subject: `acwb.models.resnet152`
Action = Callable[[], object]  # anything that is timed or whose memory is measured
