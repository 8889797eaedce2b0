"""Invalid models, batches and losses are refused with one clear sentence, and nothing is changed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import acwb
from support.tiny_models import Lambda

INPUT = torch.ones(2, 4)


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch).sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line that an error must name
            y = y * 2
        return y


class Counting(nn.Module):
    """Counts its calls in an attribute or in a list, and may use the count."""

    def __init__(self, used: bool, listed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.calls = 0
        self.list = [0]
        self.options = (used, listed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used, listed = self.options
        if listed:
            self.list[0] += 1
        else:
            self.calls += 1
        return self.linear(x) * (self.calls + self.list[0]) if used else self.linear(x)


class Catching(Branching):
    """Looks at values, and goes on where that fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except RuntimeError:
            return self.linear(x)


class Wrapping(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


def swapping_data(model: nn.Module, batch: Any) -> torch.Tensor:
    model.bias.data = model.bias.data + 1
    return total(model, batch)


def seeding(model: nn.Module, batch: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return functional.dropout(model(*batch), 0.5).sum()


def doing_more_each_time() -> tuple[Any, ...]:
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        y = total(model, batch)
        for _ in calls:
            y = y.exp()
        calls.append(0)
        return y

    return linear(), (INPUT,), loss


def hooked() -> nn.Module:
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda gradient: gradient * 2)
    return model


def wrapped() -> tuple[Any, ...]:
    model = linear()
    return model, (INPUT,), total, Wrapping(sgd(model))


class Carrying(nn.Module):
    """Keeps a state from step to step by assignment, in a buffer or a plain attribute."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        if buffer:
            self.register_buffer("state", torch.zeros(3))
        else:
            self.state = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state * 0.9 + 1
        return self.linear(x) + self.state


class Checkpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def two_layers_one_optimized() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    return model, (INPUT,), total, sgd(model[0])


def with_closure() -> tuple[Any, ...]:
    model = nn.Linear(4, 3)
    return model, (INPUT,), total, torch.optim.LBFGS(model.parameters())


def drawing_from_its_own_generator(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(*batch) * torch.rand(3, generator=torch.Generator())).sum()


def writing_into_a_closure() -> tuple[Any, ...]:
    outside = torch.ones(3)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outside.add_(1)
        return (model(*batch) * outside).sum()

    return nn.Linear(4, 3), (INPUT,), loss


def writing_into_one_of_two_aliases(model: nn.Module, batch: Any) -> torch.Tensor:
    batch[0].add_(1)
    return (model(batch[0]) + model(batch[1])).sum()


def training_a_tensor_from_outside() -> tuple[Any, ...]:
    weight = torch.ones(3, requires_grad=True)
    return nn.Linear(4, 3), (INPUT,), lambda model, batch: (model(*batch) * weight).sum()


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def branching() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), Branching())


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "not a module": (lambda: (lambda x: x, (INPUT,)), "needs an nn.Module, not function"),
    "batch is a tensor": (lambda: (linear(), INPUT), r"not Tensor: write \(x,\) for one tensor"),
    "batch without tensors": (lambda: (linear(), (1, 2)), "holds no tensor"),
    "empty batch": (lambda: (linear(), (torch.zeros(0, 4),), total), r"batch\[0\] is empty \(shape \(0, 4\)\)"),
    "batch on another device": (
        lambda: (linear(), (INPUT.to("meta"),), total),
        r"batch\[0\] is on meta, but the model is on cpu: move it with .to\('cpu'\)",
    ),
    "batch requires grad": (lambda: (linear(), (INPUT.clone().requires_grad_(),), total), "requires grad"),
    "no loss": (lambda: (linear(), (INPUT,)), r"returns a tensor float32\[2, 3\], .* pass loss_fn"),
    "loss is not a scalar": (lambda: (linear(), (INPUT,), lambda m, b: m(*b)), r"The loss has shape \(2, 3\)"),
    "loss is None": (lambda: (linear(), (INPUT,), lambda *_: None), "loss_fn returned None"),
    "loss is an integer": (lambda: (linear(), (INPUT,), lambda m, b: m(*b).sum().long()), "torch.int64"),
    "loss is detached": (lambda: (linear(), (INPUT,), lambda m, b: m(*b).sum().detach()), "does not require grad"),
    "everything is frozen": (lambda: (linear().requires_grad_(False), (INPUT,), total), "does not require grad"),
    "loss_fn wants an attribute": (
        lambda: (linear(), (INPUT,), lambda m, b: m(*b).loss),
        r"AttributeError in loss_fn at .*.py:\d+ .* no attribute 'loss'.* returned a tensor float32\[2, 3\]",
    ),
    "loss_fn wants a label": (
        lambda: (linear(), (INPUT,), lambda m, b: functional.cross_entropy(m(b[0]), b[1])),
        "IndexError in loss_fn at .*tuple index out of range",
    ),
    "wrong keyword": (lambda: (linear(), {"x": INPUT}), "unexpected keyword argument 'x'"),
    "wrong shape": (lambda: (linear(), (torch.ones(2, 5),), total), r"RuntimeError in the model \(Linear\)"),
    "data-dependent branch": (
        lambda: (branching(), (INPUT,), total),
        r"What module 1 \(Branching\) does depends on the values of a tensor at .*.py:\d+ \(if y.sum\(\) > 0:",
    ),
    "data-dependent shape": (
        lambda: (linear(), (INPUT,), lambda m, b: m(b[0][b[0][:, 0] > 0]).sum()),
        "What loss_fn does depends on the values of a tensor at .* aten.nonzero.default",
    ),
    "a number from a tensor": (
        lambda: (linear(), (INPUT,), lambda m, b: m(*b).sum() * b[0].max().item()),
        "aten._local_scalar_dense.default cannot be captured",
    ),
    "numpy": (lambda: (linear(), (INPUT,), lambda m, b: m(*b).sum() * b[0].numpy().max()), "data is asked for"),
    "another model's optimizer": (
        lambda: (linear(), (INPUT,), total, sgd(linear())),
        r"holds a parameter that the model does not have \(group 0, position 0, float32\[3, 4\]\)",
    ),
    "optimizer lacks parameters": (
        two_layers_one_optimized,
        "The optimizer lacks 1.weight, 1.bias, which require grad",
    ),
    "optimizer wants a closure": (with_closure, r"LBFGS.step\(\) cannot be recorded \(TypeError: .* 'closure'\)"),
    "own generator": (lambda: (linear(), (INPUT,), drawing_from_its_own_generator), "Generator"),
    "writes into a closure": (writing_into_a_closure, "make it a buffer of the model"),
    "writes into aliases": (
        lambda: (linear(), (torch.ones(2, 4),) * 2, writing_into_one_of_two_aliases),
        "writes into tensors of the batch that share memory",
    ),
    "trains a tensor from outside": (training_a_tensor_from_outside, "requires grad and is not a parameter"),
    "buffer requires grad": (
        lambda: (Lambda(lambda _, x: x, w=torch.ones(4, requires_grad=True)), (INPUT,), total),
        "w requires grad but is not a parameter",
    ),
    "counts its calls": (lambda: (Counting(used=False), (INPUT,), total), "changes its attribute 'calls'"),
    "uses its count": (
        lambda: (Counting(used=True), (INPUT,), total),
        r"calls mul\(1\) the first time and mul\(2\) the",
    ),
    "uses a listed count": (lambda: (Counting(True, listed=True), (INPUT,), total), r"calls mul\(1\) the first time"),
    "does more each time": (doing_more_each_time, r"calls nothing more\(\) the first time and exp\(\) the second"),
    "catches the question": (lambda: (Catching(), (INPUT,), total), "depends on the values of a tensor"),
    "swaps data": (lambda: (linear(), (INPUT,), swapping_data), "assigns to a tensor's .data"),
    "seeds": (lambda: (linear(), (INPUT,), seeding), "seeds or restores torch's random generator"),
    "Python's randomness": (
        lambda: (linear(), (INPUT,), lambda m, b: total(m, b) * random.random()),
        "Python's or numpy's",
    ),
    "numpy's randomness": (
        lambda: (linear(), (INPUT,), lambda m, b: total(m, b) * float(numpy.random.rand())),
        "Python's or numpy's",
    ),
    "hook on a parameter": (lambda: (hooked(), (INPUT,), total), "weight has hooks on its gradient"),
    "product": (lambda: (linear(), (INPUT,), lambda m, b: m(*b).prod(-1).sum()), "multiplies with torch.prod"),
    "optimizer in an optimizer": (wrapped, r"Wrapping wraps another optimizer \(inner\)"),
    "optimizer by name": (lambda: (linear(), (INPUT,), total, "sgd"), "The optimizer is 'sgd'"),
    "sparse batch": (lambda: (linear(), (INPUT.to_sparse(),), total), r"batch\[0\] is not a plain tensor"),
    "array in the batch": (lambda: (linear(), (INPUT, numpy.ones(2))), r"batch\[1\] is an object of type ndarray"),
    "carries a buffer": (lambda: (Carrying(True), (INPUT,), total), "assigns a new tensor to state"),
    "carries an attribute": (lambda: (Carrying(False), (INPUT,), total), "assigns a new tensor to state"),
    "checkpoints already": (lambda: (Checkpointing(), (INPUT,), total), "already decides what to keep"),
    "sparse gradient": (
        lambda: (nn.Embedding(5, 4, sparse=True), (torch.tensor([1, 2]),), total),
        "gradient of weight is torch.sparse_coo",
    ),
    "GRU": (
        lambda: (nn.Sequential(nn.GRU(4, 3)), (torch.ones(3, 2, 4),), lambda m, b: m(*b)[0].sum()),
        "Module 0 computes in place on slices",
    ),
    "batch norm that counts": (
        lambda: (nn.Sequential(nn.BatchNorm1d(4, momentum=None)), (INPUT,), total),
        "Module 0 is a BatchNorm1d with momentum=None",
    ),
    "lazy": (lambda: (nn.Sequential(nn.LazyLinear(3)), (INPUT,), total), "Module 0 has parameters without a shape"),
    "compiled": (lambda: (torch.compile(linear()), (INPUT,), total), "compiled with torch.compile"),
}


def state(model: Any) -> list[Any]:
    """What a failed capture must leave alone."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    attributes = [dict(module.__dict__) for module in modules]
    tensors = [dict(table) for module in modules for table in (module._parameters, module._buffers)]
    hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    flags = [torch.compiler.is_compiling(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled()]
    return [attributes, tensors, [dict(table) for table in hooks], flags, torch.get_rng_state().tolist()]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # in torch.compile's own imports
def test_bad_input_is_refused_in_a_sentence_and_changes_nothing(name: str) -> None:
    make, message = REFUSED[name]
    model, batch, *rest = make()
    before = state(model)
    with pytest.raises(acwb.AcwbError, match=message) as caught:
        acwb.trace(model, batch, *rest)
    assert "\n" not in str(caught.value)
    assert state(model) == before
    assert "FunctionalTensor" not in str(caught.value)


def test_a_capture_error_carries_the_module_and_the_line() -> None:
    with pytest.raises(acwb.CaptureError) as caught:
        acwb.trace(branching(), (INPUT,), total)
    assert caught.value.module == "1"
    file, line = caught.value.location.rsplit(":", 1)
    assert "the line that an error must name" in Path(file).read_text().splitlines()[int(line) - 1]


def test_a_failed_capture_can_be_followed_by_a_good_one() -> None:
    model = branching()
    with pytest.raises(acwb.CaptureError):
        acwb.trace(model, (INPUT,), total)
    model[1] = nn.Linear(4, 3)
    assert acwb.trace(model, (INPUT,), total).run().isfinite()


def test_capture_inside_autocast_or_inference_mode_is_refused() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(acwb.AcwbError, match="inside loss_fn"):
        acwb.trace(linear(), (INPUT,), total)
    with torch.inference_mode(), pytest.raises(acwb.AcwbError, match="inference_mode"):
        acwb.trace(linear(), (INPUT,), total)


def test_normalization_in_eval_mode_warns_and_works() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with pytest.warns(UserWarning, match=r"1 normalization layers \(first: 1\) are in eval mode: the step uses their"):
        step = acwb.trace(model, (INPUT,), total)
    step.run()
    assert model[1].num_batches_tracked == 0


def test_a_run_with_anything_else_than_captured_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).sum() * batch["scale"]

    step = acwb.trace(model, {"x": INPUT, "scale": 2.0}, loss_fn, sgd(model))
    for batch, message in [
        (
            {"x": torch.ones(3, 4), "scale": 2.0},
            r"batch\['x'\] has shape \(3, 4\), but the step was captured with \(2, 4\)",
        ),
        ({"x": INPUT.double(), "scale": 2.0}, "is torch.float64, but the step was captured with torch.float32"),
        ({"x": torch.ones(4, 2).t(), "scale": 2.0}, r"has strides \(1, 2\)"),
        ({"x": INPUT.to("meta"), "scale": 2.0}, "is on meta"),
        ({"x": 1.0, "scale": 2.0}, "is float, but the step was captured with a tensor"),
        ({"x": INPUT, "scale": 3.0}, r"batch\['scale'\] is 3.0, but the step was captured with 2.0"),
        ({"x": INPUT}, r"holds batch\['x'\], but the step was captured with batch\['x'\], batch\['scale'\]"),
        ((INPUT,), r"holds batch\[0\]"),
    ]:
        with pytest.raises(acwb.ChangedStepError, match=message):
            step.run(batch)
    model[1].eval()
    with pytest.raises(
        acwb.ChangedStepError, match="Module 1 is in eval mode, but the step was captured in train mode"
    ):
        step.run()
    model.train()
    model[0].bias.requires_grad_(False)
    with pytest.raises(acwb.ChangedStepError, match=r"0.bias has requires_grad=False"):
        step.run()
    model[0].bias.requires_grad_(True)
    model.double()
    with pytest.raises(acwb.ChangedStepError, match=r"0.weight is torch.float64"):
        step.run()
    model.float()
    step.run()


def test_a_model_that_was_changed_is_refused() -> None:
    def changed(change: Callable[[nn.Sequential], object], message: str) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        step = acwb.trace(model, (INPUT,), total)
        change(model)
        with pytest.raises(acwb.ChangedStepError, match=message):
            step.run()

    changed(lambda model: model.append(nn.Linear(4, 4)), "Module 3 was added, removed or replaced")
    changed(lambda model: model.pop(2), "Module 2 was added, removed or replaced")
    changed(lambda model: model.__setitem__(2, nn.Linear(4, 4)), "Module 2 was added, removed or replaced")
    changed(lambda model: setattr(model[1], "p", 0.9), r"Module 1 has p = 0.9, not 0.5, with which the step")
    changed(lambda model: model[0].register_forward_hook(print), "Module 0 has other hooks than at capture")
    changed(lambda model: model[0].weight.register_hook(print), "0.weight has hooks on its gradient")


def test_a_run_where_nothing_trains_is_refused() -> None:
    step = acwb.trace(linear(), (INPUT,), total)
    with torch.inference_mode(), pytest.raises(acwb.AcwbError, match="inference_mode"):
        step.run()


def test_attributes_that_a_forward_pass_leaves_in_the_model_are_removed() -> None:
    def leaving(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x)
        m.listed.append(y)
        m.kept["y"] = y
        m.last = y
        return y

    model = Lambda(leaving, linear=linear(), listed=[], kept={})
    acwb.trace(model, (INPUT,), total)
    assert (model.listed, model.kept, hasattr(model, "last")) == ([], {}, False)


def test_weights_that_were_untied_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    step = acwb.trace(model, (INPUT,), total)
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(
        acwb.ChangedStepError, match=r"0.weight and 1.weight were one tensor at capture and are two now"
    ):
        step.run()
