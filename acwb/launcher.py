"""Runs a function in a fresh process: for memory that nothing else has touched, and for limits that must not stay.

The function and its arguments go there by pickle, the result comes back the same way, and what the function raises is
raised here. This process's main module is not run again.
"""

import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from acwb.device import data_bytes
from acwb.errors import AcwbError

Result = TypeVar("Result")

# The C library then maps every block of 64 KiB or more by itself and gives it back when it is freed, so that the
# process's memory follows its tensors. It makes allocation slower: times are never measured so.
PLAIN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def launch(
    function: Callable[..., Result], *args: object, environment: Mapping[str, str] | None = None, **kwargs: object
) -> Result:
    """Call `function` in a fresh process with more environment variables, and return what it returns."""
    with tempfile.TemporaryDirectory(prefix="acwb-") as folder:
        call, answer = Path(folder) / "call", Path(folder) / "answer"
        call.write_bytes(_pickled(function, args, kwargs))
        code = f"import sys; sys.path[:] = {sys.path!r}; from acwb import launcher; launcher.answer({folder!r})"
        child = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **(environment or {})}, stderr=subprocess.PIPE, check=False
        )
        if not answer.exists():
            last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "it wrote nothing"
            raise AcwbError(
                f"The process that ran {_name(function)} ended with code {child.returncode} ({last}): it was killed, "
                "or what it should run cannot be imported there."
            )
        result: Any = pickle.loads(answer.read_bytes())
    if isinstance(result, BaseException):
        raise result
    value: Result = result
    return value


def answer(folder: str) -> None:
    """What the fresh process does: call the function, and leave its result, or what it raised, in a file."""
    function, args, kwargs = pickle.loads((Path(folder) / "call").read_bytes())
    try:
        result = function(*args, **kwargs)
    except Exception as error:  # raised again by `launch`
        result = error
    scratch = Path(folder) / "part"
    scratch.write_bytes(pickle.dumps(result))
    scratch.replace(Path(folder) / "answer")


def _pickled(function: Callable[..., object], args: object, kwargs: object) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AcwbError(
            f"{_name(function)} or its arguments cannot be sent to another process ({error}): use functions that are "
            "defined in a module."
        ) from error


def cap_memory(size: int) -> None:
    """From now on, let this process allocate `size` bytes more than it holds, and not a byte beyond that.

    Mapped libraries do not count; what the C library holds without using it stays there to be used. What torch cannot
    get, it reports as an error.
    """
    limit = data_bytes() + size
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))
