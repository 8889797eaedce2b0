"""The recorded optimizer step is the worst of the steps to come: no later one needs more memory than predicted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import acwb
from acwb.evaluation.memory import LiveBytesMeter, static_bytes

STEPS = 8
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.01),
    "SGD with momentum": partial(optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": optim.Adam,
    "Adam with amsgrad": partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "AdamW": optim.AdamW,
    "Adamax": optim.Adamax,
    "NAdam": partial(optim.NAdam, weight_decay=0.1),
    "RAdam": optim.RAdam,
    "RMSprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "Adadelta": optim.Adadelta,
    "Adagrad": partial(optim.Adagrad, lr_decay=0.1),
    "ASGD that averages after two steps": partial(optim.ASGD, t0=2),
}


class Partly(nn.Module):
    """A model with a large layer that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.ReLU()) for _ in range(3)))
        self.unused = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def traced(make: Callable[..., optim.Optimizer], **options: Any) -> acwb.TracedStep:
    torch.manual_seed(1)
    model = Partly()
    return acwb.trace(model, (torch.randn(8, 48),), None, make(model.parameters(), **options))


def peaks(step: acwb.TracedStep) -> list[int]:
    """The measured peak of live storages in each step from the second on, static memory included."""
    step.run()
    found = []
    for _ in range(STEPS - 1):
        step.free_gradients()
        meter = LiveBytesMeter()
        before = static_bytes(step)
        with meter:
            step.run()
        found.append(before + meter.peak)
    return found


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_predicted_peak_is_that_of_the_worst_step(name: str, foreach: bool) -> None:
    step = traced(OPTIMIZERS[name], foreach=foreach)
    assert max(peaks(step)) == max(step.graph.live_bytes)


def test_a_step_that_comes_after_a_million_others_is_counted() -> None:
    step = traced(optim.ASGD, foreach=False)
    predicted = max(step.graph.live_bytes)
    assert max(peaks(step)) < predicted
    for state in step.optimizer.state.values():
        state["step"].fill_(1_000_010)
    assert predicted - 4 <= max(peaks(step)) <= predicted  # it makes a number without an op, which no meter sees


def test_state_of_parameters_without_gradients_is_counted_and_measured() -> None:
    step = traced(optim.Adagrad)
    state = sum(value.nbytes for each in step.optimizer.state.values() for value in each.values())
    assert step.graph.bytes_by_role[acwb.Role.OPTIMIZER_STATE] == state
    assert static_bytes(step) == step.graph.static_bytes
