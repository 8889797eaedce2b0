"""A fresh process: results and errors are returned, and a killed process is reported."""

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


def test_an_error_in_the_fresh_process_is_raised_in_this_one() -> None:
    with pytest.raises(ValueError, match="no such thing"):
        run_in_fresh_process(_fail)


def _fail() -> None:
    raise ValueError("no such thing")


def test_a_killed_process_is_reported_with_its_exit_code() -> None:
    with pytest.raises(acwb.AcwbError, match="ran _die ended with code 9"):
        run_in_fresh_process(_die)


def _die() -> None:
    os._exit(9)


def test_an_argument_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(acwb.AcwbError, match="cannot be sent to another process"):
        run_in_fresh_process(_report, threading.Lock())


def test_functions_and_classes_of_a_notebook_are_sent_along() -> None:
    class Cell:
        word = "word"

    assert run_in_fresh_process(lambda cell: cell.word * 2, Cell()) == "wordword"


def test_the_attributes_of_an_error_are_returned_with_it() -> None:
    with pytest.raises(acwb.InfeasibleBudgetError, match="too small") as caught:
        run_in_fresh_process(_refuse)
    assert (caught.value.floor_bytes, caught.value.op, caught.value.storages) == (7, "relu", ("a", "b"))


def _refuse() -> None:
    raise acwb.InfeasibleBudgetError("too small", 7, "relu", ("a", "b"))


def test_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=30)
    assert run_concurrently({"one": meeting.wait, "two": meeting.wait}).keys() == {"one", "two"}
    assert run_concurrently({"one": lambda: 1, "two": lambda: 2}) == {"one": 1, "two": 2}


def test_once_one_process_fails_the_others_are_ended() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="no such thing"):
        run_concurrently(
            {"slow": partial(run_in_fresh_process, time.sleep, 600), "wrong": partial(run_in_fresh_process, _fail)}
        )
    assert time.monotonic() - start < 300


def test_cancelling_ends_all_concurrent_processes() -> None:
    stop = threading.Event()
    stop.set()
    with cancellable(stop), pytest.raises(CancelledError):
        run_concurrently({name: partial(run_in_fresh_process, time.sleep, 600) for name in ("one", "two")})
