"""The largest batch: the search on hand-made curves, the extrapolation against profiles, the result under a cap."""

from collections.abc import Callable
from functools import partial

import pytest

import acwb
from acwb.evaluation.baselines import eager
from acwb.evaluation.batch_search import BatchExtrapolation, largest_within
from acwb.evaluation.memory_cap import train_within


@pytest.mark.parametrize(
    ("peak_at", "memory", "largest"),
    [
        (lambda batch: 100 + 10 * batch, 100, 0),
        (lambda batch: 100 + 10 * batch, 110, 1),
        (lambda batch: 100 + 10 * batch, 119, 1),
        (lambda batch: 100 + 10 * batch, 1100, 100),
        (lambda batch: 100 + 10 * batch, 100_100, 10_000),
        (lambda batch: max(500, 100 + 10 * batch), 499, 0),
        (lambda batch: max(500, 100 + 10 * batch), 700, 60),  # level first: the optimizer's peak
        (lambda batch: 100 + batch * batch, 10_100, 100),
    ],
)
def test_the_search_finds_the_largest_batch_that_fits(peak_at: Callable[[int], int], memory: int, largest: int) -> None:
    tried: list[int] = []

    def peak(batch: int) -> int:
        tried.append(batch)
        return peak_at(batch)

    found = largest_within(peak, memory, 2, 4)
    assert found == largest
    assert len(tried) < 30


def test_the_search_ends_at_a_batch_that_fits_where_the_peak_is_not_monotone() -> None:
    def peak_at(batch: int) -> int:
        return 1000 + 10 * batch - (300 if batch % 7 == 0 else 0)

    found = largest_within(peak_at, 1203, 2, 4)
    assert peak_at(found) <= 1203 < peak_at(found + 1)


@pytest.mark.parametrize("make", [acwb.models.tiny_resnet, acwb.models.tiny_bert])
def test_sizes_of_another_batch_are_extrapolated_from_two(make: Callable[..., acwb.models.Subject]) -> None:
    def profile(batch: int) -> acwb.Profile:
        subject = make(batch_size=batch)
        return acwb.profile(acwb.trace(subject), repeats=1)

    scale = BatchExtrapolation(2, profile(2), 4, profile(4))
    real = profile(13)
    scaled = scale.at(13)
    assert {each.name: each.bytes for each in scaled.graph.storages} == {
        each.name: each.bytes for each in real.graph.storages
    }
    assert scaled.graph.live_bytes == real.graph.live_bytes
    assert scaled.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    assert all(seconds > 0 for seconds in scaled.seconds.values())
    exact = scale.at(13, real.graph)
    assert exact.graph is real.graph


def test_steps_with_different_ops_cannot_be_extrapolated() -> None:
    profiles = []
    for make in (acwb.models.tiny_resnet, acwb.models.tiny_bert):
        subject = make()
        step = acwb.trace(subject)
        profiles.append(acwb.profile(step, repeats=1))
    with pytest.raises(acwb.AcwbError, match="other ops at batch 2 than at batch 4"):
        BatchExtrapolation(2, profiles[0], 4, profiles[1])


@pytest.mark.slow
def test_the_largest_batch_trains_and_one_more_does_not() -> None:
    make = partial(_resnet, 96)
    found = acwb.largest_batch(make, "0.35GiB", small=(4, 8))
    assert found.confirmed
    assert found.planned >= 1.3 * found.eager
    with pytest.raises(acwb.DoesNotFitError):
        train_within(partial(make, found.eager + 1), eager, found.memory_bytes)
    assert f"{found.planned:,} with a plan" in repr(found)
    assert "confirmed" in repr(found)


def _resnet(image_size: int, batch_size: int) -> acwb.models.Subject:
    return acwb.models.resnet18(batch_size, image_size)


def test_a_memory_in_which_no_batch_fits_is_refused() -> None:
    with pytest.raises(acwb.InfeasibleBudgetError, match="No plan fits"):
        acwb.largest_batch(acwb.models.tiny_resnet, "1MiB")
