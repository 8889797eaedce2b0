"""Figures, returned and never written: plotly, one theme, colours with fixed meanings. `results.figures` writes them.

Titles state what is seen, with its number. Sizes are GiB, times ms.
"""

from acwb.plots.block_graph import block
from acwb.plots.method_chart import method_comparison
from acwb.plots.op_charts import activation_size, breakdown, inactive_time, node_peak_memory, node_runtime
from acwb.plots.sweeps import sweep_latency, sweep_memory
from acwb.plots.timelines import before_and_after, lifetimes, timeline
from acwb.plots.tradeoff import current_point, trade_off

__all__ = [
    "activation_size",
    "before_and_after",
    "block",
    "breakdown",
    "current_point",
    "inactive_time",
    "lifetimes",
    "method_comparison",
    "node_peak_memory",
    "node_runtime",
    "sweep_latency",
    "sweep_memory",
    "timeline",
    "trade_off",
]
