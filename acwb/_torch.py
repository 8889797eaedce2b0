"""The private names of torch that are used outside of `capture`, in one place: a new release of torch may change them.

`capture`, `evaluation.baselines` and `execution.block_checkpoint` use more of them; a test holds that no other module
does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = [
    "DispatchMode",
    "allocation_events",
    "below_autograd",
    "foreach_copy",
    "keeps_graph",
    "pytree",
    "storage_id",
    "version",
]


@contextmanager
def below_autograd(device: torch.device) -> Iterator[None]:
    """Dispatch ops below autograd, with grad mode on: recurrent layers query it."""
    no_autocast = torch.autocast(device.type, enabled=False)
    with no_autocast, torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def storage_id(memory: torch.Tensor | torch.UntypedStorage) -> int:
    """Identity of the memory behind a tensor, real or fake, as long as it lives."""
    storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    return int(storage._cdata)


def version(tensor: torch.Tensor) -> int:
    """Number of in-place changes of a tensor so far, as autograd counts them."""
    return int(tensor._version)


def foreach_copy(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each value into its target."""
    torch._foreach_copy_(targets, values)


def keeps_graph() -> bool:
    """Whether the backward pass that runs now was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def allocation_events(profiler: Any) -> Any:
    """Events of a `torch.profiler.profile` that has ended; those of the allocator are called "[memory]"."""
    return profiler.profiler.kineto_results.events()
