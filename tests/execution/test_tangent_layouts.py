"""Tangents of any layout: the drop-in's gradients are eager's, whatever strides the loss outside gives."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import acwb
from acwb import bitwise
from acwb.capture.tensor_specs import TensorSpec
from acwb.evaluation.memory import allocated_growth
from acwb.execution.tangent_layouts import strides_for

ENOUGH = 10**15
Loss = Callable[[torch.Tensor], torch.Tensor]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))


def convolutions(activation: type[nn.Module]) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), activation(), nn.Conv2d(8, 8, 3), activation()]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


def gradients(parameters: nn.Module, model: nn.Module, x: torch.Tensor, loss: Loss, seed: int) -> list[torch.Tensor]:
    parameters.zero_grad()
    torch.manual_seed(seed)
    loss(model(x)).backward()
    return [parameter.grad for parameter in parameters.parameters()]


def assert_as_in_eager(make: Callable[[], nn.Module], x: torch.Tensor, losses: list[Loss], told: bool) -> int:
    """Train with each loss in turn, twice; the number of plans that it took."""
    model, eager = seeded(make), seeded(make)
    options = {"loss_fn": lambda model, batch: losses[0](model(*batch))} if told else {}
    dropin = acwb.checkpoint(model, (x,), ENOUGH, planner="recompute_all", repeats=1, **options)
    for seed, loss in enumerate(losses * 2):
        mine, theirs = gradients(model, dropin, x, loss, seed), gradients(eager, eager, x, loss, seed)
        assert all(itertools.starmap(bitwise.equal, zip(mine, theirs, strict=True)))
    return len(dropin.plans)


TARGETS = torch.randint(0, 5, (4, 7), generator=torch.Generator().manual_seed(1))
LOSSES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Loss]] = {
    "expanded": (lambda: nn.Linear(12, 16), (33, 12), lambda output: output.sum() * 0.01),
    "transposed": (perceptron, (4, 7, 12), lambda output: functional.cross_entropy(output.transpose(1, 2), TARGETS)),
    "partly expanded": (perceptron, (4, 7, 12), lambda output: output.sum(-1).square().sum()),
    "strided": (perceptron, (4, 7, 12), lambda output: output[..., ::2].square().sum()),
    "conjugate": (perceptron, (4, 7, 12), lambda output: torch.view_as_real((1 + 2j) * output).square().sum()),
}


@pytest.mark.parametrize("told", [True, False], ids=["loss_fn", "no loss_fn"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_eagers_for_any_layout_of_the_tangent(name: str, told: bool) -> None:
    make, shape, loss = LOSSES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    assert assert_as_in_eager(make, x, [loss], told) <= (1 if told else 2)


@pytest.mark.parametrize("outside", ["mse", "flatten"])
@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.ELU, nn.Mish, nn.Softplus])
def test_gradients_are_eagers_where_a_channels_last_model_meets_a_contiguous_loss(
    activation: type[nn.Module], outside: str
) -> None:
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(3)).to(memory_format=torch.channels_last)
    target = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(4))
    losses: dict[str, Loss] = {
        "mse": lambda output: functional.mse_loss(output, target),
        "flatten": lambda output: (output.flatten(1) ** 3).sum(),
    }
    assert_as_in_eager(lambda: convolutions(activation), x, [losses[outside]], told=False)


def test_losses_in_turn_get_a_plan_each() -> None:
    x = torch.randn(4, 7, 12, generator=torch.Generator().manual_seed(3))
    turns = [LOSSES[name][2] for name in ("transposed", "partly expanded")]
    assert assert_as_in_eager(perceptron, x, [*turns, lambda output: output.square().mean()], told=True) == 3


def test_a_new_layout_is_no_new_shape() -> None:
    model = seeded(perceptron)
    x = torch.randn(4, 7, 12)
    dropin = acwb.checkpoint(model, (x,), ENOUGH, planner="recompute_all", repeats=1, on_new_shape="error")
    for _ in range(2):
        dropin(x).sum().backward()
    assert len(dropin.plans) == 2


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_the_first_backward_of_a_new_layout_needs_no_more_than_the_budget(share: float) -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(64, 8))
    x = torch.randn(256, 64)
    dropin = acwb.checkpoint(model, (x,), "100%", repeats=1)
    frontier = acwb.frontier(dropin.plans[0].profile)
    budget = round(frontier.floor_bytes + share * (frontier.baseline_bytes - frontier.floor_bytes))
    dropin = acwb.checkpoint(model, (x,), budget, repeats=1)
    static = sum(tensor.nbytes for tensor in (*model.parameters(), x))

    def step() -> None:
        model.zero_grad()
        output = dropin(x)
        output.backward(torch.randn(8, 256).t())

    first = allocated_growth(step, x.device)  # it captures the step again, without memory, and plans nothing
    step()  # plans for the new layout
    model.zero_grad()
    assert static + first <= budget
    assert static + allocated_growth(step, x.device) <= budget


@pytest.mark.parametrize(
    ("known", "strides", "shape", "expected"),
    [
        ((4, 7, 5), (35, 5, 1), (2, 9, 5), (45, 5, 1)),
        ((4, 7, 5), (35, 1, 7), (2, 9, 5), (45, 1, 9)),
        ((4, 7, 5), (7, 1, 0), (2, 9, 5), (9, 1, 0)),
        ((4, 7), (0, 0), (2, 9), (0, 0)),
        ((2, 8, 5, 5), (200, 1, 40, 8), (3, 8, 4, 4), (128, 1, 32, 8)),
        ((4, 7), (14, 2), (2, 9), None),
        ((4, 7), (7, 1), (2, 9, 1), None),
    ],
)
def test_strides_at_another_shape_follow_the_order_of_those_that_are_known(
    known: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    spec = TensorSpec(torch.float32, known, torch.device("cpu"), strides, requires_grad=False)
    assert strides_for(shape, spec) == expected
