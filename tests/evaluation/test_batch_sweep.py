"""A sweep: measured beside predicted, resumed where it stopped, with batch sizes that do not fit recorded as such."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import acwb
from acwb.evaluation import batch_sweep, measurement, memory
from acwb.subject import Subject
from support.processes import in_this_process
from support.saved_files import content_of


def make(batch_size: int) -> Subject:
    return acwb.models.tiny_encoder(batch_size, sequence_length=128)


def assert_predicted(side: batch_sweep.BatchResult) -> None:
    """To the byte, but for the states kept for random ops that run again: they exist before the step is metered."""
    states, rest = divmod(side.predicted_tensor_bytes - side.peaks.tensor_bytes, torch.get_rng_state().nbytes)
    assert rest == 0
    assert 0 <= states < 20


def test_a_sweep_measures_both_sides_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured, whole = tmp_path / "sweep.json", list[int](), batch_sweep._point

    def point(subject: object, size: int, settings: object) -> batch_sweep.SweepPoint:
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(size)
        return whole(subject, size, settings)

    monkeypatch.setattr(batch_sweep, "_point", point)
    with pytest.raises(KeyboardInterrupt):
        acwb.sweep(make, [32, 64], reduction=0.3, rounds=2, path=path)
    (first,) = acwb.Sweep.load(path).points

    def copied(_subject: object, size: int, _settings: object) -> batch_sweep.SweepPoint:
        measured.append(size)
        return replace(first, batch_size=size, fingerprint=acwb.trace(make(size)).graph.fingerprint)

    monkeypatch.setattr(batch_sweep, "_point", copied)
    found = acwb.sweep(make, [32, 64], reduction=0.3, rounds=2, path=path)
    assert measured == [32, 64]
    assert found.points[0] == first
    assert acwb.Sweep.load(path) == found
    for each in found.points:
        assert each.eager.problem == each.planned.problem == ""
        assert_predicted(each.planned)
        assert each.planned.peaks.allocator_bytes <= each.planned.predicted_bytes
        assert each.eager.peaks.tensor_bytes > each.planned.peaks.tensor_bytes
        assert each.saved == 1 - each.planned.peaks.process_bytes / each.eager.peaks.process_bytes
        assert each.time.rounds == len(each.eager.seconds) == len(each.planned.seconds) == 2
    assert list(found.frame["batch_size"]) == [32, 64]
    assert list(found.frame["planned_tensor_bytes"]) == [each.planned.peaks.tensor_bytes for each in found.points]
    assert "predicted ×" in repr(found)
    with pytest.raises(acwb.AcwbError, match="holds another sweep"):
        acwb.sweep(make, [32], reduction=0.4, rounds=2, path=path)
    content = content_of(path)
    content["points"][0]["fingerprint"] = "of another model"
    path.write_text(json.dumps(content))
    monkeypatch.setattr(batch_sweep, "_point", lambda *arguments: (measured.append(arguments[1]), found.points[0])[1])
    acwb.sweep(make, [32], reduction=0.3, rounds=2, path=path)
    assert measured == [32, 64, 32]


def test_a_folder_is_made_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(acwb.AcwbError, match="Choose a folder that you may write to"):
        acwb.sweep(make, [32], reduction=0.3, path=tmp_path / "file" / "sweep.json")
    point = batch_sweep.SweepPoint(
        32, "", 0, None, batch_sweep.BatchResult("not run", None, None), batch_sweep.BatchResult("not run", None, None)
    )
    monkeypatch.setattr(batch_sweep, "_point", lambda *_: point)
    acwb.sweep(make, [32], reduction=0.3, path=tmp_path / "new" / "sweep.json")
    assert acwb.Sweep.load(tmp_path / "new" / "sweep.json").points == (point,)


@pytest.mark.slow
def test_a_batch_size_that_does_not_fit_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch_sweep, measurement):  # the cap and the peaks are those of fresh processes
        monkeypatch.setattr(module, "run_in_fresh_process", in_this_process)
    found = acwb.sweep(make, [128], reduction=0.4, memory="100MiB", rounds=1)
    (point,) = found.points
    assert "does not fit in 0.098 GiB" in point.eager.problem
    assert point.eager.peaks is None
    assert point.eager.seconds == ()
    assert point.eager.predicted_bytes > 100 * 2**20
    assert point.planned.problem == ""
    assert point.planned.peaks.process_bytes < 100 * 2**20
    assert point.time is None
    assert "does not fit" in repr(found)


@pytest.fixture
def measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks and times are measured in this process, which is quicker, and good enough where no test looks at them."""
    for module in (batch_sweep, measurement, memory):
        monkeypatch.setattr(module, "run_in_fresh_process", in_this_process)


@pytest.mark.usefixtures("measured_here")
def test_a_budget_below_the_floor_is_recorded() -> None:
    (point,) = acwb.sweep(make, [4], budget="2MiB", rounds=1).points
    assert "No plan fits in 0.002 GiB" in point.planned.problem
    assert point.planned.peaks is None
    assert point.eager.peaks is not None
    assert point.predicted_overhead is None
    assert not point.at_floor


@pytest.mark.usefixtures("measured_here")
def test_an_infeasible_budget_may_be_replaced_by_the_floor() -> None:
    found = acwb.sweep(make, [4], budget="2MiB", or_floor=True, rounds=1)
    (point,) = found.points
    assert point.planned.problem == ""
    assert point.planned.predicted_bytes > point.budget_bytes
    assert_predicted(point.planned)
    assert "at the floor" in repr(found)
    assert found.frame["at_floor"].tolist() == [True]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batch_sizes": [], "reduction": 0.5}, "batch_sizes is \\[\\]"),
        ({"batch_sizes": [0], "reduction": 0.5}, "batch_sizes is \\[0\\]"),
        ({"batch_sizes": [2]}, "give one of them"),
        ({"batch_sizes": [2], "budget": 1, "reduction": 0.5}, "give one of them"),
        ({"batch_sizes": [2], "reduction": 1.5}, "A reduction of 1.5"),
        ({"batch_sizes": [2], "budget": "3 apples"}, "cannot be read"),
        ({"batch_sizes": [2], "reduction": 0.5, "rounds": 0}, "rounds is 0"),
        ({"batch_sizes": [2], "reduction": 0.5, "repeats": 0}, "repeats is 0"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(acwb.AcwbError, match=sentence):
        acwb.sweep(partial(make), **arguments)
