"""Time ratios of interleaved rounds, with bootstrap intervals; what is within noise is called noise."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy
import torch
from tqdm.auto import tqdm

from acwb.subject import Action

MIN_ROUNDS = 6  # rounds that may exclude chance: all of them on one side happens by chance less than once in twenty


@dataclass(frozen=True)
class Ratio:
    """A time relative to a reference, with a bootstrap 95 % interval.

    Attributes:
        median: Hodges–Lehmann estimator (median of the means of any two rounds): robust to outliers, with lower
            variance than the median of the rounds.
    """

    median: float
    low: float
    high: float
    rounds: int

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains a ratio of 1, or the rounds are too few to decide."""
        return self.rounds < MIN_ROUNDS or self.low <= 1 <= self.high

    def __str__(self) -> str:
        return f"×{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interleave(actions: Mapping[str, Action], rounds: int = 11, warm_up: bool = True) -> dict[str, list[float]]:
    """The seconds of each action in each round: after one warm-up, all actions in turn, in alternating order."""
    for action in actions.values() if warm_up else ():
        action()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in tqdm(range(rounds), desc="rounds", leave=False):
        names = list(actions) if number % 2 == 0 else list(actions)[::-1]
        for name in names:
            start = time.perf_counter()
            actions[name]()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: list[float], reference: list[float]) -> Ratio:
    """The time of one action relative to another that ran in the same rounds."""
    ratios = numpy.array(seconds) / numpy.array(reference)
    one, two = numpy.triu_indices(len(ratios))  # every pair of rounds, and each with itself

    def middle(rounds: numpy.ndarray) -> float:
        return float(numpy.median((rounds[one] + rounds[two]) / 2))

    samples = [middle(chosen) for chosen in numpy.random.default_rng(0).choice(ratios, (5_000, len(ratios)))]
    low, high = numpy.percentile(samples, [2.5, 97.5])
    return Ratio(middle(ratios), float(low), float(high), len(ratios))
