"""Running a captured step: when it frees tensors, its peak memory, and that it leaks nothing."""

import gc

import pytest
import torch

import acwb
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.evaluation.memory import LiveBytesMeter, peak_live_bytes
from acwb.experiments.benchmarks import captured_beyond_memory
from support.tiny_models import MAKERS


def test_gradients_are_freed_first_and_set_last() -> None:
    subject = MAKERS["frozen_and_unused"]()
    step = acwb.trace(subject)
    for parameter in subject.model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    loss = step.run()
    assert not loss.requires_grad
    present = {name for name, parameter in subject.model.named_parameters() if parameter.grad is not None}
    assert present == {"used.weight"}


def test_each_value_is_dropped_at_its_last_use() -> None:
    subject = MAKERS["batch_norm"]()
    step = acwb.trace(subject)
    step.run()
    meter = LiveBytesMeter()
    with meter:
        loss = step.run()
    gradients = sum(parameter.grad.nbytes for parameter in subject.model.parameters())
    assert meter.live == gradients + loss.nbytes
    held = sum(activation.bytes for activation in step.graph.activations)
    made = sum(storage.bytes for storage in step.graph.storages if storage.name in step.graph.maker)
    assert held < meter.peak < made


def test_many_runs_leak_no_memory() -> None:
    subject = MAKERS["attention"]()
    step = acwb.trace(subject)
    step.run()
    gc.collect()
    meter = LiveBytesMeter()
    with meter:
        step.run()
        after_one = meter.live
        for _ in range(5):
            step.run()
        assert meter.live == after_one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet152", "bert"])
def test_a_captured_step_peaks_no_higher_than_eager(name: str) -> None:
    eager, captured = (getattr(acwb.models, name)(batch_size=4) for _ in range(2))
    step = acwb.trace(captured)
    assert peak_live_bytes(step.run) <= 1.02 * peak_live_bytes(eager.eager_step)


@pytest.mark.slow
def test_a_step_far_beyond_this_machine_is_captured() -> None:
    row = run_in_fresh_process(captured_beyond_memory, 1024)
    assert row["capturing_process_bytes"] < 2.5 * 2**30
    assert row["activation_bytes"] / 2**30 == pytest.approx(168.641, abs=0.001)
