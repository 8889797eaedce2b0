"""Recompute rules: each is bitwise equal to the op that it recomputes, is timed, and is simulated as a run."""

import dataclasses

import pytest
import torch

import acwb
from acwb.capture.recompute_rules import RULES, rule_of
from acwb.core.schedule import Free, Run, Schedule, with_frees
from acwb.core.simulator import simulate
from support.toy_graphs import Line, draw, profiled

aten = torch.ops.aten
SHAPES = [(16, 64, 28, 28), (4, 10, 5, 5), (2, 7, 3), (64, 37)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_is_recomputed_bitwise_from_its_statistics(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3 + 1).to(dtype)
    precision = torch.float64 if dtype is torch.float64 else torch.float32
    weight, bias = (torch.randn(shape[1], generator=generator, dtype=precision) for _ in range(2))
    statistics = (torch.zeros(shape[1], dtype=precision), torch.ones(shape[1], dtype=precision))
    assert_same(aten._native_batch_norm_legit_functional.default, (x, weight, bias, *statistics, True, 0.1, 1e-5))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_is_recomputed_bitwise_from_its_mask(shape: tuple[int, ...], p: float) -> None:
    assert_same(aten.native_dropout.default, (torch.randn(shape), p, True))


def test_pooling_is_recomputed_bitwise_from_its_indices() -> None:
    assert_same(aten.max_pool2d_with_indices.default, (torch.randn(3, 5, 17, 17), [3, 3], [2, 2], [1, 1]))


def assert_same(target: torch._ops.OpOverload, arguments: tuple[object, ...]) -> None:
    rule = rule_of(target, arguments)
    assert rule is not None
    result = target(*arguments)
    again = rule.kernel(arguments, result)
    assert again.stride() == result[0].stride()
    assert torch.equal(again, result[0])


def test_rules_do_not_apply_where_they_would_not_hold() -> None:
    x = torch.randn(2, 3)
    statistics = (torch.zeros(3), torch.ones(3))
    norm = aten._native_batch_norm_legit_functional.default
    assert rule_of(norm, (x, None, None, *statistics, True, 0.1, 1e-5)) is None
    assert rule_of(norm, (x, *statistics, *statistics, False, 0.1, 1e-5)) is None
    assert rule_of(aten.native_dropout.default, (x, 1.0, True)) is None
    assert rule_of(aten.relu.default, (x,)) is None


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_bert"])
def test_every_recompute_rule_of_a_subject_is_profiled_and_bitwise_equal(name: str) -> None:
    subject = getattr(acwb.models, name)()
    step = acwb.trace(subject)
    profile = acwb.profile(step, repeats=1)
    known = {str(target) for target in RULES}
    assert profile.rules.keys() == {op.name for op in step.graph.ops if op.target in known}
    assert all(seconds > 0 for seconds, _ in profile.rules.values())


def test_a_recompute_rule_that_is_not_bitwise_equal_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    target = aten._native_batch_norm_legit_functional.default
    wrong = dataclasses.replace(RULES[target], kernel=lambda _, results: torch.nextafter(results[0], results[0] + 1))
    monkeypatch.setitem(RULES, target, wrong)
    subject = acwb.models.tiny_resnet()
    step = acwb.trace(subject)
    assert acwb.profile(step, repeats=1).rules.keys() == {"max_pool2d_with_indices"}


def test_a_run_by_rule_reads_the_kept_outputs_and_recomputes_the_first_one() -> None:
    lines: list[Line] = [
        ("F", "a", "x w", 8), ("F", "n", "a", (8, 2)), ("F", "loss", "n:0", 1),
        ("B", "one", "", 1), ("B", "g", "one n:0 n:1", 5),
    ]  # fmt: skip
    graph = draw({"x": 1, "w": 5}, lines, "loss", {"w": "g"})
    ops = [dataclasses.replace(op, rule_inputs=("a", "n:1")) if op.name == "n" else op for op in graph.ops]
    graph = dataclasses.replace(graph, ops=tuple(ops))
    profile = dataclasses.replace(profiled(graph), rules={"n": (0.25, 100)})
    runs = [Run("a"), Run("n"), Run("loss"), Run("one"), Run("n", 1, by_rule=True), Run("g")]
    schedule = with_frees(graph, runs)
    assert schedule.entries == (
        Run("a"), Run("n"), Run("loss"), Free("n:0"), Run("one"), Run("n", 1, by_rule=True), Free("a"),
        Run("g"), Free("n:1"), Free("one"), Free("n:0", 1),
    )  # fmt: skip
    timeline = simulate(profile, schedule)
    assert timeline.tensor_bytes == (14, 24, 25, 17, 18, 26, 18, 23, 21, 20, 12)
    assert (timeline.peak_bytes, timeline.seconds) == (126, 5.25)
    with pytest.raises(acwb.AcwbError, match="by a recompute rule, which the profile does not have"):
        simulate(profiled(graph), schedule)
    with pytest.raises(acwb.AcwbError, match="by a recompute rule, which the profile does not have"):
        simulate(profile, Schedule((Run("a"), Run("n", 0, by_rule=True))))
