"""The files that a run leaves: figures, tables, and a cache of what is expensive to measure."""

from acwb.results.cache import contest_of, measurement_of, profile_of
from acwb.results.figures import save_figure, save_table
from acwb.results.tables import batch_table, block, breakdown, profile_statistics, summary, trade_off

__all__ = [
    "batch_table",
    "block",
    "breakdown",
    "contest_of",
    "measurement_of",
    "profile_of",
    "profile_statistics",
    "save_figure",
    "save_table",
    "summary",
    "trade_off",
]
