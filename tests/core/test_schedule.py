"""The builders of schedules against a definition of when a storage is freed, on random schedules."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from acwb.core.graph import StepGraph, output_name, output_position
from acwb.core.schedule import Entry, Free, Run, Schedule, just_in_time, with_frees
from support.toy_graphs import recomputing_runs, steps, with_rules


def uses(graph: StepGraph, run: Run) -> tuple[str, ...]:
    op = graph.op(run.op)
    return op.rule_inputs if run.by_rule else (*op.inputs, *op.mutates, *op.holds)


def naive_frees(graph: StepGraph, runs: Sequence[Run]) -> Schedule:
    """The definition: a copy is freed after its last use, at the latest by the run that makes the next copy."""
    made = [(at, name, run.copy) for at, run in enumerate(runs) for name in graph.op(run.op).results(run.by_rule)]
    last_use = {}
    for place, name, copy in made:
        remade = min((at for at, other, _ in made if other == name and at > place), default=len(runs))
        used = [at for at, run in enumerate(runs) if place < at <= remade and name in uses(graph, run)]
        stays = name in graph.kept and remade == len(runs)
        last_use[name, copy] = len(runs) if stays else max(used, default=place)
    entries: list[Entry] = []
    for place, run in enumerate(runs):
        entries += [run, *(Free(*storage) for storage, last in last_use.items() if last == place)]
    return Schedule(tuple(entries))


@given(steps(), some.data())
def test_every_copy_is_freed_right_after_its_last_use(graph: StepGraph, data: some.DataObject) -> None:
    graph = with_rules(graph)
    runs = data.draw(recomputing_runs(graph))
    assert with_frees(graph, runs) == naive_frees(graph, runs)


@given(steps(), some.data())
def test_just_in_time_frees_by_the_same_definition(graph: StepGraph, data: some.DataObject) -> None:
    names = [activation.name for activation in graph.activations]
    discard = data.draw(some.sets(some.sampled_from(names))) if names else set()
    schedule = just_in_time(graph, discard)
    assert schedule == naive_frees(graph, [entry for entry in schedule.entries if isinstance(entry, Run)])


@given(steps(), some.data())
def test_a_view_is_retaken_after_each_recomputation_of_its_base(graph: StepGraph, data: some.DataObject) -> None:
    graph = with_rules(graph)
    newest: dict[str, int] = {}  # the copy of each storage
    taken: dict[str, dict[str, int]] = {}  # the copies of its inputs of which each view was taken
    for run in data.draw(recomputing_runs(graph)):
        op = graph.op(run.op)
        reads = op.rule_inputs if run.by_rule else op.inputs
        for view in (graph.op(name) for name in op.needs if graph.op(name).view):
            if set(view.inputs) <= set(reads):
                assert taken[view.name] == {name: newest.get(name, 0) for name in view.inputs}
        if op.view:
            taken[op.name] = {name: newest.get(name, 0) for name in op.inputs}
        newest.update(dict.fromkeys(op.results(run.by_rule), run.copy))


@pytest.mark.parametrize(("op", "position"), [("native_layer_norm_3", 1), ("relu", 0), ("fc:odd", 12)])
def test_the_name_of_an_output_has_its_position(op: str, position: int) -> None:
    assert output_name("native_layer_norm_3", 1) == "native_layer_norm_3:1"
    assert output_position(output_name(op, position)) == position
