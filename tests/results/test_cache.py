"""The cache of results: loaded if they belong to exactly this step, measured and saved otherwise."""

from pathlib import Path
from typing import Any

import pytest

import acwb
from acwb.evaluation import baselines
from acwb.evaluation.comparison import MethodComparison
from acwb.results import cache
from support.processes import in_this_process


def traced(batch_size: int) -> acwb.TracedStep:
    return acwb.trace(acwb.models.tiny_resnet(batch_size=batch_size))


def unnamed() -> tuple[Any, ...]:
    subject = acwb.models.tiny_resnet()
    return subject.model, subject.batch, subject.loss_fn, subject.optimizer


def test_a_profile_is_measured_once_for_the_same_step(tmp_path: Path) -> None:
    first, origin = cache.cached_profile(traced(4), tmp_path / "new", repeats=1)
    assert not origin.was_cached
    second, origin = cache.cached_profile(traced(4), tmp_path / "new", repeats=1)
    assert origin.was_cached
    assert str(origin) == f"read from {origin.file}, which was measured of this very step ({first.conditions})"
    assert second.seconds == first.seconds
    assert not cache.cached_profile(traced(5), tmp_path / "new", repeats=1)[1].was_cached


def test_a_loaded_profile_keeps_the_name_of_the_model(tmp_path: Path) -> None:
    """Files do not have to know the name: it comes with the step."""
    cache.cached_profile(acwb.trace(*unnamed()), tmp_path, repeats=1)
    profile, origin = cache.cached_profile(acwb.trace(acwb.models.tiny_resnet()), tmp_path, repeats=1)
    assert origin.was_cached
    assert profile.graph.title == "tiny ResNet"


def test_a_truncated_file_is_reported_and_not_used(tmp_path: Path) -> None:
    cache.cached_profile(traced(4), tmp_path, repeats=1)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-100])
    with pytest.raises(acwb.AcwbError, match="is not a whole JSON file"):
        cache.cached_profile(traced(4), tmp_path, repeats=1)


def test_a_comparison_belongs_to_its_step_its_rounds_and_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"captured, no plan": baselines.captured}
    monkeypatch.setattr(cache, "run_in_fresh_process", in_this_process)

    def comparison(batch_size: int = 4, rounds: int = 0, **options: Any) -> tuple[MethodComparison, cache.Origin]:
        make = acwb.models.tiny_resnet
        return cache.cached_comparison(make, batch_size, {}, few, rounds, tmp_path / "new", repeats=1, **options)

    measured, origin = comparison()
    assert not origin.was_cached
    assert origin.file.startswith("contest_tiny_resnet_")
    loaded, origin = comparison()
    assert origin.was_cached
    assert loaded == measured
    for other in ({"batch_size": 5}, {"rounds": 1}, {"kind": "inductor"}, {"refresh": True}):
        assert not comparison(**other)[1].was_cached
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_a_comparison_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    measured, origin = cache.cached_comparison(acwb.models.tiny_resnet, 4, {}, {}, 0, tmp_path, refresh=True)
    assert [row.name for row in measured.rows] == ["eager"]
    assert (tmp_path / origin.file).exists()
