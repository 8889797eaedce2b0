"""Recompute rules: cheaper kernels that recompute an op's first output from its inputs and other outputs, bitwise.

Dropout needs no new random numbers when its mask is kept, normalization no new statistics, pooling no new search. Where
a kernel's arithmetic is a matter of how torch was built (batch normalization fuses its multiplications and additions),
the profiler compares the results on real data, and only a rule that gives the same bits there is ever used.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True)
class RecomputeRule:
    """A cheaper way to recompute an op's first output.

    Attributes:
        kernel: computes that output from the op's arguments and its other outputs.
        arguments: the positions of the arguments that it reads.
        results: the positions of the op's own results that it reads.
        applies: whether it holds for these arguments.
    """

    kernel: Callable[[Sequence[Any], Sequence[Any]], torch.Tensor]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    applies: Callable[[Sequence[Any]], bool]


def _dropout(arguments: Sequence[Any], results: Sequence[Any]) -> torch.Tensor:
    result: torch.Tensor = aten.native_dropout_backward.default(arguments[0], results[1], 1.0 / (1.0 - arguments[1]))
    return result


def _batch_norm(arguments: Sequence[Any], results: Sequence[Any]) -> torch.Tensor:
    x, weight, bias = arguments[:3]
    mean, inverse_deviation = results[1:3]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    factor = inverse_deviation * weight
    offset = torch.addcmul(bias, mean, factor, value=-1)
    return torch.addcmul(offset.view(shape), x.to(factor.dtype), factor.view(shape)).to(x.dtype)


def _max_pool(arguments: Sequence[Any], results: Sequence[Any]) -> torch.Tensor:
    x: torch.Tensor = arguments[0]
    indices = results[1]
    return x.flatten(-2).gather(-1, indices.flatten(-2)).view(indices.shape)


RULES: dict[Any, RecomputeRule] = {
    aten.native_dropout.default: RecomputeRule(_dropout, (0,), (1,), lambda arguments: arguments[1] < 1),
    aten._native_batch_norm_legit_functional.default: RecomputeRule(
        _batch_norm, (0, 1, 2), (1, 2), lambda arguments: arguments[5] and None not in arguments[1:3]
    ),
    aten.max_pool2d_with_indices.default: RecomputeRule(_max_pool, (0,), (1,), lambda _: True),
}


def parts_of(node: fx.Node) -> dict[int, fx.Node]:
    """The nodes that name parts of an op's result, by position."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def rule_of(target: Any, arguments: Sequence[Any]) -> RecomputeRule | None:
    """The rule for an op with these arguments, if there is one."""
    rule = RULES.get(target)
    return rule if rule and rule.applies(arguments) else None
