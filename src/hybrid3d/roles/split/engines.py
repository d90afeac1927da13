"""The engines of a run, as the first rank that trains sees them: which there are, and what they are asked."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.generation.partial_rollout import Prompt
from hybrid3d.generation.replicas import Advanced, Answers, Work
from hybrid3d.roles.split.connections import Connection, Disconnected, Server, wait
from hybrid3d.roles.split.elastic_sync import Members, tell_lost
from hybrid3d.roles.split.engine import Engine
from hybrid3d.roles.split.messages import Call, End, Join, Joined, Leave, Leaving, Register, Reply, Stop
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.run.record import Record
from hybrid3d.run.timeline import Span

POLL_SECONDS = 0.05
CLOSE_SECONDS = 60  # within which engines have shut down
KEPT_SPANS = 100  # of each rank
_EPOCHS = "sync/epochs"  # key of the store, with the number of the last one


class Engines:
    """Implements `Replicas` for all engines of a run. Only the first rank that trains has it.

    An engine that is lost is started again by what started its ranks, and takes part from the next sync on. The threads
    of connections only change which engines there are; all else is called by one thread at a time.

    Attributes:
        confined_by: what confines code that rewards run, on the rank that registered last; None if none is run.
        peak_memory: the most bytes that a rank has used.
    """

    def __init__(self, recipe: Recipe, store: dist.Store, record: Record, start: int):
        """
        Args:
            start: number of this start of the ranks that train.
        """
        rollout, ranks = recipe.rollout, recipe.role_ranks["generation"]
        assert rollout is not None, "checked when the recipe was read"
        self._size, self._per_engine = rollout.tp * rollout.dp, rollout.dp
        self._store, self._record, self._first = store.clone(), record, ranks.start
        self._training = tuple(recipe.role_ranks["train"])
        places = len(ranks) // self._size
        self._lock = threading.Lock()  # of all that follows, up to the engines that take part
        self._active, self._ended = recipe.active_generation_ranks // self._size, False
        self._registered: list[dict[int, tuple[Connection, Register]]] = [{} for _ in range(places)]
        self._engines: list[Engine | None] = [None] * places
        self._lost: list[tuple[Engine, float]] = []  # that was not recorded yet, and when
        self._epoch = 0
        self._taking_part: list[Engine] = []  # in the last sync
        self._had_sync = False
        self._syncing: dict[Connection, tuple[Engine, int]] = {}
        self._spans: dict[int, list[Span]] = defaultdict(list)
        self.confined_by: str | None = None
        self.peak_memory = 0
        self._server = Server(store, start, self._register)

    # Which engines there are

    def _register(self, connection: Connection) -> None:
        """Take in a rank that has started; when all of its engine are there, start the engine."""
        try:
            register: Register = connection.receive()
        except Disconnected:
            connection.close()
            return
        place = (register.rank - self._first) // self._size
        with self._lock:
            if self._ended:
                connection.close()
                return
            engine = self._engines[place]
            if engine is not None:
                self._lose(engine)
            self._registered[place][register.rank] = connection, register
            self.confined_by = register.confined_by
            self._start_if_complete(place)
        connection.on_disconnect(lambda: self._disconnected(place, register.rank, connection))

    def _start_if_complete(self, place: int) -> None:
        """Start an engine that is needed, once its ranks have registered."""
        registered = self._registered[place]
        if place >= self._active or len(registered) < self._size:
            return
        up = {register.engine_start for _, register in registered.values()}
        if len(up) > 1:  # a rank of it was lost: the others exit too, and register again
            for rank, (connection, register) in list(registered.items()):
                if register.engine_start is not None:
                    del registered[rank]
                    with suppress(Disconnected):
                        connection.send(Leave())
            return
        self._registered[place] = {}
        start = up.pop()
        if start is None:
            start = self._store.add(f"engines/{place}/starts", 1) - 1
        engine = Engine(place, start * len(self._engines) + place, registered)
        self._engines[place] = engine
        for connection in engine.connections.values():
            with suppress(Disconnected):  # noticed when it is received from
                connection.send(Join(start))

    def _lose(self, engine: Engine) -> None:
        """Give an engine up: those of its ranks that are alive exit, as they could only wait for the others."""
        if engine.lost:
            return
        engine.lost = True
        self._engines[engine.place] = None
        self._lost.append((engine, time.time()))
        for connection in engine.connections.values():
            connection.disconnect()
        if engine in self._taking_part:
            with suppress(dist.DistError):  # without the store the run ends
                tell_lost(self._store, self._epoch)

    def _disconnected(self, place: int, rank: int, connection: Connection) -> None:
        """Give an engine up of which a rank has exited; also while this rank waits for it in a sync."""
        with self._lock:
            engine = self._engines[place]
            if engine is not None and connection in engine.connections.values() and not self._ended:
                self._lose(engine)
            if self._registered[place].get(rank, (None,))[0] is connection:
                del self._registered[place][rank]

    def _set_active(self, ranks: int) -> None:
        """Let so many ranks generate: start engines once theirs have registered, or let the last engines go."""
        left = []
        with self._lock:
            self._active = ranks // self._size
            for place, engine in enumerate(self._engines):
                if place < self._active:
                    if engine is None:
                        self._start_if_complete(place)
                elif engine is not None and engine.ready:  # one that is starting goes once it has started
                    engine.lost, self._engines[place] = True, None
                    left.append(engine)
                    for connection in engine.connections.values():
                        with suppress(Disconnected):
                            connection.send(Leave())
        for engine in left:
            message = f"{engine} stopped generating: roles.generation.active_ranks={ranks}"
            self._record.event("engine_left", message, ranks=engine.ranks)

    def _refresh(self) -> list[Engine]:
        """Return the engines that are ready; record those that have been lost since the last call."""
        for engine in filter(None, self._engines):
            starting = [one for one in engine.connections.values() if one not in engine.started]
            for connection in wait(starting, 0.0):
                with suppress(Disconnected):  # then its thread loses the engine
                    assert isinstance(connection.receive(), Joined), "all else is received by who asked for it"
                    engine.started.add(connection)
        with self._lock:
            ready = self._ready()
            lost, self._lost = self._lost, []
        for engine, moment in lost:
            message = (
                f"{engine} lost: {len(ready)} of {self._active} engines can generate, and its ranks are started again, "
                "at most roles.generation.max_restarts times"
            )
            self._record.event("engine_lost", message, ranks=engine.ranks, time=moment)
            for connection in engine.connections.values():
                connection.close()
        return ready

    def _ready(self) -> list[Engine]:
        return [engine for engine in self._engines[: self._active] if engine is not None and engine.ready]

    def members(self, active_ranks: int) -> Members:
        """Return the members of the next sync, after waiting for an engine; before the first sync, for all engines.

        Args:
            active_ranks: so many ranks are to generate, from the first one on.
        """
        self._set_active(active_ranks)
        told = False
        while True:
            self._refresh()
            with self._lock:
                ready = self._ready()
                if len(ready) >= (1 if self._had_sync else self._active):
                    before, self._taking_part = self._taking_part, ready
                    if ready != before:
                        self._epoch = self._store.add(_EPOCHS, 1)
                    break
            if self._had_sync and not told:
                self._record.event("no_engine", "no rank can generate: waiting for one to come back")
                told = True
            time.sleep(POLL_SECONDS)
        for engine in self._taking_part:
            if engine in before:
                continue
            if not self._had_sync and engine.kept:
                self._record.event("engine_kept", f"{engine} stayed up", ranks=engine.ranks)
            elif self._had_sync:
                why = "; ".join(engine.failures)
                reason = f" again after it was lost: {why}" if why else ""
                self._record.event("engine_joined", f"{engine} generates{reason}", ranks=engine.ranks, why=why)
        ranks = [rank for engine in self._taking_part for rank in engine.ranks]
        return Members(self._epoch, (*self._training, *ranks), tuple(engine.number for engine in self._taking_part))

    def unchanged(self, active_ranks: int) -> bool:
        """Return whether the engines of the last sync are those of the next one, as far as is known."""
        return active_ranks // self._size == self._active and self._refresh() == self._taking_part

    # The sync

    def begin_sync(self, members: Members, version: int, verify: bool) -> None:
        """Have the engines that are left take part in a sync, which begins."""
        arguments = {"members": members, "version": version, "verify": verify}
        self._syncing = self._send({engine: Call("sync", arguments) for engine in self._generating()})

    def finish_sync(self) -> StepMetrics | None:
        """Return the metrics of all ranks of the engines; None if the sync failed on one that is not lost."""
        metrics, intact = StepMetrics(), True
        for shares in self._receive(self._syncing).values():
            for share in shares:
                intact &= share is not None
                metrics.add_rank(share or StepMetrics())
        self._had_sync |= intact
        return metrics if intact else None

    def fail_sync(self, why: str) -> None:
        """Have the next sync begin with new process groups."""
        with self._lock:
            self._epoch = self._store.add(_EPOCHS, 1)
        self._record.event("sync_failed", why=why, epoch=self._epoch)

    # Generation

    @property
    def numbers(self) -> Sequence[int]:
        """The replicas of the engines that have weights. A replica that is lost never has its number again."""
        return [engine.number * self._per_engine + i for engine in self._generating() for i in range(self._per_engine)]

    def _generating(self) -> list[Engine]:
        self._refresh()
        return [engine for engine in self._taking_part if engine.ready]

    def answer(
        self, shares: Mapping[int, Sequence[Work]], version: int, temperature: float, scored: bool
    ) -> Mapping[int, Answers]:
        arguments = {"version": version, "temperature": temperature, "scored": scored}
        found: Mapping[int, Answers] = self._ask("answer", {"shares": shares}, arguments)
        return found

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        temperature: float,
        scored: bool,
        stop: Callable[[], bool] | None = None,
    ) -> Mapping[int, Advanced]:
        arguments = {"version": version, "temperature": temperature, "scored": scored}
        found: Mapping[int, Advanced] = self._ask("advance", {"prompts": prompts, "wanted": wanted}, arguments, stop)
        return found

    def _ask(
        self,
        method: str,
        by_replica: Mapping[str, Mapping[int, Any] | None],
        arguments: Mapping[str, Any],
        stop: Callable[[], bool] | None = None,
    ) -> dict[int, Any]:
        """Call a method of all engines that have weights, and return what it returns, by replica.

        Args:
            by_replica: the arguments of which each engine gets those of its replicas, by their numbers in it.
            arguments: the others.
        """
        k, calls = self._per_engine, {}
        for engine in self._generating():
            own = {
                name: None if values is None else {n % k: v for n, v in values.items() if n // k == engine.number}
                for name, values in by_replica.items()
            }
            calls[engine] = Call(method, {**own, **arguments}, stoppable=stop is not None)
        replies = self._receive(self._send(calls), stop)
        return {engine.number * k + i: value for engine, (first, *_) in replies.items() for i, value in first.items()}

    # Calls

    def _send(self, calls: Mapping[Engine, Call]) -> dict[Connection, tuple[Engine, int]]:
        """Send calls to all ranks of engines; return the connections that will reply, with their engine and rank."""
        sent = {}
        for engine, call in calls.items():
            for rank, connection in engine.connections.items():
                sent[connection] = engine, rank
                with suppress(Disconnected):  # noticed when the reply is received
                    connection.send(call)
        return sent

    def _receive(
        self, sent: Mapping[Connection, tuple[Engine, int]], stop: Callable[[], bool] | None = None
    ) -> dict[Engine, list[Any]]:
        """Return the replies to a call of each engine that is not lost, by rank; until `stop`, which ends the calls."""
        waiting, results, stopped = dict(sent), dict[Engine, dict[int, Any]](), False
        while waiting:
            if stop is not None and not stopped and stop():
                stopped = True
                for connection in waiting:
                    with suppress(Disconnected):
                        connection.send(Stop())
            for connection in wait(list(waiting), None if stop is None or stopped else POLL_SECONDS):
                engine, rank = waiting.pop(connection)
                try:
                    reply: Reply = connection.receive()
                except Disconnected:
                    with self._lock:
                        self._lose(engine)
                    continue
                results.setdefault(engine, {})[rank] = reply.result
                self._spans[rank] = [*self._spans[rank], *reply.spans][-KEPT_SPANS:]
                self.peak_memory = max(self.peak_memory, reply.peak_memory)
        whole = {engine: found for engine, found in results.items() if len(found) == len(engine.ranks)}
        return {engine: [found[rank] for rank in engine.ranks] for engine, found in whole.items()}

    # What is seen, and the end

    def spans(self, begin: float, end: float) -> dict[int, list[Span]]:
        """Return what each rank that generates did between two moments; it waited in the rest of the time."""
        found: dict[int, list[Span]] = {}
        for rank in range(self._first, self._first + len(self._engines) * self._size):
            found[rank], last = [], begin
            for activity, start, stop in self._spans[rank]:
                start, stop = max(start, last), min(stop, end)
                if start < stop:
                    found[rank] += [("wait", last, start), (activity, start, stop)]
                    last = stop
            found[rank].append(("wait", last, end))
        return found

    def busy_seconds(self, since: float) -> float:
        """Return the longest time that a rank has generated since a moment."""
        return max(
            sum(stop - max(start, since) for activity, start, stop in spans if activity == "generate" and stop > since)
            for spans in [*self._spans.values(), []]
        )

    def close(self) -> None:
        """End the run on all ranks that generate; those that are being started exit by themselves."""
        self._server.end_run()
        with self._lock:
            self._ended = True
            ready = [engine for engine in self._engines if engine is not None and engine.ready]  # also to leave
            waiting = {one for engine in ready for one in engine.connections.values()}
            engines = [engine.connections for engine in self._engines if engine is not None and not engine.ready]
            registered = [{rank: one for rank, (one, _) in ranks.items()} for ranks in self._registered]
            for connection in [one for ranks in (*engines, *registered) for one in ranks.values()]:
                connection.disconnect()
        for connection in waiting:
            with suppress(Disconnected):
                connection.send(End())
        end = time.monotonic() + CLOSE_SECONDS
        while waiting and time.monotonic() < end:
            for connection in wait(list(waiting), POLL_SECONDS):
                try:
                    assert isinstance(connection.receive(), Leaving), "no call is waiting for its reply"
                except Disconnected:
                    waiting.remove(connection)
        self._server.close()
