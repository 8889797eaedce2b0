"""acwb: the activation-checkpointing workbench for PyTorch."""

import importlib
from types import ModuleType

from acwb import _torchvision_shim as _torchvision_shim  # first: transformers and torchvision need what it defines
from acwb import models
from acwb.capture.step import TracedStep
from acwb.capture.tracer import trace
from acwb.core.graph import Activation, Op, Phase, Role, StepGraph, Storage
from acwb.core.profile import Profile
from acwb.errors import AcwbError, CaptureError, ChangedStepError, DoesNotFitError, InfeasibleBudgetError
from acwb.evaluation.batch_search import LargestBatch, largest_batch
from acwb.evaluation.batch_sweep import Sweep, sweep
from acwb.evaluation.measurement import Measurement, measure
from acwb.evaluation.memory_cap import train_within
from acwb.evaluation.verifier import Verification, verify
from acwb.execution.block_checkpoint import per_block_checkpoint
from acwb.execution.dropin import Checkpointed, checkpoint
from acwb.execution.rewriter import rewrite
from acwb.planning.bounds import lower_bound
from acwb.planning.frontier import Frontier, frontier
from acwb.planning.plan import Decision, Plan
from acwb.planning.planner import plan
from acwb.profiling.profiler import profile

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
    "plots",
    "profile",
    "results",
    "rewrite",
    "sweep",
    "trace",
    "train_within",
    "verify",
    "widgets",
]

_LAZY = ("plots", "results", "widgets")  # they import plotly and ipywidgets, which training code does not need


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f"acwb.{name}")
    raise AttributeError(f"module 'acwb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
