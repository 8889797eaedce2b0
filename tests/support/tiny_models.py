"""Tiny models, one for each property that a captured step must preserve. Each function returns a seeded Subject."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from acwb.models import OptimizerMaker
from acwb.subject import Subject

MAKERS: dict[str, Callable[..., Subject]] = {}


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, amsgrad=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def adam_in_groups(parameters: Any) -> torch.optim.Optimizer:
    groups = [{"params": [parameter], "lr": 1e-2 / (number + 1)} for number, parameter in enumerate(parameters)]
    return torch.optim.Adam(groups, foreach=True)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True)


OPTIMIZERS = (plain_sgd, momentum, adam, adamw, adam_in_groups, fused_adamw, rmsprop)


def subject(build: Callable[[], tuple[nn.Module, Any] | tuple[nn.Module, Any, Any]]) -> Callable[..., Subject]:
    """Register a model: `build` gives it with a batch and, where it is not the model's own output, a loss."""

    def make(optimizer: OptimizerMaker = momentum) -> Subject:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model, batch, *loss = build()
        return Subject(build.__name__, model, batch, loss[0] if loss else own_output, optimizer(model.parameters()))

    MAKERS[build.__name__] = make
    return make


def own_output(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch).square().mean()


class Lambda(nn.Module):
    """A module from its parts and a function of (module, *inputs)."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


@subject
def tied_weights() -> Any:
    model = Lambda(
        lambda m, tokens: functional.cross_entropy(
            m.head(torch.tanh(m.tokens(tokens))).flatten(0, 1), tokens.flatten()
        ),
        tokens=nn.Embedding(11, 8),
        head=nn.Linear(8, 11),
    )
    model.head.weight = model.tokens.weight
    return model, (torch.randint(11, (3, 5)),)


@subject
def one_weight_under_three_names() -> Any:
    """The order in which its gradients are summed must be eager's: floating-point sums depend on it."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        left = torch.tanh(m.first(x)) * 10
        right = torch.relu(m.second(x * 0.1 + left))
        return torch.tanh(m.third(left + right) * x + m.first(right)).square().mean()

    model = Lambda(forward, first=nn.Linear(7, 7), second=nn.Linear(7, 7), third=nn.Linear(7, 7, bias=False))
    model.second.weight = model.third.weight = model.first.weight
    return model, (torch.randn(5, 7),)


@subject
def shared_submodule() -> Any:
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    return nn.Sequential(block, nn.Linear(6, 6), block, block), (torch.randn(4, 6),), squared


@subject
def in_place_ops() -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = m.first(x).relu_()
        y = m.second(hidden)
        y += hidden
        y = functional.dropout(y, 0.3, training=m.training, inplace=True)
        y[:, 0] = 0.5
        y[1:][:, 2:4].add_(1.0)[:1].fill_(2.0)
        return y.mul_(2.0).square().mean()

    return Lambda(forward, first=nn.Linear(6, 6), second=nn.Linear(6, 6)), (torch.randn(4, 6),)


@subject
def mutated_input() -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x += 1.0
        return m.linear(x).square().mean()

    return Lambda(forward, linear=nn.Linear(6, 6)), (torch.randn(4, 6),)


@subject
def views_and_expands() -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.all(x).view(2, 5, 3, 4).unbind(2)
        scores = (q @ k.transpose(1, 2)) + m.bias.expand(2, 5, 5)
        mixed = (scores.softmax(-1) @ v).permute(1, 0, 2).reshape(5, 8)[1:, ::2].contiguous()
        return (mixed.t() + m.row.expand(4, 4)[0]).square().sum().squeeze()

    model = Lambda(
        forward, all=nn.Linear(6, 12), bias=nn.Parameter(torch.randn(1, 1, 1)), row=nn.Parameter(torch.randn(1, 4))
    )
    return model, (torch.randn(2, 5, 6),)


class InputAsGradient(torch.autograd.Function):
    """(weight · x) summed, whose backward hands out x itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


@subject
def gradient_that_is_an_input() -> Any:
    model = Lambda(lambda m, x: InputAsGradient.apply(m.weight, x), weight=nn.Parameter(torch.randn(2, 3)))
    return model, (torch.randn(2, 3),)


@subject
def gradients_that_share_memory() -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([m.a, m.b]).sum() + m.c.t().sum()
        return ((m.a + m.b) * x).sum() + (m.d.view(2, 3) + m.a).sum() + joined

    names = {name: nn.Parameter(torch.randn(2, 3)) for name in "ab"}
    return Lambda(forward, **names, c=nn.Parameter(torch.randn(3, 4)), d=nn.Parameter(torch.randn(6))), (
        torch.randn(2, 3),
    )


@subject
def batch_norm() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(model, nn.Linear(8 * 16, 5)), (torch.randn(4, 3, 8, 8),), squared


@dataclass
class Outputs:
    loss: torch.Tensor
    scores: torch.Tensor
    extra: dict[str, torch.Tensor]


@subject
def several_outputs_from_keywords() -> Any:
    def forward(m: Any, x: torch.Tensor, tokens: torch.Tensor, scale: float, mask: torch.Tensor | None) -> Outputs:
        assert mask is None
        scores = m.linear(x * scale) + m.table(tokens)
        return Outputs(scores.square().mean(), scores, {"abs": scores.abs()})

    model = Lambda(forward, linear=nn.Linear(6, 3), table=nn.Embedding(9, 3, padding_idx=0))
    return model, {"x": torch.randn(4, 6), "tokens": torch.randint(9, (4,)), "scale": 0.5, "mask": None}


@subject
def frozen_and_unused() -> Any:
    model = Lambda(
        lambda m, x: m.used(m.frozen(x)).square().mean(),
        used=nn.Linear(6, 6),
        frozen=nn.Linear(6, 6),
        unused=nn.Linear(6, 6),
    )
    model.frozen.requires_grad_(False)
    model.used.bias.requires_grad_(False)
    return model, (torch.randn(4, 6),)


@subject
def integer_inputs() -> Any:
    model = Lambda(
        lambda m, tokens, flags: (m.table(tokens)[1:5] * flags.float()[:, None]).square().sum() / flags.sum(),
        table=nn.Embedding(9, 4),
    )
    return model, (torch.randint(9, (6,)), torch.tensor([True, False, True, True]))


@subject
def embedding_bag() -> Any:
    model = Lambda(
        lambda m, tokens: m.table(tokens, torch.tensor([0, 3])).square().sum(),
        table=nn.EmbeddingBag(9, 4, mode="mean"),
    )
    return model, (torch.randint(9, (6,)),)


@subject
def autocast() -> Any:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.mse_loss(model(batch[0]).float(), batch[0])

    return model, (torch.randn(8, 16),), loss


@subject
def autocast_casting_a_weight_several_times() -> Any:
    """Eager's cast cache sums this weight's gradients in bfloat16."""
    layer = nn.Linear(16, 16)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch[0]).float().square().mean()

    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), (torch.randn(8, 16),), loss


@subject
def casts_by_hand() -> Any:
    """Outside of autocast nothing is cached: each cast has a gradient of its own."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.bfloat16()
        for _ in range(3):
            y = torch.tanh(functional.linear(y, m.linear.weight.bfloat16()))
        with torch.autocast("cpu", enabled=False):
            doubled = m.linear.bias.bfloat16().mul_(2)
            return (y + doubled + m.linear.bias.bfloat16()).float().square().mean()

    return Lambda(forward, linear=nn.Linear(16, 16)), (torch.randn(8, 16),)


@subject
def autocast_that_starts_under_no_grad() -> Any:
    """The first cast of a weight, under no_grad, is the one that later gets the gradient."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                target = m.layers[0](x)
            by_hand = functional.linear(x.bfloat16(), m.layers[1].weight.bfloat16())
            return (m.layers(x) - target + by_hand).float().square().mean()

    return Lambda(forward, layers=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), (torch.randn(4, 8),)


@subject
def one_hot_and_a_constant() -> Any:
    """A value check among the ops, and one constant from outside used twice, also as a view."""
    constant = torch.arange(12.0)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        table = constant.view(3, 4)
        scores = model(batch[0]) * table.sum(0) + constant[:4] + constant.view(4, 3)[:, 0]
        return (scores * functional.one_hot(batch[1], 4)).square().mean()

    return nn.Linear(6, 4), (torch.randn(5, 6), torch.randint(4, (5,))), loss


@subject
def autocast_without_cast_cache() -> Any:
    layer = nn.Linear(16, 16)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return model(batch[0]).float().square().mean()

    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), (torch.randn(8, 16),), loss


@subject
def dropouts() -> Any:
    """Every kind and probability of dropout; some probabilities round differently in torch's two dropout kernels."""
    kinds = [nn.Dropout(p) for p in (0.0, 0.05, 0.1, 0.15, 0.2, 0.37, 0.5, 0.9, 1.0)]
    more = [
        nn.Dropout1d(0.3),
        nn.AlphaDropout(0.2),
        nn.FeatureAlphaDropout(0.2),
        nn.Dropout(0.15, inplace=True),
        nn.RReLU(),
    ]

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(dropout(m.linear(x)).square().mean() for dropout in m.kinds)

    return Lambda(forward, linear=nn.Linear(6, 6), kinds=nn.ModuleList(kinds + more)), (torch.randn(3, 4, 6),)


@subject
def dropout_in_bfloat16() -> Any:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16)).bfloat16()
    return model, (torch.randn(8, 16, dtype=torch.bfloat16),), squared


@subject
def randomness_whose_result_is_unused() -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        functional.dropout(x, 0.5)
        noise = torch.randn_like(x) + torch.rand(x.shape) + torch.randint(3, x.shape)
        torch.bernoulli(torch.full((3,), 0.5))
        return m.linear(x + noise[:, torch.randperm(6)]).square().mean()

    return Lambda(forward, linear=nn.Linear(6, 6)), (torch.randn(4, 6),)


@subject
def state_in_buffers_and_attributes() -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.count.add_(1)
        with torch.no_grad():
            m.average.lerp_(x.mean(0), 0.1)
        m.plain += 0.5
        m.last = x * 2
        swapped = m.left.clone()
        m.left.copy_(m.right)
        m.right.copy_(swapped)
        return (m.linear(x - m.average) * m.plain * m.left + m.fixed).square().mean() / m.count

    model = Lambda(forward, linear=nn.Linear(6, 6))
    for name, value in {
        "count": torch.tensor(0),
        "average": torch.zeros(6),
        "left": torch.ones(6),
        "right": torch.arange(6.0),
    }.items():
        model.register_buffer(name, value)
    model.plain = torch.ones(1)
    model.fixed = torch.full((6,), 0.25)
    return model, (torch.randn(4, 6),)


@subject
def channels_last() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1, stride=2), nn.AdaptiveAvgPool2d(2)
    )
    return (
        model.to(memory_format=torch.channels_last),
        (torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last),),
        squared,
    )


@subject
def upsampling() -> Any:
    """torch records Python decompositions for these; eager runs kernels."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        modes = [
            {"mode": "bilinear", "align_corners": False},
            {"mode": "bicubic"},
            {"mode": "nearest"},
            {"mode": "bilinear", "antialias": True},
        ]
        return sum(functional.interpolate(y, size=(11, 7), **mode).square().mean() for mode in modes)

    return Lambda(forward, conv=nn.Conv2d(3, 4, 3)), (torch.randn(2, 3, 8, 8),)


@subject
def losses_that_keep_their_terms() -> Any:
    def forward(m: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        total = functional.mse_loss(y, target) + functional.smooth_l1_loss(y, target)
        return total + functional.binary_cross_entropy(y.sigmoid(), target) + functional.soft_margin_loss(y, target)

    return Lambda(forward, linear=nn.Linear(6, 6)), (torch.randn(4, 6), torch.rand(4, 6))


@subject
def pointwise_kernels() -> Any:
    kinds = [
        nn.Softshrink(),
        nn.Hardshrink(),
        nn.Mish(),
        nn.Hardswish(),
        nn.GLU(),
        nn.PReLU(),
        nn.Softplus(),
        nn.CELU(),
        nn.Threshold(0.1, 2.0),
    ]

    def forward(m: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        losses = functional.multi_margin_loss(y, labels) + functional.multilabel_margin_loss(
            y, labels[:, None].expand(4, 6).clone()
        )
        return sum(kind(y).square().mean() for kind in m.kinds) + losses

    return Lambda(forward, linear=nn.Linear(6, 6), kinds=nn.ModuleList(kinds)), (
        torch.randn(4, 6),
        torch.randint(6, (4,)),
    )


@subject
def attention() -> Any:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.15, batch_first=True)
    decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0)
    return Lambda(lambda m, x: m.decoder(m.layer(x), x).square().mean(), layer=layer, decoder=decoder), (
        torch.randn(2, 5, 16),
    )


@subject
def double_precision_and_names_of_ops() -> Any:
    """Parameters named like ops, and a loss of shape (1,)."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ m.mm) * m.relu).sum(dim=(0, 1), keepdim=True).view(1) + m.input

    names = {"mm": torch.randn(6, 6), "relu": torch.randn(6), "input": torch.randn(())}
    model = Lambda(forward, **{name: nn.Parameter(value.double()) for name, value in names.items()})
    return model, (torch.randn(4, 6).double(),)


@subject
def dropout_of_a_transposed_value() -> Any:
    """Noise is drawn in the order of memory, not of indices."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        turned = m.linear(x).transpose(0, 1)
        return sum(functional.dropout(turned, p).square().mean() for p in (0.1, 0.15))

    return Lambda(forward, linear=nn.Linear(6, 6)), (torch.randn(3, 4, 6),)


@subject
def parameters_written_in_the_forward_pass() -> Any:
    model = Lambda(
        lambda m, tokens: m.linear(m.table(tokens)).square().mean(),
        table=nn.Embedding(9, 4, max_norm=1.0),
        linear=nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    )
    return model, (torch.randint(9, (6,)),)


@subject
def recurrent() -> Any:
    """oneDNN's LSTM keeps a workspace for its backward, only where gradients are enabled."""
    model = Lambda(
        lambda m, x: m.simple(m.lstm(x)[0])[0].square().mean(),
        lstm=nn.LSTM(6, 5, num_layers=2, bidirectional=True, dropout=0.2),
        simple=nn.RNN(10, 4),
    )
    return model, (torch.randn(7, 3, 6),)
