"""Names ranks that do not move, with phase and function, before a timeout ends the run; and ranks that are slow.

No code reports its progress. A thread of each rank looks several times a second at the stack of the main thread, which
stands if the same call of its innermost Python function is still at the same instruction: a collective, a read, a
computation in C. A loop of short calls within one function looks the same. The samples also count the seconds in which
the rank works and does not wait for others, by which slow ranks are found (`run/slow_ranks.py`).
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType

import torch.distributed as dist

from hybrid3d.distributed import RANKS_PER_POLL_SECOND
from hybrid3d.launch_environment import heartbeat_seconds, wants_native_stacks
from hybrid3d.run import slow_ranks
from hybrid3d.run.heartbeat import OVER, STARTING, current_phase
from hybrid3d.run.native_stacks import write_native_stacks

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.1
MAX_PASSED = 2.0  # seconds that count between two samples; more passes where the process was suspended
POLL_SECONDS = 5.0  # between two times that ranks that stand tell so, and that rank 0 looks
STALE_POLLS = 2  # after which a rank that has told nothing more has moved, or is lost
NATIVE_STACKS_AFTER = 3  # times that rank 0 was told, so that it has named the rank that is stopped for them
MAX_NAMED = 8  # ranks, and places, in a message
# Where a rank waits for others: anywhere in the stack, in its innermost function, and in the innermost one of hybrid3d.
# On GPUs it may also do so elsewhere, where it first needs a result.
WAITING_ANYWHERE = ("torch.distributed.distributed_c10d", "vllm.distributed.")
WAITING_INNERMOST = (
    *("megatron.core.distributed.", "megatron.core.pipeline_parallel.", "megatron.core.tensor_parallel."),
    "hybrid3d.reshard.transport",
)
WAITING_OURS = ("hybrid3d.roles.split.", "hybrid3d.roles.weight_sync.")
_TOLD, _ALL_STAND = "standstill/told", "standstill/all"  # keys of the store

Report = Callable[[str, str, dict[str, object]], None]


@dataclass(frozen=True)
class Standstill:
    """Where the main thread of a rank stands.

    Attributes:
        where: the innermost function of hybrid3d, and what it has called.
        waits: whether it waits for other ranks there.
        seconds: for which it has stood.
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
        self._seconds = 0.0
        # The frame itself is compared from half of the limit on, as a later one may have its address. It keeps its
        # tensors, and those of its callers, until the next sample after it has ended.
        self._held: FrameType | None = None

    def sample(self, passed: float, limit: float) -> tuple[FrameType, float] | None:
        """Return the innermost frame and the seconds since the thread has moved, if they are more than `limit`.

        Args:
            passed: seconds since the last sample, in which the thread could run.
        """
        frame = sys._current_frames().get(self._thread_id)
        seen = None if frame is None else (id(frame), frame.f_lasti)
        if frame is None or seen != self._seen or (self._held is not None and self._held is not frame):
            self._seen, self._seconds, self._held = seen, 0.0, None
            return None
        self._seconds += passed
        if self._held is None and self._seconds > limit / 2:
            self._held, self._seconds = frame, limit / 2  # known to be the same from here on
        return (frame, self._seconds) if self._seconds > limit else None


def describe_frame(frame: FrameType) -> tuple[str, bool]:
    """Return where a thread is, by its innermost frame, and whether it waits for other ranks there."""
    waits, ours = waits_for_others(frame)
    where = _name(frame) if ours is None or ours is frame else f"{_name(ours)} > {_name(frame)}"
    return where, waits


def waits_for_others(frame: FrameType) -> tuple[bool, FrameType | None]:
    """Return whether a thread waits for other ranks, by its innermost frame, and its innermost frame of hybrid3d."""
    waits, ours = _module(frame).startswith(WAITING_INNERMOST), None
    found: FrameType | None = frame
    while found is not None:
        module = _module(found)
        waits = waits or module.startswith(WAITING_ANYWHERE)
        if ours is None and module.startswith("hybrid3d."):
            ours = found
            waits = waits or module.startswith(WAITING_OURS)
        found = found.f_back
    return waits, ours


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}:{frame.f_lineno}"


@dataclass
class Told:
    """What rank 0 has read of a rank.

    Attributes:
        message: the last one, as it was in the store.
        polls: for how many it has been the same.
        seen: for how many the rank has stood.
    """

    message: str = ""
    polls: int = 0
    seen: int = 0


class Watchdog:
    """Watches the main thread of this rank; on rank 0 also tells about all ranks that stand.

    A rank that stands in work of its own is named, with the stacks of its threads in its log. Ranks that wait are named
    only if none is left that they could wait for. A rank is named once at a place in a run, and not while another one
    that stands there was named. Nothing is ended: that is left to timeouts and heartbeats.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, report: Report):
        """Start the thread, which watches the one that calls this.

        Args:
            store: the store of the rendezvous; the thread uses a connection of its own.
            world_size: the ranks of all roles.
            report: called in the thread, on rank 0, with an event, a message and the event's fields.
        """
        self._store, self._rank, self._world_size, self._report = store.clone(), rank, world_size, report
        self._limit, self._poll_seconds = heartbeat_seconds(), max(POLL_SECONDS, world_size / RANKS_PER_POLL_SECOND)
        self._thread_id = threading.get_ident()
        self._sampler = StackSampler(self._thread_id)
        self._standing: Standstill | None = None  # of this rank
        self._dumped, self._times_told = False, 0  # whether its stacks are in the log; how often rank 0 was told
        self._told: dict[int, Told] = {}  # of ranks that stand, on rank 0
        self._messages = 0  # how many there were at the last poll
        self._named: set[tuple[int, str]] = set()  # ranks and places
        self._steps_told = 0
        self._steps_seen = self._looks_left = 0  # on rank 0
        self._slow: set[tuple[int, str]] = set()  # ranks that were named, and in which phase
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join(POLL_SECONDS)

    def _run(self) -> None:
        next_poll, before = time.monotonic() + self._poll_seconds, time.monotonic()
        while not self._stopped.wait(SAMPLE_SECONDS):
            now = time.monotonic()
            self._sample(min(now - before, MAX_PASSED))
            before = now
            if time.monotonic() > next_poll:
                next_poll = time.monotonic() + self._poll_seconds
                try:
                    self._tell()
                    if self._rank == 0:
                        self._look()
                        self._look_for_slow_ranks()
                except dist.DistError:  # the heartbeat finds out whether the store is lost
                    with suppress(dist.DistError):
                        self._store = self._store.clone()
                before = time.monotonic()

    def _sample(self, passed: float) -> None:
        phase = current_phase()
        if phase in slow_ranks.PHASES:
            innermost = sys._current_frames().get(self._thread_id)
            if innermost is not None and not waits_for_others(innermost)[0]:
                slow_ranks.record.add_seconds(phase, passed)
        found = None if phase in (STARTING, OVER) else self._sampler.sample(passed, self._limit)
        if found is None:
            self._standing, self._dumped, self._times_told = None, False, 0
            return
        frame, seconds = found
        where, waits = describe_frame(frame)
        self._standing = Standstill(phase, where, waits, round(seconds, 1))
        if not waits:
            self._dump(self._standing)

    def _dump(self, standing: Standstill) -> None:
        """Write the stacks of all threads to this rank's log, once for each standstill."""
        if not self._dumped:
            self._dumped = True
            message = "the main thread of process %d has not moved for %.0f s: %s"
            logger.warning(message, os.getpid(), standing.seconds, standing)
            faulthandler.dump_traceback(all_threads=True)

    def _tell(self) -> None:
        """Tell rank 0 of new steps, and that this rank stands; what is not told again counts as moved."""
        if self._steps_told != slow_ranks.record.begun:
            self._steps_told = slow_ranks.record.begun
            self._store.set(f"work/{self._rank}", slow_ranks.record.message())
        if self._standing is not None:
            self._store.set(_key(self._rank), json.dumps(asdict(self._standing)))
            self._store.add(_TOLD, 1)
            if self._store.check([_ALL_STAND]):
                self._dump(self._standing)
            self._times_told += 1
            if self._dumped and self._times_told == NATIVE_STACKS_AFTER and wants_native_stacks():
                write_native_stacks()

    def _look(self) -> None:
        """Read which ranks stand, and report places that were not named before."""
        messages, self._messages = self._messages, int(self._store.add(_TOLD, 0))
        if self._messages == messages and not self._told:
            return
        for rank in range(self._world_size):
            key, told = _key(rank), self._told.get(rank, Told())
            message = self._store.get(key).decode() if self._store.check([key]) else ""
            polls = told.polls + 1 if message == told.message else 0
            self._told[rank] = Told(message, polls, told.seen + 1 if message and polls < STALE_POLLS else 0)
        standing = {rank: Standstill(**json.loads(told.message)) for rank, told in self._told.items() if told.seen > 1}
        if not any(told.seen for told in self._told.values()):
            self._told = {}
        everyone = len(standing) == self._world_size
        working = {rank: found for rank, found in standing.items() if not found.waits}
        if everyone:
            self._store.set(_ALL_STAND, "")
        else:
            self._store.delete_key(_ALL_STAND)
        named = working or (standing if everyone else {})
        places = {(rank, str(found)) for rank, found in named.items()}
        known = {place for _, place in places & self._named}  # where a rank stands that was named
        if any(place not in known for _, place in places):
            self._named |= places
            fields = {"ranks": sorted(named), "places": _places(standing)}
            self._report("standstill", _message(standing, everyone), fields)

    def _look_for_slow_ranks(self) -> None:
        """Report ranks that are slow in a phase, once each; look twice a step, as others tell later than this rank."""
        if self._steps_seen != slow_ranks.record.begun:
            self._steps_seen, self._looks_left = slow_ranks.record.begun, 2
        if not self._looks_left:
            return
        self._looks_left -= 1
        keys = {rank: f"work/{rank}" for rank in range(self._world_size)}
        told = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        works = {rank: slow_ranks.read_message(message) for rank, message in told.items()}
        for slow in slow_ranks.find_slow_ranks(works, SAMPLE_SECONDS):
            if (slow.rank, slow.phase) not in self._slow:
                self._slow.add((slow.rank, slow.phase))
                logger.warning("%s", slow)
                self._report("slow_rank", str(slow), asdict(slow))


def _key(rank: int) -> str:
    return f"standstill/{rank}"


def _places(standing: Mapping[int, Standstill]) -> dict[str, list[int]]:
    """Return the ranks at each place."""
    found: dict[str, list[int]] = {}
    for rank, place in standing.items():
        found.setdefault(str(place), []).append(rank)
    return found


def _message(standing: Mapping[int, Standstill], everyone: bool) -> str:
    """Return which ranks stand, where, and for how long; where all do, all of them, else those that do not wait."""
    working = {rank: found for rank, found in standing.items() if not found.waits}
    named = working or standing
    seconds, waiting = max(found.seconds for found in named.values()), len(standing) - len(working)
    if working:
        subject = "one rank has" if len(working) == 1 else f"{len(working)} ranks have"
        others = f", and {waiting} wait for others" if waiting else ""
        start = f"{subject} not moved for {seconds:.0f} s{others}"
    else:
        start = f"all ranks have waited for each other for {seconds:.0f} s"
    lines = []
    for place, ranks in list(_places(named).items())[:MAX_NAMED]:
        more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
        listed = ", ".join(map(str, ranks[:MAX_NAMED]))
        lines.append(f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}: {place}")
    logs = "all logs" if everyone else "their logs"
    return "\n  ".join([f"{start} (Python stacks are in {logs}):", *lines])
