"""The plain alternative, asked for by name: `torch.utils.checkpoint` around every block, without a plan or a budget.

A model comes in and goes out again with other forwards on its blocks: everything inside a block is recomputed in the
backward pass. Unlike the usual wrapping, batch-norm statistics (any buffer that a forward changes) are updated once.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils.checkpoint import checkpoint

from acwb._torch import pytree
from acwb.errors import AcwbError, check_count

CONTAINERS = (nn.Sequential, nn.ModuleList)
Kind = tuple[Any, ...]
MIN_SEQUENTIAL_LENGTH = 4  # two chunks of two: with fewer, an nn.Sequential is not worth cutting


def per_block_checkpoint(model: nn.Module, every: int = 1) -> nn.Module:
    """Checkpoint the blocks of `model`, which is changed in place, in its forward only, and returned.

    Blocks are the outermost members of an `nn.Sequential` or `nn.ModuleList` that have parts of their own and whose
    class stands in such places at least twice: ResNet bottlenecks, transformer layers. A model without any has each
    `nn.Sequential` of at least 4 members cut into about √n chunks. Parameters, classes, paths and `state_dict` stay,
    copies and pickles work, `torch.nn.DataParallel` does not. In eval mode and without gradients nothing is different.
    Loss, gradients, buffers and random state are bitwise those of the model without it; hooks inside a block run twice.

    Args:
        model: the model to change; `remove_block_checkpoints` undoes it.
        every: 1 for all blocks, 2 for every second one, beginning with the first.

    Example:
        >>> model = per_block_checkpoint(torchvision.models.resnet50())
        >>> checkpointed_blocks(model)[:2]
        ['layer1.0', 'layer1.1']
    """
    if not isinstance(model, nn.Module):
        raise AcwbError(f"model is {model!r}: give an nn.Module.")
    check_count("every", every)
    _check_untouched(model)
    blocks = list(blocks_of(model).items())
    forwards: list[_Forward] = [_Forward(block, path) for block, path in blocks[::every]]
    if not forwards:
        forwards = [_ChunkedForward(block, path, every) for block, path in _sequentials(model).items()]
    if not forwards:
        raise AcwbError(
            f"{type(model).__name__} has no blocks: no two modules of one class, with parts of their own, in an "
            f"nn.Sequential or nn.ModuleList, and no nn.Sequential of at least {MIN_SEQUENTIAL_LENGTH} members. Build "
            "it from such parts, or use acwb.trace and acwb.plan, which need no blocks."
        )
    for forward in forwards:
        if "forward" in vars(forward.block):
            raise AcwbError(f"{forward.title} has a forward that was set on the object: remove that one first.")
    for forward in forwards:
        vars(forward.block)["forward"] = forward
    return model


def remove_block_checkpoints(model: nn.Module) -> nn.Module:
    """Restore the original forwards of the blocks of `model`; returns the same model."""
    forwards = _forwards(model)
    if not forwards:
        raise AcwbError(f"{type(model).__name__} has no checkpointed blocks: there is nothing to remove.")
    for forward in forwards:
        del vars(forward.block)["forward"]
    return model


def checkpointed_blocks(model: nn.Module) -> list[str]:
    """The paths of what is checkpointed in `model`, "features[0:7]" for a chunk of an `nn.Sequential`."""
    return [name for forward in _forwards(model) for name in forward.names()]


class _Forward:
    """Checkpointing forward of a block; it is copied and pickled with the block, and does not keep it alive."""

    def __init__(self, block: nn.Module, path: str) -> None:
        self._block = weakref.ref(block)
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_block": self.block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _block=weakref.ref(state["_block"]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        if block.training and torch.is_grad_enabled():
            return self.run(block, args, kwargs)
        return type(block).forward(block, *args, **kwargs)

    @property
    def block(self) -> nn.Module:
        block = self._block()
        assert block is not None, f"the block {self.path} is gone"
        return block

    @property
    def title(self) -> str:
        return f"Block {self.path}" if self.path else "The model"

    def names(self) -> list[str]:
        return [self.path]

    def run(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's result, with nothing kept but the arguments and the buffers that it changes."""
        values = (*args, *kwargs.values())
        if any(base.__module__ == "transformers.cache_utils" for value in values for base in type(value).__mro__):
            raise AcwbError(
                f"{self.title} is given a key-value cache, which a second run would fill again: train with "
                "model.config.use_cache = False."
            )
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        # The tensors are passed twice: of those that stand by themselves, torch checks that nobody changes them
        # until the recomputation.
        result = checkpoint(_BlockRun(block), args, kwargs, *tensors, use_reentrant=False, preserve_rng_state=True)
        if [tensor._version for tensor in tensors] != versions:
            raise AcwbError(
                f"{self.title} ({type(block).__name__}) changes its input in place, so it cannot be recomputed from "
                "it: build its first part with inplace=False."
            )
        return result


class _ChunkedForward(_Forward):
    """Checkpointing forward of an `nn.Sequential` that is cut into chunks."""

    def __init__(self, block: nn.Module, path: str, every: int) -> None:
        super().__init__(block, path)
        self.every = every

    def names(self) -> list[str]:
        found, start = [], 0
        for number, chunk in enumerate(_chunks(self.block)):
            if number % self.every == 0:
                found.append(f"{self.path}[{start}:{start + len(chunk)}]")
            start += len(chunk)
        return found

    def run(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for number, chunk in enumerate(_chunks(block)):
            if number % self.every == 0:
                args, kwargs = (super().run(chunk, args, kwargs),), {}
            else:
                args, kwargs = (chunk(*args, **kwargs),), {}
        return args[0]


class _BlockRun:
    """Runs a block: first as it is, and each further time from the buffers that the first run began with."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.started = False
        self.changed: dict[tuple[nn.Module, str], torch.Tensor] = {}  # what the first run began with

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *_: torch.Tensor) -> Any:
        with self._again() if self.started else self._first():
            return type(self.block).forward(self.block, *args, **kwargs)

    @contextmanager
    def _first(self) -> Iterator[None]:
        before = [(*place, place[-1]._version, place[-1].detach().clone()) for place in _buffers(self.block)]
        yield
        self.started = True
        for module, name, buffer, version, value in before:
            if module._buffers[name] is not buffer or buffer._version != version:
                self.changed[module, name] = value

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Let copies stand in for all buffers: batch norm changes its statistics without a sign of it (a version)."""
        places = list(_buffers(self.block))
        copies = {buffer: self.changed.get((module, name), buffer).clone() for module, name, buffer in places}
        try:
            for module, name, buffer in places:
                module._buffers[name] = copies[buffer]
            yield
        finally:  # torch leaves the recomputation by an exception as soon as it has all that it needs
            for module, name, buffer in places:
                module._buffers[name] = buffer


def _buffers(block: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The places of the buffers; one that is shared has several."""
    for module in block.modules():
        yield from ((module, name, buffer) for name, buffer in module._buffers.items() if buffer is not None)


def _forwards(model: nn.Module) -> list[_Forward]:
    found = [vars(module).get("forward") for module in model.modules()]
    return [forward for forward in found if isinstance(forward, _Forward)]


def _check_untouched(model: nn.Module) -> None:
    """Refuse a model whose blocks are checkpointed already."""
    for path, module in model.named_modules():
        if isinstance(vars(module).get("forward"), _Forward):
            raise AcwbError(
                f"{type(model).__name__} has checkpointed blocks already ({path or 'the model itself'}): call "
                "remove_block_checkpoints first."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise AcwbError(
                f"{type(model).__name__} checkpoints by itself ({path or 'the model'}.gradient_checkpointing is True): "
                "call its activation_checkpointing_disable() first."
            )


def blocks_of(model: nn.Module) -> dict[nn.Module, str]:
    """The blocks and their paths, in the order of the model."""
    containers = [module for module in model.modules() if isinstance(module, CONTAINERS)]
    members = [child for container in containers for child in container.children()]
    counts = Counter(_kind(member) for member in members if _is_composite(member))
    return dict(_outermost(model, "", {kind for kind, count in counts.items() if count > 1}))


def _outermost(module: nn.Module, path: str, kinds: set[Kind]) -> Iterator[tuple[nn.Module, str]]:
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        if not isinstance(module, CONTAINERS) or not _is_composite(child) or _kind(child) not in kinds:
            yield from _outermost(child, place, kinds)
        elif type(child) is nn.Sequential:  # a stage of blocks, or itself a block
            yield from list(_outermost(child, place, kinds)) or [(child, place)]
        else:
            yield child, place


def _is_composite(module: nn.Module) -> bool:
    """Whether a module has children and a forward: an nn.ModuleList is never called, a parametrization is no child."""
    has_parts = any(name != "parametrizations" for name, _ in module.named_children())
    return has_parts and type(module).forward is not nn.Module.forward


def _kind(module: nn.Module) -> Kind:
    """Key by which repeated blocks are recognized: the class, and for an nn.Sequential those of its children."""
    return (type_before_parametrizations(module), *(map(_kind, module) if type(module) is nn.Sequential else ()))


def _sequentials(module: nn.Module, path: str = "") -> dict[nn.Module, str]:
    """The outermost nn.Sequentials that are long enough to be cut, and their paths."""
    is_plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    if is_plain and len(list(module.children())) >= MIN_SEQUENTIAL_LENGTH:
        return {module: path}
    found: dict[nn.Module, str] = {}
    for name, child in module.named_children():
        found |= _sequentials(child, f"{path}.{name}" if path else name)
    return found


def _chunks(sequential: nn.Module) -> list[nn.Sequential]:
    """About √n parts of equally many members. None begins with one that would overwrite what the part is run from."""
    assert isinstance(sequential, nn.Sequential)
    length = math.ceil(len(sequential) / max(1, math.isqrt(len(sequential))))
    chunks: list[list[nn.Module]] = []
    for child in sequential:
        if not chunks or (len(chunks[-1]) >= length and not _begins_in_place(child)):
            chunks.append([])
        chunks[-1].append(child)
    return [nn.Sequential(*chunk) for chunk in chunks]


def _begins_in_place(module: nn.Module) -> bool:
    first = next(part for part in module.modules() if not any(True for _ in part.children()))
    return getattr(first, "inplace", False) is True
