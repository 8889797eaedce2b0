"""acwb: the activation-checkpointing workbench for PyTorch."""

from acwb import compatibility

compatibility.define_missing_torchvision_ops()  # before anything imports torchvision or transformers

from acwb import models  # noqa: E402
from acwb.costs import Profile  # noqa: E402
from acwb.errors import AcwbError, CaptureError, ChangedStepError  # noqa: E402
from acwb.graph import Activation, Op, Phase, Role, StepGraph, Storage  # noqa: E402
from acwb.profiler import profile  # noqa: E402
from acwb.step import TracedStep  # noqa: E402
from acwb.tracer import trace  # noqa: E402

__all__ = [
    "Activation",
    "AcwbError",
    "CaptureError",
    "ChangedStepError",
    "Op",
    "Phase",
    "Profile",
    "Role",
    "StepGraph",
    "Storage",
    "TracedStep",
    "models",
    "profile",
    "trace",
]
