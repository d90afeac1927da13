"""This process as a child that runs a rank, which its parent may start again: it tells that it is alive."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

from hybrid3d.launch_environment import BEAT_SECONDS, State

RESTART_COUNT, FAILURE = "HYBRID3D_RESTART_COUNT", "HYBRID3D_RESTART_FAILURE"
MAX_FAILURE_TEXT = 1000  # characters of a reason that are kept


class ChildProcess:
    """This process as the child that runs a rank; where the rank has no such parent, nothing is told.

    It is made before standard output becomes the rank's log.

    Attributes:
        restart_count: how many times the rank was started before.
        failure: why the process before this one ended; empty if this is the first.
    """

    def __init__(self) -> None:
        self.restart_count, self.failure = int(os.environ.get(RESTART_COUNT, 0)), os.environ.get(FAILURE, "")
        self._pipe = os.dup(1) if FAILURE in os.environ else None  # those that train tell nothing
        if self._pipe is not None:
            threading.Thread(target=self._beat, name="alive", daemon=True).start()

    def tell(self, state: State) -> None:
        """Tell the parent that this process has reached a state; without the parent this process is killed, too."""
        if self._pipe is not None:
            try:
                os.write(self._pipe, state.value)
            except BrokenPipeError:  # the kernel does not kill this process if the parent has died before it could ask
                os.kill(os.getpid(), signal.SIGKILL)

    def _beat(self) -> None:
        while True:
            self.tell(State.ALIVE)
            time.sleep(BEAT_SECONDS)


def is_child() -> bool:
    """Return whether this process was started by one that starts its rank again."""
    return RESTART_COUNT in os.environ


@functools.cache
def this_process() -> ChildProcess:
    """Return this process as the child that runs a rank; from the first call on it tells that it is alive."""
    return ChildProcess()
