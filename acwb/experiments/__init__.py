"""The experiments behind `make`: the notebooks at three scales, and the tables of results."""

from acwb.experiments.scales import scale

__all__ = ["scale"]
