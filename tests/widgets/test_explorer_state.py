"""The explorer's choices as pure functions: each returns the next state, and a refused choice changes nothing."""

from pathlib import Path

import pytest

import acwb
from acwb.planning.plan import Decision
from acwb.widgets import explorer_state
from acwb.widgets.explorer_state import ExplorerState, start, with_budget, with_pin, with_pins, with_planner


@pytest.fixture(scope="module")
def now(profile: acwb.Profile) -> ExplorerState:
    return start(profile)


def test_the_explorer_starts_halfway_with_a_plan_that_fits(now: ExplorerState) -> None:
    assert now.budget_bytes == (now.frontier.floor_bytes + now.frontier.baseline_bytes) // 2
    assert now.plan.fits
    assert now.message == ""


def test_a_budget_is_looked_up(now: ExplorerState) -> None:
    lower = with_budget(now, now.frontier.floor_bytes)
    assert lower.plan.timeline.peak_bytes == now.frontier.floor_bytes
    assert lower.plan.timeline.peak_bytes < now.plan.timeline.peak_bytes
    assert lower.plan.timeline.seconds > now.plan.timeline.seconds


def test_a_typed_number_means_gibibytes_and_units_are_understood(now: ExplorerState) -> None:
    size = now.budget_bytes
    assert with_budget(now, f"{size / 2**30:.9f}").budget_bytes == pytest.approx(size, abs=2)
    assert with_budget(now, f" {size / 2**30:.9f} ".replace(".", ",")).budget_bytes == pytest.approx(size, abs=2)
    assert with_budget(now, f"{size / 2**20:.6f} MiB").budget_bytes == pytest.approx(size, abs=2)
    assert with_budget(now, "3 GB").budget_bytes == 3 * 10**9
    assert with_budget(now, "3 GB").plan.overhead == 0


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("", "The entry is empty"),
        ("  ", "The entry is empty"),
        ("much", "'much' cannot be read"),
        ("3 apples", "'3 apples' cannot be read"),
        ("-1", "leaves no memory"),
        ("nan", "cannot be read"),
        ("inf", "cannot be read"),
        ("1e-6", "No plan fits"),
        ("120%", "more than the step needs"),
    ],
)
def test_invalid_input_is_reported_and_the_plan_stays(now: ExplorerState, entry: str, sentence: str) -> None:
    after = with_budget(now, entry)
    assert sentence in after.message
    assert after.plan is now.plan
    assert with_budget(after, now.budget_bytes).message == ""


def test_another_planner_takes_over_where_it_fits(now: ExplorerState) -> None:
    roomy = with_budget(now, now.frontier.baseline_bytes)
    assert with_planner(roomy, "mu_two").plan.planner == "mu_two"
    assert with_budget(with_planner(roomy, "mu_two"), "100%").plan.planner == "mu_two"
    tight = with_planner(with_budget(now, now.frontier.floor_bytes), "keep_all")
    assert "The plan of keep_all needs" in tight.message
    assert tight.plan.planner == "frontier"


def test_pins_replan_and_can_be_taken_back(now: ExplorerState) -> None:
    dropped = next(name for name, each in now.plan.decisions.items() if each is Decision.RECOMPUTE)
    kept = with_pin(now, dropped, "keep")
    assert kept.message == ""
    assert kept.plan.decisions[dropped] is Decision.RETAINED
    assert next(row for row in explorer_state.table(kept) if row["activation"] == dropped)["pin"] == "keep"
    again = with_pin(kept, dropped, "recompute")
    assert again.plan.decisions[dropped] is Decision.RECOMPUTE
    assert (again.keep, again.recompute) == ((), (dropped,))
    assert with_pin(again, dropped, "free").plan.schedule == now.plan.schedule
    wrong = with_pins(now, ["no such layer"], [])
    assert "fits no activation" in wrong.message
    assert wrong.plan is now.plan


def test_key_figures_and_table_describe_the_current_plan(now: ExplorerState) -> None:
    figures = explorer_state.key_figures(now)
    assert "above static −" in figures["peak"]
    counts = [sum(each is kind for each in now.plan.decisions.values()) for kind in Decision][:2]
    assert figures["activations"] == f"{counts[0]} kept, {counts[1]} recomputed"
    assert len(explorer_state.table(now)) == len(now.profile.graph.activations)
    assert "The floor is" in explorer_state.describe_floor(now)


def test_the_plan_is_exported(now: ExplorerState, tmp_path: Path) -> None:
    paths = explorer_state.export_plan(now, tmp_path / "new")
    assert {path.name for path in paths} == {"plan.json", "ac_decisions.csv", "checkpoint_plan.csv"}
    assert acwb.Plan.load(paths[0], now.profile).schedule == now.plan.schedule
