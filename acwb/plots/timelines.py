"""Memory over time: the timeline of a plan by role, before and after, and how long each activation lives."""

from typing import TYPE_CHECKING, Any

from plotly import graph_objects
from plotly.subplots import make_subplots

from acwb.core.graph import Phase, Role
from acwb.core.schedule import Run
from acwb.evaluation.measurement import Measurement
from acwb.planning.heuristics import keep_all
from acwb.planning.plan import Decision, Plan
from acwb.planning.plan_tables import bytes_column
from acwb.plots.theme import INK, KEPT, PAPER, QUIET, RECOMPUTED, ROLES, WRONG, arrow, in_gib, themed
from acwb.units import format_bytes

if TYPE_CHECKING:
    import pandas

PIXELS = 900  # a figure's width in pixels: of the ops in one of them, the one that needs most is drawn


PlotlyValues = dict[str, Any]  # of a trace, an annotation or a shape, before plotly has checked them


def timeline(plan: Plan, measurement: Measurement | None = None) -> graph_objects.Figure:
    """The memory of a step over its time, stacked by role, with the phases, the budget and the peak."""
    shapes, notes = _marks(plan)
    figure = graph_objects.Figure(areas(plan), {"shapes": shapes, "annotations": notes})
    figure.update_xaxes(title_text="time in the step, ms (predicted)")
    figure.update_yaxes(title_text="memory, GiB")
    beside = f", measured {format_bytes(measurement.peaks.allocator_bytes)}" if measurement is not None else ""
    model = plan.profile.graph.title
    peak = plan.timeline.peak_bytes
    held = plan.timeline.by_role[Role.ACTIVATION][plan.timeline.peak_step] / peak
    finding = f"{model}: the step peaks at {format_bytes(peak)}{beside}; {held:.0%} of that are activations"
    return themed(figure, finding)


def before_and_after(plan: Plan, measurement: Measurement | None = None) -> graph_objects.Figure:
    """The step without a plan above the step with it, on the same axes."""
    drawing = BeforeAfter(keep_all(plan.profile), plan, measurement)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, shared_yaxes=True, vertical_spacing=0.09)
    figure.add_traces(drawing.traces)
    figure.update_layout(shapes=drawing.shapes, annotations=drawing.annotations)
    figure.update_yaxes(title_text="memory, GiB", range=drawing.heights)
    figure.update_xaxes(range=drawing.times)
    figure.update_xaxes(title_text="time in the step, ms (predicted)", row=2, col=1)
    return themed(figure, drawing.finding, height=640)


class BeforeAfter:
    """The data of `before_and_after` as plain values, so that a displayed figure can be updated at once.

    Plotly takes many times as long to check a new figure as these take to compute.

    Attributes:
        heights: the range of both vertical axes, in GiB.
        times: the range of both horizontal axes, in ms.
    """

    def __init__(self, plain: Plan, plan: Plan, measurement: Measurement | None = None) -> None:
        self.finding = _finding(plan, measurement)
        self.heights = [0, in_gib(plain.timeline.peak_bytes) * 1.25]
        self.times = [0, max(plain.timeline.seconds, plan.timeline.seconds) * 1e3]
        self.traces: list[PlotlyValues] = []
        self.shapes: list[PlotlyValues] = []
        self.annotations: list[PlotlyValues] = []
        for axis, name, each in (("", "without a plan", plain), ("2", "with a plan", plan)):
            self.traces += areas(each, axis)
            shapes, notes = _marks(each, axis)
            self.shapes += shapes
            heading = {"text": f"<b>{name}</b>", "x": 0.01, "y": 0.97, "xanchor": "left", "yanchor": "top"}
            place = {"xref": f"x{axis} domain", "yref": f"y{axis} domain", "showarrow": False}
            self.annotations += [*notes, {**heading, **place}]


def areas(plan: Plan, axis: str = "") -> list[PlotlyValues]:
    """The stacked areas of a timeline, role by role, then the running op's workspace; the op stands on the total.

    Only those on the first axes have names in the legend.
    """
    frame = downsample(plan.timeline_frame)
    start, traces = frame["start_ms"].to_numpy(), []
    place = {"type": "scatter", "xaxis": f"x{axis}", "yaxis": f"y{axis}", "mode": "lines"}
    for role, (colour, pattern) in ROLES.items():
        sizes = frame[bytes_column(role)].to_numpy()
        traces.append(
            {
                **place,
                "x": start,
                "y": in_gib(sizes),
                "name": str(role),
                "legendgroup": str(role),
                "showlegend": bool(not axis and sizes.any()),
                "stackgroup": f"memory{axis}",
                "line": {"width": 0, "shape": "hv", "color": colour},
                "fillcolor": colour,
                "fillpattern": {"shape": pattern, "size": 6, "solidity": 0.2, "fgcolor": INK, "bgcolor": colour},
                "hovertemplate": f"{role} %{{y:.3f}} GiB<extra></extra>",
            }
        )
    total = {
        **place,
        "x": start,
        "y": in_gib(frame["total_bytes"].to_numpy()),
        "name": "total",
        "showlegend": False,
        "line": {"width": 1, "shape": "hv", "color": INK},
        "text": frame["op"].to_numpy(),
        "hovertemplate": "<b>%{text}</b>: %{y:.3f} GiB at %{x:,.1f} ms<extra></extra>",
    }
    return [*traces, total]


def downsample(frame: "pandas.DataFrame", columns: int = PIXELS) -> "pandas.DataFrame":
    """The rows that a picture shows: of those that fall on one pixel, the one that needs most memory; and the end."""
    if len(frame) <= columns:
        return frame
    end = frame["start_ms"].iloc[-1] or 1.0
    pixel = (frame["start_ms"] / end * columns).astype(int)
    highest = frame.groupby(pixel)["total_bytes"].idxmax()
    return frame.loc[sorted({*highest, frame.index[0], frame.index[-1]})]


def _marks(plan: Plan, axis: str = "") -> tuple[list[PlotlyValues], list[PlotlyValues]]:
    """Lines and words for the phases, the budget and the peak."""
    across, up = {"xref": f"x{axis} domain", "yref": f"y{axis}"}, {"xref": f"x{axis}", "yref": f"y{axis} domain"}
    shapes: list[PlotlyValues] = []
    notes: list[PlotlyValues] = []
    frame = plan.timeline_frame
    starts = frame.groupby("phase", sort=False)["start_ms"].min()
    for phase in (Phase.BACKWARD, Phase.OPTIMIZER):
        if phase in starts.index:
            at = float(starts[phase])
            shapes.append(_line({"color": QUIET, "width": 1, "dash": "dot"}, (at, at), (0, 1)) | up)
            notes.append(_word(str(phase), at, 0.02, "left" if phase is Phase.BACKWARD else "right", PAPER) | up)
    if plan.budget_bytes is not None and plan.budget_bytes <= plan.profile.peak_bytes:
        budget = in_gib(plan.budget_bytes)
        shapes.append(_line({"color": WRONG, "width": 1.5, "dash": "dash"}, (0, 1), (budget, budget)) | across)
        notes.append(_word(f"budget {format_bytes(plan.budget_bytes)}", 0.005, budget, "left", WRONG) | across)
    row = plan.peak_row
    op = plan.profile.graph.op(row["op"])
    where = f" ({op.module})" if op.module else ""
    is_late = row["start_ms"] > 0.5e3 * plan.timeline.seconds
    side = {"ax": -40, "xanchor": "right"} if is_late else {"ax": 40, "xanchor": "left"}
    told = f"peak {format_bytes(plan.timeline.peak_bytes)}<br>{op.name}{where}"
    top = in_gib(plan.timeline.peak_bytes)
    notes.append({**arrow(told, float(row["start_ms"]), top), **side, "xref": f"x{axis}", "yref": f"y{axis}"})
    return shapes, notes


def _line(line: PlotlyValues, x: tuple[float, float], y: tuple[float, float]) -> PlotlyValues:
    return {"type": "line", "line": line, "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1]}


def _word(text: str, x: float, y: float, side: str, colour: str) -> PlotlyValues:
    place = {"x": x, "y": y, "xanchor": side, "yanchor": "bottom", "showarrow": False}
    return {"text": text, "font": {"size": 12, "color": colour}, **place}


def _finding(plan: Plan, measurement: Measurement | None) -> str:
    """The finding: what the plan saves and costs, and what was measured of that."""
    static, plain = plan.profile.graph.static_bytes, plan.profile.peak_bytes
    saved = 1 - (plan.timeline.peak_bytes - static) / (plain - static)
    text = (
        f"{plan.profile.graph.title}: peak {format_bytes(plain)} → {format_bytes(plan.timeline.peak_bytes)} "
        f"(−{saved:.0%} above static) for {plan.overhead:+.1%} time, predicted"
    )
    if measurement is not None:
        time = measurement.time
        spread = "within noise" if time.is_noise else f"95% [{time.low - 1:+.1%}, {time.high - 1:+.1%}]"
        measured = (
            f"measured {format_bytes(measurement.peaks.allocator_bytes)} for {time.median - 1:+.1%} time ({spread})"
        )
        text += "; " + measured.replace("-", "−")
    return text


def lifetimes(plan: Plan) -> graph_objects.Figure:
    """Live ranges of the activations: a bar for each copy, recomputed ones in another colour."""
    spans = _spans(plan)
    activations = plan.profile.graph.activations
    place = {each.name: number for number, each in enumerate(activations)}
    figure = graph_objects.Figure()
    for decision, colour, name in (
        (Decision.RETAINED, KEPT, "kept"),
        (Decision.RECOMPUTE, RECOMPUTED, "dropped and recomputed"),
    ):
        rows = [(place[storage], *span, storage) for storage, span in spans if plan.decisions[storage] is decision]
        if rows:
            figure.add_bar(
                orientation="h",
                y=[row for row, *_ in rows],
                base=[start for _, start, _, _ in rows],
                x=[end - start for _, start, end, _ in rows],
                width=1,
                name=name,
                marker={"color": colour, "line": {"width": 0}},
                text=[storage for *_, storage in rows],
                textposition="none",
                hovertemplate="%{text}: from %{base:,.1f} ms for %{x:,.1f} ms<extra></extra>",
            )
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_xaxes(title_text="time in the step, ms (predicted)")
    figure.update_yaxes(title_text="activation, in order of creation", autorange="reversed")
    again = sum(decision is Decision.RECOMPUTE for decision in plan.decisions.values())
    finding = (
        f"{plan.profile.graph.title}: {again:,} of {len(activations):,} activations are dropped between "
        f"the phases and recomputed"
        if again
        else f"{plan.profile.graph.title}: all {len(activations):,} activations are kept from their forward to "
        f"their backward use, idle for up to {_longest_wait(plan):.0%} of the step"
    )
    return themed(figure, finding)


def _longest_wait(plan: Plan) -> float:
    return max(map(plan.profile.inactive_seconds, plan.profile.graph.activations)) / plan.profile.step_seconds


def _spans(plan: Plan) -> list[tuple[str, tuple[float, float]]]:
    """From when to when each copy of each activation is there, in ms."""
    names = {each.name for each in plan.profile.graph.activations}
    born: dict[tuple[str, int], float] = {}
    found: list[tuple[str, tuple[float, float]]] = []
    graph = plan.profile.graph
    for entry, start in zip(plan.schedule.entries, plan.clock, strict=True):
        if isinstance(entry, Run):
            op = graph.op(entry.op)
            for storage in op.results(entry.by_rule):
                if storage in names:
                    born[storage, entry.copy] = start * 1e3
        elif (key := (entry.storage, entry.copy)) in born:
            found.append((entry.storage, (born.pop(key), start * 1e3)))
    found += [(storage, (start, plan.timeline.seconds * 1e3)) for (storage, _), start in born.items()]
    return found
