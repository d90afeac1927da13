"""Names ranks that do not move, with phase and function; ends a run in which all wait for each other; names slow ranks.

No code reports its progress. A thread of each rank looks several times a second at the stack of the main thread, which
stands if the same call of its innermost Python function is still at the same instruction: a collective, a read, a
computation in C. A loop of short calls within one function looks the same. The samples also count the seconds in which
the rank works and does not wait for others, by which slow ranks are found (`watch/work_meter.py`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import ledger
from hybrid3d.distributed import RANKS_PER_POLL_SECOND, clone_store
from hybrid3d.launch_environment import ANSWER_SECONDS, START_SECONDS, heartbeat_seconds, wants_native_stacks
from hybrid3d.watch import work_meter
from hybrid3d.watch.heartbeat import OVER, STARTING, current_phase
from hybrid3d.watch.stalls import (
    Standstill,
    Wait,
    describe_frame,
    find_wait,
    places,
    standstill_message,
    waits,
    waits_for,
    waits_for_others,
)

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.1
MAX_PASSED = 2.0  # seconds that count between two samples; more passes where the process was suspended
POLL_SECONDS = 5.0  # between two times that ranks that stand tell so, and that rank 0 looks
STALE_POLLS = 2  # after which a rank that has told nothing more has moved, or is lost
NATIVE_STACKS_AFTER = 3  # times that rank 0 was told, so that it has named the rank that is stopped for them
NATIVE_STACKS_SECONDS = 20  # for which the process may be stopped: less than a heartbeat's timeout
NATIVE_FRAMES = 40  # of each thread, the innermost ones
PR_SET_PTRACER, ANY = 0x59616D61, -1  # of prctl(2)

Report = Callable[[str, str, dict[str, object]], None]


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

        In `passed` seconds since the last sample the thread could run.
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


@dataclass
class RankStatus:
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
    that stands there was named. A wait has no limit while any rank works; heartbeats find ranks that are lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        report: Report,
        role_of: Callable[[int], str] = lambda rank: "",
        on_deadlock: Callable[[str], None] = lambda message: None,
        late: range = range(0),
    ):
        """Start the thread, which watches the one that calls this, and uses a connection of its own to the store.

        Args:
            world_size: the ranks of all roles.
            report: called in the thread, on rank 0, with an event, a message and the event's fields.
            role_of: returns the role of a rank, for messages; empty if it goes without saying.
            on_deadlock: called in the thread, on rank 0, with a message when no rank can go on.
            late: ranks that may not be there.
        """
        self._store, self._rank, self._world_size, self._report = clone_store(store), rank, world_size, report
        self._role_of, self._on_deadlock = role_of, on_deadlock
        self._beats = dict.fromkeys(late, "")  # the last ones, on rank 0
        self._told_from = heartbeat_seconds() / 2  # so that whom the others wait for is known when one is named
        self._limit, self._poll_seconds = heartbeat_seconds(), max(POLL_SECONDS, world_size / RANKS_PER_POLL_SECOND)
        self._thread_id = threading.get_ident()
        self._sampler = StackSampler(self._thread_id)
        self._standing: Standstill | None = None  # of this rank
        self._dumped, self._times_told = False, 0  # whether its stacks are in the log; how often rank 0 was told
        self._has_told = True  # whether rank 0 may have a message that this rank stands, maybe from an earlier process
        self._told: dict[int, RankStatus] = {}  # of ranks that stand, on rank 0
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

    def describe_lost(self, lost: int) -> str:
        """Return the role of a rank that does not answer, and which ranks wait for it, as the end of a message.

        Any thread may call it, also when the store does not answer: then only of this rank it is known.
        """
        own = self._standing
        known = {} if own is None else {self._rank: own}

        def read() -> None:
            found = {}
            with suppress(dist.DistError):
                store = clone_store(self._store)
                for rank in set(range(self._world_size)) - {self._rank, lost}:
                    if told := ledger.read_standstill(store, rank):
                        found[rank] = msgspec.json.decode(told, type=Standstill)
            known.update(found)

        reading = threading.Thread(target=read, name="waits", daemon=True)
        reading.start()
        reading.join(ANSWER_SECONDS)
        role = self._role_of(lost)
        return (f"; its role is {role}" if role else "") + waits_for(lost, dict(sorted(known.items())))

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
                        self._store = clone_store(self._store)
                before = time.monotonic()

    def _sample(self, passed: float) -> None:
        phase = current_phase()
        if phase in work_meter.PHASES:
            innermost = sys._current_frames().get(self._thread_id)
            if innermost is not None and not waits_for_others(innermost)[0]:
                work_meter.record.add_seconds(phase, passed)
        found = None if phase in (STARTING, OVER) else self._sampler.sample(passed, self._told_from)
        if found is None:
            self._standing, self._dumped, self._times_told = None, False, 0
            return
        frame, seconds = found
        where, is_waiting = describe_frame(frame)
        wait = _find_wait(frame) if is_waiting else None
        self._standing = Standstill(phase, where, is_waiting, round(seconds, 1), work_meter.record.step, wait)
        if not is_waiting and seconds > self._limit:
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
        if self._steps_told != work_meter.record.begun:
            self._steps_told = work_meter.record.begun
            ledger.tell_work(self._store, self._rank, work_meter.record.message())
        standing = self._standing
        if standing is None and self._has_told:
            ledger.tell_standstill(self._store, self._rank, "")
        self._has_told = standing is not None
        if standing is not None:
            ledger.tell_standstill(self._store, self._rank, msgspec.json.encode(standing).decode())
            if standing.seconds > self._limit and ledger.do_all_stand(self._store):
                self._dump(standing)
            self._times_told += self._dumped
            if self._times_told == NATIVE_STACKS_AFTER and wants_native_stacks():
                write_native_stacks()

    def _look(self) -> None:
        """Read which ranks stand, and report places that were not named before."""
        messages, self._messages = self._messages, ledger.count_standstills(self._store)
        if self._messages == messages and not self._told:
            return
        for rank in range(self._world_size):
            told, message = self._told.get(rank, RankStatus()), ledger.read_standstill(self._store, rank)
            polls = told.polls + 1 if message == told.message else 0
            self._told[rank] = RankStatus(message, polls, told.seen + 1 if message and polls < STALE_POLLS else 0)
        found = {r: msgspec.json.decode(told.message, type=Standstill) for r, told in self._told.items() if told.seen}
        standing = {r: place for r, place in found.items() if place.seconds > self._limit and self._told[r].seen > 1}
        known = {rank: place for rank, place in found.items() if place.waits or rank in standing}
        if not any(told.seen for told in self._told.values()):
            self._told = {}
        everyone = len(standing.keys() | self._find_absent()) == self._world_size
        working = {rank: place for rank, place in standing.items() if not place.waits}
        ledger.tell_all_stand(self._store, everyone)
        named = working or (standing if everyone else {})
        at = {(rank, str(place)) for rank, place in named.items()}
        seen = {place for _, place in at & self._named}  # where a rank stands that was named
        if any(place not in seen for _, place in at):
            self._named |= at
            steps = [place.step for place in named.values() if place.step is not None]
            fields: dict[str, object] = {"ranks": sorted(named), "places": places(known), "waits": waits(known)}
            fields |= {"step": max(steps)} if steps else {}
            self._report("standstill", standstill_message(named, known, everyone, self._role_of), fields)
        if everyone and not working and min(place.seconds for place in standing.values()) > START_SECONDS:
            self._on_deadlock(standstill_message(standing, known, everyone, self._role_of))

    def _find_absent(self) -> set[int]:
        """Return which of the ranks that may not be there are not: their heartbeats are those of the last call."""
        before, self._beats = self._beats, {rank: ledger.read_beat(self._store, rank) for rank in self._beats}
        return {rank for rank, beat in self._beats.items() if beat in ("", before[rank])}

    def _look_for_slow_ranks(self) -> None:
        """Report ranks that are slow in a phase, once each; look twice a step, as others tell later than this rank."""
        if self._steps_seen != work_meter.record.begun:
            self._steps_seen, self._looks_left = work_meter.record.begun, 2
        if not self._looks_left:
            return
        self._looks_left -= 1
        told = ledger.read_works(self._store, range(self._world_size))
        works = {rank: msgspec.json.decode(message, type=work_meter.Work) for rank, message in told.items()}
        for slow in work_meter.find_slow_ranks(works, SAMPLE_SECONDS):
            if (slow.rank, slow.phase) not in self._slow:
                self._slow.add((slow.rank, slow.phase))
                logger.warning("%s", slow)
                self._report("slow_rank", str(slow), asdict(slow))


def _find_wait(frame: FrameType) -> Wait | None:
    """Return what `find_wait` does, or None where it fails: without it a rank is named all the same."""
    try:
        return find_wait(frame)
    except Exception:
        logger.exception("it is not known what this rank waits for")
        return None


def write_native_stacks() -> None:
    """Write the C stacks of all threads to stderr; this process is stopped meanwhile, and goes on afterwards."""
    pid = str(os.getpid())
    if shutil.which("py-spy"):
        command = ["py-spy", "dump", "--native", "--pid", pid]
    elif shutil.which("gdb"):
        command = ["gdb", "-p", pid, "-batch", "-nx", "-ex", f"thread apply all bt {NATIVE_FRAMES}"]
    else:
        logger.warning("no C stacks, because neither py-spy nor gdb is installed: `pip install py-spy`")
        return
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, 0, 0, 0)  # some kernels let only ancestors look, unless allowed
    sys.stderr.flush()
    # `timeout`, as this process cannot watch the time while it is stopped
    command = ["timeout", "--signal=KILL", str(NATIVE_STACKS_SECONDS), *command]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, check=False)
    if done.returncode:
        logger.warning("%s has failed, with exit code %d", command[3], done.returncode)
