"""Bitwise comparison of tensors: NaN equals itself, and -0.0 differs from 0.0."""

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; their strides may differ."""
    return left.dtype == right.dtype and left.shape == right.shape and not differing(left, right).any()


def equal_with_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape, strides and bits."""
    return left.stride() == right.stride() and equal(left, right)


def differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one dtype and shape differ in a bit; of a complex number, in which part."""
    return _bits(left) != _bits(right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return plain.contiguous().view(_INTEGERS[plain.element_size()])
