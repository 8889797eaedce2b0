"""Expensive results, made once: read from a file that belongs to the very same step, made and written otherwise.

A file's name carries the fingerprint of what it was measured of, so that a result of anything else is never read. Each
function also returns a sentence that says which it was.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from acwb import files, models
from acwb.capture.step import TracedStep
from acwb.core.profile import Profile
from acwb.evaluation.baselines import traced
from acwb.evaluation.comparison import MethodComparison, compare_methods
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.evaluation.measurement import Measurement, measure
from acwb.execution.rewriter import PlannedStep
from acwb.profiling.profiler import profile
from acwb.subject import StepBuilder, Subject

Folder = str | os.PathLike[str]


class Saveable(Protocol):
    """What goes to a file and back."""

    def save(self, path: Folder) -> None:
        """Write it."""

    @classmethod
    def load(cls, path: Folder) -> Self:
        """Read it."""


Result = TypeVar("Result", bound=Saveable)


def load_or_make(
    path: Path, load: Callable[[Path], Result], make: Callable[[], Result], anew: bool = False
) -> tuple[Result, str]:
    """What the file holds, or (`anew`: always) what `make` gives, which is then written there; and which of the two."""
    if path.exists() and not anew:
        return load(path), f"read from {path.name}, which was measured of this very step"
    made = make()
    files.make_folder(path.parent)
    made.save(path)
    return made, f"measured now, and written to {path.name}"


def cached_profile(step: TracedStep, folder: Folder, repeats: int = 3) -> tuple[Profile, str]:
    """The profile of a step; what is told says on which machine it was taken, since its times belong to that one."""
    path = Path(folder) / f"profile_{step.graph.environment.model}_{step.graph.fingerprint}_{repeats}.json"
    found, told = load_or_make(path, partial(Profile.load, graph=step.graph), partial(profile, step, repeats=repeats))
    return found, f"{told} ({found.conditions})"


def cached_measurement(step: PlannedStep, folder: Folder, rounds: int) -> tuple[Measurement, str]:
    """The measurement of a planned step."""
    path = Path(folder) / f"measurement_{step.graph.environment.model}_{step.graph.fingerprint}_{rounds}.json"
    return load_or_make(path, Measurement.load, partial(measure, step, rounds=rounds))


def cached_comparison(
    name: str,
    batch_size: int,
    options: Mapping[str, Any],
    methods: Mapping[str, StepBuilder],
    rounds: int,
    folder: Folder,
    kind: str = "comparison",
    repeats: int = 3,
    anew: bool = False,
) -> tuple[MethodComparison, str]:
    """A comparison, held in a process of its own.

    Args:
        name: of the subject in `acwb.models`.
        batch_size: of the subject.
        options: of the subject.
        methods: who takes part.
        rounds: how often they take turns; without any, only what goes wrong is looked at.
        folder: where comparisons are kept.
        kind: tells comparisons of different methods apart.
        repeats: how often the profiler times each op for the plans that take part.
        anew: hold it also where it is kept, and show how far it is.
    """
    competing = partial(compare_methods, name, batch_size, options, methods, rounds, repeats)
    subject = partial(getattr(models, name), batch_size=batch_size, **options)
    return run_in_fresh_process(
        _cached_in_process, subject, competing, Path(folder), f"{kind}_{name}", rounds, anew, shows_progress=anew
    )


def _cached_in_process(
    make: Callable[[], Subject],
    competing: Callable[[TracedStep], MethodComparison],
    folder: Path,
    label: str,
    rounds: int,
    anew: bool,
) -> tuple[MethodComparison, str]:
    """The step is captured once: its fingerprint names the file, and our plans are made for it."""
    step = traced(make())
    path = folder / f"{label}_{step.graph.fingerprint}_{rounds}.json"
    return load_or_make(path, MethodComparison.load, partial(competing, step), anew)
