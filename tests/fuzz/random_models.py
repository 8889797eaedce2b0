"""Random models: graphs of layers over images, sequences and vectors, with everything that has broken a capture before.

`case(seed)` gives model, batch, loss and optimizer; the same seed gives the same ones, to the bit.
"""

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional

from acwb.subject import Subject

Value = torch.Tensor
Layer = Callable[["RandomModel", Value, list[Value]], Value]
ACTIVATIONS = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.Mish,
    nn.Softplus,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.Hardswish,
    partial(nn.ReLU, inplace=True),
    partial(nn.SiLU, inplace=True),
    partial(nn.Hardtanh, inplace=True),
)
OPTIMIZERS: tuple[Callable[..., optim.Optimizer], ...] = (
    partial(optim.SGD, lr=0.01),
    partial(optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
    partial(optim.SGD, lr=0.01, momentum=0.9, foreach=True),
    partial(optim.Adam, amsgrad=True),
    partial(optim.Adam, foreach=True),
    optim.AdamW,
    partial(optim.AdamW, fused=True),
    optim.RAdam,
    optim.NAdam,
    optim.Adamax,
    partial(optim.RMSprop, momentum=0.9, centered=True),
    partial(optim.ASGD, t0=2),
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
)


class RandomModel(nn.Module):
    """A random sequence of layers; a layer may read the results of earlier ones."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.layers: list[Layer] = []
        self.chance = chance
        self.kind = chance.choice(["image", "sequence", "vector", "tokens"])
        self.start = self._start()
        self.first = self.start
        value = self._trial()
        for _ in range(chance.randint(3, 12)):
            self._grow(value)
            value = self._trial()
        self.form = chance.choice(["one", "one", "tuple", "dict"])
        self.extra = chance.randrange(len(self.layers))

    def _start(self) -> Value:
        batch = self.chance.randint(1, 4)
        if self.kind == "image":
            image = torch.randn(batch, self.chance.choice([2, 3, 4]), *self.chance.choices(range(7, 13), k=2))
            return image.to(memory_format=torch.channels_last) if self.chance.random() < 0.4 else image
        if self.kind == "sequence":
            return torch.randn(batch, self.chance.randint(3, 9), self.chance.choice([4, 8, 12]))
        if self.kind == "tokens":
            width = self.chance.choice([4, 8])
            embedding = self._part(nn.Embedding(17, width, padding_idx=self.chance.choice([None, 0])))
            self.layers.append(lambda _model, x, _past: embedding(x))
            return torch.randint(17, (batch, self.chance.randint(3, 9)))
        return torch.randn(self.chance.randint(2, 9), self.chance.choice([4, 8, 12]))

    def _part(self, module: nn.Module) -> nn.Module:
        self.parts.append(module)
        return module

    def _trial(self) -> Value:
        """What the layers so far give, and what they leave behind, for the shapes."""
        with torch.no_grad():
            self.values = self._run(self.first)
        return self.values[-1]

    def _run(self, x: Value) -> list[Value]:
        values: list[Value] = [] if x.dtype == torch.long else [x * 1.0]
        for layer in self.layers:
            values.append(layer(self, values[-1] if values else x, values))
        return values or [x]

    def forward(self, x: Value) -> Any:
        values = self._run(x)
        first, extra = values[-1], values[min(self.extra, len(values) - 1)]
        if self.form == "tuple":
            return first, extra
        return {"main": first, "extra": extra, "size": 3} if self.form == "dict" else first

    def _grow(self, value: Value) -> None:
        makers = {4: IMAGE, 3: SEQUENCE, 2: VECTOR}[value.dim()]
        for _ in range(20):
            layer = self.chance.choice((*ANY, *makers))(self, value)
            if layer is not None:
                self.layers.append(layer)
                return


Maker = Callable[[RandomModel, Value], Layer | None]


def plain(module: nn.Module) -> Layer:
    return lambda _model, x, _past: module(x)


def activation(model: RandomModel, value: Value) -> Layer:
    module = model._part(model.chance.choice(ACTIVATIONS)())
    # In place only into what no other layer reads.
    return lambda _model, x, _past: module(x + 0) if getattr(module, "inplace", False) else module(x)


def dropout(model: RandomModel, value: Value) -> Layer:
    return plain(model._part(nn.Dropout(model.chance.choice([0.1, 0.5]))))


def residual(model: RandomModel, value: Value) -> Layer | None:
    same = [at for at, each in enumerate(model.values) if each.shape == value.shape]
    if not same:
        return None
    at = model.chance.choice(same)
    if model.chance.random() < 0.3:
        return lambda _model, x, past: (x * 1.0).add_(past[at])
    return lambda _model, x, past: x + past[at]


def gated(model: RandomModel, value: Value) -> Layer | None:
    same = [at for at, each in enumerate(model.values) if each.shape == value.shape]
    if not same:
        return None
    at = model.chance.choice(same)
    return lambda _model, x, past: torch.where(past[at] > 0, x, x * 0.5)


def concat(model: RandomModel, value: Value) -> Layer | None:
    same = [at for at, each in enumerate(model.values) if each.shape == value.shape]
    if not same or value.shape[1] > 24:
        return None
    at = model.chance.choice(same)
    return lambda _model, x, past: torch.cat([x, past[at]], 1)


def scaled(model: RandomModel, value: Value) -> Layer:
    holder = model._part(nn.ParameterList([nn.Parameter(torch.rand(value.shape[-1]))]))
    return lambda _model, x, _past: x * holder[0]  # type: ignore[index]


def sliced(model: RandomModel, value: Value) -> Layer | None:
    axis = model.chance.randrange(1, value.dim())
    if value.shape[axis] < 4:
        return None
    start, step = model.chance.choice([(0, 2), (1, 1)])
    return lambda _model, x, _past: x[(slice(None),) * axis + (slice(start, None, step),)]


def turned(model: RandomModel, value: Value) -> Layer:
    one, other = model.chance.sample(range(1, value.dim()), 2) if value.dim() > 2 else (1, 1)
    return lambda _model, x, _past: x.transpose(one, other)


def normalized(model: RandomModel, value: Value) -> Layer:
    axis = model.chance.randrange(1, value.dim())
    kind = model.chance.choice([functional.softmax, functional.log_softmax, functional.normalize])
    return lambda _model, x, _past: kind(x, dim=axis)


def reread(model: RandomModel, value: Value) -> Layer | None:
    """A layer of the model once more: a shared module."""
    shared = [part for part in model.parts if isinstance(part, nn.Linear) and part.in_features == value.shape[-1]]
    return plain(model.chance.choice(shared)) if shared else None


def convolution(model: RandomModel, value: Value) -> Layer | None:
    channels, out = value.shape[1], model.chance.choice([2, 4, 6])
    if min(value.shape[2:]) < 3:
        return None
    groups = 2 if channels % 2 == 0 and model.chance.random() < 0.3 else 1
    padding = model.chance.choice([0, 1])
    stride = model.chance.choice([1, 1, 2])
    bias = model.chance.random() < 0.7
    conv = nn.Conv2d(channels, out, 3, stride, padding, groups=groups, bias=bias)
    return plain(
        model._part(conv.to(memory_format=model.chance.choice([torch.contiguous_format, torch.channels_last])))
    )


def batch_norm(model: RandomModel, value: Value) -> Layer | None:
    if value.numel() // value.shape[1] < 2:
        return None
    kind = nn.BatchNorm2d if value.dim() == 4 else nn.BatchNorm1d
    return plain(model._part(kind(value.shape[1], affine=model.chance.random() < 0.8)))


def group_norm(model: RandomModel, value: Value) -> Layer:
    norm = model._part(nn.GroupNorm(1, value.shape[1]))
    # In channels last and without a gradient of its input, PyTorch 2.13's own backward ends the process.
    return lambda _model, x, _past: norm(x if x.requires_grad else x.contiguous())


def pooled(model: RandomModel, value: Value) -> Layer | None:
    if min(value.shape[2:]) < 4:
        return None
    kinds = (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((3, 2)), nn.Upsample(scale_factor=2))
    return plain(model.chance.choice(kinds))


def relaid(model: RandomModel, value: Value) -> Layer:
    form = model.chance.choice([torch.contiguous_format, torch.channels_last])
    return lambda _model, x, _past: x.contiguous(memory_format=form)


def to_sequence(model: RandomModel, value: Value) -> Layer:
    return lambda _model, x, _past: x.flatten(2).transpose(1, 2)


def to_vector(model: RandomModel, value: Value) -> Layer | None:
    if value.numel() // value.shape[0] > 200:
        return lambda _model, x, _past: x.flatten(2).mean(-1) if x.dim() > 2 else x
    return lambda _model, x, _past: x.flatten(1)


def linear(model: RandomModel, value: Value) -> Layer:
    out = model.chance.choice([4, 8, 12])
    return plain(model._part(nn.Linear(value.shape[-1], out, bias=model.chance.random() < 0.8)))


def layer_norm(model: RandomModel, value: Value) -> Layer:
    return plain(model._part(nn.LayerNorm(value.shape[-1])))


def attention(model: RandomModel, value: Value) -> Layer | None:
    width = value.shape[-1]
    if width % 2:
        return None
    mix = model._part(nn.Linear(width, 3 * width))
    rate, causal = model.chance.choice([0.0, 0.2]), model.chance.random() < 0.5

    def layer(_model: RandomModel, x: Value, _past: list[Value]) -> Value:
        parts = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in mix(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*parts, dropout_p=rate, is_causal=causal)
        return mixed.transpose(1, 2).flatten(2)

    return layer


def contracted(model: RandomModel, value: Value) -> Layer:
    holder = model._part(nn.ParameterList([nn.Parameter(torch.randn(value.shape[-1], 4) / 4)]))
    return lambda _model, x, _past: torch.einsum("bld,de->ble", x, holder[0])  # type: ignore[index]


def convolution_1d(model: RandomModel, value: Value) -> Layer:
    conv = model._part(nn.Conv1d(value.shape[-1], 6, 3, padding=1))
    return lambda _model, x, _past: conv(x.transpose(1, 2)).transpose(1, 2)


def masked(model: RandomModel, value: Value) -> Layer:
    return lambda _model, x, _past: x.masked_fill(x > 1.5, 0.25)


def accumulated(model: RandomModel, value: Value) -> Layer:
    return lambda _model, x, _past: x.cumsum(1) / x.shape[1]


def tied(model: RandomModel, value: Value) -> Layer | None:
    """Scores by the weight of the embedding."""
    first = model.parts[0] if len(model.parts) else None
    if not isinstance(first, nn.Embedding) or first.weight.shape[1] != value.shape[-1]:
        return None
    return lambda _model, x, _past: functional.linear(x, first.weight) / math.sqrt(x.shape[-1])


ANY: tuple[Maker, ...] = (activation, activation, dropout, residual, residual, gated, concat, scaled, sliced, masked)
IMAGE: tuple[Maker, ...] = (
    *(
        convolution,
        convolution,
        convolution,
        batch_norm,
        batch_norm,
        group_norm,
        pooled,
        relaid,
        to_sequence,
        to_vector,
    ),
    *(turned, normalized),
)
SEQUENCE: tuple[Maker, ...] = (
    *(linear, linear, layer_norm, attention, attention, contracted, convolution_1d, accumulated, to_vector, reread),
    *(tied, turned, normalized),
)
VECTOR: tuple[Maker, ...] = (linear, linear, linear, layer_norm, batch_norm, normalized, reread)

LOSSES: tuple[Callable[[Value], Value], ...] = (
    lambda x: x.sum() * 0.01,
    lambda x: x.square().mean(),
    lambda x: x.sum(-1).square().sum(),
    lambda x: x.float().log_softmax(-1)[..., 0].mean(),
    lambda x: x.transpose(0, 1).flatten().square().sum(),
    lambda x: functional.smooth_l1_loss(x, torch.ones_like(x)),
    lambda x: x[..., ::2].abs().sum(),
    lambda x: functional.mse_loss(x, torch.zeros(x.shape, dtype=x.dtype)),
    lambda x: x.mean(0).square().sum() + x.sum(),
)


@dataclass(frozen=True)
class Case:
    """A subject, and how its drop-in is to be made.

    Attributes:
        told: whether the drop-in is told of the loss function and the optimizer.
        share: where the budget lies between the floor (0) and the peak without a plan (1).
        precision: of autocast around the model's call, if any.
    """

    subject: Subject
    told: bool
    share: float
    precision: torch.dtype | None


def case(seed: int) -> Case:
    """The case of a seed; each call gives new tensors with the same values."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = RandomModel(chance)
    kind = chance.choice([torch.float32] * 5 + [torch.bfloat16, torch.float64])
    x = model.start if model.start.dtype == torch.long else model.start.to(kind)
    model = model.to(kind)
    model.values, model.start, model.first = [], None, None  # type: ignore[assignment]  # they were for the shapes
    trained = list(model.parameters())
    for parameter in trained[: len(trained) // 2] if chance.random() < 0.3 else ():
        parameter.requires_grad_(False)
    model.train(chance.random() < 0.85)
    precision = torch.bfloat16 if kind is torch.float32 and chance.random() < 0.15 else None
    losses = chance.choices(LOSSES, k=2)
    both = chance.random() < 0.5

    def loss_fn(model: nn.Module, batch: Any) -> Value:
        with torch.autocast("cpu", dtype=precision) if precision else nullcontext():
            output = model(*batch)
        outputs = list(output) if isinstance(output, tuple) else [output]
        outputs = [output["main"], output["extra"]] if isinstance(output, dict) else outputs
        terms = [loss(each) for loss, each in zip(losses, outputs if both else outputs[:1], strict=False)]
        return sum(term.float() for term in terms)  # type: ignore[return-value]

    optimizer = chance.choice(OPTIMIZERS)(model.parameters()) if trained else None
    return Case(
        Subject(f"seed {seed}", model, (x,), loss_fn, optimizer), chance.random() < 0.6, chance.random(), precision
    )
