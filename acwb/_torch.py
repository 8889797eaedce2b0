"""The private names of torch that are used outside of `capture`, in one place: what a new release may change.

`capture`, `evaluation.baselines` and `execution.block_checkpoint` use more of them; a test holds that no other module
does.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def below_autograd(device: torch.device) -> Iterator[None]:
    """Run ops as recorded: below autograd, but with gradients enabled as in eager, which recurrent layers ask for."""
    no_autocast = torch.autocast(device.type, enabled=False)
    with no_autocast, torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def storage_id(value: torch.Tensor) -> int:
    """What identifies the memory behind a recorded tensor."""
    return int(value.untyped_storage()._cdata)
