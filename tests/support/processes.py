"""Runs in this process what the package runs in a fresh one, for tests that do not look at its memory or time."""

from collections.abc import Callable
from typing import Any


def in_this_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the place of `run_in_fresh_process`, which has tests of its own."""
    own = {name: value for name, value in kwargs.items() if name not in ("environment", "shows_progress")}
    return function(*args, **own)
