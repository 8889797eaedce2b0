"""Makes a recording bitwise equal to eager, and restores torch afterwards.

It patches torch globally while a capture runs, so captures are not thread-safe.

While it records, torch replaces some kernels by decompositions written in Python and switches autocast's cast cache
off; both change the last bit of some results. `as_in_eager` and `cast_cache` undo this for the duration of a capture.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy
import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

# What recording needs: these decompositions leave the values as they are.
_HARMLESS = (
    "native_batch_norm",
    "cudnn_batch_norm",
    "one_hot",
    "tensor_split",
    "broadcast_tensors",
    "empty",
)
_COMPOSITE = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def as_in_eager(announced: bool = False) -> Iterator[None]:
    """Record what eager runs: its kernels, with gradients, the global random state left alone.

    Where the recording is `announced`, as `torch.compiler.is_compiling()`, transformers asks no questions about the
    values of a mask. But some models then compute otherwise than in eager.
    """
    with ExitStack() as stack:
        if announced:
            stack.enter_context(patched(torch.compiler, _is_compiling_flag=True))
        stack.enter_context(_random_state_kept())
        stack.enter_context(_eager_kernels())
        stack.enter_context(_eager_layouts())
        stack.enter_context(torch.enable_grad())
        yield


def accelerator_type() -> str:
    """The type of the accelerator on this machine, "cpu" without one."""
    found = torch.accelerator.current_accelerator()
    return found.type if found else "cpu"


@contextmanager
def _random_state_kept() -> Iterator[None]:
    devices = range(torch.accelerator.device_count())
    with torch.random.fork_rng(devices, device_type=accelerator_type()) if devices else torch.random.fork_rng(()):
        yield


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module, a class or an object inside a `with` block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _eager_kernels() -> Iterator[None]:
    """Record kernels where torch has a decomposition in Python: upsampling, recurrent layers, matmul, dropout."""
    with ExitStack() as stack:
        for op in list(_composite_ops()):
            stack.enter_context(_python_kernel(op, None))
        stack.enter_context(_python_kernel(torch.ops.aten.dropout.default, _dropout))
        stack.enter_context(_dropout_in_its_layout())
        yield


def _like_pointwise(gradient: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """The layout of a pointwise op: that of its first argument, where the two differ."""
    return torch.add(gradient, value)


def _like_value(_gradient: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """The memory format of what the forward pass was given, not of the gradient; without channels last, contiguous."""
    return torch.empty(value.shape, device=value.device).contiguous(memory_format=suggest_memory_format(value))


def _contiguous(value: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(value.shape, device=value.device)


def _contiguous_value(_gradient: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(value.shape, device=value.device)


def _channels_last_or_contiguous(value: torch.Tensor, *_: Any) -> torch.Tensor:
    return _like_value(value, value)


# Ops of which torch describes the first result in another layout than the CPU's kernel gives it, where arguments have
# different ones. Found by `make audit`.
_LAYOUTS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.hardswish_backward.default: _like_pointwise,
    torch.ops.aten.softplus_backward.default: _like_pointwise,
    torch.ops.aten.hardtanh_backward.default: _like_pointwise,
    torch.ops.aten.hardsigmoid_backward.default: _like_pointwise,
    torch.ops.aten.logit_backward.default: _like_pointwise,
    torch.ops.aten.elu_backward.default: lambda gradient, *others: _like_pointwise(gradient, others[-1]),
    torch.ops.aten.native_batch_norm_backward.default: _like_value,
    torch.ops.aten.batch_norm_backward.default: _like_value,
    torch.ops.aten.native_group_norm_backward.default: _like_value,
    torch.ops.aten.reflection_pad2d_backward.default: _like_value,
    torch.ops.aten.replication_pad2d_backward.default: _like_value,
    torch.ops.aten.native_layer_norm_backward.default: _contiguous,
    torch.ops.aten._log_softmax_backward_data.default: _contiguous,
    torch.ops.aten.mse_loss_backward.default: _contiguous_value,
    torch.ops.aten.smooth_l1_loss_backward.default: _contiguous_value,
    torch.ops.aten.huber_loss_backward.default: _contiguous_value,
    torch.ops.aten.glu_backward.default: _contiguous_value,
    torch.ops.aten.log_sigmoid_forward.default: _contiguous,
    torch.ops.aten.roll.default: _channels_last_or_contiguous,
    torch.ops.aten.native_batch_norm.default: _channels_last_or_contiguous,
    torch.ops.aten._native_batch_norm_legit_functional.default: _channels_last_or_contiguous,
    torch.ops.aten._native_batch_norm_legit.no_stats: _channels_last_or_contiguous,
}


def _is_of_expanded(func: Any, args: Sequence[Any], result: torch.Tensor) -> bool:
    """Whether an op is pointwise on two tensors of one shape, one of which is expanded: torch's references err then."""
    if torch.Tag.pointwise not in getattr(func, "tags", ()):
        return False
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    return (
        len(tensors) == 2
        and all(each.shape == result.shape for each in tensors)
        and any(0 in each.stride() for each in tensors)
    )


def _strides_of_pair(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """The strides that kernels give the result of a pointwise op on two tensors, from the compiled addition."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if func is torch.ops.aten.threshold_backward.default:  # which takes them in the other order
        tensors.reverse()
    with unset_fake_temporarily():
        one, other = (torch.empty_strided(each.shape, each.stride(), device="meta") for each in tensors)
        return torch.add(one, other).stride()


@contextmanager
def _eager_layouts() -> Iterator[None]:
    """Record the strides that the CPU's kernels give their results, where torch describes others."""
    recorded = FakeTensorMode.dispatch

    @wraps(recorded)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = recorded(self, func, types, args, kwargs)
        first, *others = result if isinstance(result, (tuple, list)) and result else (result,)
        if not isinstance(first, torch.Tensor) or first.device.type != "cpu":
            return result
        if func not in _LAYOUTS and not _is_of_expanded(func, args, first):
            return result
        with self:
            strides = _LAYOUTS[func](*args).stride() if func in _LAYOUTS else _strides_of_pair(func, args)
            if strides == first.stride():
                return result
            relaid = torch.empty_strided(first.shape, strides, dtype=first.dtype, device=first.device)
        return (relaid, *others) if others else relaid

    with patched(FakeTensorMode, dispatch=dispatch):
        yield


def _composite_ops() -> Iterator[Any]:
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten" and packet not in _HARMLESS:
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if op is not None and any(key in op.py_kernels for key in _COMPOSITE):
                yield op


@contextmanager
def _python_kernel(op: Any, kernel: Any) -> Iterator[None]:
    """Use `kernel` (or, where None, the compiled one) in place of what torch records for `op`."""
    before = dict(op.py_kernels)
    for key in _COMPOSITE:
        op.py_kernels.pop(key, None)
        if kernel is not None:
            op.py_kernels[key] = kernel
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.clear()
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


def _dropout(value: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """Dropout as eager computes it, with a mask of one byte per element where that is bitwise identical.

    On a CPU, eager multiplies by noise: 1 / (1 - p) in the value's own precision, or 0. The fused kernel, which keeps
    only a mask, rounds that factor from double precision. Where the two factors are one number, so are the results. On
    an accelerator eager takes the fused kernel itself.
    """
    if not train or p == 0:
        return value
    keep = 1.0 - p
    if keep == 0:
        return value * torch.zeros((), dtype=value.dtype, device=value.device)
    if value.device.type != "cpu" or _factor_is_exact(keep, value.dtype):
        dropped: torch.Tensor = torch.ops.aten.native_dropout(value, p, train)[0]
        return dropped
    return value * torch.empty_like(value).bernoulli_(keep).div_(keep)


@contextmanager
def _dropout_in_its_layout() -> Iterator[None]:
    """Record the backward of dropout in the layout of the CPU's kernel: that of the gradient, not always contiguous."""
    op = torch.ops.aten.native_dropout_backward.default
    recorded = decomposition_table[op]

    @wraps(recorded)
    def lay_out(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        if gradient.device.type != "cpu":
            result: torch.Tensor = recorded(gradient, mask, scale)
            return result
        return gradient * mask.type_as(gradient) * scale

    FakeTensorMode.cache_clear()  # of what was recorded before
    decomposition_table[op] = lay_out
    try:
        yield
    finally:
        decomposition_table[op] = recorded


def _factor_is_exact(keep: float, dtype: torch.dtype) -> bool:
    if dtype not in (torch.float32, torch.float64):
        return False
    one, rounded, factor = numpy.array([1.0, keep, 1.0 / keep], dtype=str(dtype).removeprefix("torch."))
    return bool(one / rounded == factor)


@contextmanager
def cast_cache(parameters: Sequence[torch.Tensor], enabled: bool) -> Iterator[None]:
    """Autocast's cache of cast parameters, as eager has it, around one call of the loss.

    A parameter that is used several times under autocast is cast once, so its gradients are summed in the lower
    precision. torch's own cache is off while recording, and would not take `parameters`, which are not leaves there.
    As in eager, a parameter's first cast counts, whatever comes later, and is differentiable, also under no_grad.
    """
    cache: dict[int, torch.Tensor] = {}
    casting: dict[str, bool] = {}
    cast = torch.ops.aten.to.dtype
    clear, switch, before = torch.clear_autocast_cache, torch.set_autocast_enabled, torch.is_autocast_cache_enabled()
    cacheable = {id(tensor) for tensor in parameters if tensor.requires_grad and tensor.dtype == torch.float32}

    def to(tensor: torch.Tensor, dtype: torch.dtype, *options: Any) -> torch.Tensor:
        if id(tensor) not in cacheable or not _called_by_autocast(tensor.device, casting):
            result: torch.Tensor = cast._op_dk(DispatchKey.CompositeImplicitAutograd, tensor, dtype, *options)
            return result
        if id(tensor) not in cache:
            with torch.enable_grad():
                cache[id(tensor)] = torch.ops.aten._to_copy.default(tensor, dtype=dtype)
        return cache[id(tensor)]

    def clear_both() -> None:
        cache.clear()
        clear()

    def switch_and_tell(*arguments: Any) -> None:
        casting[str(arguments[0])] = bool(arguments[-1])
        switch(*arguments)

    torch.set_autocast_cache_enabled(enabled)
    try:
        replacements = {"clear_autocast_cache": clear_both, "set_autocast_enabled": switch_and_tell}
        with patched(torch, **replacements), _python_kernel(cast, to):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _called_by_autocast(device: torch.device, casting: Mapping[str, bool]) -> bool:
    """Whether autocast itself requests a cast: it is enabled, and excludes itself from its own calls."""
    on = casting.get(device.type, False) and torch.is_autocast_cache_enabled()
    return on and bool(torch._C._dispatch_tls_is_dispatch_key_excluded(f"Autocast{device.type.upper()}"))
