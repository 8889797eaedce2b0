"""Charts of a profile: time and memory op by op, activations by size and idle time, the peak."""

from collections import Counter
from collections.abc import Mapping

from plotly import graph_objects
from plotly.subplots import make_subplots

from acwb.core.graph import Phase
from acwb.core.profile import Profile
from acwb.planning.plan import Plan
from acwb.plots.theme import INK, KEPT, PHASES, QUIET, ROLES, WORKSPACE, in_gib, mark, themed
from acwb.units import format_bytes, format_seconds

MAX_BARS = 12  # of a breakdown; the others are summed up
MIN_SHARE = 0.005  # of all: what is smaller is summed up, too


def node_runtime(profile: Profile) -> graph_objects.Figure:
    """Run time of each op, in order of execution."""
    nodes = profile.nodes
    figure = graph_objects.Figure()
    for phase, colour in PHASES.items():
        rows = nodes[nodes["gtype"] == phase]
        if len(rows):
            figure.add_scatter(
                x=rows["rank"],
                y=rows["run_time_ms"],
                name=phase,
                mode="markers",
                marker={"color": colour, "size": 4, "symbol": _symbol(phase)},
                text=rows["name"] + "  " + rows["module"],
                hovertemplate="%{text}: %{y:.3f} ms<extra></extra>",
            )
    figure.update_xaxes(title_text="op, in the order in which they run")
    figure.update_yaxes(title_text="run time, ms", type="log", dtick=1)
    kinds = Counter[str]()
    for target, spent in zip(nodes["target"], nodes["run_time_ms"], strict=True):
        kinds[target.split(".")[1] if "." in target else target] += spent
    most = sorted(kinds, key=kinds.__getitem__, reverse=True)[:2]
    share = sum(kinds[kind] for kind in most) / nodes["run_time_ms"].sum()
    finding = f"{_model(profile)}: {' and '.join(most)} take {share:.0%} of {format_seconds(profile.step_seconds)}"
    return themed(figure, finding)


def _symbol(phase: Phase) -> str:
    return {Phase.FORWARD: "circle", Phase.BACKWARD: "square", Phase.OPTIMIZER: "diamond"}[phase]


def node_peak_memory(profile: Profile) -> graph_objects.Figure:
    """The memory that is in use while each op runs, its workspace included."""
    nodes = profile.nodes
    figure = graph_objects.Figure()
    figure.add_scatter(
        x=nodes["rank"],
        y=in_gib(nodes["peak_mem_bytes"]),
        name="in use while the op runs",
        mode="lines",
        line={"color": PHASES[Phase.FORWARD], "width": 1.5, "shape": "hv"},
        text=nodes["name"],
        hovertemplate="%{text}: %{y:.3f} GiB<extra></extra>",
    )
    figure.add_scatter(
        x=nodes["rank"],
        y=in_gib(nodes["active_mem_bytes"]),
        name="op's own working set (inputs, outputs, workspace)",
        mode="lines",
        line={"color": KEPT, "width": 1, "shape": "hv"},
        hovertemplate="%{y:.3f} GiB<extra></extra>",
    )
    for phase in (Phase.BACKWARD, Phase.OPTIMIZER):
        rows = nodes[nodes["gtype"] == phase]
        if len(rows):
            figure.add_vline(
                x=rows["rank"].iloc[0],
                line={"color": QUIET, "width": 1, "dash": "dot"},
                annotation={"text": phase, "font": {"size": 11, "color": INK}, "y": 0.04},
                annotation_position="bottom right",
            )
    op = profile.graph.ops[profile.peak_rank]
    mark(figure, f"peak at {op.name}", profile.peak_rank, in_gib(profile.peak_bytes), xanchor="left")
    figure.update_xaxes(title_text="op, in the order in which they run")
    figure.update_yaxes(title_text="memory, GiB", rangemode="tozero")
    largest = in_gib(nodes["active_mem_bytes"].max())
    peak = format_bytes(profile.peak_bytes)
    finding = f"{_model(profile)}: the step needs {peak}, no single op more than {largest:.3f} GiB"
    return themed(figure, finding)


def activation_size(profile: Profile) -> graph_objects.Figure:
    """The activations in order of creation, with their sum."""
    rows = profile.activations
    sizes = in_gib(rows["median_mem_size_bytes"])
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    figure.add_bar(
        x=list(range(len(rows))),
        y=sizes * 1024,
        name="size",
        marker={"color": KEPT, "line": {"width": 0}},
        text=rows["activation_name"] + "  " + rows["module"],
        textposition="none",
        hovertemplate="%{text}: %{y:.2f} MiB<extra></extra>",
    )
    figure.add_scatter(
        x=list(range(len(rows))),
        y=sizes.cumsum(),
        name="sum so far",
        mode="lines",
        line={"color": PHASES[Phase.FORWARD], "width": 2},
        hovertemplate="%{y:.3f} GiB<extra></extra>",
        secondary_y=True,
    )
    figure.update_layout(bargap=0)
    figure.update_xaxes(title_text="activation, in order of creation")
    figure.update_yaxes(title_text="size, MiB", secondary_y=False)
    figure.update_yaxes(title_text="sum so far, GiB", rangemode="tozero", tickmode="auto", secondary_y=True)
    first = sizes[: len(rows) // 4].sum() / sizes.sum()
    held = f"{len(rows):,} activations hold {sizes.sum():.3f} GiB"
    finding = f"{_model(profile)}: {held}; the first quarter of them {first:.0%}"
    figure = themed(figure, finding)
    figure.update_yaxes(showgrid=False, secondary_y=True)
    return figure.update_layout(margin={"r": 75})


def inactive_time(profile: Profile) -> graph_objects.Figure:
    """Idle time of each activation against its recomputation time: which ones are worth dropping."""
    rows = profile.activations
    figure = graph_objects.Figure()
    largest = rows["median_mem_size_bytes"].max()
    figure.add_scatter(
        x=rows["inactive_time_ms"],
        y=rows["recomp_time_ms"],
        mode="markers",
        showlegend=False,
        marker={
            "color": KEPT,
            "opacity": 0.55,
            "size": (rows["median_mem_size_bytes"] / largest) ** 0.5 * 22 + 2,
            "line": {"width": 0.5, "color": "#7a5400"},
        },
        text=rows["activation_name"] + "  " + rows["module"],
        customdata=in_gib(rows["median_mem_size_bytes"]) * 1024,
        hovertemplate="%{text}: %{customdata:.2f} MiB<br>idle %{x:,.1f} ms, recomputation %{y:.2f} ms<extra></extra>",
    )
    figure.update_xaxes(title_text="idle time, ms")
    figure.update_yaxes(title_text="recomputation time, ms", type="log", dtick=1)
    cheap = rows["recomp_time_ms"] * 100 < rows["inactive_time_ms"]
    share = rows["median_mem_size_bytes"][cheap].sum() / rows["median_mem_size_bytes"].sum()
    finding = (
        f"{_model(profile)}: {share:.0%} of the activations' bytes are idle for more than 100 times their "
        "recomputation time (area: bytes)"
    )
    return themed(figure, finding)


def breakdown(plan: Plan) -> graph_objects.Figure:
    """Live memory at the peak, by role and by module."""
    graph, timeline = plan.profile.graph, plan.timeline
    roles = {str(role): sizes[timeline.peak_step] for role, sizes in timeline.by_role.items()}
    roles[WORKSPACE] = timeline.peak_bytes - timeline.tensor_bytes[timeline.peak_step]
    modules = Counter[str]()
    for name, _ in timeline.alive_at_peak:
        maker = graph.maker.get(name)
        module = graph.op(maker).module if maker else name.partition(":")[0].rpartition(".")[0]
        modules[_group(module)] += graph.storage[name].bytes
    modules[WORKSPACE] += roles[WORKSPACE]
    figure = make_subplots(cols=2, horizontal_spacing=0.32, subplot_titles=("by role", "by module"))
    shown = _largest(roles)
    figure.add_bar(**_bars(shown, ROLES), col=1, row=1)
    figure.add_bar(**_bars(_largest(modules), {WORKSPACE: ROLES[WORKSPACE]}), col=2, row=1)
    figure.update_xaxes(title_text="GiB at the peak")
    figure.update_layout(showlegend=False)
    first = next(iter(shown))
    finding = (
        f"{_model(plan.profile)}: {format_bytes(timeline.peak_bytes)} at the peak, "
        f"{roles[first] / timeline.peak_bytes:.0%} of it {first}s"
    )
    figure = themed(figure, finding)
    figure.update_yaxes(showgrid=False, ticks="", autorange="reversed")
    return figure.update_layout(margin={"l": 130, "r": 60})


def _group(module: str) -> str:
    """The part of a model that a module is counted with: the container of its blocks, or else of the module itself."""
    parts = module.split(".")
    numbered = next((position for position, part in enumerate(parts) if part.isdigit()), max(1, len(parts) - 1))
    return ".".join(parts[:numbered]) or "outside of modules"


def _largest(sizes: dict[str, int] | Counter[str]) -> dict[str, int]:
    """The largest, and the sum of the rest, which no bar of its own could show."""
    ordered = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)
    least = MIN_SHARE * sum(sizes.values())
    found = {name: size for size, name in ordered[:MAX_BARS] if size >= least}
    rest = sum(size for size, _ in ordered[len(found) :])
    return {**found, f"{len(ordered) - len(found)} others": rest} if rest else found


def _bars(sizes: dict[str, int], looks: Mapping[str, tuple[str, str]]) -> dict[str, object]:
    total = sum(sizes.values())
    return {
        "orientation": "h",
        "y": list(sizes),
        "x": [in_gib(size) for size in sizes.values()],
        "marker": {"color": [looks.get(name, (QUIET, ""))[0] for name in sizes]},
        "text": [f"{size / total:.0%}" for size in sizes.values()],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{x:.3f} GiB<extra></extra>",
    }


def _model(profile: Profile) -> str:
    return profile.graph.title
