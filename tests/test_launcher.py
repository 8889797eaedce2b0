"""A fresh process: results and errors come back, and a death is told."""

import os

import pytest

import acwb
from acwb.launcher import launch


def test_a_result_comes_back_from_another_process() -> None:
    identity, variable, word = launch(_report, "word", environment={"ACWB_TEST": "set"})
    assert identity != os.getpid()
    assert (variable, word) == ("set", "word")


def _report(word: str) -> tuple[int, str, str]:
    return os.getpid(), os.environ["ACWB_TEST"], word


def test_an_error_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no such thing"):
        launch(_fail)


def _fail() -> None:
    raise ValueError("no such thing")


def test_a_killed_process_is_told_with_its_code() -> None:
    with pytest.raises(acwb.AcwbError, match="ran _die ended with code 9"):
        launch(_die)


def _die() -> None:
    os._exit(9)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(acwb.AcwbError, match="cannot be sent to another process"):
        launch(lambda: None)
