"""Bitwise comparison of tensors: NaN equals itself, and -0.0 differs from 0.0."""

import torch

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def equal_with_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal in every bit and in layout."""
    if left.dtype != right.dtype or left.shape != right.shape or left.stride() != right.stride():
        return False
    whole = _WHOLE_NUMBERS[left.itemsize]
    return torch.equal(left.view(whole), right.view(whole))
