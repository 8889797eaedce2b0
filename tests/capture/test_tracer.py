"""A captured step is bitwise equal to eager PyTorch."""

import copy

import pytest
import torch

import acwb
from acwb.subject import Subject
from support.bitwise import differences, train
from support.tiny_models import MAKERS, OPTIMIZERS, momentum


def assert_equal_training(eager: Subject, captured: Subject) -> acwb.TracedStep:
    expected = train(eager, eager.eager_step)
    step = acwb.trace(captured)
    assert differences(train(captured, step.run), expected) == []
    return step


@pytest.mark.parametrize("name", MAKERS)
def test_tiny_models_train_as_in_eager(name: str) -> None:
    assert_equal_training(MAKERS[name](), MAKERS[name]())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["batch_norm", "tied_weights", "frozen_and_unused", "gradients_that_share_memory"])
def test_every_optimizer_trains_as_in_eager(name: str, optimizer: acwb.models.OptimizerMaker) -> None:
    step = assert_equal_training(MAKERS[name](optimizer), MAKERS[name](optimizer))
    assert any(op.phase is acwb.Phase.OPTIMIZER for op in step.graph.ops)


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_bert", "tiny_encoder"])
def test_tiny_subjects_train_as_in_eager(name: str) -> None:
    make = getattr(acwb.models, name)
    assert_equal_training(make(), make())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet152", "bert", "encoder"])
def test_real_subjects_train_as_in_eager(name: str) -> None:
    make = getattr(acwb.models, name)
    assert_equal_training(make(batch_size=4), make(batch_size=4))


def test_the_bitwise_oracle_detects_a_single_bit() -> None:
    eager, other = MAKERS["batch_norm"](), MAKERS["batch_norm"]()
    parameter = next(other.model.parameters())
    with torch.no_grad():
        parameter.view(-1)[:1].view(torch.int32).bitwise_xor_(64)  # one bit, not so low that the update rounds it away
    found = differences(train(other, other.eager_step), train(eager, eager.eager_step))
    assert "iteration 0: parameter 0.0.weight" in found


def test_without_an_optimizer_only_gradients_and_buffers_change() -> None:
    subject, eager = MAKERS["batch_norm"](), MAKERS["batch_norm"]()
    step = acwb.trace(subject.model, subject.batch, subject.loss_fn)
    before = [parameter.detach().clone() for parameter in subject.model.parameters()]
    step.run()
    eager.loss_fn(eager.model, eager.batch).backward()
    for parameter, old, reference in zip(subject.model.parameters(), before, eager.model.parameters(), strict=True):
        assert torch.equal(parameter, old)
        assert torch.equal(parameter.grad, reference.grad)
    assert all(map(torch.equal, subject.model.buffers(), eager.model.buffers()))
    assert not any(op.phase is acwb.Phase.OPTIMIZER for op in step.graph.ops)


def test_a_learning_rate_schedule_and_clipping_hook_work_as_in_eager() -> None:
    def prepare() -> tuple[Subject, torch.optim.lr_scheduler.LRScheduler]:
        subject = MAKERS["batch_norm"]()

        def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

        subject.optimizer.register_step_pre_hook(clip)
        return subject, torch.optim.lr_scheduler.StepLR(subject.optimizer, step_size=1, gamma=0.5)

    (eager, eager_schedule), (captured, schedule) = prepare(), prepare()
    step = acwb.trace(captured)

    def then(action: object, schedule: torch.optim.lr_scheduler.LRScheduler) -> torch.Tensor:
        loss = action()
        schedule.step()
        return loss

    expected = train(eager, lambda: then(eager.eager_step, eager_schedule))
    assert differences(train(captured, lambda: then(step.run, schedule)), expected) == []
    assert schedule.get_last_lr() == [momentum([torch.zeros(1)]).defaults["lr"] / 8]


def test_other_batches_of_the_same_spec_are_run() -> None:
    eager, captured = MAKERS["batch_norm"](), MAKERS["batch_norm"]()
    step = acwb.trace(captured)
    for seed in range(3):
        batch = (torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),)
        eager.optimizer.zero_grad()
        loss = eager.loss_fn(eager.model, batch)
        loss.backward()
        eager.optimizer.step()
        assert torch.equal(step.run(batch), loss.detach())


def test_a_run_uses_weights_that_were_loaded_after_the_capture() -> None:
    eager, captured = MAKERS["batch_norm"](), MAKERS["batch_norm"]()
    step = acwb.trace(captured)
    train(eager, eager.eager_step)
    captured.model.load_state_dict(eager.model.state_dict())
    captured.optimizer.load_state_dict(copy.deepcopy(eager.optimizer.state_dict()))
    expected = train(eager, eager.eager_step)
    assert differences(train(captured, step.run), expected) == []


def test_capture_leaves_model_optimizer_and_random_state_unchanged() -> None:
    for name in ("dropouts", "state_in_buffers_and_attributes", "autocast_casting_a_weight_several_times"):
        subject, untouched = MAKERS[name](), MAKERS[name]()
        random_state = torch.get_rng_state()
        attributes = {path: dict(module.__dict__) for path, module in subject.model.named_modules()}
        acwb.trace(subject)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert attributes == {path: dict(module.__dict__) for path, module in subject.model.named_modules()}
        assert all(parameter.grad is None for parameter in subject.model.parameters())
        assert not subject.optimizer.state
        for mine, reference in zip(
            subject.model.state_dict().values(), untouched.model.state_dict().values(), strict=True
        ):
            assert type(mine) is type(reference)
            assert torch.equal(mine, reference)
        assert not torch.compiler.is_compiling()
        assert torch.is_autocast_cache_enabled()
