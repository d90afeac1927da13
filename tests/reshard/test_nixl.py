"""The transport by NIXL between real processes: values, bytes, ports, lost ranks and ranks that disagree."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybrid3d import distributed
from hybrid3d.distributed import is_lost_peer
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.move.nixl import NixlTransport
from hybrid3d.reshard.move.nixl_agent import NoNixl, gather_bytes, load_nixl
from hybrid3d.reshard.move.transport import Pending, make_transport
from sockets import is_open, listening
from spawned import spawn
from test_reshard_executor import Layers, canonical, large_world, memories, plan_of_rank, truth, unlike, write_pieces

CPU = torch.device("cpu")
LIMIT = 20.0  # seconds in which a rank must tell that another one was killed


def start(rank: int, ranks: int, folder: Path) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    return group


def among(ranks: int, job: Callable[..., None], folder: Path, *more: Any) -> None:
    """Run a job in so many processes, each of which leaves a file at its end."""
    spawn(job, (folder, *more), ranks)
    assert len(list(folder.glob("rank*.done"))) == ranks


def plan_is_executed(rank: int, folder: Path, shares_memory: bool) -> None:
    group = start(rank, 4, folder)
    world = large_world()
    plan = plan_of_rank(world, rank, partial(distributed.all_reduce_min, group=group), 300_000)
    before = listening(["self"])  # type: ignore[list-item]
    transport = make_transport(CPU, group, 2, shares_memory=shares_memory, kind="nixl")
    assert isinstance(transport, NixlTransport)
    opened = listening(["self"]) - before  # type: ignore[list-item]
    assert opened, "UCX listens for TCP"
    assert not [one for one in opened if is_open(one)]
    assert os.environ.get("UCX_NET_DEVICES") is None
    held, sink = memories(world.held, rank, 0.0), Layers(world.wanted, rank)
    executor = Executor(plan, NamedTensors(held), sink, transport)
    registered = list[set[int]]()
    for step in (1, 2, 3):
        values = canonical(world, step)
        write_pieces(world.held.pieces[rank], values, held)
        time.sleep(0.3 * ((rank + step) % 3))  # nobody needs to be first
        sink.begin()
        report = executor.run(verify=step == 2)
        sink.end()
        assert report.corrupted == (() if step == 2 else None)
        assert report.received_bytes == world.must_receive(rank)
        assert report.network_bytes == sum(
            t.nbytes for t in plan.transfers if t.dst == rank and t.src // 2 != rank // 2
        )
        assert (report.lent_bytes > 0) == shares_memory
        assert unlike(sink.landed, truth(world, rank, values)) == [], f"step {step}"
        registered.append(transport._memory.starts)
    assert set() < registered[0] <= registered[1] <= registered[2], "each storage is registered once"
    (folder / f"rank{rank}.done").touch()
    dist.barrier()
    dist.destroy_process_group()


def send(transport: NixlTransport, tensor: torch.Tensor, dst: int, tag: int = 0) -> Pending:
    transport.submit_send(tensor, dst, tag)
    return transport.run()


def receive(transport: NixlTransport, tensor: torch.Tensor, src: int, tag: int = 0) -> Pending:
    transport.submit_recv(tensor, src, tag)
    return transport.run()


def memory_is_freed_and_used_again(rank: int, folder: Path) -> None:
    """Every message lies in memory of its own, of which the operating system gives the same addresses again."""
    transport, other, seen = NixlTransport(start(rank, 2, folder), 1), 1 - rank, set[int]()
    again, learned, learn = 0, list[bool](), transport._learn

    def note(peer: Any, metadata: bytes, replaces: bool) -> None:
        learned.append(replaces)
        learn(peer, metadata, replaces)

    transport._learn = note  # type: ignore[method-assign]
    for step in range(12):
        sent, got = torch.full((1 << 20,), step + rank), torch.zeros(1 << 20, dtype=torch.int64)
        again += got.data_ptr() in seen
        seen.add(got.data_ptr())
        pending = [send(transport, sent.view(torch.uint8), other), receive(transport, got.view(torch.uint8), other)]
        for one in pending:
            one.wait()
        assert got.unique().tolist() == [step + other]
        assert len(transport._memory.starts) <= 4
        del sent, got, pending
    assert again
    assert any(learned), "NIXL must forget the older registration of an address"
    assert transport.received_bytes == transport.network_bytes == 12 << 23
    (folder / f"rank{rank}.done").touch()
    dist.barrier()


def messages_of_several_runs(rank: int, folder: Path) -> None:
    """Both ends submit in the same order, but in other runs; some messages are empty; nobody else is heard."""
    transport, data = NixlTransport(start(rank, 2, folder), 2), torch.arange(100, dtype=torch.uint8)
    foreign = load_nixl().nixl_agent(f"foreign{rank}", load_nixl().nixl_agent_config())
    to = foreign.add_remote_agent(gather_bytes(transport._agent.get_agent_metadata(), dist.group.WORLD)[1 - rank])
    for note in (b"", b"\x00", pickle.dumps(print), bytes(50)):
        foreign.send_notif(to.decode(), note)
    if rank == 0:
        for first, last in ((0, 10), (10, 10), (10, 60), (60, 60)):
            transport.submit_send(data[first:last], 1, 7)
        both = transport.run()
        send(transport, data[60:], 1, 7).wait()
        both.wait()
        both.wait()  # once more changes nothing
    else:
        got = torch.zeros(100, dtype=torch.uint8)
        time.sleep(0.5)
        pending = [receive(transport, got[i:j], 0, 7) for i, j in ((0, 10), (10, 10), (10, 60), (60, 60), (60, 100))]
        for one in reversed(pending):
            one.wait()
        assert got.equal(data)
        assert (transport.received_bytes, transport.network_bytes) == (100, 0)
    (folder / f"rank{rank}.done").touch()
    dist.barrier()


def order_differs(rank: int, folder: Path) -> None:
    transport, data = NixlTransport(start(rank, 2, folder), 2, timeout=timedelta(seconds=3)), torch.zeros(8)
    if rank == 0:
        with pytest.raises(RuntimeError, match="message 0 to rank 1 has tag 1 and 32 bytes here, and tag 2 and 16"):
            send(transport, data.view(torch.uint8), 1, 1).wait()
    else:
        pending = receive(transport, data[:4].view(torch.uint8), 0, 2)
        assert pending.awaited() == ("a message from rank 0", (0,))
        with pytest.raises(dist.DistNetworkError, match="waited 0:00:03 for a message from rank 0") as late:
            pending.wait()
        assert is_lost_peer(late.value)
    (folder / f"rank{rank}.done").touch()
    dist.barrier()


def peer_is_killed(rank: int, folder: Path, when: str) -> None:
    """Rank 1 is killed: before any message, before it sends, or before it receives."""
    transport, data = NixlTransport(start(rank, 2, folder), 2), torch.ones(1 << 22, dtype=torch.uint8)
    if when != "at first":
        (send if rank == 0 else receive)(transport, data, 1 - rank).wait()
        (send if rank == 1 else receive)(transport, data, 1 - rank).wait()
    (folder / f"rank{rank}.done").touch()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "rank1.done").exists():
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="rank 1 has ended") as lost:
        (send if when == "receiving" else receive)(transport, data, 1).wait()
    assert is_lost_peer(lost.value)
    (folder / "told").write_text(str(time.monotonic() - began))
    os._exit(0)  # as the other one is gone


@pytest.mark.engines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shares_memory", [False, True])
def test_plan_is_executed_between_processes(tmp_path: Path, shares_memory: bool) -> None:
    pytest.importorskip("nixl")
    among(4, plan_is_executed, tmp_path, shares_memory)


@pytest.mark.engines
@pytest.mark.timeout(120)
@pytest.mark.parametrize("job", [memory_is_freed_and_used_again, messages_of_several_runs, order_differs])
def test_messages_between_two_processes(tmp_path: Path, job: Callable[..., None]) -> None:
    pytest.importorskip("nixl")
    among(2, job, tmp_path)


@pytest.mark.engines
@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["at first", "sending", "receiving"])
def test_killed_peer_is_told_within_its_limit(tmp_path: Path, when: str) -> None:
    pytest.importorskip("nixl")
    context = mp.get_context("spawn")
    ranks = [context.Process(target=peer_is_killed, args=(rank, tmp_path, when)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    assert float((tmp_path / "told").read_text()) < LIMIT


def test_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(NoNixl, match=r"the package nixl cannot be imported .*pip install .*requirements/nixl\.txt"):
        load_nixl()
