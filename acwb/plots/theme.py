"""The look that all figures share: one theme, colours with fixed meanings that also differ in grey, GiB and ms."""

import textwrap
from typing import Any

from plotly import graph_objects
from plotly.offline import get_plotlyjs

from acwb.core.graph import Phase, Role
from acwb.evaluation.timing import Ratio
from acwb.units import GIBIBYTE


def extra_time(time: Ratio) -> str:
    """A measured overhead as a label, marked where it is within noise."""
    text = f"{time.median - 1:+.0%}".replace("-", "−")
    return f"{text} (noise)" if time.is_noise else text


INK, PAPER, GRID, QUIET = "#222222", "#ffffff", "#dddddd", "#777777"
FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
WIDTH, HEIGHT = 900, 520
TITLE_WIDTH = 92  # characters that fit in a line

# Okabe and Ito's colours, which colour-blind readers tell apart.
OURS, THEIRS, WRONG = "#0072b2", "#e69f00", "#d55e00"
KEPT, RECOMPUTED = "#e69f00", "#0072b2"  # an activation that is kept; one that is recomputed
WORKSPACE = "workspace"

# From the bottom of a stack to its top, with a pattern where the grey of two neighbours would be the same.
ROLES: dict[str, tuple[str, str]] = {
    Role.PARAMETER: ("#0072b2", ""),
    Role.OPTIMIZER_STATE: ("#56b4e9", ""),
    Role.BUFFER: ("#332288", ""),
    Role.INPUT: ("#f0e442", ""),
    Role.GRADIENT: ("#cc79a7", "/"),
    Role.ACTIVATION: ("#e69f00", ""),
    Role.OTHER: ("#009e73", "\\"),
    WORKSPACE: ("#555555", ""),
}
PHASES = {Phase.FORWARD: "#0072b2", Phase.BACKWARD: "#e69f00", Phase.OPTIMIZER: "#009e73"}


def themed(figure: graph_objects.Figure, title: str, height: int = HEIGHT) -> graph_objects.Figure:
    """Apply the shared theme to a figure; long titles are broken into lines."""
    lines = wrap_title(title).count("<br>") + 1
    is_named = sum(trace.showlegend is not False for trace in figure.data) > 1  # plotly then draws a legend
    figure.update_layout(
        template="none",
        title={
            "text": wrap_title(title),
            "font": {"size": 16},
            "x": 0.01,
            "xref": "container",
            "xanchor": "left",
            "y": 1 - 20 / height,
            "yanchor": "top",
        },
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        width=WIDTH,
        height=height,
        margin={"l": 75, "r": 30, "t": (66 if is_named else 46) + 20 * lines, "b": 60},
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.01,
            "xanchor": "left",
            "yanchor": "bottom",
            "traceorder": "normal",
            "font": {"size": 12},
        },
        hovermode="closest",
    )
    axis = {
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": INK,
        "ticks": "outside",
        "showline": True,
        "showgrid": True,
        "title_standoff": 8,
        "automargin": True,
        "separatethousands": True,
        "exponentformat": "none",
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure


def wrap_title(title: str, width: int = TITLE_WIDTH) -> str:
    """A title with line breaks, at most `width` characters a line."""
    return "<br>".join(textwrap.wrap(title, width, break_long_words=False, break_on_hyphens=False))


def in_gib(size: Any) -> Any:
    """Convert bytes to GiB for an axis: one number or many."""
    return size / GIBIBYTE


def script() -> str:
    """The source of plotly.js, which exported html files load."""
    return str(get_plotlyjs())


def arrow(text: str, x: float, y: float) -> dict[str, Any]:
    """Plotly annotation: an arrow to a point, with a text."""
    return {
        "text": text,
        "x": x,
        "y": y,
        "showarrow": True,
        "arrowhead": 2,
        "ax": 40,
        "ay": -28,
        "align": "left",
        "bgcolor": "rgba(255,255,255,0.85)",
        "font": {"size": 12},
    }


def mark(figure: graph_objects.Figure, text: str, x: float, y: float, **where: Any) -> None:
    """Annotate a point of a figure with an arrow and a text."""
    figure.add_annotation({**arrow(text, x, y), **where})
