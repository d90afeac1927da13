"""What follows from the end of a process that runs a rank. Nothing here starts, ends or waits for anything."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid3d.launch_environment import DISCONNECTED, END_SECONDS, FORGIVEN_SECONDS, RUN_LOST, State
from hybrid3d.run.ends import Ended

STOPPED = -signal.SIGTERM  # exit code of a process that was killed because nothing more was expected of it


@dataclass(frozen=True)
class Exit:
    """How a process that runs a rank has ended.

    Attributes:
        code: its exit code, negative for a signal.
        states: those that it had told, one after another.
        ready_seconds: for how long it was ready.
    """

    code: int
    states: bytes = b""
    ready_seconds: float = 0.0

    def had(self, state: State) -> bool:
        """Return whether it had reached a state."""
        return state.value in self.states


@dataclass(frozen=True)
class Over:
    """The rank is not started again.

    Attributes:
        code: the exit code of its parent.
        end: what that reports; None where the rank has succeeded, or another one, or itself, reports it.
    """

    code: int
    end: Ended | None = None


@dataclass(frozen=True)
class Again:
    """The rank is started again after `pause` seconds; `why` the process before ended is empty if it was asked to."""

    why: str = ""
    pause: float = 0.0


class ServingPolicy:
    """Whether a rank that serves those that train is started again: if it was ready once, or was lost by others' doing.

    One that fails by itself before it is ready would fail again.
    """

    def __init__(self, rank: int, role: str, max_restarts: int):
        self._rank, self._role, self._max_restarts = rank, role, max_restarts
        self._exits = self._restarts = self._pauses = 0
        self._was_ready = False

    def after(self, exit: Exit, record: Ended | None, run_has_ended: bool) -> Over | Again:
        """Return what follows; `record` is what the process has left.

        A process that is stopped does not hear that the run has ended.
        """
        self._exits += 1
        if exit.code < 0 and run_has_ended:
            return Over(0)
        if exit.had(State.LEAVING):
            self._was_ready = True
            return Again()
        if exit.had(State.ENDING):
            return Over(0)
        if exit.code == RUN_LOST:
            return Over(1)
        connected, ready = exit.had(State.CONNECTED), exit.had(State.READY)
        if record is None and exit.code in (1, 2) and not connected and self._exits == 1:  # the ranks have not met
            return Over(exit.code)
        end = record or Ended.by_code(self._rank, exit.code)
        if record is None and exit.code == DISCONNECTED:
            end = Ended(self._rank, "its connection to rank 0 ended", peer=True)
        self._was_ready |= ready
        if not (self._was_ready or exit.code < 0 or end.peer):
            return Over(1, Ended(self._rank, end.reason))
        if exit.ready_seconds > FORGIVEN_SECONDS:
            self._restarts = 0
        self._pauses = 0 if ready else self._pauses + 1
        if self._restarts == self._max_restarts:
            often = f"; it was started again {self._restarts} times: raise roles.{self._role}.max_restarts"
            return Over(1, Ended(self._rank, end.reason + (often if self._restarts else ""), peer=end.peer))
        self._restarts += 1
        return Again(end.reason, min(END_SECONDS, 2.0 ** min(self._pauses, 9) - 1))


@dataclass(frozen=True)
class Decision:
    """What follows from the failure of a start of the ranks that train.

    Attributes:
        again: whether all of them are started again.
        counts: whether that is one of `run.max_restarts`.
        final: whether nothing else is to start them again either.
    """

    again: bool
    counts: bool
    final: bool


def decide_training(
    cause: Ended, codes: Mapping[int, int], ranks: range, restarts: int, max_restarts: int, run_has_ended: bool
) -> Decision:
    """Return what follows from the failure of a start of the ranks that train.

    Args:
        codes: the exit codes of their processes.
        ranks: those that train. If one of them has not ended, as its node is lost, none is started again.
        run_has_ended: those that do not train have been told so.
    """
    out_of_memory = cause.kind == "out_of_memory"  # its next start has settings that need less
    more = out_of_memory or (restarts < max_restarts and not cause.on_all_ranks)
    again = more and not run_has_ended and all(codes.get(rank) for rank in ranks)
    return Decision(again, counts=again and not out_of_memory, final=not more)
