"""The widgets as Python sees them: controls lead to the explorer's functions, and bad input leaves the plan alone."""

from pathlib import Path

import pytest

import acwb
from acwb.planning.plan import Decision
from acwb.widgets.explorer_view import BudgetExplorer, budget_explorer
from acwb.widgets.sweep_view import SweepBoard, sweep_board

GIB = 2**30


@pytest.fixture
def board(profile: acwb.Profile, tmp_path: Path) -> BudgetExplorer:
    return budget_explorer(profile, folder=tmp_path)


def peak(board: BudgetExplorer) -> float:
    """The highest point of the drawn plan."""
    return max(board.timeline.data[-1].y)


def test_the_slider_moves_the_plan(board: BudgetExplorer) -> None:
    frontier = board.now.frontier
    assert board.slider.min * GIB == pytest.approx(frontier.floor_bytes)
    assert board.slider.max * GIB == pytest.approx(frontier.baseline_bytes)
    before = peak(board)
    board.slider.value = board.slider.min
    assert board.now.plan.timeline.peak_bytes == frontier.floor_bytes
    assert peak(board) == frontier.floor_bytes / GIB < before
    assert float(board.entry.value) == pytest.approx(board.slider.min, rel=1e-4)
    assert board.curve.data[-1].y[0] == pytest.approx(board.now.plan.overhead * 100)
    board.slider.value = board.slider.max
    assert board.now.plan.overhead == 0


def test_an_exact_entry_moves_the_slider(board: BudgetExplorer) -> None:
    wanted = (board.now.frontier.floor_bytes * 3 + board.now.frontier.baseline_bytes) // 4
    board.entry.value = f"{wanted}B"
    assert board.now.budget_bytes == wanted
    assert board.slider.value == pytest.approx(wanted / GIB)


@pytest.mark.parametrize("entry", ["", "much", "0.000001", "-2"])
def test_invalid_entries_are_reported_and_the_plan_stays(board: BudgetExplorer, entry: str) -> None:
    plan, drawn = board.now.plan, peak(board)
    board.entry.value = entry
    assert board.now.plan is plan
    assert peak(board) == drawn
    assert "acwb-message" in board.message.value
    assert float(board.entry.value) * GIB == pytest.approx(board.now.budget_bytes, rel=1e-2)
    board.slider.value = board.slider.max
    assert board.message.value == ""


def test_a_planner_that_does_not_fit_is_not_taken(board: BudgetExplorer) -> None:
    board.planner.value = "keep_all"
    assert "The plan of keep_all needs" in board.message.value
    assert board.planner.value == board.now.plan.planner == "frontier"
    board.slider.value = board.slider.max
    board.planner.value = "mu_two"
    assert board.now.plan.planner == "mu_two"


def test_a_chosen_activation_is_explained_and_pinned(board: BudgetExplorer) -> None:
    board.pin.value = "keep"
    assert "Choose an activation" in board.message.value
    name = next(name for name, each in board.now.plan.decisions.items() if each is Decision.RECOMPUTE)
    board.table.selected = name
    assert "is dropped after" in board.why.value
    assert board.pin.value == "free"
    board.pin.value = "keep"
    assert board.now.plan.decisions[name] is Decision.RETAINED
    assert next(row for row in board.table.rows if row["activation"] == name)["pin"] == "keep"
    assert "is kept" in board.why.value
    board.pin.value = "free"
    assert board.now.keep == ()


def test_export_writes_the_current_figure_and_plan(board: BudgetExplorer, tmp_path: Path) -> None:
    board.export.click()
    assert {path.name for path in tmp_path.iterdir()} >= {
        *("plan.json", "ac_decisions.csv", "checkpoint_plan.csv"),
        *("before_and_after.html", "before_and_after.svg", "before_and_after.pdf", "before_and_after.png"),
    }
    assert "written to " in board.message.value
    assert acwb.Plan.load(tmp_path / "plan.json", board.now.profile).schedule == board.now.plan.schedule


def test_the_sweep_board_reports_invalid_input(tmp_path: Path) -> None:
    board: SweepBoard = sweep_board(folder=tmp_path)
    board.sizes.value = "four"
    board.start.click()
    assert "&#x27;four&#x27; is not a batch size" in board.message.value
    assert not board.start.disabled
    assert board.cancel.disabled
