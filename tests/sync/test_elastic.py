"""Members of a sync notice that one of them is lost, also those that wait for another one."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from hybrid3d.reshard.move.transport import GlooTransport, Transport
from hybrid3d.sync.elastic import ElasticSync, Members
from hybrid3d.sync.session import Sync, SyncReport
from hybrid3d.watch.watchdog import SAMPLE_SECONDS, StackSampler
from servers import free_port
from spawned import spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

MEMBERS = Members(epoch=0, ranks=(0, 1, 2), engines=(1, 2))
WAITED_FOR = {0: 2, 1: 0}  # rank 1 only notices that rank 0 leaves
LONGEST = 10.0  # seconds in which all notice; a message may take 15


class Waiting(Sync):
    """A sync in which each rank waits for a message of another one, which never comes."""

    def __init__(self, transport: Transport, rank: int):
        self._transport, self._rank = transport, rank
        self._itself = self  # so that it is freed by a garbage collection, as what has callbacks of its own

    def begin(self, version: int, verify: bool = False) -> None:
        pass

    def abandon(self) -> None:
        pass

    def finish(self) -> SyncReport:
        self._transport.submit_recv(torch.zeros(8, dtype=torch.uint8), WAITED_FOR[self._rank], tag=0)
        self._transport.run().wait()
        raise AssertionError("nobody sends")


def watch(sampler: StackSampler) -> None:
    while True:
        time.sleep(SAMPLE_SECONDS)
        sampler.sample(SAMPLE_SECONDS, limit=0.2)


def member(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    sync = ElasticSync(
        store, lambda _, weights, ranks: Waiting(GlooTransport(weights, ranks_per_node=3, ranks=ranks), rank)
    )
    sync.begin(MEMBERS, version=0, verify=False)
    if rank == 2:
        time.sleep(2)
        os._exit(0)
    threading.Thread(target=watch, args=(StackSampler(threading.get_ident()),), daemon=True).start()
    start = time.monotonic()
    assert sync.finish() is None
    assert time.monotonic() - start < LONGEST
    if rank == 0:
        store.wait(["left"])
    else:
        store.set("left", "")


def test_member_that_waits_for_another_notices_that_it_left() -> None:
    """Although the watchdog of the one that left holds the frame in which that one waited."""
    spawn(member, (free_port(),), 3)
