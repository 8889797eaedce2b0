"""The profiler: what it measures, that it changes nothing, what fits and what does not."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import acwb
from acwb.core.schedule import just_in_time
from acwb.core.simulator import simulate
from acwb.evaluation.baselines import captured
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.evaluation.memory import allocated_peak_bytes, peaks_of, tensor_peak_bytes
from acwb.models import adamw, sgd
from acwb.profiling import devices, process_memory
from acwb.profiling.instruments import OpTimer
from acwb.profiling.process_memory import MALLOC_RETURNS_MEMORY, cap_memory
from acwb.subject import Subject
from support.bitwise import differences, snapshot
from support.tiny_models import MAKERS, OPTIMIZERS


def traced(subject: Subject) -> acwb.TracedStep:
    return acwb.trace(subject)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_profiling_leaves_model_optimizer_and_rng_unchanged(name: str, swap: bool) -> None:
    subject = MAKERS[name]()
    step = traced(subject)
    loss = step.run()
    before = snapshot(subject, loss)
    profile = acwb.profile(step, repeats=1, swap=swap)
    assert differences([before], [snapshot(subject, loss)]) == []
    assert all(seconds > 0 for seconds in profile.seconds.values())
    assert all(seconds > 0 for seconds in (*profile.swap_out_seconds.values(), *profile.swap_in_seconds.values()))
    assert profile.conditions.swapped is swap


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_without_state_is_profiled_and_stays_without(optimizer: acwb.models.OptimizerMaker) -> None:
    subject = MAKERS["batch_norm"](optimizer)
    step = traced(subject)
    profile = acwb.profile(step, repeats=1)
    assert not subject.optimizer.state
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    assert profile.seconds.keys() == {op.name for op in step.graph.ops}


def test_a_profile_that_is_interrupted_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = MAKERS["batch_norm"]()
    step = traced(subject)
    loss = step.run()
    before = snapshot(subject, loss)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OpTimer, "medians", interrupt)
    monkeypatch.setattr(OpTimer, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        acwb.profile(step)
    assert differences([before], [snapshot(subject, loss)]) == []


def test_workspace_is_what_a_kernel_allocates_beyond_its_results() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(x @ self.weight, 0).sort(dim=0).values.sum()

    model = Layer()
    step = acwb.trace(model, (torch.randn(1000, 64),), lambda model, batch: model(*batch))
    profile = acwb.profile(step, repeats=1)
    # What the allocator reports for each op alone is its results and its workspace.
    x = torch.randn(1000, 64)
    for name, kernel in {"mm": partial(torch.mm, x, model.weight), "sort": partial(torch.sort, x, dim=0)}.items():
        with devices.CpuAllocationMeter() as meter, torch.no_grad(), meter.watch(name):
            kernel()
        made = sum(step.graph.storage[each].bytes for each in step.graph.op(name).outputs)
        assert profile.workspace_bytes[name] == meter.growth()[name] - made
    assert profile.workspace_bytes["sort"] > 0


SMALL = {"batch_size": 64, "sequence_length": 128}
PEAKS = [
    ("resnet18", {"batch_size": 2, "image_size": 128}, sgd),
    ("tiny_bert", SMALL, adamw),
    ("tiny_encoder", SMALL, sgd),
    pytest.param("resnet18", {"batch_size": 2, "image_size": 128}, adamw, marks=pytest.mark.slow),
    pytest.param("tiny_bert", SMALL, sgd, marks=pytest.mark.slow),
    pytest.param("tiny_encoder", SMALL, adamw, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options", "optimizer"), PEAKS)
def test_predicted_peaks_are_the_measured_ones(
    name: str, options: dict[str, int], optimizer: acwb.models.OptimizerMaker
) -> None:
    make = partial(getattr(acwb.models, name), **options, optimizer=optimizer)
    step = traced(make())
    timeline = simulate(acwb.profile(step, repeats=1), just_in_time(step.graph))
    static = step.graph.static_bytes
    assert timeline.tensor_peak_bytes == tensor_peak_bytes(step)
    total = timeline.peak_bytes - static
    assert total == pytest.approx(allocated_peak_bytes(step) - static, rel=0.01)
    assert total == pytest.approx(peaks_of(make, captured).process_bytes - static, rel=0.02)


def test_the_peak_of_a_small_batch_with_adamw_lies_in_the_optimizer() -> None:
    step = traced(acwb.models.tiny_bert(batch_size=1))
    profile = acwb.profile(step, repeats=1)
    timeline = simulate(profile, just_in_time(step.graph))
    phase = step.graph.op(timeline.peak_entry.op).phase
    assert phase is step.graph.ops[profile.peak_rank].phase is acwb.Phase.OPTIMIZER
    assert "in the optimizer phase" in repr(profile)


def test_a_step_that_does_not_fit_is_profiled_under_a_hard_cap() -> None:
    assert_profiled_under_a_cap(deep)


@pytest.mark.slow
def test_resnet152_is_profiled_in_less_memory_than_it_needs() -> None:
    assert_profiled_under_a_cap(partial(acwb.models.resnet152, batch_size=16))


def assert_profiled_under_a_cap(make: Callable[[], Subject]) -> None:
    """With half of the memory that the step needs, a profile has the same sizes as with all of it."""
    free = acwb.profile(traced(make()), repeats=1)
    need = max(free.graph.live_bytes) - free.graph.static_bytes
    swapped, growth, sizes, workspaces = run_in_fresh_process(_profile_under_a_cap, make, need // 2)
    assert swapped
    assert growth < need // 2
    assert sizes == {storage.name: storage.bytes for storage in free.graph.storages}
    assert workspaces == free.workspace_bytes


def deep() -> Subject:
    """Many activations of 8 MiB, each of which is small beside their sum."""
    layers = [layer for _ in range(24) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    return Subject("deep", model, (torch.randn(8192, 256),), _sum, sgd(model.parameters()))


def wide() -> Subject:
    """A few activations of 128 MiB: far more than the C library may still hold for reuse when a cap is set."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.GELU())
    return Subject("wide", model, (torch.randn(131072, 8),), _sum, sgd(model.parameters()))


def _sum(model: torch.nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return model(*batch).sum()


def _profile_under_a_cap(make: Callable[[], Subject], size: int) -> tuple[bool, int, dict[str, int], dict[str, int]]:
    acwb.profile(traced(acwb.models.tiny_resnet()))  # libraries keep buffers from their first calls
    step = traced(make())
    cap_memory(size)
    before = process_memory.resident_bytes()
    process_memory.reset_peak_resident()
    profile = acwb.profile(step, repeats=1)
    growth = process_memory.peak_resident_bytes() - before
    sizes = {storage.name: storage.bytes for storage in profile.graph.storages}
    return profile.conditions.swapped, growth, sizes, dict(profile.workspace_bytes)


def test_an_op_that_fits_nowhere_is_named() -> None:
    with pytest.raises(acwb.AcwbError, match=r"not enough memory for \w+ while profiling .*: use a smaller batch"):
        run_in_fresh_process(_profile_under_a_cap, wide, 20 * 2**20)


@pytest.mark.slow
def test_profiling_needs_hardly_more_memory_than_the_step() -> None:
    make = partial(acwb.models.resnet18, batch_size=8)
    own, while_profiling = run_in_fresh_process(_peak_of_profiling, make, environment=MALLOC_RETURNS_MEMORY)
    assert while_profiling <= 1.1 * own


@pytest.mark.slow
def test_profiling_resnet152_needs_hardly_more_memory_than_the_step() -> None:
    make = partial(acwb.models.resnet152, batch_size=4)
    own, while_profiling = run_in_fresh_process(_peak_of_profiling, make, environment=MALLOC_RETURNS_MEMORY)
    assert while_profiling <= 1.1 * own


def _peak_of_profiling(make: Callable[[], Subject]) -> tuple[int, int]:
    """The process's peak in a step and while it is profiled, each with what exists before."""
    acwb.profile(traced(acwb.models.tiny_resnet()))
    step = traced(make())
    for _ in range(2):
        step.run()
    step.free_gradients()
    found = []
    for action in (step.run, partial(acwb.profile, step, 1)):
        before = process_memory.resident_bytes()
        process_memory.reset_peak_resident()
        action()
        found.append(step.graph.static_bytes + process_memory.peak_resident_bytes() - before)
        step.free_gradients()
    return found[0], found[1]


@pytest.mark.parametrize("repeats", [0, -1, 1.5, True, "3", None])
def test_repeats_must_be_a_whole_number_from_one(repeats: object) -> None:
    step = traced(MAKERS["batch_norm"]())
    with pytest.raises(acwb.AcwbError, match=r"repeats is .*: give a whole number of at least 1"):
        acwb.profile(step, repeats=repeats)  # type: ignore[arg-type]


def test_only_a_captured_step_is_profiled() -> None:
    with pytest.raises(acwb.AcwbError, match=r"profile takes the step that acwb\.trace gives, not Linear"):
        acwb.profile(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
