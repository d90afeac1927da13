"""Finds a rank that does not answer: each rank beats in the store that all have met at, and watches the next one."""

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

from hybrid3d.launch_environment import BEAT_SECONDS, heartbeat_seconds
from hybrid3d.process import started, state

START_SECONDS = 600.0  # before its first phase a rank imports libraries and builds engines, and may not run Python
STARTING, OVER = "start-up", "over"
CLOSING_SECONDS = 5.0

_phase = STARTING


def enter_phase(name: str) -> None:
    """Say what this process is doing from now on, such as `train`: the name that a message about its silence has."""
    global _phase
    _phase = name


class Heartbeat:
    """Beats for this rank, and watches rank + 1 (the last rank: rank 0), with one read a beat.

    A rank that waits for others goes on beating: its threads need the interpreter alone. Silence is counted in this
    rank's own beats, so that ranks which were all suspended, and go on together, do not take each other for lost.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, tell: Callable[[int, str], None]):
        """
        Args:
            store: all ranks have met at it; the threads have a connection of their own.
            tell: called once, in a thread, with a rank that does not answer and what is known of it. This process ends
                when it returns.
        """
        self._store = store.clone()
        self._rank, self._watched = rank, (rank + 1) % world_size
        self._tell = tell
        self._over = threading.Event()
        self._identity = (os.getpid(), started(os.getpid()), socket.gethostname())
        # Under srun rank 0's process has the store: silence of the store is silence of rank 0. Under torchrun the first
        # node's agent has it, which may be stopped at a terminal while its ranks go on.
        self._agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._answers, self._seen, self._refused = 0, "", False
        # Two threads, because a call waits without end for a store whose process is stopped
        runs = (self._beat, self._watch) if world_size > 1 else ()
        self._threads = [threading.Thread(target=run, name="heartbeat", daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Neither beat nor watch any more, and say so: ranks end at different times, and silence is no fault then.

        Waits for the threads: one that came back from the store while the interpreter shuts down would abort it.
        """
        enter_phase(OVER)
        self._over.set()
        for thread in self._threads:
            thread.join(CLOSING_SECONDS)

    def _beat(self) -> None:
        count, own_key, watched = 0, f"beat/{self._rank}", f"beat/{self._watched}"
        over = False
        while not over:
            over = self._over.wait(BEAT_SECONDS)
            count += 1
            try:
                self._store.set(own_key, json.dumps([count, _phase, *self._identity]))
                self._seen = self._store.get(watched).decode() if self._store.check([watched]) else ""
                self._answers, self._refused = self._answers + 1, False
            except dist.DistError:  # silence, which is counted
                self._refused = True
                with suppress(dist.DistError):  # a connection that is broken stays so
                    self._store = self._store.clone()

    def _watch(self) -> None:
        answers, seen, unreachable, silent = 0, "", 0.0, 0.0
        before = time.monotonic()
        while not self._over.wait(BEAT_SECONDS):
            now = time.monotonic()
            passed, before = min(now - before, 2 * BEAT_SECONDS), now
            unreachable = unreachable + passed if self._answers == answers else 0.0
            if unreachable == 0.0:
                silent = silent + passed if self._seen == seen else 0.0
            answers, seen = self._answers, self._seen
            if silent > self._limit(seen):
                self._lost(self._watched, silent, seen)
                return
            if unreachable > self._limit(seen) and self._agent_has_store and self._refused:
                self._lost(0, unreachable, "", "the store in its node's torchrun")
                return
            if unreachable > self._limit(seen) and self._rank > 0 and not self._agent_has_store:
                self._lost(0, unreachable, seen if self._watched == 0 else "")
                return

    def _limit(self, seen: str) -> float:
        phase = json.loads(seen)[1] if seen else STARTING
        if phase == OVER:
            return math.inf
        return max(heartbeat_seconds(), START_SECONDS) if phase == STARTING else heartbeat_seconds()

    def _lost(self, rank: int, silent: float, seen: str, what: str = "it") -> None:
        if self._over.is_set():
            return
        said, process = f"{what} has not answered for {silent:.0f} s", 0
        if seen:
            _, phase, pid, ticks, host = json.loads(seen)
            said += f", in phase {phase}"
            if host == socket.gethostname() and started(pid) == ticks:
                said += f": its process {pid} is {'stopped (SIGSTOP)' if state(pid) in ('T', 't') else 'stuck'}"
                process = pid
            else:
                said += f": look at process {pid} on {host}"
        try:
            self._tell(rank, said)
        finally:
            if process:  # after the reason is told: its death is what makes the launcher end this process
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)  # the launcher would wait for it
            os._exit(1)  # the main thread may be waiting for that rank
