"""What happens when a step is interrupted: it is undone, or its end is waited for.

Until a step writes anything, an error leaves everything as it was: the random state is put back, and the values that
were computed are let go, although the error's traceback would hold them. Once it writes, or puts something back, a
signal has to wait, whichever it is: the handler of any may raise.
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


class SignalGate:
    """Stands before the handlers of signals, any of which may raise: lets a signal through, or has it wait.

    A handler that raises shuts the gate, so that nothing disturbs what is undone then.
    """

    def __init__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()  # no other thread runs handlers
        known = {int(number): signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
        self._handlers = {number: handler for number, handler in known.items() if callable(handler)}
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._shut = True
        self._removed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: later, if the gate is shut."""
        if self._shut and not self._removed:
            self._waiting.append((number, frame))
            return
        self._shut = True
        self._handlers[number](number, frame)
        self._shut = False

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Let signals through, first those that waited. It is the innermost context, so that others end undisturbed."""
        try:
            self._shut = False
            while self._waiting:
                self(*self._waiting.pop(0))
            yield
        finally:
            self._shut = True

    def install(self) -> None:
        """Take the place of all handlers."""
        for number in self._handlers:
            signal.signal(number, self)

    def remove(self) -> None:
        """Put the handlers back and call them for what waited, all of them, also if one raises."""
        try:
            self._put_back()
        finally:
            self._removed = True
            self._put_back()  # the rest, if a signal came whose handler was back and raised
        self._handle_waiting()

    def _handle_waiting(self) -> None:
        if self._waiting:
            number, frame = self._waiting.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._handle_waiting()

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)


@contextmanager
def defer_signals() -> Iterator[SignalGate]:
    """Let signals that have a handler in Python (Ctrl-C, a scheduler's SIGTERM) wait until the end."""
    gate = SignalGate()
    try:
        gate.install()
        yield gate
    finally:
        gate.remove()
