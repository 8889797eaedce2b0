"""Rewrites a captured step so that it does what a plan says: exactly the runs of its schedule, in that order.

A recomputed op is a copy of its node, named after its original (`relu_17_recomputed`, then
`relu_17_recomputed_2`), and every later consumer reads the copy. Nothing is freed explicitly: generated
code drops each value at its last use, which is what a schedule says. A recomputed random op is replayed (`rng`).
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx

from acwb import rng
from acwb.capture.node_meta import meta_of, set_meta
from acwb.capture.recompute_rules import parts_of, rule_of
from acwb.capture.step import TracedStep
from acwb.core.graph import Op, Phase, Role, StepGraph, Storage
from acwb.core.schedule import Run, Schedule, SwapIn, SwapOut
from acwb.errors import AcwbError
from acwb.planning.plan import Plan

# Words of rewritten graphs, which are part of their fingerprints: they stay, whatever the code is called.
STATE_KEPT, BY_RULE = "acwb.kernels.keep_random_state", " by a shortcut"


@dataclass(frozen=True, eq=False, repr=False)
class PlannedStep(TracedStep):
    """A captured step rewritten to follow the schedule of a plan."""

    plan: Plan = field(kw_only=True)


def rewrite(step: TracedStep, plan: Plan) -> PlannedStep:
    """The step as `plan` does it: bitwise the same results, within the plan's memory.

    Args:
        step: the step that the plan's profile was made from, or the same step captured again.
        plan: what `acwb.plan` gave; one that swaps cannot be run.

    Example:
        >>> planned = acwb.rewrite(step, acwb.plan(profile, "1.5GiB"))
        >>> loss = planned.run(batch)
    """
    if not isinstance(step, TracedStep):
        raise AcwbError(f"rewrite takes the step that acwb.trace gives, not {type(step).__name__}.")
    if not isinstance(plan, Plan):
        raise AcwbError(f"rewrite takes a plan as acwb.plan gives it, not {type(plan).__name__}.")
    if plan.profile.graph.fingerprint != step.graph.fingerprint:
        environment = step.graph.environment
        raise AcwbError(
            f"The plan is for another step than this one ({step.graph.title}, {', '.join(environment.batch)}): "
            "profile and plan this step."
        )
    swapped = next((each for each in plan.schedule.entries if isinstance(each, (SwapOut, SwapIn))), None)
    if swapped is not None:
        raise AcwbError(f"The plan swaps {swapped.storage}, which a rewritten step does not do: plan without swapping.")
    for each in recomputations(plan.schedule):
        if step.graph.op(each.before).phase is Phase.OPTIMIZER:
            raise AcwbError(
                f"The plan runs {each.runs[0].op} again before {each.before}, which is the optimizer's own: plan again."
            )
    plan.timeline  # a schedule that cannot be followed is refused here  # noqa: B018
    emission = _GraphEmitter(step, plan.schedule)
    changed = {
        "graph": rewritten_graph(step.graph, plan.schedule),
        "fx_graph": emission.graph,
        "constants": {**step.constants, **emission.states},
    }
    same = {each.name: getattr(step, each.name) for each in fields(TracedStep)}
    return PlannedStep(**{**same, **changed}, plan=plan)


@dataclass(frozen=True)
class Recomputation:
    """Ops that are recomputed right before an op of the step.

    Attributes:
        before: that op.
        runs: the recomputations, in order.
    """

    before: str
    runs: tuple[Run, ...]


def recomputations(schedule: Schedule) -> tuple[Recomputation, ...]:
    """The recomputations of a schedule: the subgraphs that the rewritten step has beyond the captured one."""
    found: list[Recomputation] = []
    waiting: list[Run] = []
    for entry in schedule.entries:
        if isinstance(entry, Run) and entry.copy:
            waiting.append(entry)
        elif isinstance(entry, Run) and waiting:
            found.append(Recomputation(entry.op, tuple(waiting)))
            waiting = []
    return tuple(found)


def copy_name(name: str, copy: int) -> str:
    """Name of a recomputed copy of an op, a node or a storage; copy 0 is the original."""
    base, colon, position = name.partition(":")
    number = f"_{copy}" if copy > 1 else ""
    return f"{base}_recomputed{number}{colon}{position}" if copy else name


def state_name(op: str) -> str:
    """Name of the constant that holds the saved RNG state of an op."""
    return f"{op}_random_state"


class _GraphEmitter:
    """The FX graph that does what a schedule says.

    Attributes:
        states: room for the random state of each op that replays.
    """

    def __init__(self, step: TracedStep, schedule: Schedule) -> None:
        self.graph = fx.Graph()
        self.states: dict[str, torch.Tensor] = {}
        self._device = step.device
        self._newest: dict[fx.Node, fx.Node] = {}  # of each node of the captured step
        self._state_of: dict[str, fx.Node] = {}
        replayed = set(schedule.replayed(step.graph))
        before = {each.before: each.runs for each in recomputations(schedule)}
        start, *groups = _by_op(step.fx_graph)
        originals = {group[0].name: group[0] for group in groups}
        for node in start:
            self._take_over(node)
        for op, *others in groups:
            for run in before.get(op.name, ()):
                copy = self._emit_by_rule if run.by_rule else self._again
                copy(originals[run.op], run, meta_of(op)["phase"])
            if op.name in replayed:
                self._keep_state(op)
            for node in (op, *others):
                self._take_over(node)
        for node in self.graph.find_nodes(op="call_function", target=operator.getitem):
            if "recomputes" in meta_of(node) and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()

    def _take_over(self, node: fx.Node) -> None:
        """Copy a node of the captured step into the new graph unchanged."""
        self._newest[node] = self.graph.node_copy(node, self._newest.__getitem__)

    def _add(self, node: fx.Node, run: Run, target: Any, args: Any, phase: Phase) -> fx.Node:
        """Add a recomputed copy of a node to the graph; later consumers read the copy."""
        copy = self.graph.create_node("call_function", target, args, name=copy_name(node.name, run.copy))
        copy.meta = {**node.meta, "phase": phase, "recomputes": node.name}
        self._newest[node] = copy
        return copy

    def _again(self, node: fx.Node, run: Run, phase: Phase) -> None:
        """Recompute an op, with the nodes that select parts of its result."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._newest.__getitem__)
        if node.name in self._state_of:
            state = self._state_of[node.name]
            copy = self._add(node, run, rng.replay, (state, self._device, node.target, args, kwargs), phase)
        else:
            copy = self._add(node, run, node.target, args, phase)
            copy.kwargs = kwargs
        for position, part in parts_of(node).items():
            self._add(part, run, operator.getitem, (copy, position), phase)

    def _emit_by_rule(self, node: fx.Node, run: Run, phase: Phase) -> None:
        """An op's first result once more, from what its recompute rule reads."""
        rule, parts = rule_of(node.target, node.args), parts_of(node)
        assert rule is not None  # or the profile would not have measured it
        read = [
            value if position in rule.arguments or not isinstance(value, fx.Node) else None
            for position, value in enumerate(node.args)
        ]
        results = [parts[position] if position in rule.results else None for position in range(max(rule.results) + 1)]
        copy = self._add(node, run, rule.kernel, fx.map_arg((read, results), self._newest.__getitem__), phase)
        meta_of(copy)["val"] = meta_of(parts[0])["val"]
        self._newest[parts[0]] = copy

    def _keep_state(self, node: fx.Node) -> None:
        """Keep the random state from which an op that will replay draws."""
        name = state_name(node.name)
        self.states[name] = rng.get_state(self._device)
        phase, module = meta_of(node)["phase"], meta_of(node)["module"]
        state = self._state_of[node.name] = self.graph.create_node("get_attr", name, name=name)
        set_meta(state, val=self.states[name], phase=phase, module=module)
        arguments = (state, self._device)
        kept = self.graph.create_node("call_function", rng.record_state, arguments, name=f"{name}_kept")
        set_meta(kept, val=None, phase=phase, module=module)


def _by_op(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes before the first op, then each op with the nodes after it that are none: names of its results."""
    groups: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            groups.append([])
        groups[-1].append(node)
    return groups


def rewritten_graph(graph: StepGraph, schedule: Schedule) -> StepGraph:
    """The graph of the step that does what a schedule says, without torch."""
    newest = {name: name for name in (*graph.rank, *graph.storage)}

    def latest(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(newest[name] for name in names))

    replayed = set(schedule.replayed(graph))
    storages = list(graph.storages)
    ops: list[Op] = []
    runs = [entry for entry in schedule.entries if isinstance(entry, Run)]
    phases = _phases(graph, runs)
    for run, phase in zip(runs, phases, strict=True):
        op = graph.op(run.op)
        made = op.results(run.by_rule)
        copies = {name: copy_name(op.name if run.by_rule else name, run.copy) for name in made}
        state = (state_name(op.name),) if run.copy and not run.by_rule and op.name in replayed else ()
        if op.name in replayed and not run.copy:
            storages.append(Storage(state_name(op.name), graph.environment.random_state_bytes, Role.OTHER))
            ops.append(_record_state_op(op))
        ops.append(
            replace(
                op,
                name=copy_name(op.name, run.copy),
                phase=phase,
                target=f"{op.target}{BY_RULE}" if run.by_rule else op.target,
                needs=latest(op.needs),
                inputs=latest(op.rule_inputs if run.by_rule else op.inputs) + state,
                outputs=tuple(copies.values()),
                mutates=latest(op.mutates),
                holds=latest(op.holds),
                rule_inputs=() if run.copy else tuple(newest[name] for name in op.rule_inputs),
                recomputes=op.name if run.copy else "",
            )
        )
        newest |= {op.name: ops[-1].name, **copies}
        if run.copy:
            storages += [replace(graph.storage[name], name=copy) for name, copy in copies.items()]
    return replace(
        graph,
        ops=tuple(ops),
        storages=tuple(_with_roles(ops, storages)),
        loss=newest[graph.loss],
        gradients=tuple((newest[parameter], newest[gradient]) for parameter, gradient in graph.gradients),
        outputs=latest(graph.outputs),
    )


def _phases(graph: StepGraph, runs: Sequence[Run]) -> list[Phase]:
    """The phase of each run: that of the next op of the step."""
    found: list[Phase] = []
    for run in reversed(runs):
        found.append(found[-1] if run.copy else graph.op(run.op).phase)
    return found[::-1]


def _record_state_op(op: Op) -> Op:
    name = state_name(op.name)
    return Op(f"{name}_kept", STATE_KEPT, op.phase, op.module, inputs=(name,), mutates=(name,))


def _with_roles(ops: Sequence[Op], storages: Sequence[Storage]) -> Iterator[Storage]:
    """The storages, of which only those are activations that the backward phase still reads."""
    made = {name for op in ops if op.phase is Phase.FORWARD for name in op.outputs}
    read = {name for op in ops if op.phase is Phase.BACKWARD for name in op.inputs}
    for storage in storages:
        is_none = storage.role is Role.ACTIVATION and not (storage.name in made and storage.name in read)
        yield replace(storage, role=Role.OTHER) if is_none else storage
