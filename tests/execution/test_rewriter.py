"""A rewritten step follows its plan: bitwise equal results, within the plan's memory."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import acwb
from acwb.core.schedule import Free, Run, Schedule, ScheduleBuilder, SwapIn, SwapOut, just_in_time, with_frees
from acwb.core.simulator import simulate
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.evaluation.memory import LiveBytesMeter, allocated_peak_bytes, tensor_peak_bytes
from acwb.execution.rewriter import Recomputation, recomputations, rewritten_graph
from acwb.planning.mu_two import mu_two
from acwb.planning.planner import PLANNERS
from acwb.profiling.process_memory import MALLOC_RETURNS_MEMORY, resident_bytes
from acwb.rng import record_state, replay
from acwb.subject import Subject
from support.bitwise import Start, differences, train, train_to_the_end
from support.candidates import nine_plans
from support.tiny_models import MAKERS
from support.toy_graphs import draw, profiled, steps

STATE_BYTES = torch.get_rng_state().nbytes
ENOUGH = 10**15  # bytes: a budget that nothing exceeds


def traced(subject: Subject) -> acwb.TracedStep:
    return acwb.trace(subject)


def plans_of(profile: acwb.Profile) -> dict[str, acwb.Plan]:
    """The first, the middle and the last point of the frontier, and what the habits do."""
    frontier = acwb.frontier(profile)
    points = {"first": frontier.points[0], "middle": frontier.points[len(frontier.points) // 2]}
    found = {name: frontier.plan(point) for name, point in {**points, "floor": frontier.points[-1]}.items()}
    habits = ("recompute_all", "sqrt_n", "per_block")
    return {**found, **{name: PLANNERS[name](profile, ENOUGH) for name in habits}}


class Prepared:
    """A tiny model, captured and profiled, with what eager PyTorch makes of it."""

    def __init__(self, name: str) -> None:
        make = MAKERS[name] if name in MAKERS else getattr(acwb.models, name)
        eager = make()
        self.expected = train(eager, eager.eager_step)
        self.subject = make()
        self.step = traced(self.subject)
        self.start = Start(self.step)
        self.profile = acwb.profile(self.step, repeats=1)


def assert_runs_as_planned(prepared: Prepared, plan: acwb.Plan) -> None:
    step = acwb.rewrite(prepared.step, plan)
    prepared.start.restore()
    assert differences(train(prepared.subject, step.run), prepared.expected) == []
    assert tensor_peak_bytes(step) == plan.timeline.tensor_peak_bytes
    # What is counted for the state that waits during a replay may not be needed where the peak is.
    least = plan.timeline.peak_bytes - (STATE_BYTES if plan.schedule.replayed(plan.profile.graph) else 0)
    # The state that is read before a step that draws is larger than all that some of these models make.
    draws = any(op.random for op in step.graph.ops)
    most = max(plan.timeline.peak_bytes, step.graph.static_bytes + (STATE_BYTES if draws else 0))
    assert 0.99 * least <= allocated_peak_bytes(step) <= most


TINY = [*MAKERS, "tiny_resnet", "tiny_bert", "tiny_encoder"]


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_run_as_planned(name: str) -> None:
    prepared = Prepared(name)
    for plan in plans_of(prepared.profile).values():
        assert_runs_as_planned(prepared, plan)


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_bert", "dropouts", "attention"])
def test_the_papers_plans_run(name: str) -> None:
    prepared = Prepared(name)
    profile = prepared.profile
    floor = mu_two(profile).timeline.peak_bytes
    for share in (0.25, 0.5, 0.75):
        budget = int(floor + share * (profile.peak_bytes - floor))
        assert_runs_as_planned(prepared, mu_two(profile, budget))


def test_an_empty_plan_leaves_the_code_as_it_is() -> None:
    step = traced(acwb.models.tiny_bert())
    profile = acwb.profile(step, repeats=1)
    same = acwb.rewrite(step, acwb.plan(profile, ENOUGH, planner="keep_all"))
    assert same.fx_graph.python_code("self").src == step.fx_graph.python_code("self").src
    assert same.graph == step.graph


def test_copies_are_named_after_their_originals_and_marked() -> None:
    step = traced(acwb.models.tiny_resnet())
    plan = acwb.plan(acwb.profile(step, repeats=1), ENOUGH, planner="recompute_all")
    planned = acwb.rewrite(step, plan)
    names = [node.name for node in planned.fx_graph.nodes]
    assert [name for name in names if "recomputed" not in name] == [node.name for node in step.fx_graph.nodes]
    originals = {op.name for op in step.graph.ops}
    again = [op for op in planned.graph.ops if op.recomputes]
    assert len(again) == sum(run.copy > 0 for run in plan.schedule.entries if isinstance(run, Run)) > 0
    for op in again:
        assert op.recomputes in originals
        assert op.name.startswith(f"{op.recomputes}_recomputed")
        assert op.phase is acwb.Phase.BACKWARD
    nodes = {node.name: node for node in planned.fx_graph.nodes}
    assert all(nodes[op.name].meta["recomputes"] == op.recomputes for op in again)


@settings(deadline=None, max_examples=100)
@given(steps(), st.data())
def test_the_rewritten_graph_costs_what_the_schedule_costs(graph: acwb.StepGraph, data: st.DataObject) -> None:
    schedule = random_schedule(graph, data)
    timeline = simulate(profiled(graph), schedule)
    rewritten = rewritten_graph(graph, schedule)
    again = simulate(profiled(rewritten), just_in_time(rewritten))
    assert (again.seconds, again.peak_bytes, again.tensor_bytes) == (
        timeline.seconds,
        timeline.peak_bytes,
        timeline.tensor_bytes,
    )


def random_schedule(graph: acwb.StepGraph, data: st.DataObject) -> Schedule:
    """Forward ops that run again at random places, with what they need; half of the time one of them twice."""
    forward = [rank for rank, op in enumerate(graph.ops) if op.phase is acwb.Phase.FORWARD and op.recomputable]
    backward = [rank for rank, op in enumerate(graph.ops) if op.phase is acwb.Phase.BACKWARD]
    if not forward or not backward:
        return just_in_time(graph)
    count = data.draw(st.integers(1, 6), label="how many")
    chosen = st.tuples(st.sampled_from(backward), st.sampled_from(forward))
    places = data.draw(st.lists(chosen, min_size=count, max_size=count), label="before what, which")
    if data.draw(st.booleans(), label="one of them twice"):
        places.append((data.draw(st.sampled_from(backward), label="once more before"), places[0][1]))
    listing = ScheduleBuilder(graph)
    for before, rank in sorted(places):
        listing.run_until(before)
        for each in with_sources(graph, rank):
            listing.recompute(each)
    listing.run_until(len(graph.ops))
    return with_frees(graph, listing.runs)


def with_sources(graph: acwb.StepGraph, rank: int) -> list[int]:
    """An op and every op from which its result comes, in order."""
    found: set[int] = set()
    waiting = [rank]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += [graph.rank[need] for need in graph.ops[each].needs]
    return sorted(found)


RANDOM = ("dropouts", "batch_norm", "views_and_expands", "attention")


@pytest.fixture(scope="module", params=RANDOM)
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return Prepared(request.param)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_schedules_run(prepared: Prepared, data: st.DataObject) -> None:
    profile = prepared.profile
    schedule = random_schedule(profile.graph, data)
    assert any(run.copy for run in schedule.entries if isinstance(run, Run))
    plan = acwb.Plan(profile, schedule, "random", None, simulate(profile, schedule).peak_bytes)
    assert_runs_as_planned(prepared, plan)


def test_recomputations_are_extracted_from_a_schedule() -> None:
    entries = (Run("a"), Run("b"), Free("a"), Run("a", 1), Free("x"), Run("b", 1, by_rule=True), Run("c"), Run("d"))
    assert recomputations(Schedule(entries)) == (Recomputation("c", (Run("a", 1), Run("b", 1, by_rule=True))),)
    assert recomputations(Schedule((Run("a"), Free("a")))) == ()


def test_a_rewritten_graph_by_hand() -> None:
    graph = draw(
        {"x": 4, "w": 4},
        [
            ("F", "a", "x w", 8),
            ("F", "v", "a", None),
            ("F", "loss", "v", 1),
            ("B", "one", "", 1),
            ("B", "g", "one v", 4),
        ],
        "loss",
        {"w": "g"},
    )
    rewritten = rewritten_graph(graph, just_in_time(graph, {"a"}))
    assert [op.name for op in rewritten.ops] == ["a", "v", "loss", "one", "a_recomputed", "v_recomputed", "g"]
    assert rewritten.ops[-1].needs == ("one", "v_recomputed")
    assert rewritten.ops[-1].inputs == ("one", "a_recomputed")
    assert rewritten.storage["a"].role is rewritten.storage["a_recomputed"].role is acwb.Role.OTHER


def test_plans_of_other_steps_and_plans_that_swap_are_refused() -> None:
    step = traced(MAKERS["batch_norm"]())
    profile = acwb.profile(step, repeats=1)
    plan = acwb.plan(profile, ENOUGH, planner="keep_all")
    with pytest.raises(acwb.AcwbError, match=r"takes the step that acwb\.trace gives, not Sequential"):
        acwb.rewrite(step.model, plan)
    with pytest.raises(acwb.AcwbError, match=r"takes a plan as acwb\.plan gives it, not int"):
        acwb.rewrite(step, 5)
    with pytest.raises(acwb.AcwbError, match=r"another step than this one \(attention.*: profile and plan this step"):
        acwb.rewrite(traced(MAKERS["attention"]()), plan)
    name = profile.graph.activations[0].name
    entries = (*plan.schedule.entries, SwapOut(name), SwapIn(name))
    swapping = dataclasses.replace(plan, schedule=Schedule(entries))
    with pytest.raises(acwb.AcwbError, match=f"swaps {name}, which a rewritten step does not do"):
        acwb.rewrite(step, swapping)
    planned = acwb.rewrite(step, acwb.plan(profile, ENOUGH, planner="recompute_all"))
    with pytest.raises(acwb.AcwbError, match="another step than this one"):
        acwb.rewrite(planned, plan)
    late = ScheduleBuilder(step.graph)
    late.run_until(len(step.graph.ops))
    late.recompute(0)
    runs = [*late.runs[:-2], late.runs[-1], late.runs[-2]]
    with pytest.raises(acwb.AcwbError, match="which is the optimizer's own"):
        acwb.rewrite(step, dataclasses.replace(plan, schedule=with_frees(step.graph, runs)))


def test_a_replay_draws_the_same_numbers_and_leaves_the_rng_state_unchanged() -> None:
    state, device = torch.get_rng_state(), torch.device("cpu")
    record_state(state, device)
    first = torch.rand(5)
    torch.rand(3)
    now = torch.get_rng_state()
    assert torch.equal(replay(state, device, torch.rand, [5], {}), first)
    assert torch.equal(torch.get_rng_state(), now)


def test_a_planned_step_leaks_nothing() -> None:
    subject = acwb.models.tiny_encoder()
    step = traced(subject)
    planned = acwb.rewrite(step, acwb.plan(acwb.profile(step, repeats=1), ENOUGH, planner="recompute_all"))
    live = []
    with LiveBytesMeter() as meter:
        for _ in range(50):
            planned.run()
            live.append(meter.live)
    assert live[49] == live[5]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet152", "bert"])
def test_real_models_run_as_planned(name: str) -> None:
    make = partial(getattr(acwb.models, name), batch_size=4)
    subject = make()
    step = traced(subject)
    start = Start(step)
    expected = train_to_the_end(subject, subject.eager_step)
    start.restore()
    profile = acwb.profile(step, repeats=1)
    for plan in nine_plans(profile, acwb.frontier(profile)):
        planned = acwb.rewrite(step, plan)
        start.restore()
        assert differences(train_to_the_end(subject, planned.run), expected) == []
        assert tensor_peak_bytes(planned) == plan.timeline.tensor_peak_bytes
        assert allocated_peak_bytes(planned) <= plan.timeline.peak_bytes


@pytest.mark.slow
def test_a_planned_process_does_not_grow() -> None:
    after_5, after_50 = run_in_fresh_process(resident_after_steps, environment=MALLOC_RETURNS_MEMORY)
    assert after_50 == pytest.approx(after_5, rel=0.01)


def resident_after_steps() -> tuple[int, int]:
    step = traced(acwb.models.resnet18(batch_size=4, image_size=64))
    planned = acwb.rewrite(step, PLANNERS["recompute_all"](acwb.profile(step, repeats=1), ENOUGH))
    found = []
    for number in range(50):
        planned.run()
        if number in (4, 49):
            found.append(resident_bytes())
    return found[0], found[1]
