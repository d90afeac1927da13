"""Names ranks that do not move: in which phase and function, and which others wait, before a timeout ends the run.

No code reports its progress. A thread of each rank looks once a second at the stack of the main thread, which has not
moved if the same call of the same function is still at the same instruction: a collective, a read, a computation in C.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType

import torch.distributed as dist

from hybrid3d.distributed import RANKS_PER_POLL_SECOND
from hybrid3d.launch_environment import heartbeat_seconds
from hybrid3d.run.heartbeat import OVER, STARTING, current_phase

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 1.0
POLL_SECONDS = 5.0  # between two looks at what other ranks say
MAX_NAMED = 8  # places of ranks in a message
# Where a rank waits for others: anywhere in the stack, and in the innermost function of hybrid3d. On GPUs it may also
# do so elsewhere, where it first needs a result.
WAITING_LIBRARIES = ("torch.distributed.", "vllm.distributed.")
WAITING_MODULES = ("hybrid3d.roles.split.", "hybrid3d.roles.weight_sync.")
_COUNT, _ALL_STAND = "standstill/count", "standstill/all"  # keys of the store

Report = Callable[[str, dict[str, object]], None]


@dataclass(frozen=True)
class Standstill:
    """Where the main thread of a rank stands.

    Attributes:
        where: the innermost function of hybrid3d, and what it has called.
        waits: whether it waits for other ranks there.
        seconds: for which it had stood when this was told.
    """

    phase: str
    where: str
    waits: bool
    seconds: float

    def __str__(self) -> str:
        return f"phase {self.phase}, in {self.where}"


class StackSampler:
    """Tells for how long a thread has been in the same call, at the same instruction."""

    def __init__(self, thread_id: int):
        self._thread_id = thread_id
        self._seen: tuple[int, int] | None = None  # address of the innermost frame, and the instruction
        self._since = self._before = time.monotonic()
        self._held: FrameType | None = None  # only once it seems to stand, as a frame keeps its tensors

    def sample(self, limit: float) -> tuple[FrameType, float] | None:
        """Return the innermost frame and the seconds since the thread has moved, if they are more than `limit`.

        The first time that the limit is exceeded only prepares the answer of the next call: by then the address of a
        frame that has ended could be that of another one.
        """
        now, frame = time.monotonic(), sys._current_frames().get(self._thread_id)
        passed, self._before = now - self._before, now
        if passed > 2 * SAMPLE_SECONDS:  # this process was suspended itself
            self._since += passed
        seen = None if frame is None else (id(frame), frame.f_lasti)
        if seen is None or seen != self._seen or (self._held is not None and self._held is not frame):
            self._seen, self._since, self._held = seen, now, None
            return None
        if now - self._since <= limit or frame is None:
            return None
        if self._held is None:
            self._held = frame
            return None
        return frame, now - self._since


def describe_frame(frame: FrameType) -> tuple[str, bool]:
    """Return where a thread is, by its innermost frame, and whether it waits for other ranks there."""
    inner, modules = frame, list[str]()
    ours: FrameType | None = None
    found: FrameType | None = frame
    while found is not None:
        module = _module(found)
        modules.append(module)
        if ours is None and module.startswith("hybrid3d."):
            ours = found
        found = found.f_back
    where = _name(inner) if ours is None or ours is inner else f"{_name(ours)} > {_name(inner)}"
    waits = any(module.startswith(WAITING_LIBRARIES) for module in modules)
    return where, waits or (ours is not None and _module(ours).startswith(WAITING_MODULES))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}:{frame.f_lineno}"


class Watchdog:
    """Watches the main thread of this rank; on rank 0 also tells about all ranks that stand.

    A rank that stands in work of its own is named, with the stacks of its threads in its log. Ranks that wait are named
    only if none is left that they could wait for. Nothing is ended: that is left to timeouts and heartbeats.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, report: Report):
        """Start the thread.

        Args:
            store: the store of the rendezvous; the thread uses a connection of its own.
            world_size: the ranks of all roles.
            report: called in the thread, on rank 0, with a message and its fields.
        """
        self._store, self._rank, self._world_size, self._report = store.clone(), rank, world_size, report
        self._limit, self._poll_seconds = heartbeat_seconds(), max(POLL_SECONDS, world_size / RANKS_PER_POLL_SECOND)
        self._sampler = StackSampler(threading.main_thread().ident or 0)
        self._told: Standstill | None = None  # what the others know
        self._dumped = False
        self._named: set[int] = set()  # ranks in the last report
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join(POLL_SECONDS)

    def _run(self) -> None:
        polled = time.monotonic()
        with suppress(dist.DistError):
            self._forget_process_before()
        while not self._stopped.wait(SAMPLE_SECONDS):
            phase = current_phase()
            stands = None if phase in (STARTING, OVER) else self._sampler.sample(self._limit)
            try:
                if stands is None:
                    self._move()
                elif self._told is None:
                    self._stand(Standstill(phase, *describe_frame(stands[0]), round(stands[1], 1)))
                if time.monotonic() - polled > self._poll_seconds:
                    polled = time.monotonic()
                    self._poll()
            except dist.DistError:  # the heartbeat finds out whether the store is lost
                with suppress(dist.DistError):
                    self._store = self._store.clone()

    def _forget_process_before(self) -> None:
        """Take back what a process of this rank has told that was killed."""
        if self._store.check([_key(self._rank)]) and self._store.get(_key(self._rank)):
            self._store.set(_key(self._rank), "")
            self._store.add(_COUNT, -1)

    def _stand(self, standstill: Standstill) -> None:
        self._told, self._dumped = standstill, False
        self._store.set(_key(self._rank), json.dumps(asdict(standstill)))
        self._store.add(_COUNT, 1)
        if not standstill.waits:
            self._dump()

    def _move(self) -> None:
        if self._told is not None:
            told, self._told = self._told, None
            self._store.set(_key(self._rank), "")
            self._store.add(_COUNT, -1)
            if not told.waits:
                logger.info("the main thread has moved again: it was in %s", told)

    def _dump(self) -> None:
        """Write the Python stacks of all threads to this rank's log."""
        if not self._dumped:
            self._dumped = True
            logger.warning("the main thread has not moved for %g s or more: %s", self._limit, self._told)
            faulthandler.dump_traceback(all_threads=True)

    def _poll(self) -> None:
        if self._told is not None and self._store.check([_ALL_STAND]):
            self._dump()
        if self._rank > 0:
            return
        standing = self._read() if int(self._store.add(_COUNT, 0)) else {}
        everyone = len(standing) == self._world_size
        working = {rank for rank, found in standing.items() if not found.waits}
        culprits = working or (set(standing) if everyone else set())
        if everyone:
            self._store.set(_ALL_STAND, "")
        else:
            self._store.delete_key(_ALL_STAND)
        if culprits - self._named:
            self._report(_message(standing, everyone), {"ranks": sorted(culprits), "places": _places(standing)})
        self._named = culprits

    def _read(self) -> dict[int, Standstill]:
        keys = {rank: _key(rank) for rank in range(self._world_size)}
        found = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        return {rank: Standstill(**json.loads(said)) for rank, said in found.items() if said}


def _key(rank: int) -> str:
    return f"standstill/{rank}"


def _places(standing: Mapping[int, Standstill]) -> dict[str, str]:
    return {str(rank): str(found) for rank, found in standing.items()}


def _message(standing: Mapping[int, Standstill], everyone: bool) -> str:
    """Return which ranks stand, where, and for how long; where all do, all of them, else those that do not wait."""
    working = {rank: found for rank, found in standing.items() if not found.waits}
    named = working or standing
    seconds = max(found.seconds for found in named.values())
    lines = [f"rank {rank}: {found}" for rank, found in list(named.items())[:MAX_NAMED]]
    if len(named) > MAX_NAMED:
        lines.append(f"and {len(named) - MAX_NAMED} more ranks")
    waiting = [rank for rank, found in standing.items() if found.waits]
    if working:
        subject = "one rank has" if len(working) == 1 else f"{len(working)} ranks have"
        others = f", and {len(waiting)} wait for others" if waiting else ""
        start = f"{subject} not moved for {seconds:.0f} s{others}"
    else:
        start = f"all ranks have waited for each other for {seconds:.0f} s"
    logs = "all logs" if everyone else "their logs"
    return "\n  ".join([f"{start} (Python stacks are in {logs}):", *lines])
