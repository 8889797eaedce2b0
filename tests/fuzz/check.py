"""Checks one random model: step and drop-in are bitwise eager's, within the budget, or refused in a sentence."""

import warnings
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch

import acwb
from acwb.core.schedule import Run
from acwb.evaluation.memory import LiveBytesMeter, static_bytes
from acwb.subject import Subject
from fuzz.random_models import Case, case
from support.bitwise import differences, train

STEPS = 8
REFUSED, HELD = "refused", "held"


def check(seed: int) -> str:
    """ "held", or "refused: …" with the sentence; whatever else is wrong is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_step(seed)
            check_drop_in(seed)
        except acwb.AcwbError as error:
            if "\n" in str(error):
                raise
            return f"{REFUSED}: {error}"
    return HELD


def expected(seed: int) -> list[dict[str, Any]]:
    eager = case(seed).subject
    return train(eager, eager.eager_step, STEPS)


def check_step(seed: int) -> None:
    """The planned step trains as eager, its live bytes are as predicted at every op, its peak is within the budget."""
    given = case(seed)
    subject = given.subject
    step = acwb.trace(subject)
    profile = acwb.profile(step, repeats=1)
    frontier = acwb.frontier(profile)
    plan = frontier.at(budget_between(frontier, given.share))
    planned = acwb.rewrite(step, plan)
    found = differences(train(subject, planned.run, STEPS), expected(seed))
    assert not found, f"step differs from eager: {found[:4]}"
    planned.free_gradients()
    static, meter = static_bytes(planned), LiveBytesMeter()
    with meter:
        planned.run()
    predicted = [
        (profile.graph.op(entry.op).target, size - profile.graph.static_bytes)
        for entry, size in zip(plan.schedule.entries, plan.timeline.tensor_bytes, strict=True)
        if isinstance(entry, Run)
    ]
    assert static + meter.peak <= plan.budget_bytes, f"step needs {static + meter.peak}, not {plan.budget_bytes}"
    if any(isinstance(entry, Run) and entry.by_rule for entry in plan.schedule.entries):  # which runs several ops
        most = plan.timeline.peak_bytes - profile.graph.static_bytes  # with what these make and free again
        assert max(size for _, size in predicted) <= meter.peak <= most
    else:
        same = [size for _, size in predicted] == [size for _, size in meter.curve]
        assert same, f"live bytes are not as predicted: {_first(predicted, meter)}"


def _first(predicted: list[tuple[str, int]], meter: LiveBytesMeter) -> Any:
    """The first op at which the live bytes differ."""
    pairs = zip_longest(predicted, meter.curve)
    return next((mine, theirs) for mine, theirs in pairs if mine is None or theirs is None or mine[1] != theirs[1])


def budget_between(frontier: acwb.Frontier, share: float) -> int:
    return round(frontier.floor_bytes + share * (frontier.baseline_bytes - frontier.floor_bytes))


def loop(given: Case, model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    subject = given.subject

    def step() -> torch.Tensor:
        subject.free_gradients()
        loss = subject.loss_fn(model, subject.batch)
        loss.backward()
        if subject.optimizer is not None:
            subject.optimizer.step()
        return loss.detach()

    return step


def planned_for(subject: Subject, budget: int, options: dict[str, Any]) -> tuple[int, torch.nn.Module]:
    """The drop-in for a budget; by other times the search finds another floor, which is then taken for the budget."""
    for _ in range(5):
        try:
            return budget, acwb.checkpoint(subject.model, subject.batch, budget, **options)
        except acwb.InfeasibleBudgetError as error:
            budget = error.floor_bytes
    return budget, acwb.checkpoint(subject.model, subject.batch, budget, **options)


def check_drop_in(seed: int) -> None:
    """The drop-in trains as eager; told of loss and optimizer, its peak is within the budget."""
    given = case(seed)
    subject = given.subject
    options: dict[str, Any] = {"repeats": 1}
    with torch.autocast("cpu", dtype=given.precision, enabled=given.precision is not None):
        if given.told:
            options |= {"loss_fn": subject.loss_fn, "optimizer": subject.optimizer}
        whole = acwb.checkpoint(subject.model, subject.batch, "100%", **options)
        budget, model = planned_for(
            subject, budget_between(acwb.frontier(whole.plans[0].profile), given.share), options
        )
    found = differences(train(subject, loop(given, model), STEPS), expected(seed))
    assert not found, f"drop-in differs from eager: {found[:4]}"
    if given.told:
        subject.free_gradients()
        static, meter = subject.static_bytes, LiveBytesMeter()
        with meter:
            loop(given, model)()
        assert static + meter.peak <= budget, f"drop-in needs {static + meter.peak}, not {budget}"
