"""Figures: what is drawn is what was computed, titles state it, and nothing is written."""

from dataclasses import replace
from itertools import pairwise

import numpy
import pytest

import acwb
from acwb import plots
from acwb.core.graph import Phase, Role
from acwb.evaluation.batch_sweep import BatchResult, Sweep, SweepPoint
from acwb.evaluation.comparison import MethodComparison, MethodResult
from acwb.evaluation.measurement import Measurement, Prediction
from acwb.evaluation.memory import Peaks
from acwb.planning.heuristics import keep_all, recompute_all
from acwb.planning.plan import Decision, Plan
from acwb.planning.plan_tables import bytes_column
from acwb.plots.theme import ROLES, WORKSPACE, wrap_title
from acwb.plots.timelines import downsample

GIB = 2**30


@pytest.fixture(scope="module")
def plan(profile: acwb.Profile) -> Plan:
    frontier = acwb.frontier(profile)
    return frontier.at((frontier.floor_bytes + frontier.baseline_bytes) // 2)


def test_the_rows_behind_a_timeline_are_the_timeline(plan: Plan) -> None:
    frame = plan.timeline_frame
    assert frame["total_bytes"].max() == plan.timeline.peak_bytes
    assert frame["start_ms"].is_monotonic_increasing
    last = frame.iloc[-1]
    seconds = plan.profile.seconds[last["op"]]
    assert last["start_ms"] / 1e3 + seconds == pytest.approx(plan.timeline.seconds)
    parts = [frame[bytes_column(name)] for name in (*Role, WORKSPACE)]
    assert (sum(parts) == frame["total_bytes"]).all()
    order = [list(Phase).index(Phase(phase)) for phase in frame["phase"]]
    assert all(before <= after for before, after in pairwise(order))
    assert frame["copy"].gt(0).any()


def test_a_picture_shows_every_peak_of_its_pixels(plan: Plan) -> None:
    frame = plan.timeline_frame
    few = downsample(frame, columns=20)
    assert len(few) <= 23
    assert few["total_bytes"].max() == plan.timeline.peak_bytes
    assert (few.iloc[0] == frame.iloc[0]).all()
    assert (few.iloc[-1] == frame.iloc[-1]).all()
    assert downsample(frame, columns=10**6) is frame


def test_the_stack_of_a_timeline_adds_up_to_its_total(plan: Plan) -> None:
    figure = plots.timeline(plan)
    *areas, total = figure.data
    assert [area.name for area in areas] == list(ROLES)
    assert numpy.allclose(sum(numpy.asarray(area.y) for area in areas), numpy.asarray(total.y))
    assert max(total.y) == plan.timeline.peak_bytes / GIB
    assert "the step peaks at" in figure.layout.title.text
    assert any("budget" in note.text for note in figure.layout.annotations)
    assert any(note.text == "backward" for note in figure.layout.annotations)


def test_before_and_after_share_their_axes_and_say_what_was_saved(plan: Plan) -> None:
    figure = plots.before_and_after(plan, measured(plan))
    assert len(figure.data) == 2 * (len(ROLES) + 1)
    assert figure.layout.yaxis.range == figure.layout.yaxis2.range
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    title = figure.layout.title.text.replace("<br>", " ")
    assert f"for {plan.overhead:+.1%} time, predicted" in title
    assert "measured 0.250 GiB for +10.0% time (95% [+10.0%, +10.0%])" in title
    uneven = replace(measured(plan), seconds=(0.9, 1.1) * 3)
    assert "(within noise)" in plots.before_and_after(plan, uneven).layout.title.text


def measured(plan: Plan) -> Measurement:
    peaks = Peaks(plan.profile.graph.static_bytes, GIB // 4, GIB // 4, GIB // 4)
    return Measurement("tiny", plan.budget_bytes, Prediction.of(plan), peaks, peaks, (1.1,) * 6, (1.0,) * 6)


def test_lifetimes_have_a_bar_for_each_live_range(plan: Plan) -> None:
    whole = plots.lifetimes(keep_all(plan.profile))
    assert sum(len(trace.y) for trace in whole.data) == len(plan.profile.graph.activations)
    figure = plots.lifetimes(plan)
    again = sum(each is Decision.RECOMPUTE for each in plan.decisions.values())
    kept, dropped = figure.data
    assert len(kept.y) == len(plan.decisions) - again
    assert len(dropped.y) >= 2 * again
    assert f"{again:,} of {len(plan.decisions):,} activations" in figure.layout.title.text
    ends = numpy.asarray(dropped.base) + numpy.asarray(dropped.x)
    assert (numpy.asarray(dropped.x) > 0).all()
    assert ends.max() <= plan.timeline.seconds * 1e3 + 1e-6


def test_every_op_and_activation_of_a_profile_is_drawn(profile: acwb.Profile) -> None:
    assert sum(len(trace.x) for trace in plots.node_runtime(profile).data) == len(profile.graph.ops)
    memory = plots.node_peak_memory(profile)
    assert max(memory.data[0].y) == profile.peak_bytes / GIB
    sizes = plots.activation_size(profile)
    held = sum(activation.bytes for activation in profile.graph.activations)
    assert sizes.data[1].y[-1] == pytest.approx(held / GIB)
    assert f"hold {held / GIB:.3f} GiB" in sizes.layout.title.text
    assert len(plots.inactive_time(profile).data[0].x) == len(profile.graph.activations)


@pytest.mark.parametrize("make", [keep_all, recompute_all])
def test_a_breakdown_adds_up_to_the_peak(profile: acwb.Profile, make: type[Plan]) -> None:
    plan = make(profile)
    for bars in plots.breakdown(plan).data:
        states = plan.timeline.peak_bytes - plan.timeline.tensor_bytes[plan.timeline.peak_step]
        assert sum(bars.x) == pytest.approx(plan.timeline.peak_bytes / GIB, abs=(states + 10**6) / GIB)


def test_the_trade_off_shows_all_planners_and_the_current_plan(profile: acwb.Profile, plan: Plan) -> None:
    frontier = acwb.frontier(profile)
    figure = plots.trade_off(frontier, {"recompute_all": [recompute_all(profile)]}, plan)
    names = [trace.name for trace in figure.data]
    assert names == ["frontier", "lower bound", "recompute_all", "this plan"]
    assert len(figure.data[0].x) == len(frontier.points)
    assert (figure.data[-1].x[0], figure.data[-1].y[0]) == plots.current_point(frontier, plan)
    assert "is possible" in figure.layout.title.text


def test_a_sweep_says_what_is_saved_and_what_does_not_fit() -> None:
    figure = plots.sweep_memory(swept())
    plain, _, planned, _ = figure.data
    assert list(plain.y) == [4.0, 0.0]
    assert list(planned.y) == [3.0, 5.0]
    assert list(plain.text) == ["", "does not fit"]
    assert list(planned.text) == ["−25%", ""]
    assert "plans save 25% of the peak; batch 8 fits only with one" in figure.layout.title.text.replace("<br>", " ")
    without = replace(swept().points[0], planned=BatchResult("No plan fits.", None, None))
    figure = plots.sweep_memory(Sweep("tiny", {}, (without,)))
    assert list(figure.data[2].text) == ["no plan fits"]
    floor = replace(swept().points[0], budget_bytes=2 * GIB)
    assert list(plots.sweep_memory(Sweep("tiny", {}, (floor,))).data[2].text) == ["−25%<br>(floor)"]
    assert "tiny: no plan fits" in figure.layout.title.text
    latency = plots.sweep_latency(swept())
    assert list(latency.data[1].y) == [1100.0, 2000.0]
    assert list(latency.data[1].text) == ["+10%", ""]
    assert "takes +10% time" in latency.layout.title.text
    few = replace(
        swept().points[0],
        eager=BatchResult("", GIB, GIB, None, (1.0,) * 3),
        planned=BatchResult("", GIB, GIB, None, (0.9,) * 3),
    )
    latency = plots.sweep_latency(Sweep("tiny", {}, (few,)))
    assert [list(line.text) for line in latency.data] == [["−10% (noise)"], [""]]  # above both lines
    assert "within noise (3 rounds)" in latency.layout.title.text


def swept() -> Sweep:
    def side(size: int, *seconds: float) -> BatchResult:
        peaks = Peaks(GIB, size * GIB, size * GIB, size * GIB)
        return BatchResult("", size * GIB, size * GIB, peaks, seconds)

    first = SweepPoint(4, "a", 3 * GIB, 0.1, side(4, *[1.0] * 6), side(3, *[1.1] * 6))
    no = BatchResult("It does not fit.", 9 * GIB, 9 * GIB)
    return Sweep("tiny", {}, (first, replace(first, batch_size=8, eager=no, planned=side(5, 2.0, 2.0, 2.0))))


def test_a_block_is_drawn_before_and_after(step: acwb.TracedStep, profile: acwb.Profile) -> None:
    planned = acwb.rewrite(step, recompute_all(profile))
    module = next(op.module for op in planned.graph.ops if op.recomputes and ".attention" in op.module)
    figure = plots.block(module, step.graph, planned.graph)
    before, after = figure.data[:6], figure.data[6:]
    assert not before[-1].x
    again = [op for op in planned.graph.ops if op.recomputes and op.module == module and not op.view]
    assert len(after[-1].x) >= len(again) > 0
    with pytest.raises(acwb.AcwbError, match="No op of the step belongs to module 'nothing'"):
        plots.block("nothing", step.graph)


def test_long_titles_are_broken() -> None:
    assert wrap_title("one two three", 7) == "one two<br>three"
    assert wrap_title("one", 2) == "one"


def test_labels_of_a_method_comparison_cover_no_other_mark() -> None:
    def row(name: str, peak: int, time: float) -> MethodResult:
        return MethodResult(name, peak, 0.0, 0.0, 0, 0, (time,) * 6)

    rows = (row("eager", 100, 1.0), row("every second block", 50, 1.10), row("other", 60, 1.105), row("high", 20, 1.5))
    figure = plots.method_comparison(MethodComparison("tiny", 1, {}, 0, rows, {}, ()))
    (others,) = [trace for trace in figure.data if trace.name == "others, bitwise equal"]
    assert list(others.text) == ["every second block", "other", "high"]
    assert others.textposition[0] == "bottom right"  # above, it would cover the mark of the other one
    assert others.textposition[2] == "top right"
