"""The sweep board, a Jupyter widget: start, watch and cancel a batch-size sweep. It holds no logic; see `sweep_job`."""

import html
import os
from collections.abc import Iterable

import ipywidgets
from plotly import graph_objects

from acwb import models, plots
from acwb.evaluation.batch_sweep import Sweep
from acwb.widgets.explorer_view import WIDE
from acwb.widgets.sweep_job import JobState, SweepJob


class SweepBoard(ipywidgets.VBox):  # type: ignore[misc]
    """A sweep to start and to cancel: see `sweep_board`."""

    def __init__(self, board: SweepJob, subjects: Iterable[str]) -> None:
        self.board = board
        self.subject = ipywidgets.Dropdown(description="model", options=list(subjects), style=WIDE)
        self.sizes = ipywidgets.Text(description="batch sizes", value="2, 4", style=WIDE)
        self.reduction = ipywidgets.BoundedFloatText(
            description="peak above static, less by %", value=50, min=0, max=95, step=5, style=WIDE
        )
        self.start = ipywidgets.Button(description="start", button_style="primary")
        self.cancel = ipywidgets.Button(description="cancel", disabled=True)
        self.progress = ipywidgets.IntProgress(min=0, max=1, description="", layout={"width": "320px"})
        self.message = ipywidgets.HTML()
        self.memory, self.latency = graph_objects.FigureWidget(), graph_objects.FigureWidget()
        super().__init__(
            [
                ipywidgets.HBox([self.subject, self.sizes, self.reduction]),
                ipywidgets.HBox([self.start, self.cancel, self.progress]),
                self.message,
                ipywidgets.HBox([self.memory, self.latency]),
            ]
        )
        self.start.on_click(self._on_start)
        self.cancel.on_click(lambda _button: self.board.cancel())
        board.observe(self._show)
        self._show(board)

    def _on_start(self, _button: object) -> None:
        self.board.start(self.subject.value, self.sizes.value, self.reduction.value / 100)

    def _show(self, board: SweepJob) -> None:
        is_busy = board.state in (JobState.RUNNING, JobState.CANCELLING)
        self.start.disabled, self.cancel.disabled = is_busy, board.state is not JobState.RUNNING
        self.progress.max = max(1, len(board.wanted))
        self.progress.value = len(board.sweep.points) if board.sweep else 0
        self.message.value = f'<span role="status" class="acwb-message">{html.escape(board.message)}</span>'
        if board.sweep is not None and board.sweep.points:
            self._draw(board.sweep)

    def _draw(self, sweep: Sweep) -> None:
        for shown, drawn in ((self.memory, plots.sweep_memory(sweep)), (self.latency, plots.sweep_latency(sweep))):
            drawn.update_layout(width=560, height=420)
            with shown.batch_update():
                shown.data = []
                shown.add_traces(drawn.data)
                shown.layout = drawn.layout


def sweep_board(
    subjects: Iterable[str] = ("resnet152", "bert"), folder: str | os.PathLike[str] = "results", rounds: int = 3
) -> SweepBoard:
    """A board on which sweeps over batch sizes are started, watched and cancelled.

    Args:
        subjects: names of `acwb.models`.
        folder: where the points are kept, each as soon as it is measured.
        rounds: how often the steps with and without a plan take turns.

    Example:
        >>> acwb.widgets.sweep_board()
    """
    names = list(subjects)
    return SweepBoard(SweepJob(folder, rounds, {name: models.maker(name) for name in names}), names)
