"""Runs PyTorch's own samples of every op and compares the memory behind each result with what a captured step predicts.

What is compared are the ops that a capture sees: those that autograd calls, forward and backward.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode, UnsupportedOperatorException
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from acwb._torch import storage_id
from acwb.capture.eager_parity import as_in_eager
from acwb.capture.node_meta import set_meta
from acwb.capture.storage_analysis import _StorageAnalysis
from acwb.core.graph import Phase, Role, output_name

MAX_RELAID = 6  # samples of each op that are tried in other layouts
UNKNOWN_SIZES = (DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError)


def predicted(function: Any, args: Any, kwargs: Any) -> tuple[dict[int, int], list[Any]]:
    """What capture says of an op: the bytes of the storages that it makes, by position, and its results."""
    graph, fake = fx.Graph(), FakeTensorMode()
    analysis = _StorageAnalysis(graph)
    nodes: dict[int, fx.Node] = {}
    fakes: dict[int, torch.Tensor] = {}

    def as_node(tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in nodes:
            node = nodes[id(tensor)] = graph.placeholder(f"x{len(nodes)}")
            fakes[id(tensor)] = fake.from_tensor(tensor.detach())
            size = tensor.untyped_storage().nbytes()
            set_meta(node, val=fakes[id(tensor)], role=Role.INPUT, storage=node.name, module="", bytes=size)
            analysis._add_existing(node)
        return nodes[id(tensor)]

    arguments = tree_map_only(torch.Tensor, as_node, (args, kwargs))
    node = graph.call_function(function, *arguments)
    with fake:
        on_fakes, options = tree_map_only(torch.Tensor, lambda each: fakes[id(each)], (args, kwargs))
        result = function(*on_fakes, **options)
    set_meta(node, val=result, phase=Phase.FORWARD, module="")
    op = analysis._op(node)
    several = isinstance(result, (tuple, list))
    values = list(result) if several else [result]
    names = [output_name(node.name, at) if several else node.name for at in range(len(values))]
    return {at: analysis.bytes_of[name] for at, name in enumerate(names) if name in op.outputs}, values


def relaid(args: Any) -> Iterator[Any]:
    """The arguments of an op, with each of its tensors in turn, and with all, in the order of channels last."""
    leaves, structure = tree_flatten(args)
    large = [at for at, each in enumerate(leaves) if isinstance(each, torch.Tensor) and each.dim() in (3, 4)]
    for chosen in (*([at] for at in large), large) if len(large) > 1 else ([at] for at in large):
        yield tree_unflatten(
            [_channels_last(each) if at in chosen else each for at, each in enumerate(leaves)], structure
        )


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().movedim(1, -1).contiguous().movedim(-1, 1)


class Audit(TorchDispatchMode):
    """While entered, compares every op that runs; `wrong` has the ops whose results have other storages."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.wrong: dict[str, tuple[int, int]] = {}
        self.strided: dict[str, tuple[Any, Any]] = {}
        self._tried: set[Any] = set()
        self._counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {storage_id(tensor) for tensor in _tensors((args, kwargs))}
        result = function(*args, **kwargs)
        key = (function, str([_describe(each) for each in tree_leaves((args, kwargs))]))
        if key not in self._tried and function.namespace == "aten" and not function._schema.is_mutable:
            self._tried.add(key)
            self._compare(function, args, kwargs, result, before)
            self._counts[function] += 1
            if self._counts[function] <= MAX_RELAID:
                for other in relaid(args):
                    self._try(function, other, kwargs)
        return result

    def _try(self, function: Any, args: Any, kwargs: Any) -> None:
        """Compare an op on arguments that it may not take: eager would not get there either."""
        with contextlib.suppress(RuntimeError):
            result = function(*args, **kwargs)
            self._compare(function, args, kwargs, result, {storage_id(tensor) for tensor in _tensors((args, kwargs))})

    def _compare(self, function: Any, args: Any, kwargs: Any, result: Any, before: set[int]) -> None:
        try:
            sizes, described = predicted(function, args, kwargs)
        except UNKNOWN_SIZES:  # a capture refuses these: the size of the result depends on values
            return
        self.seen.add(str(function))
        values = list(result) if isinstance(result, (tuple, list)) else [result]
        for at, size in sizes.items():
            if isinstance(values[at], torch.Tensor) and storage_id(values[at]) not in before:
                real = values[at].untyped_storage().nbytes()
                if real != size:
                    self.wrong.setdefault(str(function), (size, real))
                if _strides(values[at]) != _strides(described[at]):
                    self.strided.setdefault(str(function), (_strides(described[at]), _strides(values[at])))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor; those of a dimension of size 1 do not matter, nor do those of an empty tensor."""
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _describe(value: Any) -> Any:
    return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value


def samples(dtype: torch.dtype, most: int) -> Iterator[tuple[Any, Any]]:
    """Ops of PyTorch's own tests, each with samples of its arguments, as they are and with gaps between elements."""
    for info in op_db:
        if info.supports_dtype(dtype, "cpu") and info.supports_autograd:
            for number, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=True)):
                if number == most:
                    break
                yield info, sample
                if all(tensor.layout is torch.strided for tensor in _tensors((sample.input, sample.args))):
                    yield info, sample.noncontiguous()


def run_sample(info: Any, sample: Any) -> None:
    """Run one sample forward and, where it has a gradient, backward."""
    result = info(sample.input, *sample.args, **sample.kwargs)
    outputs = [each for each in _tensors(result) if each.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])


def audit(dtype: torch.dtype = torch.float32, most: int = 60) -> Audit:
    """Run all samples of one dtype; those that eager itself cannot run are left out."""
    found = Audit()
    with warnings.catch_warnings(), as_in_eager():
        warnings.simplefilter("ignore")
        for info, sample in samples(dtype, most):
            try:
                with found:
                    run_sample(info, sample)
            except RuntimeError:
                continue
    return found


def _image(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 4, 17, 18)), requires_grad=True)


def _indices(size: int, *shape: int) -> torch.Tensor:
    return torch.randint(size, shape)


_ACTIVATIONS = {
    layer.__name__: layer
    for layer in (
        *(nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Mish, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Hardswish),
        *(nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.SELU, nn.CELU, nn.PReLU, nn.Softsign, nn.Hardshrink),
    )
}


# Layers at sizes at which a result is smaller or larger than what it is made from; PyTorch's samples are tiny.
LAYERS: dict[str, Any] = {
    "unfold": lambda: functional.unfold(_image(), 3, padding=1),
    "unfold with gaps": lambda: functional.unfold(_image(), 1, stride=5),
    "fold": lambda: functional.fold(_image(2, 36, 64), (8, 8), 3, padding=1),
    "fold of one": lambda: functional.fold(_image(36, 64), (8, 8), 3, padding=1),
    "conv1d": lambda: nn.Conv1d(4, 6, 3, stride=2)(_image(2, 4, 31)),
    "conv2d": lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2)(_image()),
    "conv2d channels last": lambda: nn.Conv2d(4, 6, 3)(_image().to(memory_format=torch.channels_last)),
    "conv3d": lambda: nn.Conv3d(2, 3, 3)(_image(2, 2, 7, 8, 9)),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2)(_image()),
    "max pooling": lambda: nn.MaxPool2d(3, stride=2)(_image()),
    "max pooling 1d": lambda: nn.MaxPool1d(3)(_image(2, 4, 31)),
    "max pooling 3d": lambda: nn.MaxPool3d(2)(_image(2, 2, 7, 8, 9)),
    "average pooling": lambda: nn.AvgPool2d(3)(_image()),
    "adaptive pooling": lambda: nn.AdaptiveAvgPool2d((5, 3))(_image()),
    "adaptive max pooling": lambda: nn.AdaptiveMaxPool2d((5, 3))(_image()),
    "power-average pooling": lambda: nn.LPPool2d(2, 3)(_image().abs()),
    "fractional pooling": lambda: nn.FractionalMaxPool2d(3, output_size=(5, 6))(_image()),
    "max unpooling": lambda: nn.MaxUnpool2d(2)(*nn.MaxPool2d(2, return_indices=True)(_image())),
    "bilinear": lambda: functional.interpolate(_image(), scale_factor=2, mode="bilinear"),
    "bicubic": lambda: functional.interpolate(_image(), size=(7, 9), mode="bicubic"),
    "nearest": lambda: functional.interpolate(_image(), scale_factor=3),
    "area": lambda: functional.interpolate(_image(), size=(4, 4), mode="area"),
    "antialias": lambda: functional.interpolate(_image(), size=(7, 9), mode="bilinear", antialias=True),
    "pixel shuffle": lambda: nn.PixelShuffle(2)(_image()),
    "reflection": lambda: nn.ReflectionPad2d(3)(_image()),
    "replication": lambda: nn.ReplicationPad2d(3)(_image()),
    "circular": lambda: functional.pad(_image(), (3, 3, 3, 3), mode="circular"),
    "grid sample": lambda: functional.grid_sample(_image(), torch.rand(2, 5, 5, 2) * 2 - 1, align_corners=False),
    "affine grid": lambda: functional.affine_grid(torch.randn(2, 2, 3, requires_grad=True), [2, 4, 5, 5], False),
    "batch norm": lambda: nn.BatchNorm2d(4)(_image()),
    "batch norm channels last": lambda: nn.BatchNorm2d(4)(_image().to(memory_format=torch.channels_last)),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True)(_image()),
    "group norm": lambda: nn.GroupNorm(2, 4)(_image()),
    "layer norm": lambda: nn.LayerNorm(18)(_image()),
    "root mean square norm": lambda: nn.RMSNorm(18)(_image()),
    "local response norm": lambda: nn.LocalResponseNorm(2)(_image()),
    "embedding": lambda: nn.Embedding(50, 8, padding_idx=0)(_indices(50, 6, 7)),
    "embedding bag": lambda: nn.EmbeddingBag(50, 8, mode="sum")(_indices(50, 6, 7)),
    "largest in a bag": lambda: nn.EmbeddingBag(50, 8, mode="max")(_indices(50, 6, 7)),
    "attention": lambda: functional.scaled_dot_product_attention(*(_image(2, 4, 33, 16) for _ in range(3))),
    "causal attention": lambda: functional.scaled_dot_product_attention(
        *(_image(2, 4, 33, 16) for _ in range(3)), is_causal=True
    ),
    "multi-head attention": lambda: nn.MultiheadAttention(16, 4, batch_first=True)(*[_image(2, 9, 16)] * 3)[0],
    "lstm": lambda: nn.LSTM(8, 12, batch_first=True)(_image(3, 5, 8))[0],
    "bidirectional lstm": lambda: nn.LSTM(8, 12, num_layers=2, bidirectional=True)(_image(5, 3, 8))[0],
    "cross entropy": lambda: functional.cross_entropy(_image(6, 9), _indices(9, 6), label_smoothing=0.1),
    "cross entropy of an image": lambda: functional.cross_entropy(_image(), _indices(4, 2, 17, 18)),
    "ctc": lambda: functional.ctc_loss(
        _image(12, 2, 9).log_softmax(-1), _indices(8, 2, 4) + 1, torch.full((2,), 12), torch.full((2,), 4)
    ),
    "squared error": lambda: functional.mse_loss(_image(), torch.randn(2, 4, 17, 18)),
    "smooth error": lambda: functional.smooth_l1_loss(_image(), torch.randn(2, 4, 17, 18)),
    "huber": lambda: functional.huber_loss(_image(), torch.randn(2, 4, 17, 18)),
    "binary cross entropy": lambda: functional.binary_cross_entropy_with_logits(_image(), torch.rand(2, 4, 17, 18)),
    "gated linear unit": lambda: functional.glu(_image(), 1),
    **{name: (lambda layer=layer: layer()(_image())) for name, layer in _ACTIVATIONS.items()},
    "einsum": lambda: torch.einsum("bchw,bdhw->bcd", _image(), _image()),
    "cumulative sum": lambda: _image().cumsum(-1),
    "sort": lambda: _image().sort(-1).values,
    "largest": lambda: _image().topk(3, -1).values,
    "gather": lambda: _image(6, 9).gather(1, _indices(9, 6, 4)),
    "scatter": lambda: _image(6, 9).scatter_add(1, _indices(9, 6, 4), _image(6, 4)),
    "index": lambda: _image(6, 9)[_indices(6, 20)],
    "roll": lambda: _image().roll((2, 3), (-1, -2)),
    "distance": lambda: torch.cdist(_image(2, 5, 4), _image(2, 7, 4)),
    "bilinear layer": lambda: nn.Bilinear(4, 5, 6)(_image(7, 4), _image(7, 5)),
    "fourier": lambda: torch.fft.rfft2(_image()).abs(),
    "svd": lambda: torch.linalg.svdvals(_image(6, 9)),
    "solve": lambda: torch.linalg.solve(_image(6, 6) + 9 * torch.eye(6), _image(6, 2)),
    "cholesky": lambda: torch.linalg.cholesky(9 * torch.eye(6) + 0.1 * _image(6, 6).square()),
}


def audit_layers() -> Audit:
    """Run the layers above, forward and backward."""
    found = Audit()
    for layer in LAYERS.values():
        with as_in_eager(), found:
            output = layer()
            output.abs().sum().backward()
    return found
