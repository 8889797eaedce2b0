"""Tangents of another layout than a plan was made for: their strides, and a plan from the values that were saved.

Kernels of the backward pass, and so its bits, depend on the strides of the tangents, which only the loss outside
determines. A step that was captured for others is planned here with the decisions of the plan whose forward phase ran.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping

import torch

from acwb.capture.step import TracedStep
from acwb.capture.tensor_specs import TensorSpec
from acwb.core.graph import Phase, StepGraph
from acwb.core.profile import Profile
from acwb.core.schedule import Run, ScheduleBuilder, with_frees
from acwb.core.simulator import simulate
from acwb.planning.plan import Plan

Strides = tuple[int, ...]
Layout = tuple[tuple[int, Strides], ...]  # positions of the outputs that the loss is computed from, with strides


def strides_of(tangents: Mapping[int, TensorSpec | torch.Tensor]) -> Layout:
    """The strides of tangents, by the positions of their outputs."""
    specs = {at: each if isinstance(each, TensorSpec) else TensorSpec.of(each) for at, each in tangents.items()}
    return tuple((at, spec.strides) for at, spec in sorted(specs.items()))


def strides_for(shape: Collection[int], known: TensorSpec) -> Strides | None:
    """The strides that a tangent probably has at another shape; None if those that are known follow no order."""
    if tuple(shape) == known.shape:
        return known.strides
    if _dense(known.shape, known.strides) != known.strides or len(shape) != len(known.shape):
        return None
    return _dense(tuple(shape), known.strides)


def _dense(shape: Strides, like: Strides) -> Strides:
    """Strides without gaps for `shape`, in the order of `like`; those that are zero stay zero."""
    strides = [0] * len(shape)
    step = 1
    for at in sorted(range(len(shape)), key=lambda at: (like[at], -at)):
        if like[at]:
            strides[at] = step
            step *= shape[at]
    return tuple(strides)


def same_forward_plan(known: Plan, step: TracedStep) -> Plan:
    """A plan of `step`, captured with other tangents, whose forward phase saves what that of the plan `known` saves.

    It recomputes what that plan recomputes, before the same ops, and what else the backward phase then lacks. Its costs
    are not known; they are given as zero.
    """
    graph = step.graph
    costs = dict.fromkeys((op.name for op in graph.ops), 0)
    swaps = dict.fromkeys((activation.name for activation in graph.activations), 0.0)
    profile = Profile(graph, costs, costs, swaps, swaps, known.profile.conditions, known.profile.rules)
    saved = _saved_for_backward(known)
    groups = _recomputations_before(known, graph)
    builder = ScheduleBuilder(graph)
    for rank, op in enumerate(graph.ops):
        if op.phase is Phase.BACKWARD:
            builder.run_until(rank)
            for source, by_rule in groups.get(rank, ()):
                read = graph.ops[source].rule_inputs if by_rule else graph.ops[source].inputs
                _recompute_missing(graph, read, saved, builder)
                builder.recompute(source, by_rule)
            _recompute_missing(graph, op.inputs, saved, builder)
    builder.run_until(len(graph.ops))
    schedule = with_frees(graph, builder.runs)
    return Plan(profile, schedule, known.planner, None, simulate(profile, schedule).peak_bytes)


def _saved_for_backward(known: Plan) -> set[str]:
    """The storages of a plan that are alive at the end of the forward phase."""
    graph, alive = known.profile.graph, set[str]()
    for entry in known.schedule.entries:
        if isinstance(entry, Run):
            if graph.op(entry.op).phase is not Phase.FORWARD:
                break
            alive.update(graph.op(entry.op).outputs)
        else:
            alive.discard(entry.storage)
    return alive


def _recomputations_before(known: Plan, graph: StepGraph) -> dict[int, list[tuple[int, bool]]]:
    """What a plan recomputes before each op, without views, for the ops of another graph of the same model, by rank."""
    ours, theirs = ([(op.target, op.module) for op in each.ops] for each in (known.profile.graph, graph))
    match = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    ranks = {
        block.a + offset: block.b + offset for block in match.get_matching_blocks() for offset in range(block.size)
    }
    groups: dict[int, list[tuple[int, bool]]] = {}
    pending: list[tuple[int, bool]] = []
    for entry in known.schedule.entries:
        if not isinstance(entry, Run):
            continue
        op = known.profile.graph.op(entry.op)
        if entry.copy:
            pending += [(graph.rank[op.name], entry.by_rule)] if not op.view else []
        elif pending and (rank := ranks.get(known.profile.graph.rank[op.name])) is not None:
            groups[rank] = pending
            pending = []
    return groups


def _recompute_missing(graph: StepGraph, read: Iterable[str], saved: set[str], builder: ScheduleBuilder) -> None:
    """Recompute what an op is to read and what is neither saved nor recomputed yet."""
    sources: set[int] = set()
    pending = list(read)
    while pending:
        name = pending.pop()
        maker = graph.op(graph.maker[name]) if name in graph.maker else None
        if maker is None or maker.phase is not Phase.FORWARD or name in saved or builder.was_recomputed(name):
            continue
        if graph.rank[maker.name] not in sources:
            sources.add(graph.rank[maker.name])
            pending += maker.inputs
    for source in sorted(sources):
        builder.recompute(source)
