"""A fresh process: results and errors come back, and a death is told."""

import os
import threading
import time
from functools import partial

import pytest

import acwb
from acwb.errors import CancelledError
from acwb.evaluation.fresh_process import cancellable, run_concurrently, run_in_fresh_process


def test_a_result_comes_back_from_another_process() -> None:
    identity, variable, word = run_in_fresh_process(_report, "word", environment={"ACWB_TEST": "set"})
    assert identity != os.getpid()
    assert (variable, word) == ("set", "word")


def _report(word: str) -> tuple[int, str, str]:
    return os.getpid(), os.environ["ACWB_TEST"], word


def test_an_error_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no such thing"):
        run_in_fresh_process(_fail)


def _fail() -> None:
    raise ValueError("no such thing")


def test_a_killed_process_is_told_with_its_code() -> None:
    with pytest.raises(acwb.AcwbError, match="ran _die ended with code 9"):
        run_in_fresh_process(_die)


def _die() -> None:
    os._exit(9)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(acwb.AcwbError, match="cannot be sent to another process"):
        run_in_fresh_process(_report, threading.Lock())


def test_functions_and_classes_of_a_notebook_are_sent_along() -> None:
    class Cell:
        word = "word"

    assert run_in_fresh_process(lambda cell: cell.word * 2, Cell()) == "wordword"


def test_what_an_error_carries_comes_back_with_it() -> None:
    with pytest.raises(acwb.InfeasibleBudgetError, match="too small") as caught:
        run_in_fresh_process(_refuse)
    assert (caught.value.floor_bytes, caught.value.op, caught.value.storages) == (7, "relu", ("a", "b"))


def _refuse() -> None:
    raise acwb.InfeasibleBudgetError("too small", 7, "relu", ("a", "b"))


def test_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=30)
    assert run_concurrently({"one": meeting.wait, "two": meeting.wait}).keys() == {"one", "two"}
    assert run_concurrently({"one": lambda: 1, "two": lambda: 2}) == {"one": 1, "two": 2}


def test_once_one_fails_the_others_end() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="no such thing"):
        run_concurrently(
            {"slow": partial(run_in_fresh_process, time.sleep, 600), "wrong": partial(run_in_fresh_process, _fail)}
        )
    assert time.monotonic() - start < 300


def test_who_cancels_reaches_all_of_them() -> None:
    stop = threading.Event()
    stop.set()
    with cancellable(stop), pytest.raises(CancelledError):
        run_concurrently({name: partial(run_in_fresh_process, time.sleep, 600) for name in ("one", "two")})
