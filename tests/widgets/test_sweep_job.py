"""The sweep board's states, without widgets and with a sweep that is waited for by hand."""

import threading
from pathlib import Path
from typing import Any

import pytest

import acwb
from acwb.errors import CancelledError
from acwb.evaluation.batch_sweep import Sweep
from acwb.evaluation.fresh_process import cancellable, run_in_fresh_process
from acwb.widgets import sweep_job
from acwb.widgets.sweep_job import JobState, SweepJob, read_sizes


class Stage:
    """Stands in for `sweep`: gives a point whenever it is let to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, problem: Exception | None = None) -> None:
        self.goes_on, self.problem = threading.Semaphore(0), problem
        monkeypatch.setattr(sweep_job, "sweep", self.sweep)

    def sweep(self, _subject: Any, sizes: Any, watcher: Any, **_options: Any) -> Sweep:
        points: list[Any] = []
        for size in sizes:
            assert self.goes_on.acquire(timeout=20)
            if self.problem is not None:
                raise self.problem
            points.append(size)
            watcher(Sweep("subject", {}, tuple(points)))
        return Sweep("subject", {}, tuple(points))


@pytest.fixture
def board(tmp_path: Path) -> SweepJob:
    return SweepJob(tmp_path, 1, {"tiny": acwb.models.tiny_resnet})


def test_observers_see_every_point_until_the_sweep_is_done(board: SweepJob, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, seen = Stage(monkeypatch), list[tuple[JobState, int]]()
    board.observe(lambda each: seen.append((each.state, len(each.sweep.points) if each.sweep else 0)))
    assert board.state is JobState.IDLE
    board.start("tiny", "2, 4", 0.5)
    assert board.state is JobState.RUNNING
    stage.goes_on.release(2)
    assert board.wait(20) is JobState.DONE
    assert seen == [(JobState.RUNNING, 0), (JobState.RUNNING, 1), (JobState.RUNNING, 2), (JobState.DONE, 2)]
    assert "Done: 2 batch sizes" in board.message


def test_a_second_start_is_refused_while_a_sweep_runs(board: SweepJob, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    board.start("tiny", "2", 0.5)
    board.start("tiny", "8", 0.5)
    assert board.wanted == (2,)
    assert "cancel it first" in board.message
    stage.goes_on.release()
    assert board.wait(20) is JobState.DONE


def test_an_error_of_the_sweep_becomes_the_message(board: SweepJob, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, acwb.AcwbError("The file holds another sweep."))
    board.start("tiny", "2", 0.5)
    stage.goes_on.release()
    assert board.wait(20) is JobState.FAILED
    assert board.message == "The sweep stopped: The file holds another sweep."
    board.cancel()
    assert board.state is JobState.FAILED


@pytest.mark.parametrize(
    ("name", "sizes", "sentence"),
    [
        ("tiny", "", "No batch size is given"),
        ("tiny", "two", "'two' is not a batch size"),
        ("tiny", "2, 0", "'0' is not a batch size"),
        ("tiny", "-3", "'-3' is not a batch size"),
        ("huge", "2", "There is no model 'huge'"),
    ],
)
def test_invalid_input_is_reported_and_nothing_starts(board: SweepJob, name: str, sizes: str, sentence: str) -> None:
    board.start(name, sizes, 0.5)
    assert sentence in board.message
    assert board.state is JobState.IDLE


def test_batch_sizes_are_read_as_typed() -> None:
    assert read_sizes(" 4,8  16;4\n") == (4, 8, 16)


def test_cancelling_ends_a_running_measurement_at_once(board: SweepJob) -> None:
    board.start("tiny", "2, 4", 0.5)
    assert board.state is JobState.RUNNING
    board.cancel()
    assert board.state in (JobState.CANCELLING, JobState.CANCELLED)
    assert board.wait(60) is JobState.CANCELLED
    assert "0 of 2 batch sizes are measured and kept" in board.message


def test_cancelling_kills_the_measuring_process(tmp_path: Path) -> None:
    stop, sign = threading.Event(), tmp_path / "alive"
    threading.Timer(1.0, stop.set).start()
    with cancellable(stop), pytest.raises(CancelledError):
        run_in_fresh_process(_wait, str(sign))
    assert not sign.exists()


def _wait(path: str) -> None:
    import time

    time.sleep(60)
    Path(path).write_text("still here")
