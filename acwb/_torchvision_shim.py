"""Lets torchvision be imported beside a CPU-only torch.

The published torchvision wheel is linked against CUDA: its compiled library does not load there, and importing
torchvision then fails for want of the two ops that it would define (and so does transformers, which imports it).
"""

import importlib.util
from pathlib import Path

import torch


def _define_missing_torchvision_ops() -> torch.library.Library | None:
    """Define the schemas that torchvision looks for on import, only where its own library cannot be loaded.

    It must run before the first import of torchvision or transformers. The definitions live as long as the result.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    compiled = next(Path(found.origin).parent.glob("_C.*"), None)
    try:
        if compiled is not None:
            torch.ops.load_library(str(compiled))
    except OSError:
        if not hasattr(torch.ops.torchvision, "nms"):
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            return library
    return None


_LIBRARY = _define_missing_torchvision_ops()  # on import: that is what this module is for
