"""Ops of our own in a captured step, for what eager does and ATen's functional ops cannot express.

`gradient_copy` is the copy that autograd makes when it sets `.grad`; `bernoulli` draws in memory order, as in-place
`bernoulli_` does; `tangent` stands for a tangent from outside, in its layout.
"""

from collections.abc import Sequence

import torch

from acwb.capture.tensor_specs import TensorSpec

_LIBRARY = torch.library.Library("acwb", "DEF")
_LIBRARY.define("gradient_copy(Tensor gradient, int[] size, int[] stride) -> Tensor")
_LIBRARY.define("tangent(int output, int[] size, int[] stride, *, ScalarType dtype, Device device) -> Tensor")
_LIBRARY.define("bernoulli(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _gradient_copy(gradient: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A gradient in its parameter's layout and in memory of its own, as autograd makes it when it sets `.grad`."""
    return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _tangent(
    _output: int, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Ones in the layout of a tangent, whose elements may share memory: that of a sum is one number, expanded."""
    return TensorSpec(dtype, tuple(size), device, tuple(stride), requires_grad=False).filled(1)


def _bernoulli(like: torch.Tensor, p: float) -> torch.Tensor:
    """As `bernoulli_`, which draws in the order of memory; `aten.bernoulli.p` draws in the order of indices."""
    return torch.empty_like(like).bernoulli_(p)


_LIBRARY.impl("gradient_copy", _gradient_copy, "CompositeExplicitAutograd")
_LIBRARY.impl("tangent", _tangent, "CompositeExplicitAutograd")
_LIBRARY.impl("bernoulli", _bernoulli, "CompositeExplicitAutograd")

gradient_copy = torch.ops.acwb.gradient_copy.default
tangent = torch.ops.acwb.tangent.default
bernoulli = torch.ops.acwb.bernoulli.default
