"""A block of a step as a graph, before and after it is rewritten: what is kept, and what is recomputed where."""

from collections.abc import Sequence

from plotly import graph_objects
from plotly.subplots import make_subplots

from acwb.core.graph import Op, Phase, StepGraph
from acwb.errors import AcwbError
from acwb.plots.theme import INK, KEPT, PAPER, PHASES, QUIET, RECOMPUTED, themed

Place = tuple[float, float]
MAX_OPS = 80  # ops that can be read in one drawing
RECOMPUTED_COLUMN = 0.8  # of recomputed ops, between forward (0) and backward ops (1)


def block(module: str, captured: StepGraph, rewritten: StepGraph | None = None) -> graph_objects.Figure:
    """The ops of one module in the captured step and, beside that, in the rewritten one (`planned.graph`).

    Forward ops run down on the left, backward ops up on the right, with recomputed ops a little before them. Lines
    across are activations that are kept.
    """
    graphs = [captured] if rewritten is None else [captured, rewritten]
    figure = make_subplots(cols=len(graphs), horizontal_spacing=0.04)
    for column, graph in enumerate(graphs, start=1):
        for trace in _traces(graph, _ops(graph, module), named=column == len(graphs)):
            figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(range=[-0.8, 2.1])
    figure.update_yaxes(range=[-0.02, 1.02])
    rows = max(len(_ops(graph, module)) for graph in graphs)
    figure = themed(figure, _finding(module, captured, rewritten), height=max(420, 130 + 15 * rows))
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure.update_layout(margin={"l": 20, "r": 20, "b": 20})


def _finding(module: str, captured: StepGraph, rewritten: StepGraph | None) -> str:
    crossing = _crossing(_ops(captured, module))
    if rewritten is None:
        return f"{module}: {crossing} results of its forward ops are saved for backward"
    after = _ops(rewritten, module)
    again = sum(bool(op.recomputes) for op in after)
    return (
        f"{module} as captured (left) and rewritten (right): {crossing} results are saved for backward before, "
        f"{_crossing(after)} after; {again} ops are recomputed"
    )


def _crossing(ops: Sequence[Op]) -> int:
    """Number of forward results that are saved for backward."""
    made = {name for op in ops if op.phase is Phase.FORWARD for name in op.outputs}
    return len(made & {name for op in ops if op.phase is Phase.BACKWARD for name in op.inputs})


def _ops(graph: StepGraph, module: str) -> list[Op]:
    """The ops of a module and of those in it, without views and the optimizer's."""
    found = [
        op
        for op in graph.ops
        if f"{op.module}.".startswith(f"{module}.") and op.phase is not Phase.OPTIMIZER and not op.view and op.outputs
    ]
    if not found:
        known = sorted({op.module for op in graph.ops if op.module})
        raise AcwbError(f"No op of the step belongs to module {module!r}: there are {', '.join(known[:5])} and others.")
    if len(found) > MAX_OPS:
        raise AcwbError(f"Module {module!r} has {len(found)} ops, too many for one drawing: choose a smaller one.")
    return found


def _traces(graph: StepGraph, ops: Sequence[Op], named: bool) -> list[graph_objects.Scatter]:
    places = _places(ops)
    maker = {name: op for op in ops for name in op.outputs}
    lines: dict[str, list[tuple[Place, Place]]] = {"kept": [], "again": [], "other": []}
    for op in ops:
        for source in dict.fromkeys(maker[name].name for name in op.inputs if name in maker):
            made = ops[next(number for number, each in enumerate(ops) if each.name == source)]
            crosses = made.phase is Phase.FORWARD and op.phase is Phase.BACKWARD
            kind = "kept" if crosses else "again" if made.recomputes else "other"
            lines[kind].append((places[source], places[op.name]))
    looks = {
        "other": ("reads", QUIET, 1, "solid"),
        "kept": ("activation that is kept", KEPT, 2, "solid"),
        "again": ("recomputed", RECOMPUTED, 2, "dash"),
    }
    traces = [
        graph_objects.Scatter(
            x=[x for start, end in lines[kind] for x in (start[0], end[0], None)],
            y=[y for start, end in lines[kind] for y in (start[1], end[1], None)],
            mode="lines",
            name=name,
            legendgroup=kind,
            showlegend=named,
            line={"color": colour, "width": width, "dash": dash},
            hoverinfo="skip",
        )
        for kind, (name, colour, width, dash) in looks.items()
    ]
    sizes = {storage.name: storage.bytes for storage in graph.storages}
    for name, colour, symbol, chosen in (
        ("forward", PHASES[Phase.FORWARD], "circle", [op for op in ops if op.phase is Phase.FORWARD]),
        ("backward", KEPT, "square", [op for op in ops if op.phase is Phase.BACKWARD and not op.recomputes]),
        ("recomputed op", PAPER, "diamond", [op for op in ops if op.recomputes]),
    ):
        traces.append(
            graph_objects.Scatter(
                x=[places[op.name][0] for op in chosen],
                y=[places[op.name][1] for op in chosen],
                mode="markers+text",
                name=name,
                legendgroup=name,
                showlegend=named,
                marker={"color": colour, "symbol": symbol, "size": 9, "line": {"width": 1.5, "color": RECOMPUTED}},
                text=[_short(op.name) for op in chosen],
                textposition="middle left" if name == "forward" else "middle right",
                textfont={"size": 10, "color": INK},
                cliponaxis=False,
                hovertext=[f"{op.name}: {sum(sizes[each] for each in op.outputs) / 2**20:.2f} MiB" for op in chosen],
                hoverinfo="text",
            )
        )
    return traces


def _places(ops: Sequence[Op]) -> dict[str, Place]:
    """Forward ops down the left side, backward ops up the right side, over the same height."""
    down = [op for op in ops if op.phase is Phase.FORWARD]
    up = [op for op in ops if op.phase is Phase.BACKWARD][::-1]
    return {
        op.name: (
            0.0 if side is down else RECOMPUTED_COLUMN if op.recomputes else 1.0,
            1 - number / max(1, len(side) - 1),
        )
        for side in (down, up)
        for number, op in enumerate(side)
    }


def _short(name: str) -> str:
    for long, brief in (
        ("_native_batch_norm_legit_functional", "batch_norm"),
        ("native_", ""),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
    ):
        name = name.replace(long, brief)
    return name
