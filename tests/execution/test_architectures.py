"""Real architectures, built small: each is captured, planned, rewritten and run, and is bitwise equal to eager."""

from collections.abc import Iterator

import pytest
import torch

import acwb
from acwb.evaluation.memory import tensor_peak_bytes
from support.architectures import TORCHVISION, TRANSFORMERS
from support.bitwise import Start, differences, train
from support.candidates import nine_plans

FAST = ("resnet_of_bottlenecks", "bert")
# At these sizes most of their memory is parameters: the floor is above 95 % of what they need without a plan, or so
# close to that that it depends on the times that were measured or on the workspaces of the processor's own kernels.
FLOOR_IS_HIGH = {
    *("torchvision alexnet", "torchvision convnext", "torchvision googlenet", "torchvision inception_v3"),
    *("torchvision resnet_of_basic_blocks", "torchvision resnet_of_bottlenecks", "torchvision resnet_with_dilation"),
    *("torchvision resnext", "torchvision squeezenet1_0", "torchvision squeezenet1_1", "torchvision wide_resnet"),
    *("transformers falcon", "transformers bart", "transformers marian", "transformers pegasus"),
    "transformers convnext",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Ops this small are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=() if name in FAST else pytest.mark.slow)
        for family, members in (("torchvision", TORCHVISION), ("transformers", TRANSFORMERS))
        for name in members
    ],
)
def test_architectures_run_as_planned(family: str, name: str) -> None:
    make = (TORCHVISION if family == "torchvision" else TRANSFORMERS)[name]
    eager, subject = make(), make()
    expected = train(eager, eager.eager_step)
    step = acwb.trace(subject)
    start = Start(step)
    profile = acwb.profile(step, repeats=1)
    frontier = acwb.frontier(profile)
    for plan in nine_plans(profile, frontier):
        planned = acwb.rewrite(step, plan)
        start.restore()
        assert differences(train(subject, planned.run), expected) == []
        assert tensor_peak_bytes(planned) == plan.timeline.tensor_peak_bytes
    assert frontier.floor_bytes <= 0.95 * frontier.baseline_bytes or f"{family} {name}" in FLOOR_IS_HIGH


def test_at_least_forty_architectures_are_tried() -> None:
    assert len(TORCHVISION) >= 25
    assert len(TRANSFORMERS) >= 15
