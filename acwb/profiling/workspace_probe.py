"""Measures what kernels allocate at a batch that was never run: every spec of call once, on zeros.

A kernel may choose its algorithm by the size of its inputs, so that its workspace jumps where everything else grows in
proportion. A real step repeats few specs of calls many times, and one call at a time needs little memory: asking the
kernels themselves takes seconds where the step would take minutes.
"""

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from acwb._torch import below_autograd
from acwb.capture.step import TracedStep
from acwb.core.graph import Phase
from acwb.profiling import devices
from acwb.profiling.instruments import WorkspaceMeter, rule_label
from acwb.profiling.replay import OpCall, calls_of
from acwb.rng import preserved


def probe_workspaces(step: TracedStep) -> tuple[dict[str, int], dict[str, int]]:
    """Workspace bytes of each op before the optimizer's, and of each recompute rule; the step itself is not run."""
    graph, device = step.graph, step.device
    first: dict[str, tuple[OpCall, Any]] = {}
    specs: dict[str, str] = {}
    for call in calls_of(step):
        if call.op.phase is not Phase.OPTIMIZER:
            arguments = fx.map_arg((call.node.args, call.node.kwargs), lambda node: node.meta["val"])
            specs[call.op.name] = spec = _call_signature(call, arguments)
            first.setdefault(spec, (call, arguments))
    meter = devices.meter_of(device)
    watched = WorkspaceMeter(meter, devices.clock_of(device), None, graph, repeats=1)
    with meter, below_autograd(device), preserved(device):
        for call, arguments in first.values():
            watched(call, [pytree.tree_map_only(torch.Tensor, _zeros, arguments)])
    growth = meter.growth()
    alike = {name: first[spec][0].op.name for name, spec in specs.items()}
    made = {name: [graph.storage[each].bytes for each in graph.op(name).outputs] for name in specs}
    own = {name: max(0, growth[one] - sum(made[name])) for name, one in alike.items()}
    short = {
        name: max(0, growth[label] - made[name][0])
        for name, one in alike.items()
        if (label := rule_label(one)) in growth
    }
    return own, short


def _call_signature(call: OpCall, arguments: Any) -> str:
    """What decides how a kernel works: what it is called with, but for the values."""
    leaves, structure = pytree.tree_flatten(arguments)
    parts = [(leaf.dtype, leaf.shape, leaf.stride()) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return repr((call.node.target, parts, structure, call.rule is None))


def _zeros(recorded: torch.Tensor) -> torch.Tensor:
    """A tensor of the recorded spec; zero is a valid index and a valid label everywhere."""
    return torch.empty_strided(recorded.shape, recorded.stride(), dtype=recorded.dtype, device=recorded.device).zero_()
