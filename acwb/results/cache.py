"""Cache of profiles, measurements and comparisons, keyed by the fingerprint of the step's graph.

A file's name carries the fingerprint, so that a result of another step is never read. Each function also returns the
origin of its result: read from a file, or measured now.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from acwb import files
from acwb.capture.step import TracedStep
from acwb.capture.tracer import trace
from acwb.core.profile import Profile
from acwb.evaluation.comparison import MethodComparison, compare_methods
from acwb.evaluation.fresh_process import run_in_fresh_process
from acwb.evaluation.measurement import Measurement, measure
from acwb.execution.rewriter import PlannedStep
from acwb.profiling.profiler import profile
from acwb.subject import StepBuilder, Subject, SubjectMaker

Folder = str | os.PathLike[str]


Result = TypeVar("Result", Profile, Measurement, MethodComparison)


@dataclass(frozen=True)
class Origin:
    """Whether a result was read from a file or measured now; prints as a sentence."""

    was_cached: bool
    file: str
    conditions: str = ""

    def __str__(self) -> str:
        how = "read from {}, which was measured of this very step" if self.was_cached else "measured now, saved as {}"
        return how.format(self.file) + (f" ({self.conditions})" if self.conditions else "")


def load_or_make(
    path: Path, load: Callable[[Path], Result], make: Callable[[], Result], refresh: bool = False
) -> tuple[Result, Origin]:
    """Load `path` if it exists (unless `refresh`), else make the result and save it there."""
    if path.exists() and not refresh:
        return load(path), Origin(was_cached=True, file=path.name)
    made = make()
    files.make_folder(path.parent)
    made.save(path)
    return made, Origin(was_cached=False, file=path.name)


def cached_profile(step: TracedStep, folder: Folder, repeats: int = 3) -> tuple[Profile, Origin]:
    """The profile of a step, loaded from `folder` if it is there; its origin names the machine that was timed."""
    path = Path(folder) / f"profile_{step.graph.environment.model}_{step.graph.fingerprint}_{repeats}.json"
    load, make = partial(Profile.load, graph=step.graph), partial(profile, step, repeats=repeats)
    result, origin = load_or_make(path, load, make)
    return result, replace(origin, conditions=str(result.conditions))


def cached_measurement(step: PlannedStep, folder: Folder, rounds: int) -> tuple[Measurement, Origin]:
    """The measurement of a planned step, loaded from `folder` if it is there, and where it came from."""
    path = Path(folder) / f"measurement_{step.graph.environment.model}_{step.graph.fingerprint}_{rounds}.json"
    return load_or_make(path, Measurement.load, partial(measure, step, rounds=rounds))


def cached_comparison(
    make: SubjectMaker,
    batch_size: int,
    options: Mapping[str, Any],
    methods: Mapping[str, StepBuilder],
    rounds: int,
    folder: Folder,
    kind: str = "contest",
    repeats: int = 3,
    refresh: bool = False,
) -> tuple[MethodComparison, Origin]:
    """A comparison of methods, measured in a process of its own.

    Args:
        make: `make(batch_size=…, **options)` makes the subject: a function of `acwb.models`.
        batch_size: of the subject.
        options: of the subject.
        methods: what is measured beside eager and our plans.
        rounds: how often all of them are timed in turn; 0 to check correctness only.
        folder: where comparisons are kept.
        kind: tells comparisons of different methods apart; the first part of the file's name.
        repeats: how often the profiler times each op for our plans.
        refresh: measure even if there is a file, and show progress.
    """
    compare = partial(compare_methods, make, batch_size, options, methods, rounds, repeats)
    subject = partial(make, batch_size=batch_size, **options)
    label = f"{kind}_{make.__name__}"
    return run_in_fresh_process(
        _load_or_compare, subject, compare, Path(folder), label, rounds, refresh, shows_progress=refresh
    )


def _load_or_compare(
    make: Callable[[], Subject],
    compare: Callable[[TracedStep], MethodComparison],
    folder: Path,
    label: str,
    rounds: int,
    refresh: bool,
) -> tuple[MethodComparison, Origin]:
    """The step is captured once: its fingerprint names the file, and our plans are made for it."""
    step = trace(make())
    path = folder / f"{label}_{step.graph.fingerprint}_{rounds}.json"
    return load_or_make(path, MethodComparison.load, partial(compare, step), refresh)
