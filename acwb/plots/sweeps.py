"""Batch-size sweeps: peak memory and step time with and without a plan."""

import statistics
from collections.abc import Sequence

from plotly import graph_objects

from acwb.evaluation.batch_sweep import BatchResult, Sweep, SweepPoint
from acwb.plots.theme import INK, OURS, THEIRS, extra_time, in_gib, themed


def sweep_memory(sweep: Sweep) -> graph_objects.Figure:
    """The peak at each batch size with and without a plan, predicted beside measured."""
    figure = graph_objects.Figure()
    for name, colour, side in (("eager", THEIRS, "eager"), ("with a plan", OURS, "planned")):
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
    missing = [point.batch_size for point in sweep.points if point.eager.problem and not point.planned.problem]
    found = [f"plans save {_span([-each for each in saved])} of the peak"] if saved else []
    if missing:
        found.append(f"batch {', '.join(map(str, missing))} fits only with {'one' if saved else 'a plan'}")
    finding = f"{sweep.subject}: {'; '.join(found) or 'no plan fits'}"
    return themed(figure, finding)


def _measured(side: BatchResult) -> float:
    return in_gib(side.peaks.process_bytes) if side.peaks else 0.0  # a bar without height still has its words


def _saved(point: SweepPoint) -> str:
    if point.planned.problem:
        return "no plan fits"
    if point.saved is None:
        return ""
    return f"{-point.saved:+.0%}".replace("-", "−") + ("<br>(floor)" if point.at_floor else "")


def _problem(side: BatchResult) -> str:
    return "does not fit" if side.problem else ""


def _span(parts: Sequence[float]) -> str:
    low, high = (f"{abs(part):.0%}" for part in (max(parts), min(parts)))
    return low if low == high else f"{low} to {high}"


def sweep_latency(sweep: Sweep) -> graph_objects.Figure:
    """The time of a step at each batch size with and without a plan."""
    figure = graph_objects.Figure()
    for name, colour, side, symbol in (
        ("eager", THEIRS, "eager", "square"),
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
    """The title's finding on the plans' overhead; overheads within noise are called noise."""
    times = [point.time for point in sweep.points if point.time]
    claimed = [time.median - 1 for time in times if not time.is_noise]
    if not times:
        return "no batch size was timed with and without a plan"
    if not claimed:
        return f"with a plan, a step takes as long as without, within noise ({times[0].rounds} rounds)"
    rest = ", the others are within noise" if len(claimed) < len(times) else ""
    return f"a step with a plan takes {_signed_span(claimed)} time{rest}"


def _upper(point: SweepPoint) -> str:
    """The side (planned or eager) whose line is the upper one at a point, where a label overlaps neither."""
    medians = {side: statistics.median(getattr(point, side).seconds or (0.0,)) for side in ("planned", "eager")}
    return max(medians, key=medians.__getitem__)


def _slower(point: SweepPoint) -> str:
    return extra_time(point.time) if point.time is not None else ""


def _signed_span(parts: Sequence[float]) -> str:
    low, high = (f"{part:+.0%}".replace("-", "−") for part in (min(parts), max(parts)))
    return low if low == high else f"{low} to {high}"
