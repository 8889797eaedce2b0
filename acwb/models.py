"""Subjects to study: a model with a batch, a loss and an optimizer, built from a configuration with random weights.

Nothing is downloaded. The same arguments give the same weights and batch, and the global random state is left alone.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from acwb import rng
from acwb.errors import AcwbError, check_count
from acwb.subject import Subject, SubjectMaker

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Names of the subjects in titles, tables and messages, by the functions that make them.
TITLES = {
    "resnet152": "ResNet-152",
    "resnet18": "ResNet-18",
    "tiny_resnet": "tiny ResNet",
    "bert": "BERT-base",
    "tiny_bert": "tiny BERT",
    "encoder": "encoder",
    "tiny_encoder": "tiny encoder",
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, the image models' default."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, the language models' default."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def resnet152(batch_size: int = 8, image_size: int = 224, optimizer: OptimizerMaker = sgd) -> Subject:
    """Torchvision's ResNet-152 on random images of 1,000 classes."""
    return _resnet(TITLES["resnet152"], "Bottleneck", [3, 8, 36, 3], batch_size, image_size, 1000, optimizer)


def resnet18(batch_size: int = 8, image_size: int = 224, optimizer: OptimizerMaker = sgd) -> Subject:
    """Torchvision's ResNet-18 on random images of 1,000 classes."""
    return _resnet(TITLES["resnet18"], "BasicBlock", [2, 2, 2, 2], batch_size, image_size, 1000, optimizer)


def tiny_resnet(batch_size: int = 2, image_size: int = 32, optimizer: OptimizerMaker = sgd) -> Subject:
    """A ResNet with one block per stage, for tests."""
    return _resnet(TITLES["tiny_resnet"], "BasicBlock", [1, 1, 1, 1], batch_size, image_size, 10, optimizer)


def bert(
    batch_size: int = 8, sequence_length: int = 128, dropout: float = 0.1, optimizer: OptimizerMaker = adamw
) -> Subject:
    """Transformers' BertForMaskedLM in its base configuration, on random tokens with a padding mask that masks."""
    return _bert(TITLES["bert"], {}, batch_size, sequence_length, dropout, optimizer)


def tiny_bert(
    batch_size: int = 2, sequence_length: int = 16, dropout: float = 0.1, optimizer: OptimizerMaker = adamw
) -> Subject:
    """The same BertForMaskedLM with two small layers, for tests."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
    }
    return _bert(TITLES["tiny_bert"], sizes, batch_size, sequence_length, dropout, optimizer)


def encoder(
    batch_size: int = 8, sequence_length: int = 128, dropout: float = 0.1, optimizer: OptimizerMaker = adamw
) -> Subject:
    """A transformer encoder of 6 layers (width 512, 8 heads, feed-forward 2,048) over 30,000 tokens."""
    model = {"vocabulary": 30_000, "width": 512, "layers": 6, "heads": 8, "feedforward": 2048}
    return _encoder(TITLES["encoder"], model, batch_size, sequence_length, dropout, optimizer)


def tiny_encoder(
    batch_size: int = 2, sequence_length: int = 16, dropout: float = 0.1, optimizer: OptimizerMaker = adamw
) -> Subject:
    """The same encoder with two small layers, for tests."""
    model = {"vocabulary": 100, "width": 32, "layers": 2, "heads": 2, "feedforward": 64}
    return _encoder(TITLES["tiny_encoder"], model, batch_size, sequence_length, dropout, optimizer)


def maker(name: str) -> SubjectMaker:
    """The function of this module that makes a subject, by its name."""
    if name not in TITLES:
        raise AcwbError(f"There is no model {name!r}: choose one of {', '.join(TITLES)}.")
    found: SubjectMaker = globals()[name]
    return found


def title(name: str) -> str:
    """The name of a subject in titles and tables; `name` itself where it is none of these."""
    return TITLES.get(name, name)


class EncoderModel(nn.Module):
    """Tokens to scores per token: embeddings, `nn.TransformerEncoder`, a linear head."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, feedforward: int, length: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, feedforward, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary, for each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(positions))
        scores: torch.Tensor = self.head(self.layers(hidden))
        return scores


def classification_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the model's scores (last dimension: classes) against the batch's labels."""
    inputs, labels = batch
    scores = model(inputs)
    return functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that a transformers model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


@contextmanager
def _seeded() -> Iterator[None]:
    with rng.preserved(torch.device("cpu")):
        torch.manual_seed(0)
        yield


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        check_count(name, size)


def _resnet(
    name: str, block: str, layers: list[int], batch_size: int, image_size: int, classes: int, optimizer: OptimizerMaker
) -> Subject:
    from torchvision.models import resnet

    _check_sizes(batch_size=batch_size, image_size=image_size)
    with _seeded():
        model = resnet.ResNet(getattr(resnet, block), layers, num_classes=classes)
        batch = (torch.randn(batch_size, 3, image_size, image_size), torch.randint(classes, (batch_size,)))
    return Subject(name, model, batch, classification_loss, optimizer(model.parameters()))


def _bert(
    name: str, sizes: dict[str, Any], batch_size: int, length: int, dropout: float, optimizer: OptimizerMaker
) -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    _check_sizes(batch_size=batch_size, sequence_length=length)
    with _seeded():
        positions = max(512, length)
        config = BertConfig(
            **sizes,
            max_position_embeddings=positions,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        model = BertForMaskedLM(config).train()
        tokens = torch.randint(config.vocab_size, (batch_size, length))
        lengths = torch.randint((length + 1) // 2, length + 1, (batch_size, 1))
        mask = (torch.arange(length) < lengths).long()
        chosen = (torch.rand(batch_size, length) < 0.15) & mask.bool()
        chosen[:, 0] = True  # at least one token of each row is predicted
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(~chosen, -100)}
    return Subject(name, model, batch, own_loss, optimizer(model.parameters()))


def _encoder(
    name: str, sizes: dict[str, int], batch_size: int, length: int, dropout: float, optimizer: OptimizerMaker
) -> Subject:
    _check_sizes(batch_size=batch_size, sequence_length=length)
    with _seeded():
        model = EncoderModel(**sizes, length=length, dropout=dropout)
        tokens = torch.randint(sizes["vocabulary"], (batch_size, length))
        labels = torch.randint(sizes["vocabulary"], (batch_size, length))
    return Subject(name, model, (tokens, labels), classification_loss, optimizer(model.parameters()))
