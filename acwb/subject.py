"""A training workload (model, batch, loss, optimizer), and the types of functions that build and run its step."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class Subject:
    """What `acwb.trace` takes, together: `trace(subject.model, subject.batch, subject.loss_fn, subject.optimizer)`."""

    name: str
    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None

    def eager_step(self) -> torch.Tensor:
        """One iteration as a plain PyTorch loop does it: what every captured or planned step is compared with."""
        self.free_gradients()
        loss = self.loss_fn(self.model, self.batch)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def free_gradients(self) -> None:
        """Give up the gradients, as every iteration does first."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def twin(self) -> "Subject":
        """The same tensors and the same optimizer with a model that can be wrapped while this one stays as it is."""
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
        """Their memory."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in self.tensors}
        return sum(storages.values())

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        optimizer = type(self.optimizer).__name__ if self.optimizer else "no optimizer"
        return f"Subject({self.name}, {parameters / 1e6:,.1f} M parameters, {optimizer})"


Step = Callable[[], torch.Tensor]  # one training iteration; returns the detached loss
StepBuilder = Callable[[Subject], Step]
Action = Callable[[], object]  # anything that is timed or whose memory is measured
