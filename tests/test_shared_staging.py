"""Staging memory that the ranks of a machine read in place: who finds whom, what arrives, and what failures say."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybrid3d.distributed import is_lost_peer
from hybrid3d.reshard.shared_staging import SharedBuffer, SharedStaging, map_buffer
from hybrid3d.reshard.staging import Place

RANKS = (10, 11, 12, 13)
"""The plan's rank of each member of the group: 10 to 12 may share memory, but 12 has none to share."""


def test_a_buffer_is_mapped_by_another_file_descriptor_until_it_is_closed() -> None:
    buffer = SharedBuffer(100)
    mapped = map_buffer(os.getpid(), buffer.fd, 100)
    fd = buffer.fd
    buffer.close()
    buffer.flat_view(0, 100, torch.uint8).fill_(7)
    assert mapped.tolist() == [7] * 100
    with pytest.raises(OSError, match=f"/fd/{fd}"):
        map_buffer(os.getpid(), fd, 100)


def test_nothing_but_staging_memory_is_mapped(tmp_path: Path) -> None:
    """The number of a file descriptor in another container may be that of any file here."""
    (tmp_path / "file").write_bytes(bytes(100))
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="is no staging memory"):
        map_buffer(os.getpid(), file.fileno(), 100)
    read, write = os.pipe()
    with pytest.raises(OSError, match="is no staging memory"):
        map_buffer(os.getpid(), write, 100)  # opening it would wait
    os.close(read)
    os.close(write)


def job(member: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=member, world_size=4)
    rank, counted = RANKS[member], list[tuple[int, int]]()
    if rank == 12:
        del os.memfd_create  # as where there is no Linux
    near = RANKS[:3] if rank in RANKS[:3] else [rank]
    before = os.listdir("/proc/self/fd")
    shared = SharedStaging(dist.group.WORLD, RANKS, near, lambda *args: counted.append(args), timedelta(seconds=2))
    assert shared.peers == {10: {11}, 11: {10}}.get(rank, set())
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2 * len(shared.peers)
    messages_arrive(rank, shared)
    if rank in (10, 11):
        notes_of_a_run_that_others_have_begun(rank, shared)
        a_peer_that_does_not_answer(rank, shared)
        a_peer_that_has_gone(rank, shared, folder)
    (folder / f"rank{rank}.done").touch()
    os._exit(0)


def messages_arrive(rank: int, shared: SharedStaging) -> None:
    buffers = [shared.buffer(0), shared.buffer(64)]
    assert isinstance(buffers[1], SharedBuffer) == bool(shared.peers)
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


def notes_of_a_run_that_others_have_begun(rank: int, shared: SharedStaging) -> None:
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


def a_peer_that_does_not_answer(rank: int, shared: SharedStaging) -> None:
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


def a_peer_that_has_gone(rank: int, shared: SharedStaging, folder: Path) -> None:
    if rank == 10:
        (folder / "rank10.done").touch()
        os._exit(0)
    with pytest.raises(RuntimeError, match="rank 10 has ended") as failure:
        shared.wait_for_loan(10, 1)
    assert is_lost_peer(failure.value)
    with pytest.raises(RuntimeError, match="rank 10 has ended") as failure:
        shared.give_back(10, 1)
    assert is_lost_peer(failure.value)


@pytest.mark.engines
@pytest.mark.timeout(120)
def test_ranks_of_a_machine_lend_messages(tmp_path: Path) -> None:
    mp.spawn(job, (tmp_path,), nprocs=4)
    assert len(list(tmp_path.glob("rank*.done"))) == 4
