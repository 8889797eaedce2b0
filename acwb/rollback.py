"""What happens when a step is interrupted: it is undone, or its end is waited for.

Until a step writes anything, an error leaves everything as it was: the random state is put back, and the values that
were computed are let go, although the error's traceback would hold them. Once it writes, an interrupt has to wait.
"""

import ctypes
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from acwb import rng


@contextmanager
def rollback_on_error(device: torch.device, draws: bool) -> Iterator[None]:
    """After an error, let go of what its traceback holds, and put the random state back if something `draws`."""
    state = _as_bytes(rng.get_state(device)) if draws else None
    try:
        yield
    except BaseException as error:
        if state is not None:
            rng.set_state(device, torch.frombuffer(bytearray(state), dtype=torch.uint8))
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        raise


def _as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, outside of the memory that is planned."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Let an interrupt (Ctrl-C) wait until the end; in other threads than the main one there are none."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        usual(*came[0])
