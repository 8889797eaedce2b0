"""Live-byte meters and time ratios, against values computed by hand."""

from collections.abc import Callable

import pytest
import torch

from acwb.evaluation import timing
from acwb.evaluation.memory import LiveBytesMeter, peak_live_bytes
from acwb.evaluation.timing import interleave, ratio


def test_live_bytes_follow_storages_not_tensors() -> None:
    meter = LiveBytesMeter()
    existing = torch.ones(100)
    with meter:
        first = torch.zeros(1000)
        assert meter.live == 4000
        view = first[:10].view(2, 5)
        assert meter.live == 4000
        existing.add_(1)
        alias = existing[:50]
        assert meter.live == 4000
        del first
        assert meter.live == 4000
        del view
        assert meter.live == 0
    assert meter.peak == 4000
    assert alias.numel() == 50


def test_the_peak_is_measured_in_the_second_run() -> None:
    kept: list[torch.Tensor] = []

    def action() -> None:
        if not kept:
            kept.append(torch.zeros(10_000))
        torch.zeros(10) + torch.zeros(10)

    assert peak_live_bytes(action) == 120


def test_actions_are_timed_in_turn_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], list[str]()

    def action(name: str, seconds: float) -> Callable[[], None]:
        def act() -> None:
            order.append(name)
            clock[0] += seconds

        return act

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    found = interleave({"one": action("one", 2.0), "two": action("two", 6.0)}, rounds=3)
    assert found == {"one": [2.0] * 3, "two": [6.0] * 3}
    assert order == ["one", "two", *("one", "two"), *("two", "one"), *("one", "two")]  # after one warm-up


def test_a_ratio_has_an_interval_around_its_median() -> None:
    found = ratio([2.0, 2.2, 1.8, 2.1, 1.9, 2.0], [1.0] * 6)
    assert found.low < found.median < found.high
    assert found.median == pytest.approx(2.0)
    assert ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).median == 1.0
    assert str(ratio([1.1], [1.0])) == "×1.100 [1.100, 1.100]"


def test_a_ratio_is_the_median_of_the_means_of_all_pairs_of_rounds() -> None:
    assert ratio([1.0, 2.0, 9.0], [1.0, 1.0, 1.0]).median == 3.5  # of 1, 1.5, 2, 5, 5.5 and 9


@pytest.mark.parametrize(("rounds", "is_noise"), [(5, True), (6, False)])
def test_too_few_rounds_claim_nothing(rounds: int, is_noise: bool) -> None:
    assert ratio([0.9] * rounds, [1.0] * rounds).is_noise is is_noise
