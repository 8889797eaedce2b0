"""The trade-off between peak memory and time: the Pareto frontier, its lower bound, other planners."""

from collections.abc import Iterable, Mapping, Sequence

from plotly import graph_objects

from acwb.planning.frontier import Frontier
from acwb.planning.plan import Plan
from acwb.plots.theme import OURS, QUIET, WRONG, in_gib, mark, themed
from acwb.units import format_bytes

SYMBOLS = ("square", "diamond", "triangle-up", "x", "cross", "star")
COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#332288")


def trade_off(
    frontier: Frontier, others: Mapping[str, Iterable[Plan]] | None = None, current: Plan | None = None
) -> graph_objects.Figure:
    """Extra time against peak: the Pareto frontier, its lower bound, other planners, the current plan."""
    figure = graph_objects.Figure([_frontier_line(frontier), _bound_line(frontier)])
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
    floor = f"floor {format_bytes(last.peak_bytes)}"
    mark(
        figure,
        floor,
        _percent_above_static(frontier, last.peak_bytes),
        frontier.overhead(last) * 100,
        ax=50,
        ay=0,
        xanchor="left",
    )
    figure.update_xaxes(title_text="peak above static, % of the step without a plan", range=[0, 103])
    figure.update_yaxes(title_text="extra time per step, % (predicted)", rangemode="tozero")
    half = next((point for point in frontier.points if _percent_above_static(frontier, point.peak_bytes) <= 50), None)
    cost = (
        f"halving the peak above static costs {frontier.overhead(half):+.1%} time" if half else "half is out of reach"
    )
    most = 100 - _percent_above_static(frontier, last.peak_bytes)
    return themed(figure, f"{frontier.profile.graph.title}: {cost}; at most −{most:.0f}% is possible")


def _frontier_line(frontier: Frontier) -> graph_objects.Scatter:
    return graph_objects.Scatter(
        x=[_percent_above_static(frontier, point.peak_bytes) for point in frontier.points],
        y=[frontier.overhead(point) * 100 for point in frontier.points],
        customdata=[in_gib(point.peak_bytes) for point in frontier.points],
        name="frontier",
        mode="lines",
        line={"color": OURS, "width": 2.5, "shape": "hv"},
        hovertemplate="%{customdata:.3f} GiB: %{y:+.1f} % time<extra></extra>",
    )


def _bound_line(frontier: Frontier) -> graph_objects.Scatter:
    return graph_objects.Scatter(
        x=[_percent_above_static(frontier, size) for size, _ in frontier.bounds],
        y=[seconds / frontier.profile.step_seconds * 100 for _, seconds in frontier.bounds],
        name="lower bound",
        mode="lines",
        line={"color": QUIET, "width": 1, "dash": "dot"},
        hoverinfo="skip",
    )


def _dots(frontier: Frontier, name: str, plans: Sequence[Plan], colour: str, symbol: str) -> graph_objects.Scatter:
    return graph_objects.Scatter(
        x=[_percent_above_static(frontier, plan.timeline.peak_bytes) for plan in plans],
        y=[plan.overhead * 100 for plan in plans],
        name=name,
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": 9},
        customdata=[in_gib(plan.timeline.peak_bytes) for plan in plans],
        hovertemplate=f"{name}: %{{customdata:.3f}} GiB, %{{y:+.1f}} % time<extra></extra>",
    )


def current_point(frontier: Frontier, plan: Plan) -> tuple[float, float]:
    """Coordinates of a plan in the trade-off: peak above static and extra time, both in %."""
    return _percent_above_static(frontier, plan.timeline.peak_bytes), plan.overhead * 100


def _percent_above_static(frontier: Frontier, peak: int) -> float:
    """Peak above static memory, in % of that of the step without a plan."""
    static = frontier.profile.graph.static_bytes
    return (peak - static) / (frontier.baseline_bytes - static) * 100
