"""Watches a forward pass while it is recorded, and refuses what the recording would silently get wrong.

A recording has the ops of one call. What the model does besides (seeding generators, drawing from Python's or numpy's,
counting calls, swapping a tensor's data, catching the error of a question about values) is not in it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode

from acwb._torch import pytree
from acwb.capture.eager_parity import patched
from acwb.errors import CaptureError

ValueQuestion = (DataDependentOutputException, DynamicOutputShapeException)

TorchCall = tuple[str, tuple[Any, ...]]

_DATA_SETTER = vars(torch._C.TensorBase)["data"].__set__


class SideEffectWatch(TorchFunctionMode):
    """While entered, notes every call of a torch function with its numbers, and refuses `tensor.data = ...`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TorchCall] = []
        self.question: Exception | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if function == _DATA_SETTER:
            raise CaptureError(
                "The forward pass assigns to a tensor's .data, which is not recorded: write with copy_()."
            )
        if name != "__get__":  # reads an attribute
            numbers = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, (bool, int, float, str))]
            self.calls.append((name, tuple(numbers)))
        try:
            return function(*args, **(kwargs or {}))
        except ValueQuestion as error:
            self.question = error
            raise

    def refuse_differences(self, earlier: "SideEffectWatch") -> None:
        """Refuse a forward pass that did something else when it was called before."""
        for mine, theirs in zip_longest(self.calls, earlier.calls, fillvalue=("nothing more", ())):
            if mine != theirs:
                raise CaptureError(
                    f"The forward pass calls {_describe_call(theirs)} the first time and {_describe_call(mine)} the "
                    "second time, but a captured step does the same each time: keep what changes in a "
                    "buffer, and draw with torch."
                )


def _describe_call(call: TorchCall) -> str:
    return f"{call[0]}({', '.join(map(repr, call[1]))})"


@contextmanager
def watch_side_effects() -> Iterator[SideEffectWatch]:
    """Detect side effects of one call of the loss function that a trace would silently lose."""
    guard = SideEffectWatch()
    states = random.getstate(), numpy.random.get_state()
    seeding = {"manual_seed": _refuse_seeding, "fork_rng": _refuse_seeding}
    with patched(torch, manual_seed=_refuse_seeding, set_rng_state=_refuse_seeding), patched(torch.random, **seeding):
        try:
            with guard:
                yield guard
            if random.getstate() != states[0] or not _same(numpy.random.get_state(), states[1]):
                raise CaptureError(
                    "The forward pass draws from Python's or numpy's random generator, which is not recorded: draw "
                    "with torch, or before the step."
                )
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
    if guard.question is not None:
        raise guard.question


def _refuse_seeding(*_arguments: Any, **_options: Any) -> Any:
    raise CaptureError(
        "The forward pass seeds or restores torch's random generator, which is not recorded: do it before the step."
    )


def _same(left: Any, right: Any) -> bool:
    return all(numpy.array_equal(mine, theirs) for mine, theirs in zip(left, right, strict=True))
