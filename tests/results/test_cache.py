"""Expensive results: read where they belong to the very same step, made and written otherwise."""

from pathlib import Path
from typing import Any

import pytest

import acwb
from acwb.evaluation import baselines
from acwb.evaluation.comparison import MethodComparison
from acwb.results import cache


def traced(batch_size: int) -> acwb.TracedStep:
    subject = acwb.models.tiny_bert(batch_size=batch_size)
    return acwb.trace(subject.model, subject.batch, subject.loss_fn, subject.optimizer)


def test_a_profile_is_measured_once_for_the_same_step(tmp_path: Path) -> None:
    first, told = cache.cached_profile(traced(4), tmp_path / "new", repeats=1)
    assert "measured now" in told
    second, told = cache.cached_profile(traced(4), tmp_path / "new", repeats=1)
    assert "read from" in told
    assert f"({first.conditions})" in told
    assert second.seconds == first.seconds
    _, told = cache.cached_profile(traced(5), tmp_path / "new", repeats=1)
    assert "measured now" in told


def test_a_file_that_was_cut_off_is_told_and_not_used(tmp_path: Path) -> None:
    cache.cached_profile(traced(4), tmp_path, repeats=1)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-100])
    with pytest.raises(acwb.AcwbError, match="is not a whole JSON file"):
        cache.cached_profile(traced(4), tmp_path, repeats=1)


def test_a_contest_belongs_to_its_step_its_rounds_and_its_kind(tmp_path: Path) -> None:
    few = {"captured, no plan": baselines.captured}

    def comparison(batch_size: int = 4, rounds: int = 0, **options: Any) -> tuple[MethodComparison, str]:
        return cache.cached_comparison(
            "tiny_bert", batch_size, {"dropout": 0.0}, few, rounds, tmp_path / "new", repeats=1, **options
        )

    held, told = comparison()
    assert "measured now" in told
    again, told = comparison()
    assert "read from" in told
    assert again == held
    for other in ({"batch_size": 5}, {"rounds": 1}, {"kind": "inductor"}, {"anew": True}):
        assert "measured now" in comparison(**other)[1]
    assert len(list((tmp_path / "new").iterdir())) == 4
