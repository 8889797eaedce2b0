"""Plans: budgets, pins, heuristics, guarantees of the frontier, files, explanations; and what is refused."""

import dataclasses
import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import acwb
from acwb.core.graph import StepGraph
from acwb.core.schedule import Run, just_in_time
from acwb.core.simulator import simulate
from acwb.planning.explain import compare_peaks
from acwb.planning.heuristics import block_of, keep_all, per_block, recompute_all, sqrt_n
from acwb.planning.mu_two import mu_two
from acwb.planning.plan import Decision, Plan
from acwb.planning.plan_tables import DECISION_FILE, PLAN_FILE
from acwb.units import parse_bytes
from support.saved_files import content_of, without_checksum
from support.toy_graphs import network, profiled, steps

DECISION_COLUMNS = "activation_name decision median_mem_size_bytes recomp_time_s creation_rank first_bw_use_rank"
PLAN_COLUMNS = (
    "rank name gtype run_time_ms peak_mem_bytes active_mem_bytes to_recompute to_delete to_offload to_prefetch"
)


@cache
def real() -> acwb.Profile:
    """A real step with real sizes; every op takes a second, its recompute rule much less."""
    subject = acwb.models.tiny_bert(batch_size=64, sequence_length=64)
    step = acwb.trace(subject)
    profile = acwb.profile(step, repeats=1)
    rules = {name: (0.01, workspace) for name, (_, workspace) in profile.rules.items()}
    return dataclasses.replace(profile, seconds=dict.fromkeys(profile.seconds, 1.0), rules=rules)


@pytest.mark.parametrize(
    ("budget", "size"),
    [(123, 123), (1e3, 1000), ("1.5GiB", 3 * 2**29), (" 2 MiB ", 2**21), ("3GB", 3 * 10**9), ("60%", 600), ("7B", 7)],
)
def test_a_budget_has_bytes_a_unit_or_a_percentage(budget: int | float | str, size: int) -> None:
    assert parse_bytes(budget, relative_to=1000) == size


@pytest.mark.parametrize(
    "budget", [0, -1, "-1GiB", "abc", "150%", float("nan"), float("inf"), True, None, "", "0%", "5", "1.2.3GiB", "3 gb"]
)
def test_a_budget_that_is_no_size_is_refused(budget: object) -> None:
    with pytest.raises(acwb.AcwbError, match="budget"):
        acwb.plan(profiled(network()), budget)  # type: ignore[arg-type]


def test_the_frontier_of_one_block_is_that_by_hand() -> None:
    profile = profiled(network(1))
    # Kept: static 20, a0 10, b0 10, loss 1, one 1, gb0 10 make 52 at the peak. a0 can be recomputed before ga0.
    frontier = acwb.frontier(profile)
    assert [(point.peak_bytes, point.seconds) for point in frontier.points] == [(52, 6.0), (51, 7.0)]
    plan = frontier.at(51)
    assert plan.decisions == {"a0": Decision.RECOMPUTE, "b0": Decision.RETAINED}
    assert [entry.op for entry in plan.schedule.entries if isinstance(entry, Run)] == [
        "a0", "b0", "loss", "one", "gb0", "a0", "ga0",
    ]  # fmt: skip
    assert (plan.fits, plan.timeline.peak_bytes, plan.claimed_peak_bytes, plan.extra_seconds) == (True, 51, 51, 1.0)


@given(steps(), some.integers(0, 100))
def test_a_plan_fits_its_budget_or_the_floor_is_named(graph: StepGraph, percent: int) -> None:
    profile = profiled(graph)
    frontier = acwb.frontier(profile)
    budget = max(1, frontier.baseline_bytes * percent // 100)
    if budget < frontier.floor_bytes:
        with pytest.raises(acwb.InfeasibleBudgetError) as caught:
            acwb.plan(profile, budget)
        assert caught.value.floor_bytes == frontier.floor_bytes
        assert f"{frontier.floor_bytes:,} bytes" in str(caught.value)
        assert "another profile may give a slightly other one" in str(caught.value)
        assert caught.value.op in graph.rank
        return
    plan = acwb.plan(profile, budget)
    assert plan.fits
    assert plan.timeline.peak_bytes == plan.claimed_peak_bytes <= budget


@given(steps())
def test_a_larger_budget_never_costs_more(graph: StepGraph) -> None:
    frontier = acwb.frontier(profiled(graph))
    sizes = range(frontier.floor_bytes, frontier.baseline_bytes + 1, max(1, frontier.baseline_bytes // 20))
    seconds = [frontier.at(size).timeline.seconds for size in sizes]
    assert all(after <= before for before, after in pairwise(seconds))


@pytest.mark.parametrize("pins", [{}, {"keep": "a0", "recompute": "block.2"}])
def test_a_frontier_goes_to_a_file_and_back(tmp_path: Path, pins: dict[str, str]) -> None:
    profile = profiled(network())
    frontier = acwb.frontier(profile, **pins)
    frontier.save(tmp_path / "frontier.json")
    loaded = acwb.Frontier.load(tmp_path / "frontier.json", profile)
    assert loaded.points == frontier.points
    assert [loaded.plan(point) for point in loaded.points] == [frontier.plan(point) for point in frontier.points]
    assert loaded.at("70%") == frontier.at("70%")
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "frontier.json").read_text()


@pytest.mark.torch
def test_a_frontier_with_recompute_rules_goes_to_a_file_and_back(tmp_path: Path) -> None:
    frontier = acwb.frontier(real())
    frontier.save(tmp_path / "frontier.json")
    loaded = acwb.Frontier.load(tmp_path / "frontier.json", real())
    plans = [loaded.plan(point) for point in loaded.points]
    assert plans == [frontier.plan(point) for point in frontier.points]
    assert any(run.by_rule for plan in plans for run in plan.schedule.entries if isinstance(run, Run))


def test_a_frontier_of_another_graph_or_profile_is_refused(tmp_path: Path) -> None:
    profile = profiled(network())
    acwb.frontier(profile).save(tmp_path / "frontier.json")
    with pytest.raises(acwb.AcwbError, match=r"a frontier of another graph .*: make one of this profile"):
        acwb.Frontier.load(tmp_path / "frontier.json", profiled(network(3)))
    slower = dataclasses.replace(profile, seconds={**profile.seconds, "a0": 2.0})
    with pytest.raises(acwb.AcwbError, match="a frontier of another profile of this graph"):
        acwb.Frontier.load(tmp_path / "frontier.json", slower)


def test_a_damaged_file_of_a_frontier_is_refused(tmp_path: Path) -> None:
    profile = profiled(network())
    path = tmp_path / "frontier.json"
    acwb.frontier(profile).save(path)
    text = without_checksum(path)
    content = json.loads(text)
    first = content["points"][0]
    damaged = {
        text[: len(text) // 2]: "not a whole JSON file",
        text.replace('"kind": "Frontier"', '"kind": "Plan"'): "holds Plan, not a Frontier",
        text.replace('"points"', '"dots"'): "not a Frontier that this acwb can read",
        json.dumps({**content, "points": content["points"][::-1]}): "its points are not a frontier",
        json.dumps({**content, "points": []}): "its points are not a frontier",
        json.dumps({**content, "points": [{**first, "recompute_sites": [[5, [999]]]}]}): "it recomputes",
        json.dumps({**content, "points": [{**first, "recompute_sites": [[999, [0]]]}]}): "it recomputes",
    }
    for written, message in damaged.items():
        path.write_text(written)
        with pytest.raises(acwb.AcwbError, match=message):
            acwb.Frontier.load(path, profile)


def test_cheapest_within_gives_the_least_peak_within_an_overhead() -> None:
    frontier = acwb.frontier(profiled(network()))
    assert frontier.cheapest_within(0).timeline.peak_bytes == frontier.baseline_bytes
    plan = frontier.cheapest_within(0.2)
    assert plan.overhead <= 0.2
    assert plan.timeline.peak_bytes == min(
        point.peak_bytes for point in frontier.points if point.seconds <= 1.2 * frontier.profile.step_seconds
    )
    with pytest.raises(acwb.AcwbError, match="not a fraction"):
        frontier.cheapest_within(-1)


def test_heuristics_keep_the_activations_known_by_hand() -> None:
    profile = profiled(network())
    assert keep_all(profile).schedule == just_in_time(profile.graph)
    kept = {name: {each for each, is_ in plan(profile).decisions.items() if is_ is Decision.RETAINED}
            for name, plan in {"all": keep_all, "none": recompute_all, "block": per_block}.items()}  # fmt: skip
    assert kept["all"] == {f"{letter}{number}" for letter in "ab" for number in range(4)}
    assert kept["none"] == set()
    assert kept["block"] == {"b0", "b1", "b2", "b3"}  # what the next block, or the loss, reads
    assert {block_of(name) for name in ("layer3.4.conv2", "bert.encoder.layer.11.output", "0", "fc")} == {
        "layer3.4", "bert.encoder.layer.11", "0", "",
    }  # fmt: skip
    plan = sqrt_n(profile)
    assert 0 < sum(each is Decision.RETAINED for each in plan.decisions.values()) < 8
    assert plan.timeline.peak_bytes < keep_all(profile).timeline.peak_bytes


@pytest.mark.parametrize("planner", ["keep_all", "recompute_all", "sqrt_n", "per_block"])
def test_a_heuristic_plan_that_does_not_fit_is_refused(planner: str) -> None:
    with pytest.raises(acwb.AcwbError, match=f"The plan of {planner} needs .* use frontier"):
        acwb.plan(profiled(network()), 45, planner)


@settings(max_examples=200)
@given(steps())
def test_no_other_planner_is_ahead_of_the_frontier_on_random_steps(graph: StepGraph) -> None:
    profile = profiled(graph)
    frontier = acwb.frontier(profile)
    fixed = [other(profile, frontier.baseline_bytes) for other in (keep_all, recompute_all, sqrt_n, per_block)]
    for size in range(frontier.floor_bytes, frontier.baseline_bytes + 1, max(1, frontier.baseline_bytes // 20)):
        ours = frontier.at(size)
        for plan in (*fixed, mu_two(profile, size)):
            fits = plan.timeline.peak_bytes <= size
            assert not fits or ours.timeline.seconds <= plan.timeline.seconds, plan


def test_pinned_activations_are_kept_or_recomputed_in_every_plan() -> None:
    profile = profiled(network())
    assert acwb.frontier(profile).at("70%").decisions["a0"] is Decision.RECOMPUTE
    kept = acwb.frontier(profile, keep=["a0"]).points
    assert all(acwb.frontier(profile, keep=["a0"]).plan(point).decisions["a0"] is Decision.RETAINED for point in kept)
    for pin in ("block.1.a", "a1", r"block\.1\.a.*"):
        frontier = acwb.frontier(profile, recompute=pin)
        assert all(frontier.plan(point).decisions["a1"] is Decision.RECOMPUTE for point in frontier.points)
    both = acwb.frontier(profile, recompute="block.2")
    assert both.baseline_bytes == acwb.frontier(profile).baseline_bytes
    assert {name for name, is_ in both.plan(both.points[0]).decisions.items() if is_ is Decision.RECOMPUTE} == {
        "a2",
        "b2",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "nothing_like_it"}, "keep holds 'nothing_like_it', which fits no activation"),
        ({"recompute": r"layer\d+"}, "fits no activation"),
        ({"keep": "(("}, "neither a name nor a regular expression"),
        ({"keep": [3]}, "give op names, module paths or regular expressions as text"),
        ({"keep": "a1", "recompute": "block.1"}, "a1 is to be kept and to be recomputed"),
        ({"planner": "magic"}, "There is no planner 'magic': choose one of frontier"),
        ({"planner": "sqrt_n", "keep": "a1"}, "does not support pins"),
    ],
)
def test_bad_pins_and_planners_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(acwb.AcwbError, match=message):
        acwb.plan(profiled(network()), "100%", **options)  # type: ignore[arg-type]


def test_why_says_what_the_opposite_decision_would_change() -> None:
    plan = acwb.frontier(profiled(network(1))).at(51)  # the plan by hand above
    assert plan.why("a0") == (
        "a0 (9.3e-09 GiB, block.0.a) is dropped after b0 and recomputed before ga0: keeping it would save 1,000.0 ms "
        "and raise the peak from 4.7e-08 to 4.8e-08 GiB, over the budget."
    )
    assert plan.why("b0") == (
        "b0 (9.3e-09 GiB, block.0.b) is kept, idle for 1,000.0 ms: recomputing it would run 2 ops in 2,000.0 ms and "
        "leave the peak at 4.7e-08 GiB."
    )


def test_why_has_an_answer_for_every_activation() -> None:
    plan = acwb.frontier(profiled(network())).at("70%")
    for name, decision in plan.decisions.items():
        text = plan.why(name)
        assert name in text
        assert ("is kept" in text) == (decision is Decision.RETAINED)
        assert ("is dropped after" in text) == (decision is Decision.RECOMPUTE)
    with pytest.raises(acwb.AcwbError, match="'w' is not an activation"):
        plan.why("w")


@pytest.mark.torch
def test_a_plan_with_recompute_rules_goes_to_a_file_and_back(tmp_path: Path) -> None:
    profile = real()
    frontier = acwb.frontier(profile)
    plans = [frontier.plan(point) for point in frontier.points]
    plan = next(
        plan for plan in plans if any(isinstance(entry, Run) and entry.by_rule for entry in plan.schedule.entries)
    )
    assert plan.timeline.peak_bytes == plan.claimed_peak_bytes
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", profile) == plan
    with pytest.raises(acwb.AcwbError, match="a plan for another graph"):
        Plan.load(tmp_path / "plan.json", profiled(network()))
    content = content_of(tmp_path / "plan.json")
    entries = content["entries"]
    odd = [[["jump", "a", 0]], entries[:3], entries[::-1], [*entries, ["run", entries[0][1], 10**12]]]
    for wrong in odd:
        (tmp_path / "odd.json").write_text(json.dumps({**content, "entries": wrong}))
        with pytest.raises(acwb.AcwbError, match="not a Plan that this acwb can read"):
            Plan.load(tmp_path / "odd.json", profile)


def test_two_peaks_that_print_the_same_differ_by_their_bytes() -> None:
    assert compare_peaks(2**31, 2**30) == "raise the peak from 1.000 to 2.000 GiB"
    assert compare_peaks(2**30 - 1024, 2**30) == "lower the peak by 1,024 bytes"
    assert compare_peaks(2**30, 2**30) == "leave the peak at 1.000 GiB"


def test_both_csv_files_of_a_plan_have_their_columns_and_decisions(tmp_path: Path) -> None:
    plan = acwb.frontier(profiled(network())).at("70%")
    paths = plan.to_csv(tmp_path)
    assert [path.name for path in paths] == [DECISION_FILE, PLAN_FILE]
    decisions, ops = (pandas.read_csv(path, keep_default_na=False) for path in paths)
    assert list(decisions.columns) == DECISION_COLUMNS.split()
    assert list(ops.columns) == PLAN_COLUMNS.split()
    assert dict(zip(decisions.activation_name, decisions.decision, strict=True)) == dict(plan.decisions)
    again = " ".join(ops.to_recompute).split()
    assert sorted(again) == sorted(entry.op for entry in plan.schedule.entries if isinstance(entry, Run) and entry.copy)
    assert len(ops) == len(plan.profile.graph.ops)


def test_reports_say_what_fits_and_how_much_is_recomputed() -> None:
    frontier = acwb.frontier(profiled(network()))
    assert "fits" in repr(frontier.at("70%"))
    assert "recomputed in" in repr(frontier.at("70%"))
    assert "no plan fits this budget" in keep_all(frontier.profile, 1).report()
    assert repr(frontier).startswith(f"Frontier: {len(frontier.points)} plans from")
    plain = simulate(frontier.profile, just_in_time(frontier.profile.graph))
    assert frontier.baseline_bytes == plain.peak_bytes


@pytest.mark.torch
@pytest.mark.parametrize("batch_size", [4, 6, 8])
def test_at_a_floor_in_the_optimizer_no_rng_state_is_saved(batch_size: int) -> None:
    subject = acwb.models.tiny_bert(batch_size=batch_size)
    profile = acwb.profile(acwb.trace(subject), repeats=1)
    frontier = acwb.frontier(profile)
    rows = keep_all(profile).timeline_frame
    assert frontier.floor_bytes == rows["total_bytes"][rows["phase"] == "optimizer"].max()
    lowest = frontier.plan(frontier.points[-1])
    assert lowest.schedule.replayed(profile.graph) == ()
    assert lowest.overhead > 0
