"""The budget explorer, a Jupyter widget: a slider, its plan, and why. It holds no logic; see `explorer_state`."""

import html
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import numpy
import traitlets
from plotly import graph_objects

from acwb import plots
from acwb.core.profile import Profile
from acwb.planning.heuristics import keep_all
from acwb.plots.theme import wrap_title
from acwb.plots.timelines import BeforeAfter
from acwb.results.figures import save_figure
from acwb.units import GIBIBYTE
from acwb.widgets import explorer_state
from acwb.widgets.explorer_state import ExplorerState

HERE = Path(__file__).parent
WIDE = {"description_width": "initial"}
STEPS = 100  # of the slider


class DecisionTable(anywidget.AnyWidget):
    """A table that sorts by any column; the chosen row is in `selected`."""

    _esm = HERE / "table.js"
    _css = HERE / "table.css"
    rows: traitlets.List[Any] = traitlets.List().tag(sync=True)
    selected = traitlets.Unicode("").tag(sync=True)


class BudgetExplorer(ipywidgets.VBox):  # type: ignore[misc]
    """A budget to move, and what it does: see `budget_explorer`."""

    def __init__(self, now: ExplorerState, name: str, folder: str | os.PathLike[str]) -> None:
        self.now = now
        self._name, self._folder = name, Path(folder)
        self._is_showing = False
        self._plain = keep_all(now.profile)
        self.slider = ipywidgets.FloatSlider(
            description="budget, GiB",
            continuous_update=False,
            readout_format=".3f",
            style=WIDE,
            layout={"width": "520px"},
            **_range(now),
        )
        self.entry = ipywidgets.Text(
            description="exactly", continuous_update=False, style=WIDE, layout={"width": "190px"}, placeholder="1.5"
        )
        self.planner = ipywidgets.Dropdown(
            description="planner",
            options=explorer_state.CHOICES,
            value=now.plan.planner,
            style=WIDE,
            layout={"width": "190px"},
        )
        self.export = ipywidgets.Button(description="export", tooltip="write figure, plan and tables to results")
        self.message = ipywidgets.HTML()
        self.figures = ipywidgets.HTML()
        self.floor = ipywidgets.HTML(f"<small>{html.escape(explorer_state.describe_floor(now))}</small>")
        self.table = DecisionTable()
        self.why = ipywidgets.HTML()
        self.pin = ipywidgets.ToggleButtons(
            options=[("planner decides", "free"), ("keep", "keep"), ("recompute", "recompute")],
            value="free",
            description="pin",
            style={"button_width": "150px", **WIDE},
        )
        self.timeline = graph_objects.FigureWidget(plots.before_and_after(now.plan))
        self.curve = graph_objects.FigureWidget(plots.trade_off(now.frontier, current=now.plan))
        self.curve.update_layout(width=640, height=440)
        super().__init__(
            [
                ipywidgets.HTML(f"<b>{html.escape(name)}</b>"),
                ipywidgets.HBox([self.slider, self.entry, self.planner, self.export]),
                self.message,
                self.floor,
                self.timeline,
                ipywidgets.HBox([self.curve, self.figures]),
                self.table,
                self.pin,
                self.why,
            ]
        )
        self.add_class("acwb-explorer")
        self._show()
        self.slider.observe(self._on_slider, "value")
        self.entry.observe(self._on_entry, "value")
        self.planner.observe(self._on_planner, "value")
        self.pin.observe(self._on_pin, "value")
        self.table.observe(self._on_selected, "selected")
        self.export.on_click(self._on_export)

    def _on_slider(self, change: dict[str, Any]) -> None:
        self._go(lambda: explorer_state.with_budget(self.now, _bytes_of(change["new"], self.now)))

    def _on_entry(self, change: dict[str, Any]) -> None:
        self._go(lambda: explorer_state.with_budget(self.now, change["new"]))

    def _on_planner(self, change: dict[str, Any]) -> None:
        self._go(lambda: explorer_state.with_planner(self.now, change["new"]))

    def _on_pin(self, change: dict[str, Any]) -> None:
        if self._is_showing:
            return
        if not self.table.selected:
            self._show_reason()
            self._say("Choose an activation in the table first: a pin belongs to one.")
        else:
            self._go(lambda: explorer_state.with_pin(self.now, self.table.selected, change["new"]))

    def _on_selected(self, _change: dict[str, Any]) -> None:
        self._show_reason()

    def _on_export(self, _button: object) -> None:
        paths = [*explorer_state.export_plan(self.now, self._folder), *self._figure_files()]
        self._say(f"written to {self._folder}: " + ", ".join(path.name for path in paths))

    def _figure_files(self) -> tuple[Path, ...]:
        rows = self.now.plan.timeline_frame.to_dict("records")
        return save_figure(plots.before_and_after(self.now.plan), "before_and_after", rows, self._folder)

    def _go(self, change: Callable[[], ExplorerState]) -> None:
        """Take a choice over, unless it is the widget itself that sets its controls."""
        if not self._is_showing:
            before, self.now = self.now, change()
            self._show(redraws_curve=self.now.frontier is not before.frontier)

    def _say(self, text: str) -> None:
        self.message.value = f'<span role="status" class="acwb-message">{html.escape(text)}</span>' if text else ""

    def _show(self, redraws_curve: bool = False) -> None:
        now = self.now
        self._is_showing = True
        try:
            with self.hold_trait_notifications():
                for name, value in _range(now).items():
                    setattr(self.slider, name, value)
                self.entry.value = f"{now.budget_bytes / GIBIBYTE:.6g}"
                self.planner.value = now.plan.planner
        finally:
            self._is_showing = False
        self._say(now.message)
        self._redraw_timeline()
        if redraws_curve:
            redraw(self.curve, plots.trade_off(now.frontier, current=now.plan))
            self.floor.value = f"<small>{html.escape(explorer_state.describe_floor(now))}</small>"
        else:
            point = plots.current_point(now.frontier, now.plan)
            self.curve.data[-1].update(x=[point[0]], y=[point[1]])
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td><b>{html.escape(value)}</b></td></tr>"
            for name, value in explorer_state.key_figures(now).items()
        )
        self.figures.value = f'<table class="acwb-figures">{rows}</table>'
        self.table.rows = explorer_state.table(now)
        self._show_reason()

    def _redraw_timeline(self) -> None:
        """Send what has changed in the timeline, and only that; the step without a plan mostly has not."""
        drawing = BeforeAfter(self._plain, self.now.plan)
        with self.timeline.batch_update():
            for shown, trace in zip(self.timeline.data, drawing.traces, strict=True):
                if not (numpy.array_equal(shown.y, trace["y"]) and numpy.array_equal(shown.x, trace["x"])):
                    shown.update({key: trace[key] for key in ("x", "y", "text") if key in trace})
            layout = self.timeline.layout
            layout.annotations, layout.shapes = drawing.annotations, drawing.shapes
            layout.title.text = wrap_title(drawing.finding)
            for axis in (layout.xaxis, layout.xaxis2):
                axis.range = drawing.times

    def _show_reason(self) -> None:
        name = self.table.selected
        self.why.value = f"<span>{html.escape(self.now.plan.why(name))}</span>" if name else ""
        self._is_showing = True
        pinned = next((row["pin"] for row in self.table.rows if row["activation"] == name), "")
        self.pin.value = pinned or "free"
        self._is_showing = False


def redraw(shown: graph_objects.FigureWidget, drawn: graph_objects.Figure) -> None:
    """Let a figure that is on the screen become another one with the same traces."""
    with shown.batch_update():
        for old, new in zip(shown.data, drawn.data, strict=True):
            old.update(x=new.x, y=new.y, showlegend=new.showlegend)
        shown.layout.annotations = drawn.layout.annotations
        shown.layout.title.text = drawn.layout.title.text


def _range(now: ExplorerState) -> dict[str, float]:
    """The slider from the floor to the step without a plan; a hair above the floor, so that its end fits."""
    low = now.frontier.floor_bytes / GIBIBYTE
    high = max(now.frontier.baseline_bytes, now.frontier.points[0].peak_bytes) / GIBIBYTE
    value = min(max(now.budget_bytes / GIBIBYTE, low), high)
    return {"max": high, "min": low, "step": (high - low) / STEPS, "value": value}


def _bytes_of(value: float, now: ExplorerState) -> int:
    """A position of the slider in bytes; its lower end is exactly the minimum feasible peak."""
    return max(round(value * GIBIBYTE), now.frontier.floor_bytes)


def budget_explorer(
    profile: Profile, budget: int | float | str | None = None, folder: str | os.PathLike[str] = "results"
) -> BudgetExplorer:
    """A budget to move, with the plan for it: timeline, key figures, trade-off, decisions, reasons, pins, export.

    Args:
        profile: what `acwb.profile` gave, or a file of it.
        budget: where to begin; without it, in the middle.
        folder: where "export" writes to.

    Example:
        >>> acwb.widgets.budget_explorer(profile)
    """
    environment = profile.graph.environment
    name = f"{profile.graph.title}, {', '.join(environment.batch)}, {environment.optimizer}"
    return BudgetExplorer(explorer_state.start(profile, budget), name, folder)
