"""A module that shares the parameters, buffers and submodules of another one, under the same names."""

from typing import Any

from torch import nn

SHARED_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class SharedModule(nn.Module):
    """Shares a model's tensors and submodules, and looks up every other attribute there.

    Attributes:
        unplanned: the model.
    """

    unplanned: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({table: model.__dict__[table] for table in SHARED_TABLES})
        self.__dict__.update(unplanned=model, training=model.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "unplanned" not in self.__dict__:
                raise
            return getattr(self.unplanned, name)
