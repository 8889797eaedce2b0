"""The numbers behind figures: they are those of the plan, the graph and the sweep, and add up."""

from dataclasses import replace

import pytest

import acwb
from acwb.evaluation.batch_sweep import BatchResult, Sweep, SweepPoint
from acwb.evaluation.memory import Peaks
from acwb.planning.heuristics import keep_all, recompute_all
from acwb.results import tables

GIB = 2**30


def test_a_block_has_a_row_for_each_of_its_ops(step: acwb.TracedStep, profile: acwb.Profile) -> None:
    module = next(op.module for op in step.graph.ops if ".attention" in op.module)
    before = tables.block_rows(step.graph, module)
    after = tables.block_rows(acwb.rewrite(step, recompute_all(profile)).graph, module)
    assert [row["op"] for row in before] == [
        op.name for op in step.graph.ops if op.module == module or op.module.startswith(f"{module}.")
    ]
    assert not any(row["recomputes"] for row in before)
    assert {row["op"] for row in before} < {row["op"] for row in after}
    assert all(row["recomputes"] for row in after if row["op"] not in {each["op"] for each in before})


def test_a_breakdown_adds_up_to_the_live_bytes_at_the_peak(profile: acwb.Profile) -> None:
    plan = keep_all(profile)
    rows = tables.breakdown_rows(plan)
    assert sum(row["bytes"] for row in rows) == plan.timeline.tensor_bytes[plan.timeline.peak_step]
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)


def test_a_trade_off_has_every_plan(profile: acwb.Profile) -> None:
    frontier = acwb.frontier(profile)
    rows = tables.tradeoff_rows(frontier, {"recompute_all": [recompute_all(profile)]})
    assert [row["planner"] for row in rows] == ["frontier"] * len(frontier.points) + ["recompute_all"]
    assert rows[0]["overhead"] == 0
    assert rows[len(frontier.points) - 1]["peak_bytes"] == frontier.floor_bytes


def test_lower_bounds_of_a_trade_off_are_below_the_bound_for_exactly_that_budget(profile: acwb.Profile) -> None:
    frontier = acwb.frontier(profile)
    for size in range(frontier.floor_bytes, frontier.baseline_bytes, (frontier.baseline_bytes - 1) // 10):
        assert 0 <= frontier.lower_bound_seconds(size) <= acwb.lower_bound(profile, size)
    assert frontier.lower_bound_seconds(frontier.floor_bytes) == acwb.lower_bound(profile, frontier.floor_bytes) > 0
    assert frontier.lower_bound_seconds(frontier.baseline_bytes) == 0


def test_a_summary_says_what_a_plan_saves_and_costs(profile: acwb.Profile) -> None:
    row = tables.summary_row(keep_all(profile))
    assert (row["peak"], row["peak above static"], row["time"], row["recomputed"]) == ("+0.0%", "+0.0%", "+0.0%", 0)
    assert row["kept"] == len(profile.graph.activations)
    lower = tables.summary_row(recompute_all(profile))
    assert lower["recomputed"] > 0
    assert float(lower["time"].rstrip("%")) > 0


def test_statistics_of_a_profile_add_up(profile: acwb.Profile) -> None:
    row = tables.profile_row(profile)
    assert sum(row[f"{phase} ops"] for phase in acwb.Phase) == len(profile.graph.ops)
    assert sum(row[f"{phase}, ms"] for phase in acwb.Phase) == pytest.approx(profile.step_seconds * 1e3, abs=0.2)
    parts = [size for key, size in row.items() if key.startswith("of which")]
    assert len(parts) == len(acwb.Role) + 1
    assert sum(parts) == pytest.approx(row["peak, GiB"], abs=0.0005 * len(parts))
    assert row["peak, GiB"] == round(profile.peak_bytes / GIB, 3)
    assert row["activations"] == len(profile.graph.activations)


def test_a_table_of_batches_says_what_was_measured_and_what_does_not_fit() -> None:
    def side(size: int, *seconds: float) -> BatchResult:
        return BatchResult("", size * GIB, size * GIB, Peaks(GIB, size * GIB, size * GIB, size * GIB), seconds)

    first = SweepPoint(4, "a", 3 * GIB, 0.12, side(4, 1.0, 1.0, 1.0), side(3, 1.1, 1.1, 1.1))
    large = replace(first, batch_size=8, eager=BatchResult("It does not fit.", 9 * GIB, 9 * GIB))
    one, two = tables.batch_rows(Sweep("tiny", {}, (first, large)))
    assert one == {
        "model": "tiny",
        "batch": 4,
        "peak without a plan, GiB": 4.0,
        "predicted without a plan, GiB": 4.0,
        "step without a plan, ms": 1000,
        "peak with a plan, GiB": 3.0,
        "predicted with a plan, GiB": 3.0,
        "step with a plan, ms": 1100,
        "peak": "-25.0%",
        "time": "+10.0% (noise)",
        "95 %": "[+10.0%, +10.0%]",
        "time, predicted": "+12.0%",
    }
    assert (two["peak without a plan, GiB"], two["step without a plan, ms"], two["peak"]) == ("does not fit", "", "")
    assert "time" not in two
    (floor,) = tables.batch_rows(Sweep("tiny", {}, (replace(first, budget_bytes=2 * GIB),)))
    assert floor["peak"] == "-25.0% (floor)"
