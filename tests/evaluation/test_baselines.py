"""Every method trains the same tensors: its results are bitwise equal to eager's, or the known differences."""

from functools import partial

import pytest
import torch
from torch import nn

import acwb
from acwb import subject
from acwb.evaluation import baselines
from acwb.evaluation.verifier import BUFFER, GRADIENT, compare
from acwb.subject import Subject


@pytest.mark.parametrize(
    "method",
    [
        baselines.captured,
        baselines.per_block,
        partial(baselines.per_block, every=2),
        baselines.sqrt_n,
        baselines.op_policy,
    ],
)
def test_without_batch_norm_all_methods_are_bitwise_equal_to_eager(method: subject.StepBuilder) -> None:
    subject = acwb.models.tiny_encoder()
    assert compare(subject, method(subject.twin()), iterations=2)


def test_per_block_saves_memory_and_updates_batch_norm_twice() -> None:
    subject = acwb.models.tiny_resnet()
    found = compare(subject, baselines.per_block(subject.twin()))
    assert not found.of_kind(GRADIENT)
    assert {each.name.rpartition(".")[2] for each in found.of_kind(BUFFER)} == {
        *("running_mean", "running_var", "num_batches_tracked")
    }
    assert not any(each.name.startswith("bn1.") for each in found.of_kind(BUFFER))  # the stem is in no block


@pytest.mark.parametrize("method", [baselines.per_block, baselines.sqrt_n, baselines.op_policy])
def test_checkpointed_blocks_are_recomputed(method: subject.StepBuilder) -> None:
    twin = acwb.models.tiny_resnet().twin()
    runs: list[str] = []
    twin.model.layer1[0].conv1.register_forward_hook(lambda *_: runs.append("run"))
    method(twin)()
    assert len(runs) == 2


def test_memory_budgets_of_two_compiled_steps_lead_to_different_peaks() -> None:
    from acwb.evaluation.memory import allocated_growth

    subject = _wide()
    peaks = {}
    for share in (1.0, 0.2):
        step = baselines.memory_budget(subject.twin(), share)
        step()
        assert not compare(subject, step).of_kind(BUFFER)
        subject.free_gradients()
        peaks[share] = allocated_growth(step, torch.device("cpu"))
    assert peaks[0.2] != peaks[1.0]  # it may well be higher: the knob is not a budget


def test_a_twin_shares_tensors_but_not_modules() -> None:
    subject = acwb.models.tiny_resnet()
    twin = subject.twin()
    for mine, theirs in zip(subject.model.parameters(), twin.model.parameters(), strict=True):
        assert mine is theirs
    for mine, theirs in zip(subject.model.buffers(), twin.model.buffers(), strict=True):
        assert mine is theirs
    assert twin.model is not subject.model
    assert twin.optimizer is subject.optimizer
    baselines.per_block(twin)
    assert not any("forward" in vars(module) for module in subject.model.modules())


def test_the_static_bytes_of_a_subject_are_those_of_its_graph() -> None:
    for make in (acwb.models.tiny_resnet, acwb.models.tiny_bert):
        subject = make()
        graph = acwb.trace(subject).graph
        subject.eager_step()
        assert subject.static_bytes == graph.static_bytes


def test_a_model_without_blocks_is_refused() -> None:
    subject = Subject("plain", nn.Linear(2, 2), (torch.ones(1, 2),), lambda model, batch: model(*batch).sum(), None)
    with pytest.raises(acwb.AcwbError, match="Linear has no blocks"):
        baselines.per_block(subject)


def _wide() -> Subject:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Tanh(), nn.Sigmoid())]
    model = nn.Sequential(*layers)
    return Subject("wide", model, (torch.randn(512, 64),), lambda model, batch: model(*batch).square().mean(), None)
