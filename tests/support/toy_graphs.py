"""Hand-drawn and random steps for tests without torch."""

import dataclasses
from typing import Any

from hypothesis import strategies

from acwb.core.graph import Environment, Op, Phase, Role, StepGraph, Storage, output_name
from acwb.core.profile import Conditions, Profile
from acwb.core.schedule import Run, ScheduleBuilder

ENVIRONMENT = Environment("2.13.0", "cpu", "Drawing", "SGD", "float32", ())
CONDITIONS = Conditions("drawing", 1, 1, swapped=False)
PHASES = {"F": Phase.FORWARD, "B": Phase.BACKWARD, "O": Phase.OPTIMIZER}

# An op: phase, name, what it reads, and the bytes of what it makes; None for a view, a tuple for several outputs.
Line = tuple[str, str, str, int | tuple[int, ...] | None]


def draw(existing: dict[str, int], lines: list[Line], loss: str, gradients: dict[str, str]) -> StepGraph:
    """A step from its ops; what is read may be an op, one of its outputs ("norm:1"), or what exists before."""
    storage_of = {name: name for name in existing}
    sizes = dict(existing)
    ops = []
    for phase, name, reads, size in lines:
        sources = reads.split()
        inputs = tuple(dict.fromkeys(storage_of[source] for source in sources))
        needs = tuple(dict.fromkeys(source.split(":")[0] for source in sources if source not in existing))
        made = (
            {output_name(name, number): part for number, part in enumerate(size)}
            if isinstance(size, tuple)
            else {name: size}
        )
        if size is None:
            storage_of[name] = inputs[0]
            made = {}
        storage_of.update({made_name: made_name for made_name in made})
        sizes.update(made)
        ops.append(Op(name, "drawn", PHASES[phase], "", needs, inputs, tuple(made), view=size is None))
    return StepGraph(
        ops=tuple(ops),
        storages=tuple(Storage(name, size, role(name, existing, ops, gradients, loss)) for name, size in sizes.items()),
        loss=loss,
        gradients=tuple(gradients.items()),
        environment=ENVIRONMENT,
    )


def role(name: str, existing: Any, ops: list[Op], gradients: dict[str, str], loss: str) -> Role:
    if name in existing:
        return Role.PARAMETER if name in gradients else Role.INPUT
    if name in gradients.values():
        return Role.GRADIENT
    made_forward = any(name in op.outputs and op.phase is Phase.FORWARD for op in ops)
    read_backward = any(name in op.inputs and op.phase is Phase.BACKWARD for op in ops)
    return Role.ACTIVATION if made_forward and read_backward and name != loss else Role.OTHER


def profiled(graph: StepGraph, workspace: dict[str, int] | None = None) -> Profile:
    """A profile in which every op takes one second, and nothing but `workspace`."""
    nothing = {activation.name: 0.0 for activation in graph.activations}
    seconds = {op.name: 1.0 for op in graph.ops}
    workspaces = {op.name: (workspace or {}).get(op.name, 0) for op in graph.ops}
    return Profile(graph, seconds, workspaces, nothing, nothing, CONDITIONS)


def network(blocks: int = 4) -> StepGraph:
    """Blocks of two ops each, in modules "block.0", "block.1", …; every result is read again in the backward phase."""
    lines: list[Line] = []
    last = "x"
    for number in range(blocks):
        lines += [("F", f"a{number}", f"{last} w", 10), ("F", f"b{number}", f"a{number}", 10)]
        last = f"b{number}"
    lines += [("F", "loss", last, 1), ("B", "one", "", 1)]
    previous = "one"
    for number in reversed(range(blocks)):
        lines += [("B", f"gb{number}", f"{previous} b{number}", 10), ("B", f"ga{number}", f"gb{number} a{number}", 10)]
        previous = f"ga{number}"
    graph = draw({"x": 10, "w": 10}, lines, "loss", {"w": previous})
    ops = [
        dataclasses.replace(op, module=f"block.{op.name[-1]}.{op.name[0]}") if op.name[-1].isdigit() else op
        for op in graph.ops
    ]
    return dataclasses.replace(graph, ops=tuple(ops))


def with_rules(graph: StepGraph) -> StepGraph:
    """The step with a recompute rule for every forward op with two outputs: from its first input and second output."""
    ops = [
        dataclasses.replace(op, rule_inputs=(*op.inputs[:1], op.outputs[1]))
        if op.phase is Phase.FORWARD and len(op.outputs) == 2
        else op
        for op in graph.ops
    ]
    return dataclasses.replace(graph, ops=tuple(ops))


@strategies.composite
def recomputing_runs(draw_from: strategies.DrawFn, graph: StepGraph) -> list[Run]:
    """All ops of a step in order, with random recomputations of earlier ops before some of them, also by rules."""
    builder = ScheduleBuilder(graph)
    for rank in sorted(draw_from(strategies.sets(strategies.integers(1, len(graph.ops) - 1), max_size=4))):
        builder.run_until(rank)
        earlier = [number for number, op in enumerate(graph.ops[:rank]) if op.recomputable and not op.view]
        for number in draw_from(strategies.lists(strategies.sampled_from(earlier), max_size=4)) if earlier else ():
            by_rule = bool(graph.ops[number].rule_inputs) and draw_from(strategies.booleans())
            builder.recompute(number, by_rule)
    builder.run_until(len(graph.ops))
    return builder.runs


@strategies.composite
def steps(draw_from: strategies.DrawFn, most: int = 12) -> StepGraph:
    """A random step: forward ops that read some of what is there, a backward op for each in reverse, one update."""
    count = draw_from(strategies.integers(1, most))
    sizes = strategies.integers(0, 9)
    lines: list[Line] = []
    values = ["x", "w"]
    for number in range(count):
        reads = draw_from(strategies.lists(strategies.sampled_from(values), min_size=1, max_size=3, unique=True))
        kind = draw_from(strategies.sampled_from(["op", "op", "op", "view", "pair"]))
        name = f"f{number}"
        if kind == "view":
            lines.append(("F", name, reads[0], None))
        elif kind == "pair":
            lines.append(("F", name, " ".join(reads), (draw_from(sizes), draw_from(sizes))))
        else:
            lines.append(("F", name, " ".join(reads), draw_from(sizes)))
        values += [output_name(name, 0), output_name(name, 1)] if kind == "pair" else [name]
    lines.append(("F", "loss", values[-1], 1))
    previous = "one"
    lines.append(("B", "one", "", 1))
    for number in reversed(range(count)):
        saved = draw_from(strategies.lists(strategies.sampled_from(values), max_size=3, unique=True))
        lines.append(("B", f"b{number}", " ".join([previous, *saved]), draw_from(sizes)))
        previous = f"b{number}"
    return draw({"x": 3, "w": 5}, lines, "loss", {"w": previous})
