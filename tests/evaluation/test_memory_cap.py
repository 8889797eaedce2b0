"""A hard memory cap: where eager does not fit, the planned step trains to the same losses."""

from functools import partial

import pytest
import torch

import acwb
from acwb.evaluation.baselines import eager, planned
from acwb.evaluation.memory_cap import train_within
from acwb.experiments.benchmarks import CAPPED, trained_under_a_cap
from acwb.subject import Subject


def make(batch_size: int = 8) -> Subject:
    return acwb.models.resnet18(batch_size=batch_size, image_size=128)


def test_under_a_cap_the_planned_step_trains_where_eager_does_not_fit() -> None:
    subject = make()
    step = acwb.trace(subject)
    frontier = acwb.frontier(acwb.profile(step, repeats=1))
    memory = (frontier.floor_bytes + frontier.baseline_bytes) // 2
    plan = frontier.at(int(memory * 0.99))
    losses = [float(subject.eager_step()) for _ in range(10)]
    assert len(set(losses)) == 10
    with pytest.raises(acwb.DoesNotFitError, match="does not fit in"):
        train_within(make, eager, memory)
    assert train_within(make, partial(planned, plan=plan), memory, iterations=10) == losses


def test_a_cap_below_the_static_memory_is_refused() -> None:
    with pytest.raises(acwb.DoesNotFitError, match=r"of parameters, buffers and inputs do not fit in 0\.010 GiB"):
        train_within(make, eager, 10 * 2**20)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        train_within(_broken, eager, 2**30)


def _broken() -> Subject:
    model = torch.nn.Linear(2, 2)
    return Subject(
        "broken", model, (torch.ones(1, 2),), lambda model, batch: (model(*batch) + torch.ones(3)).sum(), None
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch_size"), CAPPED)
def test_real_models_train_under_a_cap_in_which_eager_does_not_fit(name: str, batch_size: int) -> None:
    row = trained_under_a_cap(name, batch_size)
    assert row["eager"] == "does not fit"
    assert row["equal_losses"] == row["iterations"] == row["different_losses_of_eager"] == 10
