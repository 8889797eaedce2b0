"""The two scales at which the notebooks run, in one place: `quick` in minutes, `full` for the figures of a report."""

from collections.abc import Mapping
from dataclasses import dataclass

from acwb.errors import AcwbError
from acwb.evaluation.comparison import ALTERNATIVES
from acwb.subject import StepBuilder


@dataclass(frozen=True)
class ExperimentScale:
    """How large and how often.

    Attributes:
        resnet: batch size of the ResNet-152 steps that are profiled, planned and rewritten.
        bert: and of BERT's; at 4 and below, its peak lies in the optimizer's step, where no plan can lower it.
        resnet_batches: of its sweep.
        bert_batches: and of BERT's.
        comparison: batch sizes of the side-by-side, by subject.
        dropout: batch size of BERT where only what goes wrong with dropout is looked at.
        methods: who takes part in the side-by-side.
        dropout_contenders: and who where dropout is on.
        repeats: how often the profiler times each op.
        rounds: how often steps take turns.
        reduction: by which part the peak above static is to be lower.
        memory: in which the largest batch is looked for.
    """

    name: str
    resnet: int
    bert: int
    resnet_batches: tuple[int, ...]
    bert_batches: tuple[int, ...]
    comparison: Mapping[str, int]
    dropout: int
    methods: Mapping[str, StepBuilder]
    dropout_contenders: Mapping[str, StepBuilder]
    repeats: int
    rounds: int
    reduction: float
    memory: str


SCALES = {
    "quick": ExperimentScale(
        name="quick",
        resnet=4,
        bert=6,
        resnet_batches=(2, 3),
        bert_batches=(6,),
        comparison={"resnet152": 2, "bert": 6},
        dropout=2,
        methods={"per block": ALTERNATIVES["per block"]},
        dropout_contenders={"memory budget 0.3": ALTERNATIVES["memory budget 0.3"]},  # which gets it wrong
        repeats=1,
        rounds=1,
        reduction=0.25,
        memory="1GiB",
    ),
    "full": ExperimentScale(
        name="full",
        resnet=16,
        bert=16,
        resnet_batches=(4, 8, 16, 32, 64),
        bert_batches=(4, 8, 16, 32, 64),
        comparison={"resnet152": 8, "bert": 8},
        dropout=8,
        methods=ALTERNATIVES,
        dropout_contenders=ALTERNATIVES,
        repeats=3,
        rounds=11,
        reduction=0.5,
        memory="1.5GiB",
    ),
}


def scale(name: str) -> ExperimentScale:
    """A scale by its name."""
    if name not in SCALES:
        raise AcwbError(f"There is no scale {name!r}: choose {' or '.join(SCALES)}.")
    return SCALES[name]
