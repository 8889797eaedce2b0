"""Bitwise comparison of two trainings that started equal: the oracle for everything that runs a captured step."""

from collections.abc import Callable
from typing import Any

import torch

from acwb.capture.step import TracedStep
from acwb.subject import Subject

Snapshot = dict[str, Any]


def snapshot(subject: Subject, loss: torch.Tensor) -> Snapshot:
    """Copies of everything that an iteration leaves behind."""
    found: Snapshot = {"loss": loss, "random state": torch.get_rng_state()}
    for name, parameter in subject.model.named_parameters(remove_duplicate=False):
        found[f"parameter {name}"] = parameter.detach()
        found[f"gradient {name}"] = parameter.grad
        for key, value in subject.optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = value
    for name, buffer in subject.model.named_buffers(remove_duplicate=False):
        found[f"buffer {name}"] = buffer
    leaves = torch.utils._pytree.tree_leaves_with_path(subject.batch)
    found.update({f"batch{torch.utils._pytree.keystr(path)}": leaf for path, leaf in leaves})
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


class Start:
    """Where a captured step's training started, to go back there."""

    def __init__(self, step: TracedStep) -> None:
        self._optimizer = step.optimizer
        tensors = [*(slot.tensor for slot in step.slots), *step.batch.tensors]
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Put every parameter, buffer and input back; drop gradients and the optimizer's state."""
        self._optimizer.state.clear()
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
                tensor.grad = None


def train(subject: Subject, step: Callable[[], torch.Tensor], iterations: int = 3) -> list[Snapshot]:
    torch.manual_seed(11)
    return [snapshot(subject, step()) for _ in range(iterations)]


def train_to_the_end(subject: Subject, step: Callable[[], torch.Tensor], iterations: int = 3) -> list[Snapshot]:
    """As `train`, but with copies only of what the last iteration leaves, and the losses of all: for large models."""
    torch.manual_seed(11)
    losses = [step() for _ in range(iterations)]
    return [snapshot(subject, torch.stack(losses))]


def differences(left: list[Snapshot], right: list[Snapshot]) -> list[str]:
    """What is not equal to the bit, in words; empty where all is."""
    found = []
    for iteration, (mine, theirs) in enumerate(zip(left, right, strict=True)):
        if mine.keys() != theirs.keys():
            found.append(f"iteration {iteration}: only one has {sorted(mine.keys() ^ theirs.keys())}")
        for key in mine.keys() & theirs.keys():
            if not same(mine[key], theirs[key]):
                found.append(f"iteration {iteration}: {key}")
    return sorted(found)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN equals itself, and -0.0 is not 0.0."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(raw(left), raw(right))
    return type(left) is type(right) and left == right
