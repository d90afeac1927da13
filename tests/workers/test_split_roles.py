"""The roles on different ranks, without engines: how far generation runs ahead, and what is done about lost ranks."""

from __future__ import annotations

import dataclasses
import json
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from fake_ranks import FakeRank, make_store
from hybrid3d.config import load_recipe
from hybrid3d.generation.engine import ExpertChoices, Sampling
from hybrid3d.generation.replicas import Answers, NoReplicas
from hybrid3d.generation.rollouts import FailedRewards
from hybrid3d.generation.samples import RolloutBatch, Sample
from hybrid3d.generation.scheduler import Prompt
from hybrid3d.ledger import RankStart
from hybrid3d.process import this_process
from hybrid3d.rl.data import Example
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.scoring.scorer import Query
from hybrid3d.sync.elastic import Members
from hybrid3d.trainer.remote_generator import GenerationAhead
from hybrid3d.workers import loop, role_client
from hybrid3d.workers.channel import Connection, Disconnected, Server, connect
from hybrid3d.workers.engines import Engines
from hybrid3d.workers.loop import WorkerServer
from hybrid3d.workers.messages import (
    Advance,
    Call,
    End,
    Join,
    Leave,
    Register,
    Reply,
    Score,
    Stop,
    SyncWeights,
    WithTexts,
    decode,
    encode,
)

pytestmark = pytest.mark.engines

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "demo-cpu.yaml"


class FakeRollouts:
    """Generates batches that name their weights and their first batch of prompts; each took two batches of prompts."""

    def __init__(self) -> None:
        self.generated: list[tuple[int, int]] = []
        self.before: Callable[[], None] = lambda: None

    def generate_batch(self, version: int, batch: int, recipe: Any) -> RolloutBatch:
        self.before()
        self.generated.append((version, batch))
        return RolloutBatch([], batches=2, zero_variance_groups=0)


def generation_ahead() -> tuple[GenerationAhead, FakeRollouts]:
    rollouts: Any = FakeRollouts()
    return GenerationAhead(rollouts), rollouts


def recipe_of(bound: int, steps: int = 40, *more: str) -> Any:
    needed = ["roles.generation.ranks=2", "algorithm.correction.kind=truncate", f"async.max_staleness={bound}"]
    return load_recipe(DEMO, [*needed, f"run.steps={steps}", *more])


def run_step(ahead: GenerationAhead, step: int, batch: int, recipe: Any, slow: bool = True) -> int:
    """Take the samples of a step, and update: until as much is generated ahead as may be, if that is slow."""
    generated = ahead.next_batch(step, batch, recipe)
    if step < recipe.run.steps:
        ahead.begin(step, recipe)
        if slow and ahead._thread is not None:
            ahead._thread.join()
        ahead.end()
    return batch + generated.batches


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_slow_updates_let_generation_run_ahead_up_to_the_bound(bound: int) -> None:
    """Prompts are used in order, and the samples of step s are from weights s - bound, or the first ones."""
    (ahead, rollouts), recipe, batch = generation_ahead(), recipe_of(bound, steps=6), 10
    for step in range(7):
        batch = run_step(ahead, step, batch, recipe)
    assert rollouts.generated == [(max(0, step - bound), 10 + 2 * step) for step in range(7)]


def test_generation_joins_the_sync_when_the_update_is_done() -> None:
    (ahead, rollouts), recipe = generation_ahead(), recipe_of(4)
    ahead.next_batch(0, 0, recipe)
    rollouts.before = ahead._updated.set  # while the next samples are generated
    ahead.begin(0, recipe)
    ahead.end()
    assert rollouts.generated == [(0, 0), (0, 2)]
    rollouts.before = lambda: None
    run_step(ahead, 1, 2, recipe)  # which has samples; update 1 is not done before four steps are ahead
    assert rollouts.generated[2:] == [(1, batch) for batch in (4, 6, 8, 10)]


def test_error_ahead_is_raised_by_step_needing_the_samples() -> None:
    (ahead, rollouts), recipe = generation_ahead(), recipe_of(1)
    ahead.next_batch(0, 0, recipe)

    def fail() -> None:
        raise FailedRewards("no reward today")

    rollouts.before = fail
    ahead.begin(0, recipe)
    ahead.end()
    with pytest.raises(FailedRewards, match="no reward today"):
        ahead.next_batch(1, 2, recipe)


@pytest.mark.parametrize(("error", "raised"), [(NoReplicas("all lost"), False), (ValueError("of this rank"), True)])
def test_step_goes_on_where_there_is_nobody_to_generate_ahead(error: Exception, raised: bool) -> None:
    (ahead, rollouts), recipe = generation_ahead(), recipe_of(1)
    ahead.next_batch(0, 0, recipe)

    def fail() -> None:
        raise error

    rollouts.before = fail
    ahead.begin(0, recipe)
    if raised:
        with pytest.raises(ValueError, match="of this rank"):
            ahead.end()
    else:
        ahead.end()
        rollouts.before = lambda: None
        ahead.next_batch(1, 2, recipe)
        assert rollouts.generated == [(0, 0), (1, 2)]


# ---- engines that are lost and come back

RECIPE = recipe_of(0, 40, "roles.generation.ranks=4", "rollout.tp=2", "machine.gpus_per_node=8")


def prompt(text: str) -> Prompt:
    return Prompt((0, 1), Example(2, text, "", (3, 4)), [5, None], 6)


def answer_to(one: Prompt) -> Sample:
    """An answer of which every number is another when it has been rounded."""
    logprobs, experts = (-1 / 3, -2e-40), ExpertChoices.of(np.arange(12, dtype=np.uint16).reshape(3, 2, 2) * 999)
    mask, reward = (True, True), 0.1 + 0.2
    return Sample(
        one.example.prompt, one.example.prompt_ids, (7, 8), mask, logprobs, "é", reward, (6, 9), experts=experts
    )


class GenerationRank(FakeRank):
    """A rank that generates, until it is killed."""

    def __init__(self, rank: int, store: dist.Store, group_start: int | None = None, start: int = 0):
        self.killed_by: type[Call] | None = None  # the call during which it is killed
        super().__init__(store, Register(rank, confined_by=f"rank {rank}", group_start=group_start), start)

    def dies_at(self, call: Call) -> bool:
        return type(call) is self.killed_by

    def reply(self, call: Call) -> Reply:
        if isinstance(call, SyncWeights):
            metrics = StepMetrics(sums={"sync/received_bytes": 10})
            return Reply(metrics=metrics, spans=[("sync", 1.0, 2.0)], peak_memory=self.rank)
        assert isinstance(call, Advance)
        if call.stoppable:
            while not self.connection.has_message():
                time.sleep(0.01)
        begin = time.time()
        answers = {number: Answers([answer_to(one) for one in share]) for number, share in call.prompts.items()}
        return replace(Reply.of_answers(answers), spans=[("generate", begin, begin + 1)])

    def kill(self, made: Engines) -> None:
        """End this rank, and wait until it is noticed."""
        engine = made._groups[(self.rank - 4) // 2]
        assert engine is not None
        self.connection.disconnect()
        self.thread.join()
        while not engine.lost:
            time.sleep(0.01)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    return make_store(monkeypatch, ranks=8)


@pytest.fixture
def events() -> list[tuple[str, Any]]:
    return []


@pytest.fixture
def roles(store: dist.Store, events: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerServer]:
    """Four training ranks, and two engines of two ranks each that generate: 4, 5 and 6, 7."""
    monkeypatch.setattr(role_client, "CLOSE_SECONDS", 0.5)

    def event(name: str, message: str = "", **fields: Any) -> None:
        events.append((name, fields.get("ranks")))

    made = WorkerServer(RECIPE, store, SimpleNamespace(event=event), 0)  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.fixture
def made(roles: WorkerServer) -> Engines:
    assert roles.engines is not None
    return roles.engines


def start_all(made: Engines, store: dist.Store) -> tuple[dict[int, GenerationRank], Members]:
    """Start all ranks, and let them take part in a sync; return also its members."""
    ranks = {rank: GenerationRank(rank, store) for rank in range(4, 8)}
    return ranks, sync(made, 0)


def wait_for_start(made: Engines, place: int) -> None:
    while made._groups[place] not in made._refresh():
        time.sleep(0.01)


def sync(made: Engines, version: int, active: int = 4) -> Members:
    members = made.members(active)
    made.begin_sync(members, version, verify=False)
    assert made.finish_sync() is not None
    return members


def test_engines_all_take_part_in_the_first_sync(made: Engines, store: dist.Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = {rank: GenerationRank(rank, store) for rank in (5, 6, 4)}
        waiting = pool.submit(made.members, 4)
        time.sleep(0.3)
        assert not waiting.done()
        assert first[6].group_start is None  # before rank 7 is there
        last = GenerationRank(7, store)
        assert waiting.result(timeout=10) == Members(1, tuple(range(8)), (0, 1))
    made.begin_sync(Members(1, tuple(range(8)), (0, 1)), 3, verify=True)
    metrics = made.finish_sync()
    assert metrics is not None
    assert metrics.sums == {"sync/received_bytes": 40.0}
    assert made.lap_peaks() == {rank: {"sync": rank} for rank in (4, 5, 6, 7)}
    assert made.lap_peaks() == {}
    assert made.confined_by == "rank 7"
    assert last.calls == [SyncWeights(Members(1, tuple(range(8)), (0, 1)), version=3, verify=True)]
    assert made.members(4) == Members(1, tuple(range(8)), (0, 1))
    assert made.unchanged(4)
    assert not made.unchanged(2)


def test_engine_is_lost_with_its_first_rank_and_comes_back(
    made: Engines, store: dist.Store, events: list[tuple[str, Any]]
) -> None:
    ranks, _ = start_all(made, store)
    assert made.numbers == [0, 1]
    ranks[4].kill(made)
    assert made.numbers == [1]
    ranks[5].thread.join(10)  # it could only wait for rank 4
    assert not ranks[5].thread.is_alive()
    assert events == [("engine_lost", [4, 5])]
    assert not made.unchanged(4)
    assert sync(made, 1) == Members(2, (0, 1, 2, 3, 6, 7), (1,))
    again = [GenerationRank(rank, store) for rank in (4, 5)]
    wait_for_start(made, 0)
    assert [one.group_start for one in again] == [1, 1]
    assert made.numbers == [1]  # before it has weights
    assert sync(made, 2) == Members(3, tuple(range(8)), (2, 1))
    assert made.numbers == [2, 1]  # never those of replicas that were lost
    assert events == [("engine_lost", [4, 5]), ("engine_joined", [4, 5])]


def test_returned_rank_shows_that_its_engine_was_lost(made: Engines, store: dist.Store) -> None:
    """Also before anybody has noticed, as on a node that was switched off."""
    ranks, _ = start_all(made, store)
    GenerationRank(6, store)
    ranks[7].thread.join(10)
    assert made.numbers == [0]
    GenerationRank(7, store)
    wait_for_start(made, 1)
    assert sync(made, 1) == Members(2, tuple(range(8)), (0, 3))


def test_running_engine_is_taken_up_by_the_next_training_start(
    made: Engines, store: dist.Store, events: list[tuple[str, Any]]
) -> None:
    """One that has lost a rank meanwhile is started anew, once all of its ranks have registered without it."""
    _, before = start_all(made, store)
    roles = WorkerServer(RECIPE, store, made._record, start=1)
    second = roles.engines
    assert second is not None
    kept = [GenerationRank(rank, store, group_start=0, start=1) for rank in (4, 5)]
    left, fresh = GenerationRank(6, store, group_start=0, start=1), GenerationRank(7, store, start=1)
    left.thread.join(10)
    assert isinstance(left.last, Leave)
    again = GenerationRank(6, store, start=1)
    members = second.members(4)
    assert [one.group_start for one in (*kept, again, fresh)] == [0, 0, 1, 1]
    assert members.engines == (0, 3)  # not the number of the start that is lost
    assert members.epoch > before.epoch  # whose groups are others
    assert events == [("engine_kept", [4, 5])]
    roles.close()


def test_training_start_that_fails_before_accepting_connections_is_given_up(store: dist.Store) -> None:
    with pytest.raises(Disconnected, match="a rank that trains was lost"):
        connect(store, 0, lambda: True)


def test_share_of_an_engine_that_is_lost_is_not_answered(made: Engines, store: dist.Store) -> None:
    ranks, _ = start_all(made, store)
    ranks[5].killed_by = Advance
    found = made.advance({0: [prompt("a")], 1: [prompt("b"), prompt("c")]}, None, 0, Sampling(0.5), apart=True)
    assert {number: answers.samples for number, answers in found.items()} == {
        1: [answer_to(prompt("b")), answer_to(prompt("c"))]
    }
    assert ranks[7].calls[-1] == Advance({0: [prompt("b"), prompt("c")]}, None, 0, Sampling(0.5), apart=True)
    assert made.lap_busy_seconds() == pytest.approx(1.0)
    assert [name for name, _, _ in made.spans(time.time() - 100, time.time() + 100)[7]] == ["wait", "generate", "wait"]
    ranks[6].killed_by = Advance
    assert made.advance({1: []}, None, 0, Sampling(0.5), apart=True) == {}
    assert made.numbers == []


def test_sync_is_done_if_the_remaining_ranks_have_done_it(made: Engines, store: dist.Store) -> None:
    ranks, _ = start_all(made, store)
    ranks[4].killed_by = SyncWeights
    made.begin_sync(made.members(4), 1, verify=False)
    metrics = made.finish_sync()
    assert metrics is not None
    assert metrics.sums == {"sync/received_bytes": 20.0}
    assert sync(made, 1) == Members(2, (0, 1, 2, 3, 6, 7), (1,))
    made.fail_sync("of a loss")  # as a rank that trains has found
    assert sync(made, 1) == Members(3, (0, 1, 2, 3, 6, 7), (1,))


def test_generation_ahead_ends_when_it_is_told(made: Engines, store: dist.Store) -> None:
    start_all(made, store)
    asked = iter([False, False, True])
    engine, _ = made._taking_part
    call = Advance({0: [prompt("a")]}, None, 0, Sampling(), stoppable=True)
    replies = made._receive(made._send({engine: call}), lambda: next(asked))
    assert [answers.samples for answers in replies[engine][0].whole_answers().values()] == [[answer_to(prompt("a"))]]
    assert made.numbers == [0, 1]


def test_run_without_an_engine_waits_and_says_so(
    made: Engines, store: dist.Store, events: list[tuple[str, Any]]
) -> None:
    ranks, _ = start_all(made, store)
    for rank in (5, 6):
        ranks[rank].kill(made)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.members, 4)
        time.sleep(0.3)
        assert not waiting.done()
        assert events[-1] == ("no_engine", None)
        again = [GenerationRank(rank, store) for rank in (6, 7)]
        assert waiting.result(timeout=10) == Members(2, (0, 1, 2, 3, 6, 7), (3,))
    assert len(again) == 2


def test_engines_leave_and_join_with_a_sync(made: Engines, store: dist.Store, events: list[tuple[str, Any]]) -> None:
    ranks, _ = start_all(made, store)
    assert sync(made, 1, active=2) == Members(2, (0, 1, 2, 3, 4, 5), (0,))
    assert made.numbers == [0]
    for rank in (6, 7):  # they exit, are started again, and wait
        ranks[rank].thread.join(10)
        assert isinstance(ranks[rank].last, Leave)
    waiting = [GenerationRank(rank, store) for rank in (6, 7)]
    while len(made._registered[1]) < 2:
        time.sleep(0.01)
    assert sync(made, 2, active=2) == Members(2, (0, 1, 2, 3, 4, 5), (0,))
    assert [one.group_start for one in waiting] == [None, None]
    sync(made, 3, active=4)  # begins to start it
    wait_for_start(made, 1)
    assert sync(made, 4, active=4) == Members(3, tuple(range(8)), (0, 3))
    assert made.numbers == [0, 3]
    assert events == [("engine_left", [6, 7]), ("engine_joined", [6, 7])]


def test_engine_that_was_lost_meanwhile_takes_no_part(made: Engines, store: dist.Store) -> None:
    """It is there again when the sync begins that was decided on before; what it sends is not taken for a reply."""
    ranks, members = start_all(made, store)
    ranks[4].kill(made)
    again = [GenerationRank(rank, store) for rank in (4, 5)]
    wait_for_start(made, 0)
    made.begin_sync(members, 1, verify=False)
    metrics = made.finish_sync()
    assert metrics is not None
    assert metrics.sums == {"sync/received_bytes": 20.0}
    assert not any(one.calls for one in again)


def test_end_of_the_run_reaches_all(
    roles: WorkerServer, made: Engines, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that serve are asked to exit, others are disconnected, and who comes later finds that it has ended."""
    ranks, _ = start_all(made, store)
    ranks[4].kill(made)
    ranks[5].thread.join(10)
    half = GenerationRank(4, store)
    while not made._registered[0]:
        time.sleep(0.01)
    monkeypatch.setattr(role_client, "CLOSE_SECONDS", 10)
    roles.close()
    for one in (half, ranks[6], ranks[7]):
        one.thread.join(5)
        assert not one.thread.is_alive()
    assert [isinstance(one.last, End) for one in (half, ranks[6], ranks[7])] == [False, True, True]
    assert connect(store, 0, lambda: False) is None


class Unpickled:
    """An object that tells when it is unpickled."""

    seen: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return note, ("unpickled",)


def note(text: str) -> None:
    Unpickled.seen.append(text)


def knock(port: int, *parts: bytes) -> bytes:
    """Send parts to a server, each after what it sends, and return the last that it sends: nothing if it hangs up."""
    with socket.create_connection(("127.0.0.1", port), 10) as made:
        heard = made.recv(1000)
        for part in parts:
            heard = b""
            with suppress(OSError):
                made.sendall(part)
                heard = made.recv(1000)
        return heard


def test_connection_without_the_secret_is_not_heard(store: dist.Store) -> None:
    heard: list[Connection] = []
    server = Server(store, 0, heard.append)
    assert json.loads(store.get("roles/address/0")) == ["127.0.0.1", server.port]  # no secret
    message = pickle.dumps(Unpickled())
    message = struct.pack("!i", len(message)) + message
    for parts in ([message + bytes(64)], [bytes(64), message], [bytes(64) + message]):
        assert knock(server.port, *parts) == b""
    assert not heard
    assert not Unpickled.seen
    right = connect(store, 0, lambda: False)
    assert right is not None
    right._messages.send(Unpickled())
    while not heard:
        time.sleep(0.01)
    with pytest.raises(Disconnected, match="what came is no message: "):
        heard[0].receive()
    assert not Unpickled.seen  # nor is it for who knows it
    right.close()
    server.close()


def test_texts_that_answers_share_are_sent_once() -> None:
    """With `reward.name: code` a reference is a suite of tests, and each prompt has many answers."""
    text = "1 + 1 = 2\n" * 20_000
    samples = [dataclasses.replace(answer_to(prompt(text)), reference=text + "!", reward=float(i)) for i in range(16)]
    data = encode(Reply.of_answers({3: Answers(samples, failures={"hung": 1})}))
    assert len(data) < 2.1 * len(text)
    reply = decode(data)
    assert isinstance(reply, Reply)
    found = reply.whole_answers()[3]
    assert (found.samples, found.failures) == (samples, {"hung": 1})
    assert (
        len({id(sample.prompt) for sample in found.samples}) == len({id(one.reference) for one in found.samples}) == 1
    )
    queries = [Query(f"{i}", text, "", i, (1, 2), (3,)) for i in range(16)]
    data = encode(Score({0: WithTexts.of(queries)}, "model"))
    assert len(data) < 1.1 * len(text)
    asked = decode(data)
    assert isinstance(asked, Score)
    for one, sent in zip(asked.shares[0].whole(), queries, strict=True):
        assert [*one.prompt_ids, *one.tokens] == [1, 2, 3]
        assert (one.answer, one.reference, one.row) == (sent.answer, text, sent.row)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 10_000, encode(Stop()), encode(Join(1))[:-1]])
def test_rank_that_sends_no_message_is_lost_with_its_engine(
    made: Engines, store: dist.Store, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether as a reply, before it has joined, or as the first that it sends."""
    ranks, _ = start_all(made, store)
    ranks[6].connection.send(data)
    assert made.advance({1: []}, None, 0, Sampling(), apart=True) == {}
    assert made.numbers == [0]
    waiting = connect(store, 0, lambda: False)
    assert waiting is not None
    waiting.send(Register(6))
    GenerationRank(7, store)
    assert isinstance(waiting.receive(), Join)
    waiting.send(data)
    engine = made._groups[1]
    while engine is not None and not engine.lost:
        made._refresh()
    first = connect(store, 0, lambda: False)
    assert first is not None
    first.send(data)
    with pytest.raises(Disconnected):
        first.receive()
    assert len([one for one in caplog.records if "a connection is ended: " in one.getMessage()]) == 3


def test_process_between_two_ranks_is_not_heard(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store can be written by anybody, who could lead ranks to an address of their own and pass proofs on."""
    made, create = dict[int, socket.socket](), socket.create_connection  # by the port that they are to

    def keep(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        made[address[1]] = create(address, timeout)
        return made[address[1]]

    monkeypatch.setattr(socket, "create_connection", keep)
    heard: list[Connection] = []
    server = Server(store, 0, heard.append)
    forged = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as between:
        port = between.getsockname()[1]
        forged.set("roles/address/0", json.dumps(["127.0.0.1", port]))
        threading.Thread(target=relay, args=(between, server.port), daemon=True).start()
        with pytest.raises(Disconnected, match=f"no connection to rank 0 at 127.0.0.1:{port}: the process there has"):
            connect(forged, 0, lambda: False)
    assert made[port].fileno() == -1  # it is closed
    assert not heard
    server.close()


def relay(between: socket.socket, port: int) -> None:
    """Pass on what two ends send to each other, the first of which connects to `between`."""
    one, _ = between.accept()
    with one, socket.create_connection(("127.0.0.1", port)) as other:
        to = {one: other, other: one}
        while ready := select.select([one, other], [], [])[0]:
            for end in ready:
                data = end.recv(1000)
                if not data:
                    return
                to[end].sendall(data)


def test_worker_rank_out_of_memory_says_what_to_lower(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(loop.WorkerLoop, "run", serve)
    for rank, advice in ((4, "this rank only generates: lower rollout.gpu"), (6, "this rank only computes rewards: ")):
        monkeypatch.setenv("RANK", str(rank))
        start = RankStart(rank, store, None, this_process())
        with pytest.raises(RuntimeError, match=f"CUDA out of memory. Tried to allocate 2 GiB.: {advice}"):
            loop.run_worker(recipe_of(0, 40, "roles.generation.ranks=2", "roles.reward.ranks=1"), start)
