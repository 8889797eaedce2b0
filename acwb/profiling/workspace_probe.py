"""Probes kernel workspaces without running the step: each distinct call signature once, on zeros.

A kernel may choose its algorithm by the size of its inputs, so that its workspace jumps where everything else grows in
proportion. A step repeats few distinct calls many times, and one call at a time needs little memory, so a probe takes
seconds where the step would take minutes.
"""

from typing import Any

import torch
from torch import fx

from acwb._torch import below_autograd, pytree
from acwb.capture.node_meta import meta_of
from acwb.capture.step import TracedStep
from acwb.core.graph import Phase
from acwb.profiling import devices
from acwb.profiling.instruments import WorkspaceMeter, rule_label
from acwb.profiling.replay import MovedArguments, OpCall, calls_of
from acwb.rng import preserved


def probe_workspaces(step: TracedStep) -> tuple[dict[str, int], dict[str, int]]:
    """Workspace bytes of each op before the optimizer's, and of each recompute rule; the step itself is not run."""
    graph, device = step.graph, step.device
    first: dict[str, tuple[OpCall, Any]] = {}  # the first call of each signature
    signatures: dict[str, str] = {}
    for call in calls_of(step):
        if call.op.phase is not Phase.OPTIMIZER:
            arguments = fx.map_arg((call.node.args, call.node.kwargs), lambda node: meta_of(node)["val"])
            signatures[call.op.name] = signature = _call_signature(call, arguments)
            first.setdefault(signature, (call, arguments))
    meter = devices.meter_of(device)
    instrument = WorkspaceMeter(meter, devices.clock_of(device), None, graph, repeats=1)
    with meter, below_autograd(device), preserved(device):
        for call, arguments in first.values():
            instrument(call, MovedArguments(*pytree.tree_map_only(torch.Tensor, _zeros, arguments)))
    growth = meter.growth()
    probed = {
        name: first[signature][0].op.name for name, signature in signatures.items()
    }  # the op that was run for each
    sizes = {name: [graph.storage[storage].bytes for storage in graph.op(name).outputs] for name in signatures}
    of_ops = {name: max(0, growth[other] - sum(sizes[name])) for name, other in probed.items()}
    of_rules = {
        name: max(0, growth[label] - sizes[name][0])
        for name, other in probed.items()
        if (label := rule_label(other)) in growth
    }
    return of_ops, of_rules


def _call_signature(call: OpCall, arguments: Any) -> str:
    """All that a kernel's choice of algorithm can depend on: its arguments, but for the values of tensors."""
    leaves, structure = pytree.tree_flatten(arguments)
    parts = [(leaf.dtype, leaf.shape, leaf.stride()) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return repr((call.node.target, parts, structure, call.rule is None))


def _zeros(recorded: torch.Tensor) -> torch.Tensor:
    """A tensor of the recorded spec; zero is a valid index and a valid label everywhere."""
    return torch.empty_strided(recorded.shape, recorded.stride(), dtype=recorded.dtype, device=recorded.device).zero_()
