"""acwb: the activation-checkpointing workbench for PyTorch."""

from acwb import compatibility

compatibility.define_missing_torchvision_ops()  # before anything imports torchvision or transformers

from acwb import models  # noqa: E402
from acwb.blocks import per_block_checkpoint  # noqa: E402
from acwb.costs import Profile  # noqa: E402
from acwb.errors import (  # noqa: E402
    AcwbError,
    CaptureError,
    ChangedStepError,
    DoesNotFitError,
    InfeasibleBudgetError,
)
from acwb.graph import Activation, Op, Phase, Role, StepGraph, Storage  # noqa: E402
from acwb.limiter import train_within  # noqa: E402
from acwb.measurer import Measurement, measure  # noqa: E402
from acwb.planner import plan  # noqa: E402
from acwb.planners.bounds import lower_bound  # noqa: E402
from acwb.planners.frontier import Frontier, frontier  # noqa: E402
from acwb.plans import Decision, Plan  # noqa: E402
from acwb.profiler import profile  # noqa: E402
from acwb.rewriter import rewrite  # noqa: E402
from acwb.runtime import Checkpointed, checkpoint  # noqa: E402
from acwb.sizer import LargestBatch, largest_batch  # noqa: E402
from acwb.step import TracedStep  # noqa: E402
from acwb.sweeper import Sweep, sweep  # noqa: E402
from acwb.tracer import trace  # noqa: E402
from acwb.verifier import Verification, verify  # noqa: E402

__all__ = [
    "Activation",
    "AcwbError",
    "CaptureError",
    "ChangedStepError",
    "Checkpointed",
    "Decision",
    "DoesNotFitError",
    "Frontier",
    "InfeasibleBudgetError",
    "LargestBatch",
    "Measurement",
    "Op",
    "Phase",
    "Plan",
    "Profile",
    "Role",
    "StepGraph",
    "Storage",
    "Sweep",
    "TracedStep",
    "Verification",
    "checkpoint",
    "frontier",
    "largest_batch",
    "lower_bound",
    "measure",
    "models",
    "per_block_checkpoint",
    "plan",
    "profile",
    "rewrite",
    "sweep",
    "trace",
    "train_within",
    "verify",
]
