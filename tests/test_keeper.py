"""Expensive results: read where they belong to the very same step, made and written otherwise."""

from pathlib import Path

import pytest

import acwb
from acwb import contenders, keeper


def traced(batch_size: int) -> acwb.TracedStep:
    subject = acwb.models.tiny_bert(batch_size=batch_size)
    return acwb.trace(subject.model, subject.batch, subject.loss_fn, subject.optimizer)


def test_a_profile_is_measured_once_for_the_same_step(tmp_path: Path) -> None:
    first, told = keeper.profile_of(traced(4), tmp_path / "new", repeats=1)
    assert "measured now" in told
    second, told = keeper.profile_of(traced(4), tmp_path / "new", repeats=1)
    assert "read from" in told
    assert f"({first.conditions})" in told
    assert second.seconds == first.seconds
    _, told = keeper.profile_of(traced(5), tmp_path / "new", repeats=1)
    assert "measured now" in told


def test_a_file_that_was_cut_off_is_told_and_not_used(tmp_path: Path) -> None:
    keeper.profile_of(traced(4), tmp_path, repeats=1)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-100])
    with pytest.raises(acwb.AcwbError, match="is not a whole JSON file"):
        keeper.profile_of(traced(4), tmp_path, repeats=1)


def test_a_contest_belongs_to_its_step_its_rounds_and_its_kind(tmp_path: Path) -> None:
    def path(batch_size: int, rounds: int = 3, kind: str = "contest") -> Path:
        return keeper.contest_path("tiny_bert", batch_size, {"dropout": 0.0}, rounds, tmp_path, kind)

    assert path(4) == path(4)
    assert len({path(4), path(5), path(4, rounds=4), path(4, kind="inductor")}) == 4
    few = {"captured, no plan": contenders.captured}
    held, told = keeper.contest_of("tiny_bert", 4, {"dropout": 0.0}, few, 0, tmp_path)
    assert "measured now" in told
    again, told = keeper.contest_of("tiny_bert", 4, {"dropout": 0.0}, few, 0, tmp_path)
    assert "read from" in told
    assert again == held
