"""`verify` against faults planted in a rewritten graph: each is found in its place, and the model is restored."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

import acwb
from acwb import rng
from acwb.evaluation.verifier import BUFFER, GRADIENT, INPUT, LOSS, RANDOM, STATE
from acwb.execution.rewriter import PlannedStep
from acwb.subject import Subject
from support.bitwise import differences, snapshot


def planned(subject: Subject, reduction: float = 0.6) -> PlannedStep:
    step = acwb.trace(subject)
    frontier = acwb.frontier(acwb.profile(step, repeats=1))
    floor, peak = frontier.floor_bytes, frontier.baseline_bytes
    return acwb.rewrite(step, frontier.at(floor + int((1 - reduction) * (peak - floor))))


def with_fault(step: PlannedStep, plant: Callable[[fx.Graph], None]) -> PlannedStep:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in step.fx_graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    plant(graph)
    graph.lint()
    return replace(step, fx_graph=graph)


@pytest.mark.parametrize("make", [acwb.models.tiny_resnet, acwb.models.tiny_bert, acwb.models.tiny_encoder])
def test_a_planned_step_is_equal_and_the_model_stays_as_it_was(make: Callable[[], Subject]) -> None:
    subject = make()
    step = planned(subject)
    loss = step.run()
    before = snapshot(subject, loss)
    found = acwb.verify(step)
    assert found.equal
    assert found
    assert found.differences == ()
    assert differences([before], [snapshot(subject, loss)]) == []
    parameters = len(list(subject.model.parameters()))
    assert found.counts["gradient"] == found.counts["parameter"] == parameters
    assert found.counts[STATE] >= parameters
    assert found.counts[LOSS] == found.counts[RANDOM] == 1
    assert found.counts[INPUT] == len(torch.utils._pytree.tree_leaves(subject.batch))
    assert "bitwise equal to eager" in repr(found)


def test_before_the_first_step_the_optimizer_has_no_state_and_gets_none() -> None:
    subject = acwb.models.tiny_bert()
    assert acwb.verify(planned(subject), iterations=2)
    assert not subject.optimizer.state
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_a_fresh_dropout_mask_is_found() -> None:
    def plant(graph: fx.Graph) -> None:
        replayed = [node for node in graph.nodes if node.target is rng.replay]
        assert replayed, "the plan replays nothing"
        for node in replayed:
            _, _, kernel, args, kwargs = node.args
            node.target, node.args, node.kwargs = kernel, args, kwargs

    subject = acwb.models.tiny_bert()
    step = acwb.trace(subject)
    everything = acwb.plan(acwb.profile(step, repeats=1), 10**15, "recompute_all")
    assert acwb.verify(acwb.rewrite(step, everything))
    found = acwb.verify(with_fault(acwb.rewrite(step, everything), plant))
    assert not found
    assert found.differences[0].iteration == 1
    assert 0.01 < found.gradient_error < 2
    assert max(each.relative_error or 0 for each in found.of_kind(GRADIENT)) > 0.01
    assert found.of_kind(RANDOM)


def test_doubled_batch_norm_statistics_are_found() -> None:
    subject = acwb.models.tiny_resnet()

    def plant(graph: fx.Graph) -> None:
        output = graph.output_node()
        updated = output.args[0][2][0]  # of whichever copy the step writes back
        mean = updated.args[0].args[3]
        with graph.inserting_before(output):
            once_more = graph.call_function(torch.ops.aten.lerp.Scalar, (mean, updated, 1.9))
            once_more.meta = dict(updated.meta)
        output.replace_input_with(updated, once_more)

    found = acwb.verify(with_fault(planned(subject), plant))
    assert not found
    assert {each.kind for each in found.differences} == {BUFFER}
    assert {each.name for each in found.differences} == {"bn1.running_mean"}
    assert "buffer bn1.running_mean" in repr(found)


def test_a_gradient_off_by_one_ulp_is_found() -> None:
    subject = acwb.models.tiny_resnet()

    def plant(graph: fx.Graph) -> None:
        output = graph.output_node()
        _, gradients, _ = output.args[0]
        with graph.inserting_before(output):
            infinite = graph.call_function(torch.ops.aten.full_like.default, (gradients[0], torch.inf))
            off = graph.call_function(torch.ops.aten.nextafter.default, (gradients[0], infinite))
        for node in (infinite, off):
            node.meta = dict(gradients[0].meta)
        output.args = ((output.args[0][0], [off, *gradients[1:]], output.args[0][2]),)

    found = acwb.verify(with_fault(planned(subject), plant), iterations=1)
    assert not found
    first = next(iter(found.of_kind(GRADIENT)))
    assert first.name == "conv1.weight"
    assert first.differing == first.values
    assert 0 < first.relative_error < 2e-7
    assert len(found.of_kind(GRADIENT)) == 1
    subject.eager_step()
    norms = [parameter.grad.norm() for parameter in subject.model.parameters()]
    own = first.relative_error * norms[0]
    assert found.gradient_error == pytest.approx(float(own / torch.stack(norms).norm()), rel=0.1)


def test_a_changed_random_state_is_found() -> None:
    def plant(graph: fx.Graph) -> None:
        first = next(node for node in graph.nodes if node.op == "call_function")
        with graph.inserting_after([node for node in graph.nodes if node.op == "call_function"][-1]):
            drawn = graph.call_function(torch.ops.aten.rand.default, ([1],))
        drawn.meta = {**first.meta, "phase": acwb.Phase.BACKWARD}

    found = acwb.verify(with_fault(planned(acwb.models.tiny_resnet()), plant))
    assert {each.kind for each in found.differences} == {RANDOM}
    assert [each.iteration for each in found.differences] == [1, 2, 3]


def test_a_verification_is_saved_and_loaded(tmp_path: Path) -> None:
    step = planned(acwb.models.tiny_resnet())
    found = acwb.verify(step, iterations=1)
    found.save(tmp_path / "verification.json")
    assert acwb.Verification.load(tmp_path / "verification.json") == found


@pytest.mark.parametrize(("iterations", "sentence"), [(0, "iterations is 0"), (True, "iterations is True")])
def test_bad_input_is_refused(iterations: int, sentence: str) -> None:
    step = planned(acwb.models.tiny_resnet())
    with pytest.raises(acwb.AcwbError, match=sentence):
        acwb.verify(step, iterations)
    with pytest.raises(acwb.AcwbError, match="verify takes a step"):
        acwb.verify(step.model)
