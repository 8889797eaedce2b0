"""Jupyter widgets: the budget explorer and the sweep board."""

from acwb.widgets.explorer_view import budget_explorer
from acwb.widgets.sweep_view import sweep_board

__all__ = ["budget_explorer", "sweep_board"]
