"""Detects ranks that hang: every rank writes a heartbeat to the rendezvous store and watches that of the next rank."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import ledger
from hybrid3d.distributed import clone_store
from hybrid3d.launch_environment import ANSWER_SECONDS, BEAT_SECONDS, START_SECONDS, heartbeat_seconds
from hybrid3d.process import process_state, start_ticks
from hybrid3d.watch import work_meter

STARTING, OVER = "start-up", "over"

_phase = STARTING


def enter_phase(name: str) -> None:
    """Set the phase of this process, such as `train`, which a message about a hanging rank contains."""
    global _phase
    _phase = name


def current_phase() -> str:
    """Return the phase of this process."""
    return _phase


def read_phase(store: Store, rank: int) -> str:
    """Return the phase of a rank's last heartbeat; empty if it has not written one."""
    beat = ledger.read_beat(store, rank)
    return json.loads(beat)[1] if beat else ""


class Heartbeat:
    """Writes this rank's heartbeat and watches that of rank + 1 (of rank 0 for the last rank), one read per beat.

    A rank that waits in a collective keeps beating, because its threads only need the interpreter. Timeouts are counted
    in this rank's own beats, so that ranks that were all suspended and resume together do not report each other.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        on_lost: Callable[[int, str], None],
        watched: int | None = None,
        on_silent: Callable[[int, str, str], bool] | None = None,
        exit_code: int = 1,
    ):
        """Start the threads, which use a connection of their own to the store of the rendezvous.

        Args:
            world_size: of the ranks that watch each other.
            on_lost: called once, in a thread, with a rank that does not answer and what is known about it. When it
                returns, this process kills that rank's, if it is on this node, and exits with `exit_code`.
            watched: the rank to watch, on a rank that others do not watch.
            on_silent: called instead of `on_lost`, with the last beat too, for a rank that no longer beats while the
                store answers; it returns whether that rank is lost, whose process is then killed. This process goes
                on, and watches the one that takes its place.
        """
        self._store = clone_store(store)
        self._rank, self._watched = rank, (rank + 1) % world_size if watched is None else watched
        self._on_lost, self._on_silent, self._exit_code = on_lost, on_silent, exit_code
        self._stopped = threading.Event()
        self._identity = (os.getpid(), start_ticks(os.getpid()), socket.gethostname())
        # Under srun, rank 0's process hosts the store, so that an unreachable store means that rank 0 hangs. Under
        # torchrun, the first node's agent hosts it, which may be suspended in a terminal while its ranks continue.
        self._agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._answers, self._last_beat, self._refused = 0, "", False
        # Two threads, because a call to a store whose process is stopped never returns
        runs = (self._beat, self._watch) if world_size > 1 or watched is not None else ()
        self._threads = [threading.Thread(target=run, name="heartbeat", daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads and announce it, because ranks end at different times, which must not look like a hang.

        Waits for the threads, because one that returned from the store during interpreter shutdown would abort it.
        """
        enter_phase(OVER)
        self._stopped.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)

    def _beat(self) -> None:
        """Write this rank's heartbeat and read that of the watched rank, until stopped."""
        count, stopped = 0, False
        while not stopped:
            stopped = self._stopped.wait(BEAT_SECONDS)
            count += 1
            try:
                beat = json.dumps([count, _phase, *self._identity, work_meter.record.step])
                ledger.tell_beat(self._store, self._rank, beat)
                self._last_beat = ledger.read_beat(self._store, self._watched)
                self._answers, self._refused = self._answers + 1, False
            except dist.DistError:  # counts towards the timeout
                self._refused = True
                with suppress(dist.DistError):  # a broken connection does not recover
                    self._store = clone_store(self._store)

    def _watch(self) -> None:
        """Count the seconds for which the watched rank or the store has not answered, until stopped."""
        answers, last_beat, unreachable, silent = 0, "", 0.0, 0.0
        before = time.monotonic()
        while not self._stopped.wait(BEAT_SECONDS):
            now = time.monotonic()
            passed, before = min(now - before, 2 * BEAT_SECONDS), now
            unreachable = unreachable + passed if self._answers == answers else 0.0
            if unreachable == 0.0:
                silent = silent + passed if self._last_beat == last_beat else 0.0
            answers, last_beat = self._answers, self._last_beat
            if silent > self._timeout(last_beat):
                self._lose(self._watched, silent, last_beat, self._on_silent)
                silent = 0.0
            if unreachable > self._timeout(last_beat) and self._agent_has_store and self._refused:
                self._lose(0, unreachable, "", subject="the store in its node's torchrun")
                return
            if unreachable > self._timeout(last_beat) and self._rank > 0 and not self._agent_has_store:
                self._lose(0, unreachable, last_beat if self._watched == 0 else "")
                return

    def _timeout(self, last_beat: str) -> float:
        """Return the seconds without an answer after which the rank of this heartbeat counts as lost."""
        phase = json.loads(last_beat)[1] if last_beat else STARTING
        if phase == OVER:
            return math.inf
        # Importing libraries and building engines, before the first phase, can block threads
        return max(heartbeat_seconds(), START_SECONDS) if phase == STARTING else heartbeat_seconds()

    def _lose(
        self,
        rank: int,
        silent: float,
        last_beat: str,
        on_silent: Callable[[int, str, str], bool] | None = None,
        subject: str = "it",
    ) -> None:
        """Report a lost rank, kill its process if it is on this node, and, without `on_silent`, end this process."""
        if self._stopped.is_set():
            return
        message, lost_pid, is_lost = f"{subject} has not answered for {silent:.0f} s", 0, True
        if last_beat:
            _, phase, pid, ticks, host, step = json.loads(last_beat)
            message += f"{'' if step is None else f', in step {step}'}, in phase {phase}"
            if host == socket.gethostname() and start_ticks(pid) == ticks:
                state = "stopped (SIGSTOP)" if process_state(pid) in ("T", "t") else "stuck"
                message += f": its process {pid} is {state}"
                lost_pid = pid
            else:
                message += f": look at process {pid} on {host}"
        try:
            if on_silent is None:
                self._on_lost(rank, message)
            else:
                is_lost = on_silent(rank, message, last_beat)
        finally:
            if lost_pid and is_lost:  # after the report, because its death makes the launcher end this process
                with suppress(OSError):
                    os.kill(lost_pid, signal.SIGKILL)  # the launcher would wait for it
            if on_silent is None:
                os._exit(self._exit_code)  # the main thread may be waiting for that rank
