"""Runs a function in a fresh process: for memory that nothing else has touched, and for limits that must not stay.

The function and its arguments go there in a file, also where a notebook defines them, the result comes back the same
way, and what the function raises is raised here. The main module of this process is not run there.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import cloudpickle

from acwb.errors import AcwbError, CancelledError, ProcessDiedError

Result = TypeVar("Result")
POLL_SECONDS = 0.1  # seconds between two looks at whether a process is to be ended


_stops: ContextVar[tuple[Event, ...]] = ContextVar("stops", default=())


@contextmanager
def cancellable(stop: Event) -> Iterator[None]:
    """While entered, fresh processes of this thread are ended as soon as `stop` is set, with a `CancelledError`."""
    token = _stops.set((*_stops.get(), stop))
    try:
        yield
    finally:
        _stops.reset(token)


def run_concurrently(calls: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
    """Make calls at the same time, each in a thread of its own; once one fails, the others' processes are ended."""
    given_up = Event()

    def make(call: Callable[[], Result]) -> Result:
        with cancellable(given_up):
            return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        running = {name: pool.submit(copy_context().run, make, call) for name, call in calls.items()}
        try:
            for first in wait(running.values(), return_when=FIRST_EXCEPTION).done:
                first.result()
        except BaseException:
            given_up.set()
            raise
        return {name: future.result() for name, future in running.items()}


def run_in_fresh_process(
    function: Callable[..., Result],
    *args: object,
    environment: Mapping[str, str] | None = None,
    shows_progress: bool = False,
    **kwargs: object,
) -> Result:
    """Call `function` in a fresh process with more environment variables, and return what it returns.

    What the process writes to its standard error, progress bars for one, is shown only on demand.
    """
    with tempfile.TemporaryDirectory(prefix="acwb-") as folder:
        call, answer = Path(folder) / "call", Path(folder) / "answer"
        _write(call, function, args, kwargs)
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import answer; answer({folder!r})"
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **(environment or {})},
            stderr=None if shows_progress else subprocess.PIPE,
        )
        said = _outcome(child)
        if not answer.exists():
            written = said.decode(errors="replace").strip()
            last = "its errors stand above" if shows_progress else written.rpartition("\n")[2] or "it wrote nothing"
            raise ProcessDiedError(
                f"The process that ran {_name(function)} ended with code {child.returncode} ({last}): it was killed, "
                "or what it should run cannot be imported there."
            )
        result: Any = pickle.loads(answer.read_bytes())
    if isinstance(result, BaseException):
        raise result
    value: Result = result
    return value


def _outcome(child: "subprocess.Popen[bytes]") -> bytes:
    """Wait for a process and return its standard error; it is killed if the wait is interrupted."""
    stops = _stops.get()
    try:
        while True:
            try:
                return child.communicate(timeout=POLL_SECONDS if stops else None)[1] or b""
            except subprocess.TimeoutExpired:
                if any(stop.is_set() for stop in stops):
                    raise CancelledError("The measurement was cancelled.") from None
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()


def answer(folder: str) -> None:
    """Entry point of the fresh process: call the function, and write its result or exception to a file."""
    with (Path(folder) / "call").open("rb") as file:
        function, args, kwargs = pickle.load(file)
    try:
        result = function(*args, **kwargs)
    except Exception as error:  # raised again by `run_in_fresh_process`
        result = error
    scratch = Path(folder) / "part"
    scratch.write_bytes(cloudpickle.dumps(result))
    scratch.replace(Path(folder) / "answer")


def _write(path: Path, function: Callable[..., object], args: object, kwargs: object) -> None:
    try:
        with path.open("wb") as file:
            cloudpickle.dump((function, args, kwargs), file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AcwbError(
            f"{_name(function)} or its arguments cannot be sent to another process ({error}): leave out what belongs "
            "to this one, like open files and locks."
        ) from error


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))
