"""The simulator against timelines written by hand, a naive reference on random steps, and real runs."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

import acwb
from acwb.core.graph import Phase, Role, StepGraph
from acwb.core.profile import Profile
from acwb.core.schedule import Entry, Free, Run, Schedule, SwapIn, SwapOut, just_in_time, with_frees
from acwb.core.simulator import simulate
from acwb.evaluation.memory import LiveBytesMeter
from acwb.subject import Subject
from support.tiny_models import MAKERS, OPTIMIZERS
from support.toy_graphs import Line, draw, profiled, recomputing_runs, steps, with_rules

BACKWARD: list[Line] = [("B", "one", "", 1)]


def timeline_of(graph: StepGraph, discard: set[str] | None = None) -> list[tuple[str, int]]:
    """The whole timeline in short: "a" runs op a, "a'" runs it again, "-a" frees storage a; and the bytes after it."""
    schedule = just_in_time(graph, discard or set())
    timeline = simulate(profiled(graph), schedule)
    return [(short(entry), size) for entry, size in zip(schedule.entries, timeline.tensor_bytes, strict=True)]


def short(entry: Entry) -> str:
    marks = "'" * entry.copy
    return f"{entry.op}{marks}" if isinstance(entry, Run) else f"-{entry.storage}{marks}"


def chain() -> StepGraph:
    lines: list[Line] = [("F", "a", "x w", 10), ("F", "b", "a", 20), ("F", "c", "b", 40), ("F", "loss", "c", 1)]
    back: list[Line] = [("B", "gc", "one c", 40), ("B", "gb", "gc b", 20), ("B", "ga", "gb a", 7)]
    return draw({"x": 2, "w": 7}, [*lines, *BACKWARD, *back], "loss", {"w": "ga"})


def test_the_timeline_of_a_chain_is_that_by_hand() -> None:
    assert timeline_of(chain()) == [
        ("a", 19), ("b", 39), ("c", 79), ("loss", 80), ("one", 81), ("gc", 121), ("-c", 81), ("-one", 80),
        ("gb", 100), ("-b", 80), ("-gc", 40), ("ga", 47), ("-a", 37), ("-gb", 17),
    ]  # fmt: skip


def test_the_timeline_with_a_recomputation_is_that_by_hand() -> None:
    assert timeline_of(chain(), {"b"}) == [
        ("a", 19), ("b", 39), ("c", 79), ("-b", 59), ("loss", 60), ("one", 61), ("gc", 101), ("-c", 61), ("-one", 60),
        ("b'", 80), ("gb", 100), ("-gc", 60), ("-b'", 40), ("ga", 47), ("-a", 37), ("-gb", 17),
    ]  # fmt: skip


def test_recomputing_everything_keeps_what_later_ops_need() -> None:
    assert [name for name, _ in timeline_of(chain(), {"a", "b", "c"})] == [
        "a", "b", "-a", "c", "-b", "loss", "-c", "one",
        "a'", "b'", "c'", "gc", "-one", "-c'", "gb", "-b'", "-gc", "ga", "-a'", "-gb",
    ]  # fmt: skip


def test_the_timeline_of_a_residual_block_is_that_by_hand() -> None:
    lines: list[Line] = [
        ("F", "a", "x w", 8), ("F", "left", "a", 8), ("F", "right", "a", 4), ("F", "sum", "left right", 8),
        ("F", "out", "sum a", 8), ("F", "loss", "out", 1),
    ]  # fmt: skip
    back: list[Line] = [("B", "gs", "one sum", 8), ("B", "ga", "gs a", 5)]
    graph = draw({"x": 1, "w": 5}, [*lines, *BACKWARD, *back], "loss", {"w": "ga"})
    assert timeline_of(graph) == [
        ("a", 14), ("left", 22), ("right", 26), ("sum", 34), ("-left", 26), ("-right", 22),
        ("out", 30), ("loss", 31), ("-out", 23), ("one", 24),
        ("gs", 32), ("-sum", 24), ("-one", 23), ("ga", 28), ("-a", 20), ("-gs", 12),
    ]  # fmt: skip
    assert [name for name, _ in timeline_of(graph, {"sum"})][10:] == [
        "one", "left'", "right'", "sum'", "-left'", "-right'", "gs", "-one", "-sum'", "ga", "-a", "-gs",
    ]  # fmt: skip


def test_a_view_of_a_view_keeps_its_base_and_follows_its_copy() -> None:
    lines: list[Line] = [("F", "a", "x w", 8), ("F", "v", "a", None), ("F", "vv", "v", None), ("F", "loss", "vv", 1)]
    back: list[Line] = [("B", "g", "one vv", 5)]
    graph = draw({"x": 1, "w": 5}, [*lines, *BACKWARD, *back], "loss", {"w": "g"})
    assert timeline_of(graph) == [
        ("a", 14), ("v", 14), ("vv", 14), ("loss", 15), ("one", 16), ("g", 21), ("-a", 13), ("-one", 12),
    ]  # fmt: skip
    assert timeline_of(graph, {"a"}) == [
        ("a", 14), ("v", 14), ("vv", 14), ("loss", 15), ("-a", 7), ("one", 8),
        ("a'", 16), ("v'", 16), ("vv'", 16), ("g", 21), ("-one", 20), ("-a'", 12),
    ]  # fmt: skip


def test_each_of_several_outputs_has_its_own_live_range() -> None:
    lines: list[Line] = [("F", "n", "x w", (8, 2, 4)), ("F", "r", "n:0", 8), ("F", "loss", "r", 1)]
    back: list[Line] = [("B", "gr", "one r", 8), ("B", "gn", "gr n:1", 5)]
    graph = draw({"x": 1, "w": 5}, [*lines, *BACKWARD, *back], "loss", {"w": "gn"})
    assert timeline_of(graph) == [
        ("n", 20), ("-n:2", 16), ("r", 24), ("-n:0", 16), ("loss", 17), ("one", 18),
        ("gr", 26), ("-r", 18), ("-one", 17), ("gn", 22), ("-n:1", 20), ("-gr", 12),
    ]  # fmt: skip
    # Running n again makes n:1 again, too, so the first one is not kept for the backward phase.
    assert timeline_of(graph, {"r"}) == [
        ("n", 20), ("-n:1", 18), ("-n:2", 14), ("r", 22), ("-n:0", 14), ("loss", 15), ("-r", 7), ("one", 8),
        ("n'", 22), ("-n:2'", 18), ("r'", 26), ("-n:0'", 18), ("gr", 26), ("-one", 25), ("-r'", 17),
        ("gn", 22), ("-n:1'", 20), ("-gr", 12),
    ]  # fmt: skip


def test_the_peak_counts_workspace_and_roles_add_up() -> None:
    graph = chain()
    timeline = simulate(profiled(graph, {"loss": 500, "ga": 60}), just_in_time(graph))
    assert (timeline.peak_bytes, timeline.tensor_peak_bytes, timeline.seconds) == (580, 121, 8.0)
    assert timeline.peak_entry == Run("loss")
    assert timeline.alive_at_peak == (("c", 0), ("b", 0), ("a", 0), ("w", 0), ("x", 0), ("loss", 0))
    assert [
        size for size, tensors in zip(timeline.total_bytes, timeline.tensor_bytes, strict=True) if size != tensors
    ] == [580, 107]
    assert [sum(sizes) for sizes in zip(*timeline.by_role.values(), strict=True)] == list(timeline.tensor_bytes)
    assert set(timeline.by_role[Role.PARAMETER]) == {7}
    assert max(timeline.by_role[Role.ACTIVATION]) == 70
    assert "peak" in repr(timeline)
    assert "loss" in repr(timeline)


def test_a_storage_that_the_optimizer_holds_lives_until_it_lets_go() -> None:
    lines: list[Line] = [
        ("F", "loss", "x w", 1),
        *BACKWARD,
        ("B", "g", "one", 5),
        ("O", "t", "g", 6),
        ("O", "u", "g", 3),
    ]
    graph = draw({"x": 1, "w": 5}, lines, "loss", {"w": "g"})
    assert timeline_of(graph)[-4:] == [("t", 18), ("-t", 12), ("u", 15), ("-u", 12)]
    ops = [*graph.ops[:-1], dataclasses.replace(graph.ops[-1], holds=("t",))]
    assert timeline_of(dataclasses.replace(graph, ops=tuple(ops)))[-4:] == [
        ("t", 18),
        ("u", 21),
        ("-t", 15),
        ("-u", 12),
    ]


def test_a_swap_lowers_the_peak_and_its_stall_takes_time() -> None:
    graph = chain()
    entries = list(just_in_time(graph).entries)
    entries.insert(entries.index(Run("loss")), SwapOut("b"))
    entries.insert(entries.index(Run("gb")), SwapIn("b", stall=0.25))
    timeline = simulate(profiled(graph), Schedule(tuple(entries)))
    assert timeline.seconds == 8.25
    assert timeline.tensor_peak_bytes == 101


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: [Free("a"), *entries], "frees copy 0 of a, which is not there"),
        (lambda entries: [entries[0], Free("a"), *entries[1:]], "runs b when copy 0 of a is no longer there"),
        (lambda entries: entries[1:], "runs b before a, whose result it takes"),
        (lambda entries: [entries[0], *entries], "makes copy 0 of a, which is there already"),
        (lambda entries: [*entries, Run("zzz")], "runs zzz, which is not an op of this graph"),
        (lambda entries: [*entries, SwapIn("a")], "swaps in copy 0 of a, which was not swapped out"),
        (lambda entries: [*entries, Free("zzz")], "has zzz, which is not a storage of this graph"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(
    change: Callable[[list[Entry]], list[Entry]], message: str
) -> None:
    graph = chain()
    with pytest.raises(acwb.AcwbError, match=message):
        simulate(profiled(graph), Schedule(tuple(change(list(just_in_time(graph).entries)))))


def test_a_view_of_an_older_copy_is_refused() -> None:
    lines: list[Line] = [("F", "a", "x w", 8), ("F", "v", "a", None), ("F", "loss", "v", 1)]
    graph = draw({"x": 1, "w": 5}, [*lines, *BACKWARD, ("B", "g", "one v", 5)], "loss", {"w": "g"})
    runs = [Run("a"), Run("v"), Run("loss"), Run("one"), Run("a", 1), Run("v", 1), Run("g")]
    assert simulate(profiled(graph), with_frees(graph, runs)).seconds == 7
    with pytest.raises(acwb.AcwbError, match="runs g with the view v of an older copy of a"):
        simulate(profiled(graph), with_frees(graph, [run for run in runs if run != Run("v", 1)]))


def test_a_schedule_of_views_allocates_nothing() -> None:
    lines: list[Line] = [("F", "v", "w", None), ("F", "loss", "v", 1), *BACKWARD, ("B", "g", "one", 5)]
    graph = draw({"w": 5}, lines, "loss", {"w": "g"})
    assert simulate(profiled(graph), Schedule((Run("v"),))).tensor_bytes == (5,)
    assert simulate(profiled(graph), Schedule((Run("v"), Run("v", 1)))).seconds == 2


def test_only_activations_can_be_discarded() -> None:
    with pytest.raises(acwb.AcwbError, match="gb, w cannot be discarded: not an activation"):
        just_in_time(chain(), {"w", "gb", "a"})


def naive_bytes(graph: StepGraph, position: int) -> int:
    """The bytes alive while op number `position` runs in the captured step, from the definition alone."""
    total = 0
    for storage in graph.storages:
        made = graph.rank[graph.maker[storage.name]] if storage.name in graph.maker else -1
        uses = [rank for rank, op in enumerate(graph.ops) if storage.name in op.inputs] or [made]
        stays = storage.name in graph.kept or made == -1
        if made <= position and (stays or position <= max(uses)):
            total += storage.bytes
    return total


@given(steps())
def test_random_steps_agree_with_the_definition(graph: StepGraph) -> None:
    schedule = just_in_time(graph)
    timeline = simulate(profiled(graph), schedule)
    runs = [size for entry, size in zip(schedule.entries, timeline.tensor_bytes, strict=True) if isinstance(entry, Run)]
    assert runs == [naive_bytes(graph, position) for position in range(len(graph.ops))]
    assert timeline.tensor_peak_bytes == max(runs)


def count_references(profile: Profile, runs: Sequence[Run]) -> tuple[list[tuple[int, int, int]], float]:
    """Bytes while each run runs, without and with its workspace, and after it; and the seconds: by reference counts."""
    graph = profile.graph
    newest = {storage.name: 0 for storage in graph.storages}
    references: Counter[tuple[str, int]] = Counter()
    uses = []
    for run in runs:
        op = graph.op(run.op)
        names = op.rule_inputs if run.by_rule else (*op.inputs, *op.mutates, *op.holds)
        uses.append([(name, newest[name]) for name in dict.fromkeys(names) if name in graph.maker])
        references.update(uses[-1])
        for name in op.results(run.by_rule):
            newest[name] = run.copy
    references.update((name, newest[name]) for name in graph.kept)
    live = graph.static_bytes
    curve, seconds = [], 0.0
    for run, used in zip(runs, uses, strict=True):
        made = [(name, run.copy) for name in graph.op(run.op).results(run.by_rule)]
        live += sum(graph.storage[name].bytes for name, _ in made)
        time, workspace = profile.seconds[run.op], profile.workspace_bytes[run.op]
        if run.by_rule:
            time, workspace = profile.rules[run.op]
        seconds += time
        during = live
        for item in used:
            references[item] -= 1
        live -= sum(graph.storage[item[0]].bytes for item in (*used, *made) if not references[item])
        curve.append((during, during + workspace, live))
    return curve, seconds


@given(steps(), some.data())
def test_random_schedules_agree_with_reference_counts(graph: StepGraph, data: some.DataObject) -> None:
    graph = with_rules(graph)
    workspace = {op.name: data.draw(some.integers(0, 3)) for op in graph.ops}
    rules = {op.name: (0.25, 2) for op in graph.ops if op.rule_inputs}
    profile = dataclasses.replace(profiled(graph, workspace), rules=rules)
    runs = data.draw(recomputing_runs(graph))
    schedule = with_frees(graph, runs)
    timeline = simulate(profile, schedule)
    starts = [at for at, entry in enumerate(schedule.entries) if isinstance(entry, Run)]
    stops = [start - 1 for start in starts[1:]] + [len(schedule) - 1]
    tensors, total = timeline.tensor_bytes, timeline.total_bytes
    curve = [(tensors[start], total[start], tensors[stop]) for start, stop in zip(starts, stops, strict=True)]
    assert (curve, timeline.seconds) == count_references(profile, runs)
    assert timeline.peak_bytes == max(with_workspace for _, with_workspace, _ in curve)
    alive = sum(graph.storage[name].bytes for name, _ in timeline.alive_at_peak)
    assert alive == tensors[timeline.peak_step]


@given(steps(), some.data())
def test_random_recomputations_conserve_bytes_and_order(graph: StepGraph, data: some.DataObject) -> None:
    names = [activation.name for activation in graph.activations]
    discard = data.draw(some.sets(some.sampled_from(names))) if names else set()
    schedule = just_in_time(graph, discard)
    timeline = simulate(profiled(graph), schedule)
    first = [entry.op for entry in schedule.entries if isinstance(entry, Run) and not entry.copy]
    assert first == [op.name for op in graph.ops]
    runs = sum(isinstance(entry, Run) for entry in schedule.entries)
    assert timeline.seconds == runs
    kept = sum(
        storage.bytes for storage in graph.storages if storage.name not in graph.maker or storage.name in graph.kept
    )
    assert timeline.tensor_bytes[-1] == kept
    assert min(min(sizes) for sizes in timeline.by_role.values()) >= 0
    boundary = schedule.entries.index(Run("one"))
    assert discard <= {entry.storage for entry in schedule.entries[:boundary] if isinstance(entry, Free)}
    again = [entry.op for entry in schedule.entries if isinstance(entry, Run) and entry.copy]
    assert all(graph.op(name).phase is Phase.FORWARD for name in again)


def assert_whole_curve(subject: Subject) -> None:
    """Predicted live bytes equal the measured ones at every op of a real, steady-state iteration."""
    step = acwb.trace(subject)
    step.run()
    meter = LiveBytesMeter()
    with meter:
        step.run()
    schedule = just_in_time(step.graph)
    timeline = simulate(profiled(step.graph), schedule)
    static = sum(storage.bytes for storage in step.graph.storages if storage.name not in step.graph.maker)
    predicted = [
        (step.graph.op(entry.op).target, size - static)
        for entry, size in zip(schedule.entries, timeline.tensor_bytes, strict=True)
        if isinstance(entry, Run)
    ]
    assert predicted == meter.curve


# The kernel of the LSTM's backward makes the bias's gradient twice; torch describes the two as one storage.
@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"recurrent"}))
def test_the_curve_of_a_tiny_model_is_the_measured_one(name: str) -> None:
    assert_whole_curve(MAKERS[name]())


@pytest.mark.torch
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_curve_of_every_optimizer_is_the_measured_one(optimizer: acwb.models.OptimizerMaker) -> None:
    assert_whole_curve(MAKERS["batch_norm"](optimizer))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["resnet18", "tiny_bert", "tiny_encoder"])
def test_the_curve_of_a_small_model_is_the_measured_one(name: str) -> None:
    assert_whole_curve(getattr(acwb.models, name)(batch_size=2))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet152", "bert", "encoder"])
def test_the_curve_of_a_real_model_is_the_measured_one(name: str) -> None:
    assert_whole_curve(getattr(acwb.models, name)(batch_size=2))
