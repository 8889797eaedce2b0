"""Per-block checkpointing trains bitwise as eager does, in less memory, and refuses models where it cannot."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import acwb
from acwb.evaluation.memory import peak_live_bytes
from acwb.execution import block_checkpoint
from acwb.execution.block_checkpoint import checkpointed_blocks, per_block_checkpoint, remove_block_checkpoints
from acwb.models import classification_loss, sgd
from acwb.subject import Subject
from support.bitwise import differences, same, train


def subject_of(build: Callable[[], nn.Module], *shape: int) -> Subject:
    """A subject with ten classes and seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model, inputs = build(), torch.randn(shape)
    labels = torch.arange(shape[0]) % 10
    return Subject(build.__name__, model, (inputs, labels), classification_loss, sgd(model.parameters()))


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8, momentum=None),  # a cumulative average: the count of batches matters
        nn.Dropout(0.3, inplace=True),  # where a chunk of three would end
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * 4 * 4, 10),
    )


class Residual(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Dropout(0.1))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


def residuals(count: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), *(Residual() for _ in range(count)))


def shared_block() -> nn.Module:
    block = Residual()
    return nn.Sequential(nn.Linear(6, 10), block, Residual(), block)


def power_iteration() -> nn.Module:
    """Blocks whose result depends on a buffer that each forward changes."""

    def layer() -> nn.Module:
        normed: nn.Module = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(10, 10), n_power_iterations=1)
        return nn.Sequential(normed, nn.Tanh())

    return nn.Sequential(nn.Linear(6, 10), layer(), layer())


MAKERS: dict[str, Callable[[], Subject]] = {
    "tiny_resnet": acwb.models.tiny_resnet,
    "tiny_bert": acwb.models.tiny_bert,
    "tiny_encoder": acwb.models.tiny_encoder,
    "sequential": lambda: subject_of(sequential, 4, 3, 8, 8),
    "residuals": lambda: subject_of(residuals, 4, 6),
    "shared_block": lambda: subject_of(shared_block, 4, 6),
    "power_iteration": lambda: subject_of(power_iteration, 4, 6),
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)).train()


@pytest.mark.parametrize(("name", "every"), [*((name, 1) for name in MAKERS), ("sequential", 2), ("residuals", 2)])
def test_training_is_bitwise_equal_to_eager(name: str, every: int) -> None:
    plain, wrapped = MAKERS[name](), MAKERS[name]()
    keys, classes = list(plain.model.state_dict()), [type(module).__name__ for module in plain.model.modules()]
    assert per_block_checkpoint(wrapped.model, every) is wrapped.model
    assert list(wrapped.model.state_dict()) == keys
    assert [type(module).__name__ for module in wrapped.model.modules()] == classes
    assert differences(train(plain, plain.eager_step), train(wrapped, wrapped.eager_step)) == []


def test_torch_checkpoint_alone_is_not_bitwise_equal_to_eager() -> None:
    """That the comparison can fail: what torch's checkpoint does to statistics and power iterations."""
    for name in ("residuals", "power_iteration"):
        plain, wrapped = MAKERS[name](), MAKERS[name]()
        for block in list(wrapped.model)[1:]:
            vars(block)["forward"] = _usual(block)
        assert differences(train(plain, plain.eager_step), train(wrapped, wrapped.eager_step))


def _usual(block: nn.Module) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(type(block).forward, block, x, use_reentrant=False)

    return forward


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: acwb.models.tiny_resnet().model, [f"layer{number}.0" for number in (1, 2, 3, 4)]),
        (lambda: acwb.models.tiny_bert().model, ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        (lambda: acwb.models.tiny_encoder().model, ["layers.layers.0", "layers.layers.1"]),
        (gpt2, ["transformer.h.0", "transformer.h.1"]),
        (residuals, ["1", "2", "3"]),
        (lambda: nn.ModuleList([nn.ModuleList([Residual()]), nn.ModuleList([Residual()])]), ["0.0", "1.0"]),
        (lambda: nn.Sequential(residuals(2), residuals(2)), ["0.1", "0.2", "1.1", "1.2"]),
        (power_iteration, ["1", "2"]),
        (lambda: nn.Sequential(sequential(), nn.Flatten(), nn.Softmax(1)), ["0[0:4]", "0[4:7]", "0[7:9]"]),
        (sequential, ["[0:4]", "[4:7]", "[7:9]"]),
    ],
)
def test_blocks_are_the_outermost_repeated_members(build: Callable[[], nn.Module], expected: list[str]) -> None:
    assert checkpointed_blocks(per_block_checkpoint(build())) == expected
    assert checkpointed_blocks(per_block_checkpoint(build(), every=2)) == expected[::2]


def test_the_blocks_of_torchvision_models_are_found() -> None:
    from torchvision import models

    with torch.device("meta"):
        counts = {
            name: len(checkpointed_blocks(per_block_checkpoint(getattr(models, name)())))
            for name in ("resnet50", "vgg16", "densenet121", "vit_b_16", "mobilenet_v2")
        }
    assert counts == {"resnet50": 16, "vgg16": 5 + 2, "densenet121": 4 + 3, "vit_b_16": 12, "mobilenet_v2": 19}


def test_the_peak_goes_down() -> None:
    plain, wrapped = (acwb.models.resnet18(batch_size=2, image_size=64) for _ in range(2))
    per_block_checkpoint(wrapped.model)
    assert peak_live_bytes(wrapped.eager_step) < peak_live_bytes(plain.eager_step)

    def back_to_the_images(subject: Subject) -> int:
        """The peak without the gradients of 11.7 million parameters, which hide activations of so small a batch."""
        subject.model.requires_grad_(False)
        subject.batch[0].requires_grad_()
        return peak_live_bytes(lambda: subject.loss_fn(subject.model, subject.batch).backward())

    assert back_to_the_images(wrapped) < 0.75 * back_to_the_images(plain)


@pytest.mark.parametrize("name", ["residuals", "sequential"])
def test_in_eval_mode_and_without_grad_blocks_are_not_checkpointed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = MAKERS[name]()
    plain, wrapped, images = copy.deepcopy(subject.model), per_block_checkpoint(subject.model), subject.batch[0]
    monkeypatch.setattr(block_checkpoint, "checkpoint", None)  # which must not be called
    with torch.no_grad():
        torch.manual_seed(3)
        expected = plain(images)
        torch.manual_seed(3)
        assert same(wrapped(images), expected)
    assert same(wrapped.eval()(images), plain.eval()(images))
    with pytest.raises(TypeError, match="not callable"):
        wrapped.train()(images)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["residuals", "sequential"])
def test_a_copy_runs_with_its_own_parameters(name: str, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    plain, wrapped = MAKERS[name](), MAKERS[name]()
    model = duplicate(per_block_checkpoint(wrapped.model))
    assert checkpointed_blocks(model) == checkpointed_blocks(wrapped.model)
    before = copy.deepcopy(wrapped.model.state_dict())
    copied = Subject("copy", model, wrapped.batch, wrapped.loss_fn, sgd(model.parameters()))
    assert differences(train(plain, plain.eager_step), train(copied, copied.eager_step)) == []
    assert all(parameter.grad is None for parameter in wrapped.model.parameters())
    assert all(map(same, before.values(), wrapped.model.state_dict().values()))


def test_a_model_that_is_dropped_is_freed_at_once() -> None:
    subject = MAKERS["residuals"]()
    model = per_block_checkpoint(subject.model)
    model(subject.batch[0]).sum().backward()
    gone = weakref.ref(model[1])
    del model, subject
    assert gone() is None


@pytest.mark.parametrize("name", MAKERS)
def test_removing_checkpoints_restores_the_modules(name: str) -> None:
    model = MAKERS[name]().model
    before = [set(vars(module)) for module in model.modules()]
    assert remove_block_checkpoints(per_block_checkpoint(model)) is model
    assert [set(vars(module)) for module in model.modules()] == before
    assert checkpointed_blocks(model) == []
    with pytest.raises(acwb.AcwbError, match="has no checkpointed blocks: there is nothing to remove"):
        remove_block_checkpoints(model)


def test_two_backward_passes_through_one_forward_are_exact() -> None:
    found = []
    for prepare in (lambda model: model, per_block_checkpoint):
        subject = MAKERS["power_iteration"]()
        loss = subject.loss_fn(prepare(subject.model), subject.batch)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([*(parameter.grad for parameter in subject.model.parameters()), *subject.model.buffers()])
    assert all(map(same, *found))


def test_two_forwards_before_their_backward_passes_are_exact() -> None:
    found = []
    for prepare in (lambda model: model, per_block_checkpoint):
        subject = MAKERS["power_iteration"]()
        model = prepare(subject.model)
        (subject.loss_fn(model, subject.batch) + subject.loss_fn(model, subject.batch)).backward()
        found.append([*(parameter.grad for parameter in model.parameters()), *model.buffers()])
    assert all(map(same, *found))


class Failing(Residual):
    """Fails when it is run again."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        self.calls += 1
        if self.calls > 1:
            raise ValueError("not again")
        return result.tanh()


def test_a_recomputation_that_fails_puts_the_buffers_back() -> None:
    model = per_block_checkpoint(nn.Sequential(Failing(), Failing()))
    loss = model(torch.randn(4, 10)).sum()
    buffers, values = list(model.buffers()), [buffer.clone() for buffer in model.buffers()]
    with torch.utils.checkpoint.set_checkpoint_early_stop(False), pytest.raises(ValueError, match="not again"):
        loss.backward()
    assert all(map(lambda one, other: one is other, model.buffers(), buffers))
    assert all(map(same, buffers, values))


class Branches(nn.Module):
    """Calls its blocks with names that torch's checkpoint has for itself, and has them write into a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(function=x, debug=2.0, early_stop={"seen": seen})
        return x + torch.stack(seen).sum(0)


class Branch(Residual):
    def forward(self, function: torch.Tensor, debug: float, early_stop: dict[str, Any]) -> torch.Tensor:  # type: ignore
        if len(early_stop["seen"]) < 2:
            early_stop["seen"].append(function)
        return debug * super().forward(function)


def test_arguments_are_passed_to_the_block_unchanged() -> None:
    plain, wrapped = subject_of(Branches, 4, 10), subject_of(Branches, 4, 10)
    per_block_checkpoint(wrapped.model)
    assert differences(train(plain, plain.eager_step), train(wrapped, wrapped.eager_step)) == []


def test_a_model_that_overwrites_a_blocks_input_is_refused_by_torch() -> None:
    class Overwriting(Branches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = 2 * x
            y = self.blocks[0](function=x, debug=1.0, early_stop={"seen": [x, x]})
            x.zero_()
            return y

    loss = per_block_checkpoint(Overwriting())(torch.randn(4, 10, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_block_that_overwrites_its_input_is_refused() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.ELU(inplace=True), nn.Linear(6, 6))

    model = per_block_checkpoint(nn.Sequential(nn.Linear(6, 6), block(), block()))
    with pytest.raises(acwb.AcwbError, match=r"Block 1 \(Sequential\) changes its input in place.*inplace=False"):
        model(torch.randn(4, 6))


def test_a_cache_is_refused_and_training_without_one_is_exact() -> None:
    tokens = torch.arange(16).view(2, 8)
    torch.manual_seed(5)
    plain = gpt2()
    wrapped = per_block_checkpoint(copy.deepcopy(plain))
    with pytest.raises(acwb.AcwbError, match=r"Block transformer\.h\.0 is given a key-value cache.*use_cache = False"):
        wrapped(tokens, labels=tokens)
    found = []
    for model in (plain, wrapped):
        model.config.use_cache = False
        torch.manual_seed(6)
        model(tokens, labels=tokens).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(same, *found))


@pytest.mark.parametrize(
    ("build", "every", "sentence"),
    [
        (lambda: nn.Linear(2, 2), 1, "Linear has no blocks: no two modules of one class"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            1,
            "no nn.Sequential of at least 4 members",
        ),
        (lambda: nn.ModuleList([nn.TransformerEncoderLayer(4, 2)]), 1, "ModuleList has no blocks"),
        (lambda: nn.ModuleList(nn.ModuleList([nn.Tanh()]) for _ in range(2)), 1, "ModuleList has no blocks"),
        (lambda: per_block_checkpoint(residuals()), 1, r"already \(1\): call remove_block_checkpoints first"),
        (lambda: nn.Sequential(per_block_checkpoint(sequential())), 1, r"already \(0\): call remove"),
        (lambda: per_block_checkpoint(sequential()), 1, r"already \(the model itself\): call remove"),
        (residuals, 0, "every is 0: give a whole number of at least 1"),
        (residuals, -2, "every is -2: give a whole number"),
        (residuals, 1.5, "every is 1.5: give a whole number"),
        (residuals, True, "every is True: give a whole number"),
        (lambda: "resnet18", 1, "model is 'resnet18': give an nn.Module"),
    ],
)
def test_invalid_models_and_block_intervals_are_refused(build: Callable[[], Any], every: Any, sentence: str) -> None:
    with pytest.raises(acwb.AcwbError, match=sentence):
        per_block_checkpoint(build(), every)


def test_a_model_that_checkpoints_by_itself_is_refused() -> None:
    model = acwb.models.tiny_bert().model
    model.activation_checkpointing_enable()
    with pytest.raises(
        acwb.AcwbError, match=r"gradient_checkpointing is True\): call its activation_checkpointing_disable"
    ):
        per_block_checkpoint(model)
    assert checkpointed_blocks(model) == []


def test_a_forward_that_someone_else_set_is_not_replaced() -> None:
    model = residuals()
    forward = vars(model[2])["forward"] = lambda x: x
    with pytest.raises(acwb.AcwbError, match="Block 2 has a forward that was set on the object: remove that one first"):
        per_block_checkpoint(model)
    assert checkpointed_blocks(model) == []
    assert model[2].forward is forward


def test_a_wrapped_model_is_not_captured() -> None:
    """A captured step would recompute twice: once as wrapped, once as planned."""
    subject = MAKERS["residuals"]()
    with pytest.raises(acwb.CaptureError, match="already decides what to keep"):
        acwb.trace(per_block_checkpoint(subject.model), subject.batch, subject.loss_fn, subject.optimizer)
