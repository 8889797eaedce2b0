"""The tables of `make tradeoff`, on a small synthetic network."""

import pytest

import acwb
from acwb.core.graph import Phase
from acwb.experiments.planner_study import OTHER_PLANNERS, compare_planners, reductions
from acwb.experiments.synthetic_network import ResidualNetwork


def test_a_synthetic_network_is_a_step_of_the_size_that_was_asked_for() -> None:
    graph = ResidualNetwork(500).profile().graph
    assert len(graph.ops) == pytest.approx(500, rel=0.02)
    assert {op.phase for op in graph.ops} == set(Phase)
    assert len(graph.gradients) == sum(op.phase is Phase.OPTIMIZER for op in graph.ops)


def test_reductions_cost_more_and_more_and_never_less_than_the_bound() -> None:
    profile = ResidualNetwork(200).profile()
    found, floor = reductions(profile, (0.2, 0.4, 0.6))
    assert [each.tensors for each in found] == sorted(each.tensors for each in found)
    assert all(each.least <= each.total for each in found)
    assert floor.total < 0.4
    frontier, static = acwb.frontier(profile), profile.graph.static_bytes
    assert floor.total == (frontier.floor_bytes - static) / (frontier.baseline_bytes - static)
    assert str(found[0]).startswith("−20%: +")


def test_no_planner_is_ahead_of_the_frontier() -> None:
    first, *lines = compare_planners(ResidualNetwork(500).profile())
    assert first.startswith("frontier: ")
    assert [line.split(":")[0] for line in lines] == [other.__name__ for other in OTHER_PLANNERS]
    assert all("ahead of the frontier at 0;" in line for line in lines)
