"""A command that is stopped by a signal says so, from its first moment on; a broken console costs the console only."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Stopped(BaseException):
    """Raised in the main thread by the first of these signals; not an `Exception`, as it is no failure to handle."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def raised_signals() -> Iterator[None]:
    """Let signals that end a process raise `Stopped` in this one, which then ends its children and reports it.

    A signal that this process was started to ignore, as by nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a child that was forked, and has no other handler yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # what ends now is not to be interrupted
        raise Stopped(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_standard_streams() -> None:
    """Open standard streams that this process was started without: other files would get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            assert opened == descriptor, "those below it are open"
            os.set_inheritable(descriptor, True)
            if descriptor:
                setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", closefd=False))


def flush_standard_streams() -> None:
    """Flush the standard streams, or give up what a closed or full one does not take, before Python ends with it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
