"""Functions of our own in a step's graph, for what eager PyTorch does and ATen's functional ops cannot say.

Two of them are ops of a captured step. A rewritten step keeps the state of the random generator before a random op, and
replays the op from there: the same numbers again, and the stream goes on as if nothing had been drawn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("acwb", "DEF")
_LIBRARY.define("gradient_copy(Tensor gradient, int[] size, int[] stride) -> Tensor")
_LIBRARY.define("bernoulli(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _gradient_copy(gradient: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A gradient in its parameter's layout and in memory of its own, as autograd makes it when it sets `.grad`."""
    return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _bernoulli(like: torch.Tensor, p: float) -> torch.Tensor:
    """As `bernoulli_`, which draws in the order of memory; `aten.bernoulli.p` draws in the order of indices."""
    return torch.empty_like(like).bernoulli_(p)


_LIBRARY.impl("gradient_copy", _gradient_copy, "CompositeExplicitAutograd")
_LIBRARY.impl("bernoulli", _bernoulli, "CompositeExplicitAutograd")

gradient_copy = torch.ops.acwb.gradient_copy.default
bernoulli = torch.ops.acwb.bernoulli.default


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that ops on `profiling.devices` draw from."""
    state: torch.Tensor = (
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    )
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Have the ops on `profiling.devices` draw from a state on."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def keep_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Write the generator's state into `state`."""
    state.copy_(random_state(device))


def replayed(
    state: torch.Tensor, device: torch.device, kernel: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What a random op gave when the generator was in `state`; the generator itself does not move."""
    now = random_state(device)
    set_random_state(device, state)
    try:
        return kernel(*args, **kwargs)
    finally:
        set_random_state(device, now)
