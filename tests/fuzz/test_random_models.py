"""Random models with random losses and optimizers train as in eager, as step and as drop-in; `make fuzz` runs on."""

import pytest
import torch

from fuzz.check import HELD, check

SEEDS = 60
# Seeds that did not hold once.
FOUND = (
    33,
    102,
    121,
    133,
    259,
    310,
    10118,
    10127,
    10130,
    10137,
    10163,
    10169,
    10205,
    10411,
    10463,
    10496,
    20028,
    20136,
)


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", FOUND)
def test_models_that_once_differed_hold(seed: int) -> None:
    outcome = check(seed)  # a drop-in that is not told of its loss may be wrong about outputs, or about its floor
    assert outcome == HELD or "The loss is not computed from" in outcome or "No plan fits" in outcome


@pytest.mark.slow
def test_random_models_hold_or_are_refused_in_a_sentence() -> None:
    outcomes = [check(seed) for seed in range(SEEDS)]
    assert sum(outcome == HELD for outcome in outcomes) > 0.8 * SEEDS
