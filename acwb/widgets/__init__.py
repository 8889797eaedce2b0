"""Jupyter widgets: the budget explorer and the sweep board."""

from acwb.widgets.views import budget_explorer, sweep_board

__all__ = ["budget_explorer", "sweep_board"]
