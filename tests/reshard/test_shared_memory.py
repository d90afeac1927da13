"""Memory in which the ranks of a machine read messages: who finds whom, what arrives, and what failures say."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybrid3d.distributed import is_lost_peer
from hybrid3d.reshard.delta.executor import DeltaExecutor
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.move.lent_memory import Place, SharedBuffer, SharedMemory, map_buffer
from hybrid3d.reshard.move.transport import make_transport
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Piece, View
from hybrid3d.reshard.plan.planner import Bucket, RankPlan, Transfer, group_messages
from spawned import spawn

RANKS = (10, 11, 12, 13)
"""The plan's rank of each member of the group: 10 to 12 may share memory, but 12 has none to share."""


def test_buffer_can_be_mapped_while_it_exists() -> None:
    buffer = SharedBuffer(100)
    fd = buffer.fd
    mapped = map_buffer(os.getpid(), fd, 100)
    buffer.flat_view(0, 100, torch.uint8).fill_(7)
    del buffer
    assert mapped.tolist() == [7] * 100
    with pytest.raises(OSError, match=f"/fd/{fd}"):
        map_buffer(os.getpid(), fd, 100)


def test_map_buffer_maps_only_memory_of_messages(tmp_path: Path) -> None:
    """The number of a file descriptor in another container may be that of any file here."""
    (tmp_path / "file").write_bytes(bytes(100))
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="is no memory of messages"):
        map_buffer(os.getpid(), file.fileno(), 100)
    read, write = os.pipe()
    with pytest.raises(OSError, match="is no memory of messages"):
        map_buffer(os.getpid(), write, 100)  # opening it would wait
    os.close(read)
    os.close(write)


def test_shared_memory_unpickles_nothing_from_other_ranks(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of a run nothing signs it."""
    monkeypatch.setattr(distributed_c10d, "_tensor_to_object", lambda *_: pytest.fail("it was unpickled"))
    shared = SharedMemory(alone, [3], [3], lambda *_: None)
    assert shared.peers == set()
    buffer = SharedBuffer(8)
    buffer.flat_view(2, 4, torch.uint8).copy_(torch.arange(4))
    assert [*shared.exchange([buffer], [(3, 7, Place(0, 2, 4, True))])] == [(3, 7)]
    told = shared.exchange([buffer, buffer], [(3, 8, Place(1, 2, 4, True)), (5, 9, Place(0, 0, 8, True))])
    assert {key: memory.tolist() for key, memory in told.items()} == {(3, 8): [0, 1, 2, 3]}


def job(member: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=member, world_size=4)
    rank, counted = RANKS[member], list[tuple[int, int]]()
    if rank == 12:
        del os.memfd_create  # as where there is no Linux
    near = RANKS[:3] if rank in RANKS[:3] else [rank]
    before = os.listdir("/proc/self/fd")
    shared = SharedMemory(dist.group.WORLD, RANKS, near, lambda *args: counted.append(args), timedelta(seconds=2))
    assert shared.peers == {10: {11}, 11: {10}}.get(rank, set())
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2 * len(shared.peers)
    messages_arrive(rank, shared)
    if rank in (10, 11):
        notes_of_a_run_that_others_have_begun(rank, shared)
        a_peer_that_does_not_answer(rank, shared)
        a_peer_that_has_gone(rank, shared, folder)
    (folder / f"rank{rank}.done").touch()
    os._exit(0)


def messages_arrive(rank: int, shared: SharedMemory) -> None:
    buffers = [SharedBuffer(0), SharedBuffer(64)] if shared.peers else []
    places = [(11, 5, Place(1, 8, 16, lent=True)), (11, 6, Place(1, 32, 8, lent=True))] if rank == 10 else []
    borrowed = shared.exchange(buffers, places)
    assert sorted(borrowed) == ([(10, 5), (10, 6)] if rank == 11 else [])
    for value in (1, 2):
        shared.begin()
        if rank == 10:
            buffers[1].flat_view(0, 64, torch.uint8).copy_(torch.arange(64) * value)
            shared.lend(11, 3)
            shared.wait_for_return(11, 3)
        elif rank == 11:
            shared.wait_for_loan(10, 3)
            found = {tag: memory.tolist() for (_, tag), memory in borrowed.items()}
            assert found == {5: [n * value for n in range(8, 24)], 6: [n * value for n in range(32, 40)]}
            shared.give_back(10, 3)


def notes_of_a_run_that_others_have_begun(rank: int, shared: SharedMemory) -> None:
    """What comes early is kept; what is left of a run that failed does not count for the next one."""
    shared.begin()
    if rank == 10:
        shared.lend(11, 1)  # rank 11 fails without waiting for it
        shared.begin()
        shared.lend(11, 2)
        shared.begin()
        shared.lend(11, 1)
        shared.lend(11, 4)
        shared.wait_for_return(11, 4)
        return
    shared.begin()
    shared.wait_for_loan(10, 2)
    assert shared.awaited() is None
    shared.begin()
    shared.wait_for_loan(10, 4)
    shared.wait_for_loan(10, 1)
    shared.give_back(10, 4)


def a_peer_that_does_not_answer(rank: int, shared: SharedMemory) -> None:
    shared.begin()
    if rank == 10:
        shared.lend(11, 1)
        with pytest.raises(RuntimeError, match="waited 0:00:02 for the return of messages by rank 11"):
            shared.wait_for_return(11, 1)
        assert shared.awaited() == ("the return of messages by rank 11", (11,))
        shared.lend(11, 2)
        shared.begin()
        return
    shared.wait_for_loan(10, 1)
    time.sleep(1)  # so that the other one is the first to give up
    shared.wait_for_loan(10, 2)
    shared.begin()


def a_peer_that_has_gone(rank: int, shared: SharedMemory, folder: Path) -> None:
    if rank == 10:
        (folder / "rank10.done").touch()
        os._exit(0)
    with pytest.raises(RuntimeError, match="rank 10 has ended") as failure:
        shared.wait_for_loan(10, 1)
    assert is_lost_peer(failure.value)
    for _ in range(100):  # it may not have closed all of its files yet
        try:
            shared.give_back(10, 1)
        except dist.DistNetworkError:
            return
        time.sleep(0.1)
    raise AssertionError("a peer that has gone takes notes")


@pytest.mark.engines
@pytest.mark.timeout(120)
def test_ranks_of_a_machine_lend_messages(tmp_path: Path) -> None:
    spawn(job, (tmp_path,), 4)
    assert len(list(tmp_path.glob("rank*.done"))) == 4


LATE = {
    # (name, sender, receiver) of each bucket's message, and the names of which only changes are sent.
    # Buckets 0 and 2 have the same buffers of rank 0, which lends the first one to rank 1.
    "packs": ([("a", 0, 1), ("b", 0, 1), ("c", 0, 1)], ""),
    "encodes changes": ([("a", 0, 1), ("b", 0, 1), ("c", 0, 1)], "c"),
}
SIZE = 1000


def plan_of(rank: int, messages: list[tuple[str, int, int]]) -> RankPlan:
    """Return a plan of one message to a bucket, each of two boxes, so that it is staged."""
    tags: dict[tuple[int, int], int] = defaultdict(int)
    buckets = []
    for number, (name, src, dst) in enumerate(messages):
        if rank in (src, dst):
            pieces = [Piece(name + i, Box.full((SIZE,)), View(name + i, 0, (1,)), "bfloat16") for i in "12"]
            ends = [(piece if rank == src else None, piece if rank == dst else None) for piece in pieces]
            transfers = tuple(
                Transfer(src, dst, piece.name, piece.box, "bfloat16", *of_piece)
                for piece, of_piece in zip(pieces, ends, strict=True)
            )
            buckets.append(Bucket(number, None, transfers, group_messages(transfers, tags)))
    return RankPlan(rank, tuple(buckets))


def late_reader(rank: int, folder: Path, case: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=3)
    messages, sparse = LATE[case]
    transport = make_transport(torch.device("cpu"), dist.group.WORLD, 3, shares_memory=True)
    values = {"a": 1.0, "b": 2.0, "c": 3.0}

    def tensors(end: int, value: Callable[[str], float]) -> dict[str, torch.Tensor]:
        names = [message[0] for message in messages if message[end] == rank]
        return {name + i: torch.full((SIZE,), value(name), dtype=torch.bfloat16) for name in names for i in "12"}

    held, wanted = tensors(1, values.__getitem__), tensors(2, lambda name: 0.0)
    names = {name + i for name in sparse for i in "12"}
    executor = DeltaExecutor(plan_of(rank, messages), names, NamedTensors(held), NamedTensors(wanted), transport)
    if rank == 1:  # when the others have long posted all that they can
        start = executor._start_buckets
        executor._start_buckets = lambda *which, **how: (time.sleep(1), start(*which, **how))  # type: ignore[assignment]
    dist.barrier()
    executor.run_delta({name: torch.full((SIZE // 8,), 255, dtype=torch.uint8) for name in held if name in names})
    assert all(bool((tensor == values[name[0]]).all()) for name, tensor in wanted.items())
    (folder / f"rank{rank}.done").touch()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.engines
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", LATE)
def test_lent_memory_is_not_overwritten_before_it_is_returned(tmp_path: Path, case: str) -> None:
    spawn(late_reader, (tmp_path, case), 3)
    assert len(list(tmp_path.glob("rank*.done"))) == 3
