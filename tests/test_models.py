"""Subjects: reproducible, with data that exercises what they are for, and nothing downloaded."""

import pytest
import torch

import acwb


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_bert", "tiny_encoder"])
def test_a_subject_is_the_same_each_time_and_leaves_the_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, second = getattr(acwb.models, name)(), getattr(acwb.models, name)()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert first.model.training


@pytest.mark.parametrize(
    ("name", "parameters", "optimizer"),
    [
        ("resnet18", 11_689_512, torch.optim.SGD),
        ("resnet152", 60_192_808, torch.optim.SGD),
        ("bert", 109_514_298, torch.optim.AdamW),
        ("encoder", 49_729_840, torch.optim.AdamW),
    ],
)
def test_real_subjects_have_their_published_size(name: str, parameters: int, optimizer: type) -> None:
    subject = getattr(acwb.models, name)(batch_size=1)
    assert sum(parameter.numel() for parameter in subject.model.parameters()) == parameters
    assert type(subject.optimizer) is optimizer


def test_the_padding_mask_of_bert_masks() -> None:
    batch = acwb.models.tiny_bert(batch_size=8).batch
    lengths = batch["attention_mask"].sum(1)
    assert lengths.min() < batch["input_ids"].shape[1]
    assert (batch["labels"] != -100).any(1).all()
    assert torch.equal(batch["labels"][batch["labels"] != -100], batch["input_ids"][batch["labels"] != -100])


def test_another_optimizer_may_be_asked_for() -> None:
    subject = acwb.models.tiny_resnet(optimizer=acwb.models.adamw)
    assert type(subject.optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
def test_an_invalid_size_is_refused(size: object) -> None:
    with pytest.raises(acwb.AcwbError, match=f"batch_size is {size!r}"):
        acwb.models.resnet152(batch_size=size)
