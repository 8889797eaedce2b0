"""State of the random number generator: read, set, preserve, and replay a random op from a saved state.

A rewritten step records the generator's state before a random op and replays the op from there: the same numbers, and
the global stream goes on as if nothing had been drawn.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore the random state of `device` at the end."""
    used = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(used, device_type=device.type if used else "cuda"):
        yield


def get_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that ops on `device` draw from."""
    state: torch.Tensor = (
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    )
    return state


def set_state(device: torch.device, state: torch.Tensor) -> None:
    """Have the ops on `device` draw from `state` on."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def record_state(state: torch.Tensor, device: torch.device) -> None:
    """Write the generator's state into `state`."""
    state.copy_(get_state(device))


def replay(
    state: torch.Tensor, device: torch.device, kernel: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What a random op gave when the generator was in `state`; the generator itself does not move."""
    now = get_state(device)
    set_state(device, state)
    try:
        return kernel(*args, **kwargs)
    finally:
        set_state(device, now)
