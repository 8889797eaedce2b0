"""The drop-in trains bitwise as the model in eager does, within its budget."""

import copy
import gc
import pickle
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import acwb
from acwb.evaluation.memory import LiveBytesMeter, peak_live_bytes
from acwb.execution.dropin import Checkpointed
from acwb.execution.plan_cache import MAX_PLANS
from acwb.models import classification_loss
from acwb.profiling.devices import meter_of
from acwb.subject import Subject
from support.bitwise import Snapshot, differences, snapshot, train, train_to_the_end
from support.tiny_models import MAKERS

ENOUGH = 10**15  # bytes: a budget that nothing exceeds
NOT_A_TREE = {"several_outputs_from_keywords"}  # gives an object of a class of its own, which is refused


def maker(name: str) -> Callable[..., Subject]:
    return MAKERS[name] if name in MAKERS else getattr(acwb.models, name)


def planned(
    subject: Subject, budget: int | str = ENOUGH, planner: str = "recompute_all", **options: object
) -> Checkpointed:
    return acwb.checkpoint(
        subject.model,
        subject.batch,
        budget,
        loss_fn=subject.loss_fn,
        optimizer=subject.optimizer,
        planner=planner,
        repeats=1,
        **options,
    )


def loop(subject: Subject, model: nn.Module) -> Callable[[], torch.Tensor]:
    """An ordinary iteration, with another module in the model's place."""

    def step() -> torch.Tensor:
        subject.optimizer.zero_grad(set_to_none=True)
        loss = subject.loss_fn(model, subject.batch)
        loss.backward()
        subject.optimizer.step()
        return loss.detach()

    return step


def eager(name: str, iterations: int = 3) -> list[Snapshot]:
    subject = maker(name)()
    return train(subject, subject.eager_step, iterations)


@pytest.mark.parametrize("name", [*sorted(set(MAKERS) - NOT_A_TREE), "tiny_resnet", "tiny_bert", "tiny_encoder"])
def test_the_drop_in_trains_as_eager(name: str) -> None:
    subject = maker(name)()
    assert differences(train(subject, loop(subject, planned(subject))), eager(name)) == []


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_bert", "tiny_encoder", "recurrent", "attention"])
def test_the_predicted_peak_is_the_measured_one(name: str) -> None:
    subject = maker(name)()
    model = planned(subject, "100%", "frontier")
    floor = acwb.frontier(model.plans[0].profile).floor_bytes
    model = planned(subject, int(1.1 * floor), "frontier")
    (plan,) = model.plans
    assert plan.timeline.peak_bytes <= 1.1 * floor
    static = plan.profile.graph.static_bytes
    step = loop(subject, model)
    live = static + peak_live_bytes(step)
    graph = plan.profile.graph
    outputs = sum(graph.storage[name].bytes for name in (graph.loss, *graph.outputs))  # which a loop may free earlier
    states = len(plan.schedule.replayed(graph)) * graph.environment.random_state_bytes  # which exist before the step
    assert 0 <= plan.timeline.tensor_peak_bytes - live <= outputs + states
    subject.optimizer.zero_grad()
    meter = meter_of(torch.device("cpu"))
    with meter, meter.watch("step"):
        step()
    assert static + meter.growth()["step"] <= model.budget_bytes


def test_the_drop_in_shares_parameters_state_dict_modules_and_mode_with_the_model() -> None:
    subject = acwb.models.tiny_resnet()
    model = planned(subject)
    assert model.unplanned is subject.model
    assert [id(each) for each in model.parameters()] == [id(each) for each in subject.model.parameters()]
    assert list(model.state_dict()) == list(subject.model.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in subject.model.named_modules()]
    assert model.fc is subject.model.fc
    assert model.inplanes == subject.model.inplanes
    assert model.eval() is model
    assert not subject.model.training
    assert not subject.model.layer1.training
    assert model.train().training
    assert subject.model.training


def test_the_repr_of_the_drop_in_states_its_peak_and_what_the_budget_counts() -> None:
    subject = acwb.models.tiny_resnet()
    text = repr(planned(subject))
    assert re.search(r"peak (0\.\d+) GiB instead of \1 GiB", text)
    assert "not counted: memory that the C library" in text
    without = repr(acwb.checkpoint(subject.model, subject.batch[:1], "100%", repeats=1))
    assert "the optimizer's state" in without.split("not counted: ")[1]
    assert "the optimizer's state" in text.split("counted: ")[1].split("\n")[0]


def test_inference_is_the_models_own() -> None:
    subject = acwb.models.tiny_resnet()
    model = planned(subject)
    images = subject.batch[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), LiveBytesMeter() as meter:
            model.eval()
            given = model(images)
            expected = subject.model(images)
            model.train()
        assert torch.equal(given, expected)
        ops = [name for name, _ in meter.curve]
        assert ops[: len(ops) // 2] == ops[len(ops) // 2 :]  # nothing but the model's own
    assert len(model.plans) == 1


def test_a_copy_trains_by_itself() -> None:
    subject = acwb.models.tiny_encoder()
    model = planned(subject)
    before = copy.deepcopy(subject.model.state_dict())
    twin = copy.deepcopy(model)
    other = Subject("copy", twin.unplanned, subject.batch, subject.loss_fn, acwb.models.adamw(twin.parameters()))
    assert differences(train(other, loop(other, twin)), eager("tiny_encoder")) == []
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert twin.budget_bytes == model.budget_bytes
    loaded = pickle.loads(pickle.dumps(model))
    assert (loaded.budget_bytes, loaded.plans) == (model.budget_bytes, ())
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    loaded(subject.batch[0]).sum().backward()


def test_a_run_that_is_saved_and_loaded_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    expected = eager("tiny_encoder", 6)
    subject = acwb.models.tiny_encoder()
    first = train(subject, loop(subject, planned(subject)), 3)
    state = {
        "model": subject.model.state_dict(),
        "optimizer": subject.optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, tmp_path / "run.pt")
    again = acwb.models.tiny_encoder()
    model = planned(again)
    loaded = torch.load(tmp_path / "run.pt")
    model.load_state_dict(loaded["model"])
    again.optimizer.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["random"])
    step = loop(again, model)
    second = [snapshot(again, step()) for _ in range(3)]
    assert differences(first + second, expected) == []


def test_inputs_of_another_spec_get_a_plan_of_their_own() -> None:
    subject, plain = (MAKERS["batch_norm"]() for _ in range(2))
    model = planned(subject, "100%", "frontier")
    small = subject.batch[0][:2]
    assert torch.equal(model(small), plain.model(small))
    assert len(model.plans) == 2
    assert torch.equal(model(small), plain.model(small))
    assert len(model.plans) == 2
    with pytest.raises(acwb.InfeasibleBudgetError, match="the least is"):
        model(torch.randn(64, *small.shape[1:]))
    strict = planned(subject, on_new_shape="error")
    with pytest.raises(acwb.ChangedStepError, match=r"no plan for inputs 0: float32\[2, 3, 8, 8\].*on_new_shape"):
        strict(small)


def test_eval_mode_with_gradients_is_another_plan() -> None:
    subject, plain = (MAKERS["dropouts"]() for _ in range(2))
    model = planned(subject)
    model.eval()
    plain.model.eval()
    loss, expected = subject.loss_fn(model, subject.batch), plain.loss_fn(plain.model, plain.batch)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for mine, theirs in zip(subject.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert len(model.plans) == 2


def test_another_precision_is_another_plan() -> None:
    subject, plain = (MAKERS["dropout_in_bfloat16"]() for _ in range(2))
    model = planned(subject)
    model.to(torch.float64)
    plain.model.to(torch.float64)
    batch = tuple(each.double() if each.is_floating_point() else each for each in subject.batch)
    torch.manual_seed(3)
    loss = subject.loss_fn(model, batch)
    torch.manual_seed(3)
    assert torch.equal(loss, plain.loss_fn(plain.model, batch))
    assert len(model.plans) == 2


def test_autocast_around_the_call_is_followed() -> None:
    subject, plain = (acwb.models.tiny_encoder() for _ in range(2))
    model = planned(subject)
    for each, called in ((subject, model), (plain, plain.model)):
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = called(each.batch[0])
            assert scores.dtype is torch.bfloat16
            loss = functional.cross_entropy(scores.flatten(0, 1), each.batch[1].flatten())
        loss.backward()
    for mine, theirs in zip(subject.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def accumulating(subject: Subject, model: nn.Module, batches: int = 4) -> Callable[[], torch.Tensor]:
    """An iteration over several micro-batches, with clipping."""

    def step() -> torch.Tensor:
        subject.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for _ in range(batches):
            loss = subject.loss_fn(model, subject.batch) / batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        subject.optimizer.step()
        return total

    return step


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_encoder"])
def test_gradients_accumulate_and_are_clipped(name: str) -> None:
    plain, subject = maker(name)(), maker(name)()
    expected = train(plain, accumulating(plain, plain.model))
    model = planned(subject, accumulate=True)
    assert differences(train(subject, accumulating(subject, model)), expected) == []
    (plan,) = model.plans
    step = accumulating(subject, model)
    assert plan.profile.graph.static_bytes - gradient_bytes(plan) + peak_live_bytes(step) <= plan.timeline.peak_bytes


def gradient_bytes(plan: acwb.Plan) -> int:
    """The gradients of earlier batches, which are counted as there, but made by the loop."""
    return sum(storage.bytes for storage in plan.profile.graph.storages if storage.name.endswith(".grad"))


def test_hooks_on_parameters_are_called() -> None:
    def hooked(subject: Subject) -> list[str]:
        called: list[str] = []
        for name, parameter in subject.model.named_parameters():
            parameter.register_hook(lambda gradient: gradient * 2)

            def told(parameter: torch.Tensor, name: str = name) -> None:
                called.append(name)
                parameter.grad.mul_(0.5).add_(0.01)

            parameter.register_post_accumulate_grad_hook(told)
        return called

    plain, subject = (acwb.models.tiny_encoder() for _ in range(2))
    heard = hooked(plain)
    expected = train(plain, plain.eager_step)
    model = planned(subject)
    mine = hooked(subject)
    assert differences(train(subject, loop(subject, model)), expected) == []
    assert sorted(mine) == sorted(heard)
    (plan,) = model.plans
    # The hooks' own products come on top.
    assert plan.profile.graph.static_bytes + peak_live_bytes(loop(subject, model)) <= 1.01 * plan.timeline.peak_bytes


class Written(nn.Module):
    """Reads a buffer through a view, and writes into it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("average", torch.randn(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.relu(self.first(x) + self.average.view(8)))
        result = self.last(hidden)
        self.average.mul_(0.5).add_(hidden.detach().mean(0).view(2, 4))
        return result


@pytest.mark.parametrize("planner", ["recompute_all", "keep_all"])
def test_buffers_written_after_they_are_read_have_eager_values_and_gradients(planner: str) -> None:
    torch.manual_seed(0)
    model, x = Written(), torch.randn(16, 4)
    twin = copy.deepcopy(model)
    for called in (twin, acwb.checkpoint(model, (x,), ENOUGH, planner=planner, repeats=1)):
        for _ in range(2):
            called(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert torch.equal(model.average, twin.average)


def test_two_passes_of_a_model_that_updates_buffers_are_bitwise_equal_to_eager() -> None:
    plain, subject = (acwb.models.tiny_resnet() for _ in range(2))
    images = subject.batch[0]
    model = acwb.checkpoint(subject.model, (images,), ENOUGH, planner="recompute_all", repeats=1)
    for called in (plain.model, model):
        (called(images).square().mean() + called(images.flip(3)).square().mean()).backward()
    for mine, theirs in zip(subject.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert all(map(torch.equal, subject.model.buffers(), plain.model.buffers()))


def test_attributes_are_the_models_own() -> None:
    subject = acwb.models.tiny_encoder()
    model = planned(subject)
    model.note = "kept"
    assert subject.model.note == "kept"
    del model.note
    assert not hasattr(subject.model, "note")
    model.dropout.p = 0.5
    model(subject.batch[0])
    assert len(model.plans) == 2  # one for each setting


def test_private_attributes_reach_the_model_too() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self._scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self._scale

    model, x = Scaled(), torch.randn(3, 4)
    drop = acwb.checkpoint(model, (x,), ENOUGH, repeats=1)
    drop._scale = 3.0
    assert model._scale == 3.0
    assert torch.equal(drop(x), model(x))


def test_beyond_a_bound_the_least_recently_used_plan_is_given_up_and_that_is_told_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    drop = acwb.checkpoint(model, (torch.randn(1, 4),), ENOUGH, planner="keep_all", repeats=1)
    for size in range(2, MAX_PLANS + 1):
        drop(torch.randn(size, 4))
    drop(torch.randn(1, 4))  # used again, so that the plan for 2 is the oldest
    with pytest.warns(UserWarning, match="least recently used"):
        drop(torch.randn(MAX_PLANS + 1, 4))
    drop(torch.randn(MAX_PLANS + 2, 4))  # without another warning, which would be an error
    planned_for = {int(re.search(r"\[(\d+),", plan.profile.graph.environment.batch[0])[1]) for plan in drop.plans}
    assert planned_for == {1, *range(4, MAX_PLANS + 3)}
    drop(torch.randn(2, 4)).sum().backward()
    assert len(drop.plans) == MAX_PLANS


def test_a_parameter_whose_data_is_set_between_forward_and_backward_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4)), torch.randn(3, 4)
    drop = acwb.checkpoint(model, (x,), ENOUGH, planner="recompute_all", repeats=1)
    loss = drop(x).square().sum()
    model[1].weight.data = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"had its \.data set"):
        loss.backward()


class Leaving(nn.Module):
    def __init__(self, share: bool) -> None:
        super().__init__()
        self.layer, self.share, self.aux = nn.Linear(4, 3), share, None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        if self.share:
            return {"y": y, "same": y, "wide": y[:1].expand(4, 3)}
        self.aux = y.square().mean()
        return {"y": y}


def test_a_differentiable_tensor_left_in_an_attribute_is_refused() -> None:
    with pytest.raises(
        acwb.CaptureError, match=r"leaves a tensor that requires grad in aux.*return it with the output"
    ):
        acwb.checkpoint(Leaving(share=False), (torch.randn(5, 4),), "100%", repeats=1)


def test_outputs_that_share_memory_have_eager_gradients() -> None:
    torch.manual_seed(0)
    model, x = Leaving(share=True), torch.randn(5, 4)
    twin = copy.deepcopy(model)
    for called in (twin, acwb.checkpoint(model, (x,), ENOUGH, planner="recompute_all", repeats=1)):
        output = called(x)
        (output["y"].square().mean() + output["same"].sum() + output["wide"].square().sum()).backward()
    assert torch.equal(model.layer.weight.grad, twin.layer.weight.grad)


def test_a_loss_function_leaves_nothing_on_the_model() -> None:
    subject = acwb.models.tiny_encoder()

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return classification_loss(model, batch) + 0.1 * sum(each.square().sum() for each in model.parameters())

    acwb.checkpoint(subject.model, subject.batch, "100%", loss_fn=loss_of, repeats=1)
    assert all(parameter.grad is None for parameter in subject.model.parameters())


def test_a_norm_whose_input_needs_no_gradient_has_eager_gradients() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), torch.randn(6, 4)
    twin = copy.deepcopy(model)
    for called in (twin, acwb.checkpoint(model, (x,), ENOUGH, planner="recompute_all", repeats=1)):
        called(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_an_input_that_requires_grad_is_refused() -> None:
    subject = acwb.models.tiny_resnet()
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    with pytest.raises(acwb.AcwbError, match=r"Input \[0\] requires grad.*plan the whole model"):
        acwb.checkpoint(subject.model, (x,), "100%")


def test_hooks_on_modules_since_the_capture_are_refused() -> None:
    subject = acwb.models.tiny_encoder()
    model = planned(subject)
    model.head.register_forward_hook(lambda *_: None)
    with pytest.raises(acwb.ChangedStepError, match="Module head has other hooks"):
        model(subject.batch[0])


def test_several_passes_before_backward() -> None:
    """Each has its own values and its own random states."""
    plain, subject = (acwb.models.tiny_encoder() for _ in range(2))
    model = planned(subject)
    for each, called in ((plain, plain.model), (subject, model)):
        torch.manual_seed(2)
        losses = [each.loss_fn(called, each.batch) for _ in range(3)]
        losses[1].backward()
        (losses[0] + losses[2]).backward()
    for mine, theirs in zip(subject.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_backward_may_be_called_again_where_the_graph_is_retained() -> None:
    plain, subject = (acwb.models.tiny_encoder() for _ in range(2))
    model = planned(subject)
    for each, called in ((plain, plain.model), (subject, model)):
        torch.manual_seed(2)
        loss = each.loss_fn(called, each.batch)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match=r"second time|called twice"):
            loss.backward()
    for mine, theirs in zip(subject.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_what_autograd_would_get_wrong_is_refused() -> None:
    subject = acwb.models.tiny_resnet()
    model = planned(subject)
    loss = subject.loss_fn(model, subject.batch)
    with torch.no_grad():
        model.fc.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()
    images = subject.batch[0]
    scores = model(images)
    scores.data.zero_()
    functional.cross_entropy(scores, subject.batch[1]).backward()
    (gradient,) = torch.autograd.grad(model(images).sum(), [model.fc.bias], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        gradient.sum().backward()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, object]:
        hidden = torch.tanh(self.trunk(x)) * scale
        return {
            "left": self.left(hidden),
            "right": (self.right(hidden), hidden),
            "count": 2,
            "argmax": hidden.argmax(1),
        }


def test_only_outputs_from_which_the_loss_is_computed_are_differentiated() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(5, 4)
    twin = copy.deepcopy(model)

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        output = model(batch[0], scale=2.0)
        return output["left"].square().mean() + output["right"][0].sum()

    drop_in = acwb.checkpoint(model, (x,), ENOUGH, loss_fn=loss_of, planner="recompute_all", repeats=1)
    loss_of(drop_in, (x,)).backward()
    loss_of(twin, (x,)).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    output = drop_in(x, scale=2.0)
    assert output["count"] == 2
    assert torch.equal(output["argmax"], twin(x, 2.0)["argmax"])
    with pytest.raises(acwb.AcwbError, match=r"also computed from output\['right'\]\[1\], other than planned"):
        (output["left"].sum() + output["right"][0].sum() + output["right"][1].sum()).backward()
    without = acwb.checkpoint(model, (x,), "100%", repeats=1)
    with pytest.raises(acwb.AcwbError, match=r"not computed from output\['right'\]\[0\], other than planned"):
        without(x)["left"].sum().backward()


def test_a_loss_that_the_model_returns_is_differentiated() -> None:
    plain, subject = (acwb.models.tiny_bert() for _ in range(2))
    model = acwb.checkpoint(subject.model, subject.batch, ENOUGH, planner="recompute_all", repeats=1)
    assert differences(train(subject, loop(subject, model)), train(plain, plain.eager_step)) == []
    output = model(**subject.batch)
    assert type(output) is type(plain.model(**plain.batch))
    with pytest.raises(acwb.AcwbError, match=r"also computed from output.*logits.*other than planned"):
        (output.loss + output.logits.mean()).backward()


def test_fifty_steps_of_the_drop_in_leak_no_memory() -> None:
    subject = acwb.models.tiny_encoder()
    step = loop(subject, planned(subject))
    live = []
    gc.disable()  # what only the collector would find stays
    try:
        with LiveBytesMeter() as meter:
            for _ in range(50):
                step()
                live.append(meter.live)
            loss = subject.loss_fn(planned(subject), subject.batch)
            del loss
    finally:
        gc.enable()
    assert live[49] == live[5]


def test_bad_arguments_get_one_sentence() -> None:
    subject = acwb.models.tiny_resnet()
    images = subject.batch[:1]
    with pytest.raises(acwb.AcwbError, match=r"needs an nn\.Module, not int"):
        acwb.checkpoint(3, images, "100%")
    with pytest.raises(acwb.AcwbError, match=r"example_inputs is a tensor float32\[2, 3, 32, 32\]: give a tuple"):
        acwb.checkpoint(subject.model, images[0], "100%")
    with pytest.raises(acwb.AcwbError, match="on_new_shape is 'ignore': give 'replan' or 'error'"):
        acwb.checkpoint(subject.model, images, "100%", on_new_shape="ignore")
    with pytest.raises(acwb.AcwbError, match="loss_fn does not call the model"):
        acwb.checkpoint(subject.model, images, "100%", loss_fn=lambda _model, _batch: torch.zeros(()))
    with pytest.raises(acwb.AcwbError, match="has a plan already"):
        acwb.checkpoint(planned(subject), images, "100%")
    with pytest.raises(acwb.InfeasibleBudgetError, match="No plan fits in"):
        acwb.checkpoint(subject.model, images, "1MiB", repeats=1)
    with pytest.raises(acwb.CaptureError, match=r"gives an object of type Outputs \(output\).*in tuples or dicts"):
        planned(MAKERS["several_outputs_from_keywords"]())
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(acwb.AcwbError, match=r"nothing requires grad"):
        acwb.checkpoint(subject.model, images, "100%", repeats=1)


def trained_in_parallel(rank: int, folder: str, with_plan: bool) -> None:
    """What each of two processes does."""
    store = f"file://{folder}/store-{with_plan}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(rank)
    subject = acwb.models.tiny_encoder()
    batch = tuple(each[rank : rank + 1] for each in subject.batch)
    model: nn.Module = subject.model
    if with_plan:  # the replica's buckets are as large as gradients of an earlier batch, and stay like these
        options = {"loss_fn": classification_loss, "optimizer": subject.optimizer, "accumulate": True, "repeats": 1}
        model = acwb.checkpoint(model, batch, ENOUGH, planner="recompute_all", **options)
    replica = DistributedDataParallel(model)
    losses = []
    meter = meter_of(torch.device("cpu"))
    for number in range(3):
        subject.optimizer.zero_grad()
        with ExitStack() as measured:
            if number == 2:
                measured.enter_context(meter)
                measured.enter_context(meter.watch("step"))
            loss = classification_loss(replica, batch)
            loss.backward()
            subject.optimizer.step()
        losses.append(loss.detach())
    if with_plan:
        (plan,) = model.plans
        predicted = plan.timeline.peak_bytes - plan.profile.graph.static_bytes
        assert 0.5 * predicted < meter.growth()["step"] <= predicted
    torch.save([losses, subject.model.state_dict(), torch.get_rng_state()], f"{folder}/{with_plan}-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_it_works_inside_data_parallel_training(tmp_path: Path) -> None:
    for with_plan in (False, True):
        torch.multiprocessing.spawn(trained_in_parallel, (str(tmp_path), with_plan), nprocs=2)
    for rank in range(2):
        (plain, states, random), (losses, mine, moved) = (
            torch.load(tmp_path / f"{with_plan}-{rank}.pt") for with_plan in (False, True)
        )
        assert all(map(torch.equal, plain, losses))
        assert all(torch.equal(states[name], mine[name]) for name in states)
        assert torch.equal(random, moved)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_bert", "resnet18"])
def test_a_hundred_steps_have_the_same_losses(name: str) -> None:
    """On a task that can be learned: images whose class is their brightest channel, words that repeat."""
    curves = []
    for with_plan in (False, True):
        torch.manual_seed(0)
        if name == "resnet18":
            subject = acwb.models.resnet18(batch_size=6, image_size=32, optimizer=slow_sgd)
        else:
            subject = acwb.models.tiny_bert(batch_size=4, optimizer=fast_adamw)
        model = planned(subject, "100%", "frontier") if with_plan else subject.model
        if with_plan:
            floor = acwb.frontier(model.plans[0].profile).floor_bytes
            model = planned(subject, int(1.05 * floor), "frontier")
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(4)
        losses = []
        for _ in range(100):
            batch = learnable(name, subject, generator)
            subject.optimizer.zero_grad()
            loss = subject.loss_fn(model, batch)
            loss.backward()
            subject.optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] == curves[1]
    assert sum(curves[0][-10:]) < 0.8 * sum(curves[0][:10])


def slow_sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def fast_adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def learnable(name: str, subject: Subject, generator: torch.Generator) -> object:
    if name == "resnet18":
        labels = torch.randint(3, subject.batch[1].shape, generator=generator)
        images = torch.randn(subject.batch[0].shape, generator=generator)
        images[torch.arange(len(labels)), labels] += 2
        return images, labels
    tokens = torch.randint(8, subject.batch["input_ids"].shape, generator=generator)
    return {**subject.batch, "input_ids": tokens, "labels": tokens}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet152", "bert"])
def test_real_models_train_as_eager_within_the_budget(name: str) -> None:
    plain, subject = (getattr(acwb.models, name)(batch_size=4) for _ in range(2))
    expected = train_to_the_end(plain, plain.eager_step)
    del plain
    model = planned(subject, "100%", "frontier")
    frontier = acwb.frontier(model.plans[0].profile)
    budget = (frontier.floor_bytes + frontier.baseline_bytes) // 2
    model = planned(subject, budget, "frontier")
    assert differences(train_to_the_end(subject, loop(subject, model)), expected) == []
    (plan,) = model.plans
    static = plan.profile.graph.static_bytes
    subject.optimizer.zero_grad()
    live = static + peak_live_bytes(loop(subject, model))
    # Where the peak is in the optimizer, the loop has let go of outputs that another one would still hold.
    let_go = sum(plan.profile.graph.storage[name].bytes for name in plan.profile.graph.outputs)
    assert plan.timeline.tensor_peak_bytes * 0.998 - let_go <= live <= plan.timeline.tensor_peak_bytes * 1.002
    subject.optimizer.zero_grad()
    meter = meter_of(torch.device("cpu"))
    with meter, meter.watch("step"):
        loop(subject, model)()
    assert static + meter.growth()["step"] <= budget
