"""The incremental state of the planners against the simulator, on random steps and random changes."""

import dataclasses
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as some

from acwb.core.graph import StepGraph
from acwb.core.schedule import with_frees
from acwb.core.simulator import simulate
from acwb.planning.frontier_search import FrontierPoint, descend, non_dominated
from acwb.planning.problem import PlanningProblem, rank_of_slot
from acwb.planning.recompute_state import RecomputeState, runs_of_sites
from support.toy_graphs import draw, profiled, steps


def assert_exact(problem: PlanningProblem, state: RecomputeState) -> None:
    """Peak and time are those of the simulator."""
    timeline = simulate(problem.profile, with_frees(problem.graph, runs_of_sites(problem, state.change_log().sites())))
    assert state.peak()[1] == timeline.peak_bytes
    assert state.seconds == timeline.seconds


@given(steps(), some.data())
def test_peak_and_time_after_every_change_are_those_of_the_simulator(graph: StepGraph, data: some.DataObject) -> None:
    workspace = {op.name: data.draw(some.integers(0, 3)) for op in graph.ops}
    problem = PlanningProblem(profiled(graph, workspace))
    state = RecomputeState(problem)
    assert_exact(problem, state)
    for _ in range(data.draw(some.integers(0, 5))):
        idle = [item for item in range(len(problem.names)) if problem.droppable[item] and state.idle_until[item] > 0]
        if not idle:
            return
        storage = data.draw(some.sampled_from(idle))
        before = (state.change_log().sites(), state.seconds, state.peak(), state.need.tolist())
        mark = state.mark()
        state.apply(state.chain(storage, rank_of_slot(int(state.idle_until[storage]))))
        assert_exact(problem, state)
        if data.draw(some.booleans()):
            state.revert(mark)
            assert before == (state.change_log().sites(), state.seconds, state.peak(), state.need.tolist())
        pairs = [(rank, op) for rank, ops in state.chains.items() for op in ops]
        if pairs and data.draw(some.booleans()):
            rank, op = data.draw(some.sampled_from(pairs))
            limit = data.draw(some.integers(state.peak()[1], state.peak()[1] + 10))
            seconds = state.seconds
            if state.restore(rank, op, limit):
                assert state.seconds < seconds
                assert state.peak()[1] <= limit
            assert_exact(problem, state)


@given(steps())
def test_every_point_of_a_frontier_is_exact_and_non_dominated(graph: StepGraph) -> None:
    problem = PlanningProblem(profiled(graph))
    points = descend(problem)
    assert points[0].seconds == len(graph.ops)
    for point in points:
        timeline = simulate(problem.profile, with_frees(graph, runs_of_sites(problem, point._sites)))
        assert (timeline.peak_bytes, timeline.seconds) == (point.peak_bytes, point.seconds)
    for larger, smaller in pairwise(points):
        assert larger.peak_bytes > smaller.peak_bytes
        assert larger.seconds < smaller.seconds


def test_dominated_points_are_left_out() -> None:
    log = RecomputeState(PlanningProblem(profiled(draw({"x": 1}, [("F", "loss", "x", 1)], "loss", {})))).change_log()
    points = [
        FrontierPoint(5, 1.0, log),
        FrontierPoint(4, 3.0, log),
        FrontierPoint(3, 2.0, log),
        FrontierPoint(3, 2.5, log),
    ]
    assert non_dominated(points) == [points[0], points[2]]
    assert non_dominated([dataclasses.replace(points[0])]) == [points[0]]
