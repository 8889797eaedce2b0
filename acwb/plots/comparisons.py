"""Plans, batch sizes and contenders beside each other: trade-off curves, sweeps, the side-by-side."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from plotly import graph_objects

from acwb.evaluation.batch_sweep import Point, Side, Sweep
from acwb.evaluation.comparison import EAGER, Contest, Row
from acwb.evaluation.meters import Ratio
from acwb.planning.frontier import Frontier
from acwb.planning.plan import Plan
from acwb.plots.theme import INK, OURS, QUIET, THEIRS, WRONG, in_gib, mark, themed
from acwb.units import gibibytes

SYMBOLS = ("square", "diamond", "triangle-up", "x", "cross", "star")
COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#332288")


def trade_off(
    frontier: Frontier, others: Mapping[str, Iterable[Plan]] | None = None, current: Plan | None = None
) -> graph_objects.Figure:
    """What each peak costs in time: the frontier, what is proved to be impossible, other planners, the current plan."""
    figure = graph_objects.Figure([_own_line(frontier), _proved_line(frontier)])
    for (name, plans), colour, symbol in zip((others or {}).items(), COLOURS, SYMBOLS, strict=False):
        figure.add_trace(_dots(frontier, name, list(plans), colour, symbol))
    now = [current_point(frontier, current)] if current is not None else []
    figure.add_scatter(
        x=[x for x, _ in now],
        y=[y for _, y in now],
        name="this plan",
        mode="markers",
        showlegend=bool(now),
        marker={"color": WRONG, "symbol": "circle-open", "size": 14, "line": {"width": 3}},
        hoverinfo="skip",
    )
    last = frontier.points[-1]
    floor = f"floor {gibibytes(last.peak_bytes)}"
    mark(figure, floor, _part(frontier, last.peak_bytes), frontier.overhead(last) * 100, ax=50, ay=0, xanchor="left")
    figure.update_xaxes(title_text="peak above static, % of the step without a plan", range=[0, 103])
    figure.update_yaxes(title_text="extra time per step, % (predicted)", rangemode="tozero")
    half = next((point for point in frontier.points if _part(frontier, point.peak_bytes) <= 50), None)
    told = f"half the peak above static costs {frontier.overhead(half):+.1%} time" if half else "half is not reached"
    down = 100 - _part(frontier, last.peak_bytes)
    return themed(figure, f"{frontier.profile.graph.environment.model}: {told}, −{down:.0f}% is the most")


def _own_line(frontier: Frontier) -> graph_objects.Scatter:
    return graph_objects.Scatter(
        x=[_part(frontier, point.peak_bytes) for point in frontier.points],
        y=[frontier.overhead(point) * 100 for point in frontier.points],
        customdata=[in_gib(point.peak_bytes) for point in frontier.points],
        name="frontier",
        mode="lines",
        line={"color": OURS, "width": 2.5, "shape": "hv"},
        hovertemplate="%{customdata:.3f} GiB: %{y:+.1f} % time<extra></extra>",
    )


def _proved_line(frontier: Frontier) -> graph_objects.Scatter:
    return graph_objects.Scatter(
        x=[_part(frontier, size) for size, _ in frontier.bounds],
        y=[seconds / frontier.profile.step_seconds * 100 for _, seconds in frontier.bounds],
        name="no plan is below (proved)",
        mode="lines",
        line={"color": QUIET, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )


def _dots(frontier: Frontier, name: str, plans: Sequence[Plan], colour: str, symbol: str) -> graph_objects.Scatter:
    return graph_objects.Scatter(
        x=[_part(frontier, plan.timeline.peak_bytes) for plan in plans],
        y=[plan.overhead * 100 for plan in plans],
        name=name,
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": 9},
        customdata=[in_gib(plan.timeline.peak_bytes) for plan in plans],
        hovertemplate=f"{name}: %{{customdata:.3f}} GiB, %{{y:+.1f}} % time<extra></extra>",
    )


def current_point(frontier: Frontier, plan: Plan) -> tuple[float, float]:
    """Where a plan stands in the trade-off: peak above static and extra time, both in %."""
    return _part(frontier, plan.timeline.peak_bytes), plan.overhead * 100


def _part(frontier: Frontier, peak: int) -> float:
    """A peak above what exists before the step, in % of that of the step without a plan."""
    static = frontier.profile.graph.static_bytes
    return (peak - static) / (frontier.baseline_bytes - static) * 100


def sweep_memory(sweep: Sweep) -> graph_objects.Figure:
    """The peak at each batch size with and without a plan, predicted beside measured."""
    figure = graph_objects.Figure()
    for name, colour, side in (("plain PyTorch", THEIRS, "plain"), ("with a plan", OURS, "planned")):
        sides = [(point, getattr(point, side)) for point in sweep.points]
        figure.add_bar(
            x=[str(point.batch_size) for point, _ in sides],
            y=[_measured(each) for _, each in sides],
            name=f"{name}, measured",
            marker={"color": colour},
            text=[_saved(point) if side == "planned" else _problem(each) for point, each in sides],
            textposition="outside",
            cliponaxis=False,
            offsetgroup=side,
            hovertemplate=f"{name}, batch %{{x}}: %{{y:.3f}} GiB<extra></extra>",
        )
        figure.add_bar(
            x=[str(point.batch_size) for point, _ in sides],
            y=[in_gib(each.predicted_bytes) if each.predicted_bytes else None for _, each in sides],
            name="predicted of the captured step",
            showlegend=side == "planned",
            marker={"color": "rgba(0,0,0,0)", "line": {"color": INK, "width": 1.5}},
            offsetgroup=side,
            hovertemplate="predicted: %{y:.3f} GiB<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.05)
    figure.update_xaxes(title_text="batch size", type="category")
    figure.update_yaxes(title_text="peak of the process, GiB", rangemode="tozero")
    saved = [point.saved for point in sweep.points if point.saved is not None]
    missing = [point.batch_size for point in sweep.points if point.plain.problem and not point.planned.problem]
    found = [f"plans save {_span([-each for each in saved])} of the peak"] if saved else []
    if missing:
        found.append(f"batch {', '.join(map(str, missing))} fits only with {'one' if saved else 'a plan'}")
    finding = f"{sweep.subject}: {'; '.join(found) or 'no plan fits'}"
    return themed(figure, finding)


def _measured(side: Side) -> float:
    return in_gib(side.peaks.process) if side.peaks else 0.0  # a bar without height still has its words


def _saved(point: Point) -> str:
    if point.planned.problem:
        return "no plan fits"
    if point.saved is None:
        return ""
    return f"{-point.saved:+.0%}".replace("-", "−") + ("<br>(floor)" if point.at_floor else "")


def _problem(side: Side) -> str:
    return "does not fit" if side.problem else ""


def _span(parts: Sequence[float]) -> str:
    low, high = (f"{abs(part):.0%}" for part in (max(parts), min(parts)))
    return low if low == high else f"{low} to {high}"


def sweep_latency(sweep: Sweep) -> graph_objects.Figure:
    """The time of a step at each batch size with and without a plan."""
    figure = graph_objects.Figure()
    for name, colour, side, symbol in (
        ("plain PyTorch", THEIRS, "plain", "square"),
        ("with a plan", OURS, "planned", "circle"),
    ):
        rows = [(point, getattr(point, side).seconds) for point in sweep.points if getattr(point, side).seconds]
        figure.add_scatter(
            x=[str(point.batch_size) for point, _ in rows],
            y=[statistics.median(seconds) * 1e3 for _, seconds in rows],
            name=name,
            mode="lines+markers+text",
            line={"color": colour, "width": 2},
            marker={"symbol": symbol, "size": 9},
            text=[_slower(point) if side == _upper(point) else "" for point, _ in rows],
            textposition=["top left" if number else "top center" for number in range(len(rows))],  # clear of the axis
            cliponaxis=False,
            hovertemplate=f"{name}, batch %{{x}}: %{{y:,.0f}} ms<extra></extra>",
        )
    figure.update_xaxes(
        title_text="batch size",
        type="category",
        categoryorder="array",
        categoryarray=[str(point.batch_size) for point in sweep.points],
    )
    figure.update_yaxes(title_text="time of a step, ms (median)", rangemode="tozero")
    return themed(figure, f"{sweep.subject}: {_slowdown(sweep)}")


def _slowdown(sweep: Sweep) -> str:
    """What the plans cost; nothing is claimed of what is within noise."""
    times = [point.time for point in sweep.points if point.time]
    claimed = [time.median - 1 for time in times if not time.is_noise]
    if not times:
        return "no batch size was timed with and without a plan"
    if not claimed:
        return f"with a plan, a step takes as long as without, within noise ({times[0].rounds} rounds)"
    rest = ", the others are within noise" if len(claimed) < len(times) else ""
    return f"a step with a plan takes {_signed_span(claimed)} time{rest}"


def _upper(point: Point) -> str:
    """Which of the two lines is above the other at a point: there a label is clear of both."""
    medians = {side: statistics.median(getattr(point, side).seconds or (0.0,)) for side in ("planned", "plain")}
    return max(medians, key=medians.__getitem__)


def _slower(point: Point) -> str:
    return _claimed(point.time) if point.time is not None else ""


def _claimed(time: Ratio) -> str:
    """Extra time in a word, and whether it means anything."""
    text = f"{time.median - 1:+.0%}".replace("-", "−")
    return f"{text} (noise)" if time.is_noise else text


def _signed_span(parts: Sequence[float]) -> str:
    low, high = (f"{part:+.0%}".replace("-", "−") for part in (min(parts), max(parts)))
    return low if low == high else f"{low} to {high}"


def contest(found: Contest) -> graph_objects.Figure:
    """What each contender saves and what it costs: peak above static against time, both relative to plain PyTorch."""
    figure = graph_objects.Figure()
    whole = found.row(EAGER).peak_bytes - found.static_bytes
    line = [((size - found.static_bytes) / whole * 100, more * 100) for size, more in found.curve]
    figure.add_scatter(
        x=[x for x, _ in line], y=[y for _, y in line], mode="lines", name="ours, predicted", line={"color": OURS}
    )
    ours = [row for row in found.rows if row.predicted_overhead is not None]
    others = [row for row in found.rows if row.predicted_overhead is None and row.name != EAGER]
    wrong = [row for row in others if row.wrong_gradients or row.wrong_buffers]
    right = [row for row in others if row not in wrong]
    sides = _sides(found, others, ours, line)
    for name, rows, colour, symbol in (
        ("ours, measured", ours, OURS, "circle"),
        ("others, equal to the bit", right, THEIRS, "square"),
        ("others, gradients or statistics differ", wrong, WRONG, "x"),
    ):
        if rows:
            words = {} if rows is ours else sides
            figure.add_scatter(**_points(found, rows, words), name=name, **_marks(colour, symbol))
    figure.update_xaxes(title_text="peak above static, % of plain PyTorch's", range=[0, 106])
    figure.update_yaxes(title_text="extra time per step, %")
    return themed(figure, _finding(found))


def _points(found: Contest, rows: Sequence[Row], sides: Mapping[str, str]) -> dict[str, Any]:
    times = [found.time(row.name) for row in rows]
    return {
        "x": [found.share(row.name) * 100 for row in rows],
        "y": [(time.median - 1) * 100 for time in times],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [(time.high - time.median) * 100 for time in times],
            "arrayminus": [(time.median - time.low) * 100 for time in times],
            "thickness": 1,
        },
        "text": [row.name if row.name in sides else "" for row in rows],
        "textposition": [sides.get(row.name, "top right") for row in rows],
        "hovertext": [row.name for row in rows],
    }


Box = tuple[float, float, float, float]  # left, right, bottom, top


def _sides(
    found: Contest, named: Sequence[Row], others: Sequence[Row], curve: Sequence[tuple[float, float]]
) -> dict[str, str]:
    """On which side of its mark each name stands, so that it covers as few marks, names and curves as can be.

    Measured in % of peak and of time: about one of the first is a letter, and a line is a twentieth of the height.
    """
    times = {row.name: found.time(row.name) for row in (*named, *others)}
    top, bottom = max(time.high for time in times.values()), min(time.low for time in times.values())
    line = (top - bottom) * 100 / 20
    taken: list[Box] = []
    for name, time in times.items():
        x, y = found.share(name) * 100, (time.median - 1) * 100
        taken.append((x - 0.8, x + 0.8, y - line / 3, y + line / 3))
        taken.append((x - 0.3, x + 0.3, (time.low - 1) * 100, (time.high - 1) * 100))
    pieces = [(min(x, other), max(x, other), min(y, more), max(y, more)) for (x, y), (other, more) in pairwise(curve)]
    sides: dict[str, str] = {}
    for row in named:
        x, y = found.share(row.name) * 100, (times[row.name].median - 1) * 100
        boxes: dict[str, Box] = {}
        for side, left in (("right", x + 1), ("left", x - 1 - len(row.name))):
            boxes[f"top {side}"] = (left, left + len(row.name), y + line / 4, y + line * 5 / 4)
            boxes[f"bottom {side}"] = (left, left + len(row.name), y - line * 5 / 4, y - line / 4)
        sides[row.name] = min(boxes, key=lambda side: _cost(boxes[side], taken, pieces))
        taken.append(boxes[sides[row.name]])
    return sides


def _cost(box: Box, taken: Sequence[Box], pieces: Sequence[Box]) -> int:
    """How many boxes a box overlaps, and one more for the curve; leaving the figure counts as much as several."""
    is_outside = box[1] > 105 or box[0] < 1
    return 5 * is_outside + sum(_overlap(box, other) for other in taken) + any(_overlap(box, each) for each in pieces)


def _overlap(one: Box, two: Box) -> bool:
    return one[0] <= two[1] and two[0] <= one[1] and one[2] <= two[3] and two[2] <= one[3]


def _marks(colour: str, symbol: str) -> dict[str, Any]:
    return {"mode": "markers+text", "marker": {"color": colour, "symbol": symbol, "size": 10}}


def _finding(found: Contest) -> str:
    """The figure's sentence: the contender that saves most, and what ours takes in its place."""
    if not found.rivals:
        return f"{found.title}: no contender saves memory"
    lowest = min(found.rivals, key=found.share)
    theirs, ours = found.time(lowest), found.time(found.rivals[lowest])
    where = f"{found.title}: at {found.share(lowest):.0%} of the peak"
    return f"{where}, {lowest} takes {_claimed(theirs)} time, a plan {_claimed(ours)}"
