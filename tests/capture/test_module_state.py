"""What a captured step has built in may not change unseen: it is followed, or refused in a sentence."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import acwb
from acwb import bitwise


@dataclass
class Inner:
    factor: float = 2.0


@dataclass
class Configuration:
    inner: Inner = field(default_factory=Inner)
    sizes: dict[str, list[int]] = field(default_factory=lambda: {"heads": [2, 4]})


class Configurable(nn.Module):
    """A model whose forward depends on attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.mask: torch.Tensor | None = None
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.precision = torch.float32
        self.configuration = Configuration()
        self.options = SimpleNamespace(deep={"inside": [1.0]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.first(x)) * self.configuration.inner.factor * self.options.deep["inside"][0]
        hidden = hidden if self.mask is None else hidden * self.mask
        return self.second(hidden.to(self.precision).float()) * self.configuration.sizes["heads"][0]


def tie(model: Any) -> None:
    model.second.weight = model.first.weight


def set_mask(model: Any) -> None:
    model.mask = torch.rand(4)


def set_function(model: Any) -> None:
    model.activation = torch.tanh


def set_precision(model: Any) -> None:
    model.precision = torch.bfloat16


def set_inner_number(model: Any) -> None:
    model.configuration.inner.factor = 3.0


def set_number_in_a_list(model: Any) -> None:
    model.configuration.sizes["heads"][0] = 8


def set_number_in_a_namespace(model: Any) -> None:
    model.options.deep["inside"][0] = 5.0


def set_forward(model: Any) -> None:
    model.forward = lambda x: model.second(x)


def drop_a_bias(model: Any) -> None:
    model.first.bias = None


CHANGES = (
    tie,
    set_mask,
    set_function,
    set_precision,
    set_inner_number,
    set_number_in_a_list,
    set_number_in_a_namespace,
    set_forward,
    drop_a_bias,
)


def own_loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return model(*batch).square().mean()


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_refuses_to_run_after_a_change(change: Callable[[Any], None]) -> None:
    model, x = Configurable(), torch.randn(3, 4)
    step = acwb.trace(model, (x,), own_loss)
    step.run()
    change(model)
    with pytest.raises(acwb.ChangedStepError, match="trace"):
        step.run()


@pytest.mark.parametrize("change", CHANGES)
def test_the_drop_in_follows_a_change(change: Callable[[Any], None]) -> None:
    torch.manual_seed(5)
    model, x = Configurable(), torch.randn(3, 4)
    drop = acwb.checkpoint(model, (x,), 10**12, repeats=1)
    drop(x).square().mean().backward()
    change(model)
    model.zero_grad()
    own_loss(model, (x,)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    own_loss(drop, (x,)).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            assert bitwise.equal(parameter.grad, gradient)


def test_a_forward_that_its_class_gets_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Configurable(), torch.randn(3, 4)
    step = acwb.trace(model, (x,), own_loss)
    monkeypatch.setattr(Configurable, "forward", lambda self, x: self.second(x))
    with pytest.raises(acwb.ChangedStepError, match="forward"):
        step.run()


def test_autocast_around_a_run_is_refused() -> None:
    step = acwb.trace(Configurable(), (torch.randn(3, 4),), own_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(acwb.AcwbError, match=r"inside torch\.autocast"):
        step.run()


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_hook,
    ],
)
def test_a_hook_on_all_modules_is_refused_by_step_and_drop_in(register: Callable[..., Any]) -> None:
    model, x = Configurable(), torch.randn(3, 4)
    step = acwb.trace(model, (x,), own_loss)
    drop = acwb.checkpoint(model, (x,), 10**12, repeats=1)
    handle = register(lambda *_: None)
    try:
        with pytest.raises(acwb.ChangedStepError, match="hooks"):
            step.run()
        with pytest.raises(acwb.ChangedStepError, match="hooks"):
            drop(x)
    finally:
        handle.remove()
    step.run()


def test_attributes_that_the_forward_pass_writes_may_change() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.layer(x).detach()
            return self.layer(x).square().sum()

    step = acwb.trace(Remembering(), (torch.randn(3, 4),))
    assert acwb.verify(step, iterations=2)  # which runs the model itself between runs of the step
