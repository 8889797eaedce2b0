"""The scales at which the notebooks run: `quick` in minutes, `full` for a report, `smoke` to see that they run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from acwb.errors import AcwbError
from acwb.evaluation.comparison import ALTERNATIVES
from acwb.subject import StepBuilder


@dataclass(frozen=True)
class ExperimentScale:
    """Batch sizes, methods and repetitions of the notebooks; subjects are keys of `acwb.models.TITLES`.

    Attributes:
        batch_sizes: of the steps that are profiled, planned and rewritten, by subject. At 4 and below, BERT-base
            peaks in the optimizer step, where no plan can lower it.
        sweep_batches: of the batch sweeps, by subject.
        comparison_batches: of the comparison with other methods, by subject.
        dropout_batch: of BERT where methods are only checked with dropout on.
        methods: the other methods that are compared.
        dropout_methods: those that are checked with dropout on.
        repeats: how often the profiler times each op.
        rounds: how often steps are timed in turn.
        reduction: fraction by which the peak above static is to be lowered.
        memory: in which the largest batch is searched.
    """

    name: str
    batch_sizes: Mapping[str, int]
    sweep_batches: Mapping[str, tuple[int, ...]]
    comparison_batches: Mapping[str, int]
    dropout_batch: int
    methods: Mapping[str, StepBuilder]
    dropout_methods: Mapping[str, StepBuilder]
    repeats: int
    rounds: int
    reduction: float
    memory: str


QUICK = ExperimentScale(
    name="quick",
    batch_sizes={"resnet152": 4, "bert": 6},
    sweep_batches={"resnet152": (2, 3), "bert": (6,)},
    comparison_batches={"resnet152": 2, "bert": 6},
    dropout_batch=2,
    methods={"per block": ALTERNATIVES["per block"]},
    dropout_methods={"memory budget 0.3": ALTERNATIVES["memory budget 0.3"]},  # whose gradients are wrong
    repeats=1,
    rounds=1,
    reduction=0.25,
    memory="1GiB",
)
SMOKE = replace(
    QUICK,
    name="smoke",
    batch_sizes={"resnet152": 2, "bert": 6},
    sweep_batches={"resnet152": (2,), "bert": (6,)},
)
FULL = ExperimentScale(
    name="full",
    batch_sizes={"resnet152": 16, "bert": 16},
    sweep_batches={"resnet152": (4, 8, 16, 32, 64), "bert": (4, 8, 16, 32, 64)},
    comparison_batches={"resnet152": 8, "bert": 8},
    dropout_batch=8,
    methods=ALTERNATIVES,
    dropout_methods=ALTERNATIVES,
    repeats=3,
    rounds=11,
    reduction=0.5,
    memory="1.5GiB",
)
SCALES = {each.name: each for each in (QUICK, SMOKE, FULL)}


def scale(name: str) -> ExperimentScale:
    """The scale of this name: quick, smoke or full."""
    if name not in SCALES:
        raise AcwbError(f"There is no scale {name!r}: choose {', '.join(SCALES)}.")
    return SCALES[name]
