"""How a trainer's ranks and vLLM's workers meet, and what each says where another cannot take part."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from torch._C._distributed_c10d import PrefixStore

from hybrid3d import ledger
from hybrid3d.distributed import host_store
from hybrid3d.reshard import NoSink, NoSource
from hybrid3d.weight_transfer import TrainerEngine, TrainerInitInfo, trainer
from hybrid3d.weight_transfer.sources import ParamMeta
from hybrid3d.weight_transfer.trainer import WorkerReport
from hybrid3d.weight_transfer.worker import (
    Membership,
    TransferFailed,
    WorkerEngine,
    WorkerInitInfo,
    _gloo_listens_at,
    find_store,
    meet,
    number_by_node,
)
from servers import free_port
from sockets import is_open, listening

pytestmark = pytest.mark.engines

ADDRESS = "127.0.0.1"
INIT = {
    "master_address": ADDRESS,
    "session": "s",
    "rank_offset": 1,
    "world_size": 2,
    "device": "cpu",
    "timeout": 20.0,
    "bucket_bytes": 1 << 20,
}


class Client:
    """Stands for one of vLLM's clients, whose server says no."""

    def __init__(self, error: Exception | None = None):
        self.error, self.infos = error, list[dict[str, Any]]()

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.infos.append(info)
        if self.error is not None:
            raise self.error


def make_worker(quant_config: Any = None, device: str = "cpu", rank: int = 0, moves: bool = False) -> WorkerEngine:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=rank, enable_eplb=moves),
        model_config=SimpleNamespace(quantization="fp8"),
        quant_config=quant_config,
    )
    return WorkerEngine(None, config, torch.device(device), torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"world_size": 1}, "world_size 1 has 1 ranks of the trainer: at least one is the trainer's, and one a worker"),
        ({"world_size": 3, "num_trainer_ranks": 3}, "world_size 3 has 3 ranks of the trainer"),
        ({"world_size": 3, "rank": 1}, "rank 1 is none of the trainer's 1 ranks"),
        ({"world_size": 3, "num_trainer_ranks": 2}, "2 ranks of a trainer need a master_port, the same on each"),
    ],
)
def test_trainer_whose_numbers_do_not_fit_is_refused(given: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TrainerInitInfo(**{"rank": 0, "master_address": ADDRESS} | given)


def test_trainer_listens_at_its_address_alone() -> None:
    before = listening([os.getpid()])
    store = host_store(ADDRESS, 0, 5)
    (new,) = listening([os.getpid()]) - before
    assert (new.address, new.port, is_open(new)) == (ADDRESS, store.port, False)


def test_gloo_listens_on_the_way_to_the_trainer_alone() -> None:
    before = listening([os.getpid()])
    store = host_store(ADDRESS, 0, 5)
    info = WorkerInitInfo(**INIT | {"master_port": store.port, "world_size": 1})
    member = Membership(PrefixStore("s", store), 0, info, NoSource(), NoSink(), "cpu")
    new = listening([os.getpid()]) - before
    assert len(new) == 2
    assert not [socket for socket in new if is_open(socket)]
    assert member.ranks == [0]
    member.leave()
    assert len(listening([os.getpid()]) - before) == 1  # the store's


def test_ranks_of_a_node_are_numbered_consecutively() -> None:
    assert number_by_node([([0, 1, 4], "a"), ([2, 3], "b")], 5) == ([0, 1, 3, 4, 2], 3)
    assert number_by_node([([0, 1, 2], "a")], 3) == ([0, 1, 2], 3)


def test_meeting_ends_with_a_refusal_or_in_time() -> None:
    store = host_store(ADDRESS, 0, 5)
    with pytest.raises(TransferFailed, match=r"2 of 2 members have not arrived within 0\.1 s"):
        meet(store, ledger.count_joined, 2, 0.1)
    ledger.join(store)
    ledger.join(store)
    meet(store, ledger.count_joined, 2, 0.1)
    ledger.refuse(store, "no, thanks")
    with pytest.raises(TransferFailed, match="no, thanks"):
        meet(store, ledger.count_joined, 3, 60)


def test_store_that_does_not_answer_is_named() -> None:
    port = free_port()
    with pytest.raises(ConnectionError, match=rf"the trainer does not answer at 127\.0\.0\.1:{port} within 0\.2 s"):
        find_store(ADDRESS, port, 0.2)


def refusal_of_http() -> requests.HTTPError:
    response = requests.Response()
    response.status_code, response._content = 500, b'{"error": "Weight transfer not configured"}'
    return requests.HTTPError("500 Server Error", response=response)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_learn_why_vllm_refuses(ranks: int) -> None:
    """At once, not when a timeout has passed."""
    port, began, said = free_port(), time.monotonic(), list[str]()

    def run(rank: int) -> None:
        info = TrainerInitInfo(
            rank=rank, master_address=ADDRESS, master_port=port, num_trainer_ranks=ranks, world_size=ranks + 1
        )
        try:
            TrainerEngine.trainer_init(info, client=Client(refusal_of_http()), source={"w": torch.ones(2)})
        except TransferFailed as error:
            said.append(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = 'vLLM refuses: {"error": "Weight transfer not configured"}'
    assert said == [expected] * ranks
    assert time.monotonic() - began < 30


def test_session_is_forgotten_once_its_members_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that connects anew too early would join it."""

    class Joining(Client):
        def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
            store = find_store(info["master_address"], info["master_port"], 5)
            assert ledger.read_session(store) == info["session"]
            ledger.join(PrefixStore(info["session"], store))

    monkeypatch.setattr(trainer, "Membership", lambda *_: None)
    info = TrainerInitInfo(rank=0, master_address=ADDRESS, world_size=2, timeout=20)
    engine = TrainerEngine.trainer_init(info, client=Joining(), source={"w": torch.ones(2)})
    assert engine._store is not None
    assert not engine._store.check(["session"])


def test_tensors_of_a_source_are_dropped_after_an_update() -> None:
    """Kept, a source that makes new ones would need memory for two copies."""
    made = list[weakref.ref[torch.Tensor]]()

    class Fresh:
        metadata = (ParamMeta("w", torch.float32, (2,)),)

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            assert not [ref for ref in made if ref() is not None]
            tensor = torch.ones(2)
            made.append(weakref.ref(tensor.untyped_storage()))
            yield "w", tensor

    class Started(Client):
        def start_weight_update(self) -> None: ...

        update_weights = finish_weight_update = Client.init_weight_transfer_engine

    class Moving:
        bound: torch.Tensor | None = None
        exchange = SimpleNamespace(rank=0, unique=lambda _: [([0], (0, 0, 0)), ([1], (1, 8, 8))])

        def bind(self) -> None:
            self.bound = None

        def run(self, version: int) -> None:
            assert self.bound is None
            self.bound = engine._tensors["w"]

    engine = TrainerEngine(TrainerInitInfo(rank=0, master_address=ADDRESS, world_size=2), Started(), Fresh())
    store = host_store(ADDRESS, 0, 5)
    engine._membership = SimpleNamespace(store=store, resharder=Moving(), ranks=[0, 1], leave=lambda: None)  # type: ignore[assignment]
    for update in (1, 2):
        ledger.arrive(store, update)
        engine.send_weights()
        assert engine.reports == (WorkerReport(8, 8),)
    assert len(made) == 4
    assert not [ref for ref in made if ref() is not None]


class Updated(Client):
    """Stands for a client whose server fails at one call."""

    def __init__(self, fails: str):
        super().__init__()
        self.fails = fails

    def start_weight_update(self) -> None: ...

    def update_weights(self, update: dict[str, Any]) -> None:
        self._answer("update_weights")

    def finish_weight_update(self, version: str | None) -> None:
        self._answer("finish_weight_update")

    def _answer(self, call: str) -> None:
        time.sleep(0.2)  # in which a rank that does not wait is through
        if call == self.fails:
            raise RuntimeError(f"no {call}")


@pytest.mark.parametrize("fails", ["", "update_weights", "finish_weight_update"])
def test_ranks_return_once_vllm_has_answered(fails: str) -> None:
    port, ranks, ended, before = free_port(), 3, list[tuple[str, float]](), time.monotonic()
    stores = [host_store(ADDRESS, port, 20), *(find_store(ADDRESS, port, 20) for _ in range(1, ranks))]
    received = [([rank], (rank, 0, 0)) for rank in range(ranks + 1)]

    def run(rank: int) -> None:
        info = TrainerInitInfo(
            rank=rank, master_address=ADDRESS, master_port=port, num_trainer_ranks=ranks, world_size=ranks + 1
        )
        engine = TrainerEngine(info, Updated(fails), {"w": torch.ones(2)})
        exchange = SimpleNamespace(rank=rank, unique=lambda _: received)
        resharder = SimpleNamespace(exchange=exchange, run=lambda _: None, bind=lambda: None)
        engine._membership = SimpleNamespace(  # type: ignore[assignment]
            store=stores[rank], resharder=resharder, ranks=range(ranks + 1), leave=lambda: None
        )
        said = ""
        try:
            engine.send_weights()
        except TransferFailed as error:
            said = str(error)
        ended.append((said, time.monotonic() - before))

    ledger.arrive(stores[0], 1)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {said for said, _ in ended} == {fails and f"vLLM refuses: no {fails}"}
    assert len(ended) == ranks
    assert 0.2 * (1 if fails == "update_weights" else 2) <= min(seconds for _, seconds in ended)
    assert max(seconds for _, seconds in ended) < trainer.CAUSE_SECONDS


def test_variable_of_gloo_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_ANOTHER_THREAD", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # before it is deleted, so that it is deleted in the end, too
    for before in ({"GLOO_SOCKET_IFNAME": "eth7"}, dict[str, str]()):
        if not before:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        with _gloo_listens_at("lo"):
            assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
            os.environ["OF_ANOTHER_THREAD"] = "1"
        assert os.environ.get("GLOO_SOCKET_IFNAME") == before.get("GLOO_SOCKET_IFNAME")
        assert os.environ["OF_ANOTHER_THREAD"] == "1"


def test_workers_that_do_not_come_are_counted() -> None:
    info = TrainerInitInfo(rank=0, master_address=ADDRESS, world_size=3, timeout=0.5)
    client = Client()
    with pytest.raises(TransferFailed, match=r"2 of 3 members have not arrived within 0\.5 s"):
        TrainerEngine.trainer_init(info, client=client, source={"w": torch.ones(2)})
    assert client.infos[0] | {"session": "", "master_port": 0} == INIT | {
        "session": "",
        "master_port": 0,
        "world_size": 3,
        "timeout": 0.5,
        "bucket_bytes": 64 * trainer.MIB,
    }


def test_trainer_needs_a_source_on_one_device() -> None:
    info = TrainerInitInfo(rank=0, master_address=ADDRESS, world_size=2)
    with pytest.raises(ValueError, match="needs a source"):
        TrainerEngine.trainer_init(info, client=Client())
    tensors = {"a": torch.ones(1), "b": torch.ones(1, device="meta")}
    with pytest.raises(ValueError, match="the weights are on cpu, meta: they must be on one device"):
        TrainerEngine.trainer_init(info, client=Client(), source=tensors)


@pytest.mark.parametrize(
    ("worker", "problem"),
    [
        (lambda: make_worker(quant_config="fp8"), r"vLLM quantizes its weights \(fp8\)"),
        (lambda: make_worker(moves=True), r"vLLM moves experts between ranks \(--enable-eplb\)"),
        (
            lambda: make_worker(rank=2),
            "vLLM has 3 workers or more, and world_size=2 with 1 of the trainer's ranks leaves 1",
        ),
        (lambda: make_worker(device="meta"), "the trainer's weights are on cpu, and vLLM's on meta"),
    ],
)
def test_worker_that_cannot_take_part_tells_all(worker: Any, problem: str) -> None:
    store = host_store(ADDRESS, 0, 20)
    engine = worker()
    engine.init_transfer_engine(INIT | {"master_port": store.port})
    with pytest.raises(TransferFailed, match=problem):
        meet(PrefixStore("s", store), ledger.count_joined, 2, 60)
    assert engine.take_failure() != ""
    assert engine.take_failure() == ""


def test_worker_keeps_what_has_failed() -> None:
    engine = make_worker()
    engine.init_transfer_engine({"master_address": ADDRESS})
    assert "Invalid init_info" in engine.take_failure()
    engine.update_weights({"update": 1})
    assert "no trainer is connected" in engine.take_failure()
    engine.update_weights({"names": []})
    assert "Invalid update_info" in engine.take_failure()
    engine.finish_weight_update()
    assert "before an update has succeeded" in engine.take_failure()


def test_update_that_receives_nothing_does_not_succeed() -> None:
    """Though the one before has: its weights would get the label of a version that vLLM does not have."""
    engine = make_worker()
    engine.held = True
    sink = SimpleNamespace(version=1)
    engine._membership = SimpleNamespace(resharder=SimpleNamespace(sink=sink))  # type: ignore[assignment]
    engine._updated = True  # by the first update
    engine.finish_weight_update()
    assert engine.take_failure() == ""
    engine.start_weight_update()
    engine.finish_weight_update()
    assert "before an update has succeeded" in engine.take_failure()


def test_worker_that_cannot_leave_keeps_the_first_reason() -> None:
    engine = make_worker()

    def leave() -> None:
        raise OSError("already gone")

    engine._failure = "of an earlier call"
    engine._membership = SimpleNamespace(leave=leave)  # type: ignore[assignment]
    engine.update_weights({"names": []})
    assert "Invalid update_info" in engine.take_failure()
    engine._membership = SimpleNamespace(leave=leave)  # type: ignore[assignment]
    engine.init_transfer_engine(INIT)
    assert engine.take_failure() == "OSError: already gone"


def test_worker_refuses_an_engine_that_does_not_hold_generation() -> None:
    engine = make_worker()
    with pytest.raises(RuntimeError, match="name hybrid3d in VLLM_PLUGINS"):
        engine.start_weight_update()
    engine.held = True
    engine.start_weight_update()
