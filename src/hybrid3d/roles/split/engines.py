"""The engines of a run, as the first rank that trains sees them: which there are, and what they are asked."""

from __future__ import annotations

import logging
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
from hybrid3d.roles.split.connections import Disconnected, Line, listen, select_readable
from hybrid3d.roles.split.elastic_sync import Members, tell_lost
from hybrid3d.roles.split.messages import Call, Hello, Join, Joined, Leave, Reply, Stop
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.run.record import Record
from hybrid3d.run.timeline import Span

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
CLOSE_SECONDS = 60  # within which engines have shut down
KEPT_SPANS = 100  # of each rank


class Engine:
    """An engine: `rollout.tp` x `rollout.dp` ranks, which are lost together.

    Attributes:
        lines: to its ranks, in their order, once all are there; empty while it has none that are known to be alive.
        arriving: to those of its next ranks that are there.
        incarnation: how many times it was started, 0 before the first.
        started: those of the lines whose ranks have started vLLM.
    """

    def __init__(self, number: int, ranks: range):
        self.number, self.ranks = number, ranks
        self.lines: dict[int, Line] = {}
        self.arriving: dict[int, Line] = {}
        self.incarnation = 0
        self.started: set[Line] = set()

    @property
    def ready(self) -> bool:
        """Whether all of its ranks have started vLLM, and none is known to be lost."""
        return len(self.started) == len(self.ranks)

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        return f"rank {first}" if first == last else f"ranks {first} to {last}"


class Engines:
    """Implements `Replicas` for all engines of a run. Only the first rank that trains has it.

    An engine that is lost is started again by what started its ranks, and takes part from the next sync on. Threads
    that wait for connections only change which engines there are; all else is called by one thread at a time.
    """

    def __init__(self, recipe: Recipe, store: dist.Store, record: Record):
        rollout, ranks = recipe.rollout, recipe.role_ranks["generation"]
        assert rollout is not None, "checked when the recipe was read"
        size = rollout.tp * rollout.dp
        self._store, self._record, self._per_engine = store.clone(), record, rollout.dp
        self._training = tuple(recipe.role_ranks["train"])
        self._engines = [Engine(i, ranks[first : first + size]) for i, first in enumerate(range(0, len(ranks), size))]
        self._engine_of = {rank: engine for engine in self._engines for rank in engine.ranks}
        self._lock = threading.Lock()
        self._hellos: dict[int, Hello] = {}
        self._lost: list[tuple[Engine, float]] = []  # which is not told yet, and when
        self._syncing: dict[Line, tuple[Engine, int]] = {}
        self._taking_part: list[tuple[Engine, int]] = []  # engines of the last sync, and their incarnations
        self._epoch = 0
        self._spans: dict[int, list[Span]] = defaultdict(list)
        self.peak_memory = 0
        self._closing, self._active = False, recipe.active_generation_ranks // size
        self._dismissed: dict[int, Line] = {}  # the ranks that were told that the run has ended
        self._server = listen(store, self._arrive)

    # Which engines there are

    def _arrive(self, line: Line) -> None:
        """Take in a rank that has started; when all of its engine are there, start the engine."""
        try:
            hello: Hello = line.receive()
        except Disconnected:
            line.close()
            return
        with self._lock:
            if self._closing:
                self._dismiss(hello.rank, line)
                return
            engine = self._engine_of[hello.rank]
            if engine.lines:
                self._lose(engine)
            engine.arriving[hello.rank] = line
            line.when_hung_up(lambda: self._hung_up(engine, line))
            self._hellos[hello.rank] = hello
            self._start_if_there(engine)

    def _start_if_there(self, engine: Engine) -> None:
        """Start an engine that is needed and whose ranks are all there."""
        if engine.number >= self._active or len(engine.arriving) < len(engine.ranks):
            return
        engine.lines, engine.arriving = dict(sorted(engine.arriving.items())), {}
        join, engine.incarnation = Join(engine.incarnation), engine.incarnation + 1
        for line in engine.lines.values():
            try:
                line.send(join)
            except Disconnected:
                self._lose(engine)
                return

    def _set_active(self, ranks: int) -> None:
        """Start engines until so many ranks generate, as soon as theirs are there, or let the last engines go."""
        with self._lock:
            self._active = ranks // len(self._engines[0].ranks)
            for engine in self._engines:
                self._start_if_there(engine)
                if engine.number >= self._active and engine.lines:
                    leaving, engine.lines, engine.started = engine.lines, {}, set()
                    for line in leaving.values():
                        with suppress(Disconnected):
                            line.send(Leave())
                    self._record.event("engine_left", f"{engine} not needed for now", ranks=list(engine.ranks))

    def _lose(self, engine: Engine) -> None:
        """Give an engine up: those of its ranks that are alive exit, as they could only wait for the others."""
        for line in engine.lines.values():
            line.hang_up()
        if engine.lines:
            self._lost.append((engine, time.time()))
            if any(one is engine for one, _ in self._taking_part):
                tell_lost(self._store, self._epoch)
        engine.lines, engine.started = {}, set()

    def _hung_up(self, engine: Engine, line: Line) -> None:
        """Give an engine up of which a rank has exited; also while this rank waits for it in a sync."""
        with self._lock:
            if line in engine.lines.values() and not self._closing:
                self._lose(engine)
            for rank in [rank for rank, arrived in engine.arriving.items() if arrived is line]:
                del engine.arriving[rank]

    def _give_up(self, engine: Engine, line: Line) -> None:
        """Give an engine up of which a line is disconnected, unless it has been started again already."""
        with self._lock:
            if line in engine.lines.values():
                self._lose(engine)
        line.close()

    def _refresh(self) -> None:
        """Find out which engines have been lost, and which have started, since the last call."""
        for engine in self._engines:
            for line in select_readable(list(engine.lines.values()), 0.0):
                try:
                    assert isinstance(line.receive(), Joined), "a call's replies are received by who made it"
                    engine.started.add(line)
                except Disconnected:
                    self._give_up(engine, line)
        with self._lock:
            lost, self._lost = self._lost, []
        for engine, moment in lost:
            message = f"{engine} lost: the others generate until it is there again"
            self._record.event("engine_lost", message, ranks=list(engine.ranks), time=moment)

    def members(self, active_ranks: int) -> Members:
        """Return the members of the next sync, after waiting for an engine; before the first sync, for all engines.

        Args:
            active_ranks: so many ranks are to generate, from the first one on.
        """
        self._set_active(active_ranks)
        told = False
        while not (ready := self._ready()):
            if self._taking_part and not told:
                self._record.event("no_engine", "no rank can generate: waiting for one to come back")
                told = True
            time.sleep(POLL_SECONDS)
        taking_part = [(engine, engine.incarnation) for engine in ready]
        if taking_part != self._taking_part:
            self._epoch += 1
        for engine, _ in [one for one in taking_part if self._taking_part and one not in self._taking_part]:
            why = "; ".join(self._hellos[rank].lost for rank in engine.ranks if self._hellos[rank].lost)
            message = f"{engine} {'there again after it was lost: ' + why if why else 'there to generate'}"
            self._record.event("engine_joined", message, ranks=list(engine.ranks), why=why)
        self._taking_part = taking_part
        return Members(self._epoch, (*self._training, *(rank for engine in ready for rank in engine.ranks)))

    def _ready(self) -> list[Engine]:
        """Return the engines that have started, none if that are too few to go on."""
        self._refresh()
        ready = [engine for engine in self._engines if engine.ready]
        return ready if self._taking_part or len(ready) == self._active else []

    @property
    def unchanged(self) -> bool:
        """Whether the engines of the last sync are those of the next one, as far as is known."""
        return [(engine, engine.incarnation) for engine in self._ready()] == self._taking_part

    @property
    def confined_by(self) -> str | None:
        """What confines code that rewards run, on the first rank that generates."""
        return self._hellos[self._engines[0].ranks[0]].confined_by

    # The sync

    def begin_sync(self, members: Members, version: int, verify: bool) -> None:
        """Have the engines take part in a sync, which begins."""
        arguments = {"members": members, "version": version, "verify": verify}
        self._syncing = self._send({engine: Call("sync", arguments) for engine, _ in self._taking_part})

    def finish_sync(self) -> StepMetrics | None:
        """Return the metrics of all ranks of the engines; None if the sync failed on one that is not lost."""
        metrics, intact = StepMetrics(), True
        replies = self._receive(self._syncing)
        for engine, _ in self._taking_part:
            for share in replies.get(engine, ()):
                intact &= share is not None
                metrics.add_rank(share or StepMetrics())
        if not intact:
            self._epoch += 1
        return metrics if intact else None

    def fail_sync(self) -> None:
        """Have the next sync begin with new process groups."""
        self._epoch += 1

    # Generation

    @property
    def numbers(self) -> Sequence[int]:
        return [engine.number * self._per_engine + i for engine in self._generating() for i in range(self._per_engine)]

    def _generating(self) -> list[Engine]:
        """Return the engines that have weights."""
        self._refresh()
        return [
            engine for engine, incarnation in self._taking_part if engine.ready and engine.incarnation == incarnation
        ]

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
        arguments = {"version": version, "temperature": temperature, "scored": scored, "stoppable": stop is not None}
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
        k = self._per_engine
        calls = {}
        for engine in self._generating():
            own = {
                name: None if values is None else {n % k: v for n, v in values.items() if n // k == engine.number}
                for name, values in by_replica.items()
            }
            calls[engine] = Call(method, {**own, **arguments})
        replies = self._receive(self._send(calls), stop)
        return {engine.number * k + i: value for engine, (first, *_) in replies.items() for i, value in first.items()}

    # Calls

    def _send(self, calls: Mapping[Engine, Call]) -> dict[Line, tuple[Engine, int]]:
        """Send calls to all ranks of engines; return the lines to those that will reply, with their engine and rank."""
        sent = {}
        for engine, call in calls.items():
            for rank, line in list(engine.lines.items()):
                try:
                    line.send(call)
                    sent[line] = engine, rank
                except Disconnected:
                    self._give_up(engine, line)
        return sent

    def _receive(
        self, sent: Mapping[Line, tuple[Engine, int]], stop: Callable[[], bool] | None = None
    ) -> dict[Engine, list[Any]]:
        """Return the replies to a call of each engine that is not lost, by rank; until `stop`, which ends the calls."""
        waiting, results, lost, stopped = dict(sent), dict[int, Any](), set[Engine](), False
        while waiting:
            if stop is not None and not stopped and stop():
                stopped = True
                for line, (engine, _) in waiting.items():
                    try:
                        line.send(Stop())
                    except Disconnected:
                        self._give_up(engine, line)
            for line in select_readable(list(waiting), None if stop is None or stopped else POLL_SECONDS):
                engine, rank = waiting.pop(line)
                try:
                    reply: Reply = line.receive()
                except Disconnected:
                    self._give_up(engine, line)
                    lost.add(engine)
                    continue
                results[rank] = reply.result
                self._spans[rank] = [*self._spans[rank], *reply.spans][-KEPT_SPANS:]
                self.peak_memory = max(self.peak_memory, reply.peak_memory)
        engines = dict.fromkeys(engine for engine, _ in sent.values())
        return {
            e: [results[r] for r in e.ranks] for e in engines if e not in lost and all(r in results for r in e.ranks)
        }

    # What is seen, and the end

    def spans(self, begin: float, end: float) -> dict[int, list[Span]]:
        """Return what each rank that generates did between two moments; it waited in the rest of the time."""
        found: dict[int, list[Span]] = {}
        for rank in sorted(self._engine_of):
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
        """End all engines, also those that are being started again."""
        with self._lock:
            self._closing = True
            for engine in self._engines:
                for rank, line in {**engine.lines, **engine.arriving}.items():
                    self._dismiss(rank, line)
        end, knowing = time.monotonic() + CLOSE_SECONDS, set[int]()
        while (self._dismissed or len(knowing) < len(self._engine_of)) and time.monotonic() < end:
            with self._lock:
                waiting = {line: rank for rank, line in self._dismissed.items()}
            for line in select_readable(list(waiting), POLL_SECONDS):
                try:
                    if line.receive() is None:
                        knowing.add(waiting[line])
                except Disconnected:  # it has exited, or was lost before it knew, and will be there again
                    line.close()
                    with self._lock:
                        del self._dismissed[waiting[line]]
        self._server.close()

    def _dismiss(self, rank: int, line: Line) -> None:
        """Tell a rank that the run has ended."""
        try:
            line.send(None)
            self._dismissed[rank] = line
        except Disconnected:  # it will be there again
            line.close()
