"""The ranks of a role as the first rank that trains sees them: groups of ranks that compute results together."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import ledger
from hybrid3d.config import Recipe
from hybrid3d.distributed import clone_store
from hybrid3d.launch_environment import CLOSE_SECONDS
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.metrics import Peaks, Span
from hybrid3d.scoring.code import sandbox
from hybrid3d.watch.heartbeat import read_phase
from hybrid3d.workers.channel import Connection, Disconnected, wait
from hybrid3d.workers.messages import Call, End, Join, Joined, Leave, Leaving, Register, Reply, Stop, encode


class WorkerGroup:
    """One start of the ranks that compute results together, and that are lost together.

    Of the role `generation` it is an engine of `rollout.tp` x `rollout.dp` ranks.

    Attributes:
        place: its number among the groups of its role.
        number: different for each start.
        connections: to its ranks, by rank.
        failures: why the processes of its ranks before these ended.
        kept: it was up before the ranks that train were started.
        started: those of the connections whose ranks have started what they serve with.
        lost: a rank of it has been lost, or it was asked to leave.
        lost_in: the phase that its ranks were in when it was lost; empty if that is not known.
        awaited: whether the first rank that trains waited for it then.
    """

    def __init__(self, place: int, number: int, registered: Mapping[int, tuple[Connection, Register]]):
        self.place, self.number = place, number
        self.connections = {rank: connection for rank, (connection, _) in sorted(registered.items())}
        self.failures = [register.failure for _, register in registered.values() if register.failure]
        self.kept = all(register.group_start is not None for _, register in registered.values())
        self.started: set[Connection] = set()
        self.lost, self.lost_in, self.awaited = False, "", False

    @property
    def ranks(self) -> list[int]:
        return list(self.connections)

    @property
    def ready(self) -> bool:
        """Whether all of its ranks have started, and none is known to be lost."""
        return not self.lost and len(self.started) == len(self.connections)

    @property
    def lost_while(self) -> str:
        """What it did when it was lost, as the end of a message."""
        if not self.lost_in:
            return ""
        return f"; it was in phase {self.lost_in}" + (", and rank 0 waited for it" if self.awaited else "")

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        return f"rank {first}" if first == last else f"ranks {first} to {last}"


POLL_SECONDS = 0.05


class RoleClient:
    """All groups of a role. Only the first rank that trains has it.

    A group that is lost is started again by what started its ranks. The threads of connections only change which groups
    there are; all else is called by one thread at a time.

    Attributes:
        confined_by: what confines code that rewards run, on the rank that registered last; None if none is run.
    """

    activity: str  # what its ranks are busy with

    def __init__(self, recipe: Recipe, store: Store, record: RunLogger, role: str):
        self._role, self._ranks, self._size = role, recipe.role_ranks[role], recipe.worker_group_size(role)
        self._store, self._record = clone_store(store), record
        self._runs_code = recipe.reward.name == "code" and recipe.scoring_role == role
        places = len(self._ranks) // self._size
        self._lock = threading.Lock()  # of all that follows, up to those that are lost
        self._active, self._ended = places, False
        self._registered: list[dict[int, tuple[Connection, Register]]] = [{} for _ in range(places)]
        self._groups: list[WorkerGroup | None] = [None] * places
        self._lost: list[tuple[WorkerGroup, float]] = []  # that was not recorded yet, and when
        self._awaiting: dict[Connection, tuple[WorkerGroup, int]] = {}  # whose replies have not been received
        self._spans: dict[int, list[Span]] = defaultdict(list)
        self._peaks: dict[int, dict[str, int]] = {}  # since the last lap
        self._busy_since = self._kept_since = time.time()  # spans that ended before the latter are dropped
        self.confined_by: str | None = None

    # Which groups there are

    def register(self, connection: Connection, register: Register) -> None:
        """Take in a rank that has started; when all of its group are there, start the group."""
        place = (register.rank - self._ranks.start) // self._size
        with self._lock:
            if self._ended:
                connection.close()
                return
            group = self._groups[place]
            if group is not None:
                self._lose(group)
            self._registered[place][register.rank] = connection, register
            self.confined_by = register.confined_by
            self._start_if_complete(place)
        connection.on_disconnect(lambda: self._disconnected(place, register.rank, connection))

    def _start_if_complete(self, place: int) -> None:
        """Start a group that is needed, once its ranks have registered."""
        registered = self._registered[place]
        if place >= self._active or len(registered) < self._size:
            return
        up = {register.group_start for _, register in registered.values()}
        if len(up) > 1:  # a rank of it was lost: the others exit too, and register again
            for rank, (connection, register) in list(registered.items()):
                if register.group_start is not None:
                    del registered[rank]
                    with suppress(Disconnected):
                        connection.send(Leave())
            return
        self._registered[place] = {}
        start = up.pop()
        if start is None:
            start = ledger.count_start(self._store, self._role, place)
        group = WorkerGroup(place, start * len(self._groups) + place, registered)
        self._groups[place] = group
        for connection in group.connections.values():
            with suppress(Disconnected):  # noticed when it is received from
                connection.send(Join(start))

    def _lose(self, group: WorkerGroup) -> None:
        """Give a group up: those of its ranks that are alive exit, as they could only wait for the others."""
        if group.lost:
            return
        group.lost = True
        with suppress(dist.DistError):  # without the store the run ends
            group.lost_in = ", ".join(sorted({read_phase(self._store, rank) for rank in group.ranks} - {""}))
        group.awaited = any(one is group for one, _ in list(self._awaiting.values()))
        self._groups[group.place] = None
        self._lost.append((group, time.time()))
        for connection in group.connections.values():
            connection.disconnect()

    def _disconnected(self, place: int, rank: int, connection: Connection) -> None:
        """Give a group up of which a rank has exited; also while the first rank that trains waits for it."""
        with self._lock:
            group = self._groups[place]
            if group is not None and connection in group.connections.values() and not self._ended:
                self._lose(group)
            if self._registered[place].get(rank, (None,))[0] is connection:
                del self._registered[place][rank]

    def _refresh(self) -> list[WorkerGroup]:
        """Return the groups that are ready; record those that have been lost since the last call."""
        for group in filter(None, self._groups):
            starting = [one for one in group.connections.values() if one not in group.started]
            for connection in wait(starting, 0.0):
                with suppress(Disconnected):  # then its thread loses the group
                    connection.receive_a(Joined)  # all else is received by who asked for it
                    group.started.add(connection)
        with self._lock:
            ready = self._ready()
            lost, self._lost = self._lost, []
        for group, moment in lost:
            self._record_lost(group, moment, len(ready))
            for connection in group.connections.values():
                connection.close()
        return ready

    def _ready(self) -> list[WorkerGroup]:
        return [group for group in self._groups[: self._active] if group is not None and group.ready]

    def _wait_for(self, count: Callable[[], int], event: str, message: str) -> list[WorkerGroup]:
        """Return the groups that are ready, after waiting for so many, which may change meanwhile.

        An event that is not empty is recorded with the message if they are fewer at first.
        """
        while len(ready := self._refresh()) < count():
            if event:
                self._record.event(event, message)
                event = ""
            time.sleep(POLL_SECONDS)
        return ready

    def _record_sandbox(self) -> None:
        """Record what confines code that rewards run, if the ranks of this role run it."""
        if self._runs_code:
            confined_by = self.confined_by or ""
            self._record.event("sandbox", sandbox.warning(confined_by), confined_by=confined_by)

    def _record_lost(self, group: WorkerGroup, moment: float, ready: int) -> None:
        """Record that a group has been lost; so many are left."""
        raise NotImplementedError

    # Calls

    def _send(self, calls: Mapping[WorkerGroup, Call]) -> dict[Connection, tuple[WorkerGroup, int]]:
        """Send calls to all ranks of groups; return the connections that will reply, with their group and rank."""
        sent, encoded = {}, {group: encode(call) for group, call in calls.items()}  # all of them, or none is sent
        for group, data in encoded.items():
            for rank, connection in group.connections.items():
                sent[connection] = group, rank
                with suppress(Disconnected):  # noticed when the reply is received
                    connection.send(data)
        return sent

    def _receive(
        self, sent: Mapping[Connection, tuple[WorkerGroup, int]], stop: Callable[[], bool] | None = None
    ) -> dict[WorkerGroup, list[Reply]]:
        """Return the replies to a call of each group that is not lost, by rank; until `stop`, which ends the calls."""
        waiting, results, stopped = dict(sent), dict[WorkerGroup, dict[int, Reply]](), False
        self._awaiting = waiting
        while waiting:
            if stop is not None and not stopped and stop():
                stopped = True
                for connection in waiting:
                    with suppress(Disconnected):
                        connection.send(Stop())
            for connection in wait(list(waiting), None if stop is None or stopped else POLL_SECONDS):
                group, rank = waiting[connection]
                try:
                    reply = connection.receive_a(Reply)
                except Disconnected:
                    with self._lock:
                        self._lose(group)
                    del waiting[connection]
                    continue
                del waiting[connection]
                results.setdefault(group, {})[rank] = reply
                spans = [*self._spans[rank], *reply.spans]
                self._spans[rank] = [span for span in spans if span[2] > self._kept_since]
                for activity, _, _ in reply.spans if reply.peak_memory else ():
                    peaks = self._peaks.setdefault(rank, {})
                    peaks[activity] = max(peaks.get(activity, 0), reply.peak_memory)
        whole = {group: found for group, found in results.items() if len(found) == len(group.ranks)}
        return {group: [found[rank] for rank in group.ranks] for group, found in whole.items()}

    def awaited(self) -> tuple[str, Sequence[int]] | None:
        """Return what this rank waits for, and the ranks that it comes from; any thread may call it."""
        ranks = sorted(rank for _, rank in list(self._awaiting.values()))
        return ("replies", ranks) if ranks else None

    # What is seen, and the end

    def spans(self, begin: float, end: float) -> dict[int, list[Span]]:
        """Return what each rank did between two moments; it waited in the rest of the time."""
        found: dict[int, list[Span]] = {}
        for rank in self._ranks:
            found[rank], last = [], begin
            for activity, start, stop in self._spans[rank]:
                start, stop = max(start, last), min(stop, end)
                if start < stop:
                    found[rank] += [("wait", last, start), (activity, start, stop)]
                    last = stop
            found[rank].append(("wait", last, end))
        return found

    def lap_busy_seconds(self) -> float:
        """Return the longest time that a rank has been busy with the role's activity since the last call."""
        since, self._busy_since = self._busy_since, time.time()
        self._kept_since = since  # it is in the step before, and so before what `spans` is asked for next
        return max(
            sum(stop - max(start, since) for name, start, stop in spans if name == self.activity and stop > since)
            for spans in [*self._spans.values(), []]
        )

    def lap_peaks(self) -> dict[int, Peaks]:
        """Return the most bytes of memory that each rank has used since the last call, by activity."""
        peaks, self._peaks = self._peaks, {}
        return dict(peaks)

    def close(self) -> None:
        """End the run on all ranks of the role; those that are being started exit by themselves."""
        with self._lock:
            self._ended = True
            ready = [group for group in self._groups if group is not None and group.ready]  # also to leave
            waiting = {one for group in ready for one in group.connections.values()}
            groups = [group.connections for group in self._groups if group is not None and not group.ready]
            registered = [{rank: one for rank, (one, _) in ranks.items()} for ranks in self._registered]
            for connection in [one for ranks in (*groups, *registered) for one in ranks.values()]:
                connection.disconnect()
        for connection in waiting:
            with suppress(Disconnected):
                connection.send(End())
        end = time.monotonic() + CLOSE_SECONDS
        while waiting and time.monotonic() < end:
            for connection in wait(list(waiting), POLL_SECONDS):
                try:
                    connection.receive_a(Leaving)
                except Disconnected:
                    waiting.remove(connection)
