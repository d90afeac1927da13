"""What a rank waits for is read from its stack by another thread: real collectives and messages of two processes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.reshard.move.transport import GlooTransport, as_bytes
from hybrid3d.watch.stalls import Wait, find_wait
from spawned import spawn

RANKS = (5, 6)  # of the launcher, as of an engine in a larger run


def wait_of(work: Callable[[], object], member: int) -> Wait | None:
    """Do work in which member 1 is late; return what member 0 waits for meanwhile, as another of its threads sees."""
    found: list[Wait | None] = []
    main = threading.get_ident()
    watch = threading.Timer(0.5, lambda: found.append(find_wait(sys._current_frames()[main])))
    dist.barrier()
    if member == 1:
        time.sleep(1)
    else:
        watch.start()
    work()
    return found[0] if found else None


def together(call: str) -> Wait:
    return Wait(call, RANKS, together=True)


def member_of_two(member: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(RANKS[member]))
        patch.setenv("WORLD_SIZE", "8")
        store = dist.FileStore(str(folder / "store"), 2)
        own = distributed.start_among(RANKS, "engine", store)
        spanning = distributed.spanning_group(RANKS, "sync", store, timedelta(seconds=60))
        transport = GlooTransport(spanning, 1, RANKS)

        def exchange() -> None:
            other, received, sent = RANKS[1 - member], torch.zeros(9), torch.ones(9)
            transport.submit_recv(as_bytes(received), other, 1)
            transport.submit_send(as_bytes(sent), other, 1)
            transport.run().wait()

        def hand_over() -> None:
            dist.recv(torch.zeros(1), src=1) if member == 0 else dist.send(torch.zeros(1), dst=0)

        found = [
            wait_of(lambda: dist.barrier(), member),
            wait_of(lambda: distributed.gather_objects(member, own), member),
            wait_of(lambda: distributed.gather_objects(member, spanning), member),
            wait_of(lambda: distributed.broadcast_object("late" if member else None, spanning, src=1), member),
            wait_of(exchange, member),
            wait_of(hand_over, member),
        ]
        if member == 0:
            assert found[:4] == [together(call) for call in ("barrier", "all_gather", "all_gather", "broadcast")]
            assert found[4] == Wait("a message from rank 6", (6,), together=False)
            assert found[5] == Wait("recv, rank 6 at the other end", (6,), together=False)
        (folder / f"{member}.done").touch()
        dist.destroy_process_group()


@pytest.mark.engines
@pytest.mark.timeout(120)
def test_wait_of_a_rank_is_read_from_its_stack(tmp_path: Path) -> None:
    spawn(member_of_two, (tmp_path,), 2)
    assert len(list(tmp_path.glob("*.done"))) == 2


def test_thread_that_only_works_waits_for_nobody() -> None:
    assert find_wait(sys._getframe()) is None
