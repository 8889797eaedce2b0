"""The files that a run leaves: figures, tables, and a cache of what is expensive to measure."""

from acwb.results.cache import cached_comparison, cached_measurement, cached_profile
from acwb.results.figures import save_figure, save_table
from acwb.results.tables import batch_rows, block_rows, breakdown_rows, profile_row, summary_row, tradeoff_rows

__all__ = [
    "batch_rows",
    "block_rows",
    "breakdown_rows",
    "cached_comparison",
    "cached_measurement",
    "cached_profile",
    "profile_row",
    "save_figure",
    "save_table",
    "summary_row",
    "tradeoff_rows",
]
