"""Wrong arguments of the public functions get one sentence that quotes them, at once."""

import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import acwb
from acwb.units import parse_bytes
from support.toy_graphs import network, profiled

PROFILE = profiled(network())
STEP: Any = object()

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "plan of no profile": (
        lambda: acwb.plan(STEP, "50%"),
        "plan takes a Profile, as acwb.profile gives it",
    ),
    "plan of nothing": (lambda: acwb.plan(None, "50%"), "plan takes a Profile, .* not NoneType"),  # type: ignore[arg-type]
    "frontier of no profile": (lambda: acwb.frontier(STEP), "frontier takes a Profile"),
    "bound of no profile": (lambda: acwb.lower_bound(STEP, 10), "lower_bound takes a Profile"),
    "pins that are a number": (lambda: acwb.plan(PROFILE, "100%", keep=5), "keep is 5: give op names"),  # type: ignore[arg-type]
    "planner that is a list": (lambda: acwb.plan(PROFILE, "100%", planner=[]), r"no planner \[\]"),  # type: ignore[arg-type]
    "reduction by NaN": (lambda: PROFILE.budget(float("nan")), "A reduction of nan is not"),
    "reduction by text": (lambda: PROFILE.budget("half"), "A reduction of 'half' is not"),  # type: ignore[arg-type]
    "reduction by too much": (lambda: PROFILE.budget(2), "A reduction of 2 is not"),
    "a long number": (lambda: acwb.plan(PROFILE, "9" * 400 + "GiB"), r"A budget of '9{40,}\.\.\. cannot be read"),
    "a very long number": (lambda: parse_bytes("1" * 30_000), r"A budget of '1{40,}\.\.\. cannot be read"),
    "many spaces": (lambda: parse_bytes(" " * 30_000 + "x"), "A budget of 'x' cannot be read"),
    "more than there is": (lambda: parse_bytes("1e30GiB"), "more memory than any machine has"),
    "a budget of NaN": (lambda: parse_bytes(float("nan")), "A budget of nan is not a size"),
    "no path": (lambda: acwb.Profile.load(None), "None is no path of a file"),  # type: ignore[arg-type]
    "a list for a path": (lambda: PROFILE.save([]), r"\[\] is no path of a file"),  # type: ignore[arg-type]
    "no maker to sweep": (lambda: acwb.sweep(None, [1], reduction=0.5), "sweep takes a function"),  # type: ignore[arg-type]
    "no maker to search": (lambda: acwb.largest_batch(None, "1GiB"), "largest_batch takes a function"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_gets_one_sentence(name: str) -> None:
    call, sentence = WRONG[name]
    start = time.perf_counter()
    with pytest.raises(acwb.AcwbError, match=sentence) as caught:
        call()
    assert time.perf_counter() - start < 1
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [numpy.int64(1000), numpy.int32(1000), numpy.float32(1000), numpy.float64(1000.9)])
def test_numbers_of_numpy_are_sizes(size: Any) -> None:
    assert parse_bytes(size) == 1000


class Model(nn.Module):
    """A layer, two buffers, and a forward pass from outside."""

    def __init__(self, forward: Callable[["Model", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        memory = torch.ones(4)
        self.register_buffer("one", memory)
        self.register_buffer("other", memory.view(4))
        self.call = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


FORWARDS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "a complex number": (
        lambda model, x: torch.view_as_real(1j * model.layer(x)).square().sum(),
        r"The model computes with the complex number 1j, .*: make it a tensor",
    ),
    "random numbers between bounds": (
        lambda model, x: (model.layer(x) * torch.empty_like(x).random_(0, 4)).sum(),
        r"cannot be written as code .*: use torch.randint_like",
    ),
    "buffers that share memory": (
        lambda model, x: (model.layer(x) * model.one.add_(1) + model.other).sum(),
        "one and other share memory, and the model writes into it",
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_model_that_cannot_be_captured_gets_one_sentence(name: str) -> None:
    forward, sentence = FORWARDS[name]
    with pytest.raises(acwb.CaptureError, match=sentence) as caught:
        acwb.trace(Model(forward), (torch.randn(2, 4),))
    assert "\n" not in str(caught.value)
