"""`measure` against a plan's predictions, in fresh processes, without side effects in this one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import acwb
from acwb.evaluation.baselines import captured, eager
from acwb.evaluation.measurement import seconds_of
from acwb.evaluation.memory import Peaks, peaks_of
from acwb.subject import Subject
from support.bitwise import differences, snapshot


def make() -> Subject:
    return acwb.models.resnet18(batch_size=4, image_size=128)


def traced(subject: Subject) -> acwb.TracedStep:
    return acwb.trace(subject)


def test_a_planned_step_is_measured_as_predicted(tmp_path: Path) -> None:
    subject = make()
    step = traced(subject)
    frontier = acwb.frontier(acwb.profile(step, repeats=1))
    budget = (frontier.floor_bytes + frontier.baseline_bytes) // 2
    planned = acwb.rewrite(step, frontier.at(budget))
    before = snapshot(subject, torch.zeros(()))
    found = acwb.measure(planned, rounds=3)
    assert differences([before], [snapshot(subject, torch.zeros(()))]) == []
    assert found.budget_bytes == budget
    assert found.peaks.tensor_bytes == found.predicted.tensor_bytes
    assert found.peaks.allocator_bytes == pytest.approx(found.predicted.allocator_bytes, rel=0.005)
    assert found.peaks.process_bytes == pytest.approx(found.predicted.allocator_bytes, rel=0.02)
    assert found.peaks.static_bytes == found.eager_peaks.static_bytes == step.graph.static_bytes
    assert found.eager_peaks.process_bytes > found.peaks.process_bytes
    assert len(found.seconds) == len(found.eager_seconds) == 3
    assert found.time.rounds == 3
    for word in ("predicted", "tensor", "allocator", "process", "eager", "3 rounds"):
        assert word in repr(found)
    found.save(tmp_path / "measurement.json")
    assert acwb.Measurement.load(tmp_path / "measurement.json") == found


def test_noise_is_called_noise() -> None:
    peaks = Peaks(1, 2, 2, 2)
    steady = acwb.Measurement("tiny", None, None, peaks, peaks, (1.0, 1.02, 0.98) * 2, (1.0,) * 6)
    slower = replace(steady, seconds=(1.2, 1.22, 1.18) * 2)
    assert "within noise" in repr(steady)
    assert "within noise" not in repr(slower)
    assert "within noise" in repr(replace(slower, seconds=slower.seconds[:5], eager_seconds=steady.eager_seconds[:5]))


def test_a_model_that_a_notebook_defines_is_measured() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.layers(values)

    step = acwb.trace(Cell(), (torch.randn(512, 64),), lambda model, batch: functional.relu(model(*batch)).sum())
    profile = acwb.profile(step, repeats=1)
    found = acwb.measure(step, rounds=1, profile=profile)
    assert found.peaks.tensor_bytes == found.predicted.tensor_bytes


def test_a_cap_that_is_too_small_is_reported() -> None:
    step = traced(make())
    with pytest.raises(acwb.DoesNotFitError, match=r"does not fit in 0\.150 GiB"):
        acwb.measure(step, rounds=1, memory="0.15GiB")


@pytest.mark.slow
def test_two_measurements_of_a_peak_differ_by_less_than_half_a_percent() -> None:
    first, second = peaks_of(make, eager), peaks_of(make, eager)
    assert (first.static_bytes, first.tensor_bytes) == (second.static_bytes, second.tensor_bytes)
    assert first.allocator_bytes == pytest.approx(second.allocator_bytes, rel=0.005)
    assert first.process_bytes == pytest.approx(second.process_bytes, rel=0.005)


def test_methods_are_interleaved_in_one_process() -> None:
    seconds = seconds_of(acwb.models.tiny_resnet, {"eager": eager, "captured": captured}, rounds=4)
    assert {name: len(times) for name, times in seconds.items()} == {"eager": 4, "captured": 4}


def test_bad_input_is_refused() -> None:
    subject = acwb.models.tiny_resnet()
    step = traced(subject)
    with pytest.raises(acwb.AcwbError, match="measure takes a step"):
        acwb.measure(subject)
    with pytest.raises(acwb.AcwbError, match="rounds is 0"):
        acwb.measure(step, rounds=0)
    other = acwb.profile(traced(acwb.models.tiny_bert()), repeats=1)
    planned = acwb.rewrite(step, acwb.plan(acwb.profile(step, repeats=1), "100%"))
    with pytest.raises(acwb.AcwbError, match="another step"):
        acwb.measure(planned, profile=other)
    with pytest.raises(acwb.AcwbError, match="computed outside"):
        acwb.measure(replace(step, loss_fn=None))
