"""Logic of the sweep board, without widgets: a sweep in a background thread that can be watched and cancelled.

A board is idle, running, cancelling, done, cancelled or failed. Measured points stay in the sweep's file in every case.
"""

import os
import re
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

from acwb import files
from acwb.errors import AcwbError, CancelledError
from acwb.evaluation.batch_sweep import Sweep, sweep
from acwb.evaluation.fresh_process import cancellable
from acwb.subject import Subject

Watcher = Callable[["SweepJob"], None]


class JobState(StrEnum):
    """Whether a sweep job is idle, running or being cancelled, or how it ended."""

    IDLE = "idle"
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class SweepJob:
    """One sweep at a time, in a thread of its own.

    Attributes:
        state: idle, running, or how the last sweep ended.
        message: the state in a sentence.
        wanted: the batch sizes that were asked for.
        sweep: what is measured by now; None before the first point.
    """

    def __init__(
        self, folder: str | os.PathLike[str], rounds: int, subjects: Mapping[str, Callable[[int], Subject]]
    ) -> None:
        self.state = JobState.IDLE
        self.message = "Choose a model and batch sizes, and start."
        self.wanted: tuple[int, ...] = ()
        self.sweep: Sweep | None = None
        self._folder, self._rounds, self._subjects = Path(folder), rounds, dict(subjects)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watchers: list[Watcher] = []

    def observe(self, watcher: Watcher) -> None:
        """Call `watcher` whenever something changes, from the thread in which it does."""
        self._watchers.append(watcher)

    def start(self, name: str, sizes: str, reduction: float) -> None:
        """Begin a sweep; invalid input only sets the message."""
        if self.state in (JobState.RUNNING, JobState.CANCELLING):
            self._become(self.state, "A sweep is running: cancel it first.")
            return
        try:
            wanted = read_sizes(sizes)
            if name not in self._subjects:
                raise AcwbError(f"There is no model {name!r}: choose one of {', '.join(self._subjects)}.")
        except AcwbError as error:
            self._become(self.state, str(error))
            return
        self.wanted, self.sweep = wanted, None
        self._stop = threading.Event()
        self._become(JobState.RUNNING, f"Measuring {name} at batch {', '.join(map(str, wanted))} …")
        self._thread = threading.Thread(target=self._run, args=(name, wanted, reduction, self._stop), daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Stop a running sweep; the points that are measured stay."""
        if self.state is JobState.RUNNING:
            self._become(JobState.CANCELLING, "Stopping …")
            self._stop.set()

    def wait(self, seconds: float | None = None) -> JobState:
        """Wait for the sweep that is running, if one is."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.state

    def _run(self, name: str, wanted: tuple[int, ...], reduction: float, stop: threading.Event) -> None:
        path = self._folder / f"sweep_{name}_{round(reduction * 100)}.json"
        try:
            files.make_folder(self._folder)
            with cancellable(stop):
                self.sweep = sweep(
                    self._subjects[name],
                    wanted,
                    reduction=reduction,
                    rounds=self._rounds,
                    path=path,
                    watcher=self._on_point,
                )
        except CancelledError:
            kept = len(self.sweep.points) if self.sweep else 0
            self._become(JobState.CANCELLED, f"Cancelled; {kept} of {len(wanted)} batch sizes are measured and kept.")
        except (AcwbError, OSError, RuntimeError) as error:
            self._become(JobState.FAILED, f"The sweep stopped: {error}")
        else:
            self._become(JobState.DONE, f"Done: {len(wanted)} batch sizes, in {path}.")

    def _on_point(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._become(self.state, f"{len(sweep.points)} of {len(self.wanted)} batch sizes are measured …")

    def _become(self, state: JobState, message: str) -> None:
        self.state, self.message = state, message
        for watcher in self._watchers:
            watcher(self)


def read_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes as a person types them: "4, 8 16"."""
    words = [word for word in re.split(r"[\s,;]+", text.strip()) if word]
    if not words:
        raise AcwbError("No batch size is given: type some, like 4, 8, 16.")
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise AcwbError(f"{word!r} is not a batch size: type whole numbers of at least 1, like 4, 8, 16.")
    return tuple(dict.fromkeys(int(word) for word in words))
