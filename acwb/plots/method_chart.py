"""Methods side by side: what each saves and what it costs, relative to eager."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from plotly import graph_objects

from acwb.evaluation.comparison import EAGER, MethodComparison, MethodResult
from acwb.plots.theme import OURS, THEIRS, WRONG, extra_time, themed


def method_comparison(found: MethodComparison) -> graph_objects.Figure:
    """Peak above static against time of each method, both relative to eager."""
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
        ("others, bitwise equal", right, THEIRS, "square"),
        ("others, gradients or buffers differ", wrong, WRONG, "x"),
    ):
        if rows:
            words = {} if rows is ours else sides
            figure.add_scatter(**_points(found, rows, words), name=name, **_marks(colour, symbol))
    figure.update_xaxes(title_text="peak above static, % of eager's", range=[0, 106])
    figure.update_yaxes(title_text="extra time per step, %")
    return themed(figure, _finding(found))


def _points(found: MethodComparison, rows: Sequence[MethodResult], sides: Mapping[str, str]) -> dict[str, Any]:
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
    found: MethodComparison,
    named: Sequence[MethodResult],
    others: Sequence[MethodResult],
    curve: Sequence[tuple[float, float]],
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
    """Penalty for placing a label: one per overlapping label, one for the curve, five for leaving the figure."""
    is_outside = box[1] > 105 or box[0] < 1
    return 5 * is_outside + sum(_overlap(box, other) for other in taken) + any(_overlap(box, each) for each in pieces)


def _overlap(one: Box, two: Box) -> bool:
    return one[0] <= two[1] and two[0] <= one[1] and one[2] <= two[3] and two[2] <= one[3]


def _marks(colour: str, symbol: str) -> dict[str, Any]:
    return {"mode": "markers+text", "marker": {"color": colour, "symbol": symbol, "size": 10}}


def _finding(found: MethodComparison) -> str:
    """The figure's sentence: the method that saves most, and what ours takes in its place."""
    if not found.matching_plans:
        return f"{found.title}: no method saves memory"
    lowest = min(found.matching_plans, key=found.share)
    theirs, ours = found.time(lowest), found.time(found.matching_plans[lowest])
    where = f"{found.title}: at {found.share(lowest):.0%} of the peak"
    return f"{where}, {lowest} takes {extra_time(theirs)} time, a plan {extra_time(ours)}"
