"""The process group of a trainer's ranks and vLLM's workers, outside of the groups that each of them has otherwise."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from hybrid3d import ledger
from hybrid3d.distributed import clone_store, group_outside, interface_of
from hybrid3d.launch_environment import source_address
from hybrid3d.reshard import JsonExchange, Resharder, WeightSink, WeightSource

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the machine, for all of its containers
WATCH_SECONDS, MEETING_POLL_SECONDS = 0.5, 0.02


class TransferFailed(RuntimeError):
    """Raised if vLLM has not got the weights; the trainer must connect anew."""


@dataclass
class WorkerInitInfo(WeightTransferInitInfo):
    """What a trainer tells the workers when it begins, and how all members of the group find each other.

    Attributes:
        master_address, master_port: where the first rank of the trainer listens.
        session: a name that no other group has.
        rank_offset: the rank of the first worker, which is the number of the trainer's ranks.
        world_size: how many members there are.
        device: the type of all members' devices, `cpu` or `cuda`.
        timeout: seconds for which a member waits for others.
        bucket_bytes: the size of a staging buffer.
    """

    master_address: str
    master_port: int
    session: str
    rank_offset: int
    world_size: int
    device: str
    timeout: float
    bucket_bytes: int


def find_store(address: str, port: int, timeout: float) -> TCPStore:
    """Return a connection to the trainer's store.

    Raises:
        ConnectionError: there is no answer in time.
    """
    try:
        return TCPStore(address, port, None, False, timedelta(seconds=timeout))
    except dist.DistError as error:
        raise ConnectionError(f"the trainer does not answer at {address}:{port} within {timeout:g} s") from error


def meet(
    store: Store, arrived: Callable[[Store], int], count: int, timeout: float, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until so many members have arrived.

    Args:
        arrived: returns how many have, by the store.
        check: called now and then meanwhile.

    Raises:
        TransferFailed: a member cannot take part, or some have not arrived in time.
    """
    end = time.monotonic() + timeout
    while (here := arrived(store)) < count:
        check()
        if refusal := ledger.read_refusal(store):
            raise TransferFailed(refusal)
        if time.monotonic() > end:
            raise TransferFailed(f"{count - here} of {count} members have not arrived within {timeout:g} s")
        time.sleep(MEETING_POLL_SECONDS)


class Membership:
    """This process as a member of a transfer; `leave` undoes it.

    Attributes:
        store: of all members.
        resharder: moves the weights, together with the other members.
        ranks: the rank of each member in plans; those that share a node are numbered consecutively.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        info: WorkerInitInfo,
        source: WeightSource,
        sink: WeightSink,
        device: torch.device | str,
    ):
        """Join, and plan the transfer; all members do it together.

        Args:
            store: of this transfer alone.
            source, sink, device: as for `Resharder`.

        Raises:
            ValueError: gloo cannot listen at this machine's address on the way to the trainer.
            PlanError, UnsupportedLoader: as `Resharder`.
        """
        self.store, self._cuda, self._watching = store, info.device == "cuda", True
        self._group = _make_group(store, rank, info)
        try:
            nodes = JsonExchange(self._group).unique(BOOT_ID.read_text(encoding="ascii"))
            self.ranks, per_node = number_by_node(nodes, info.world_size)
            if self._cuda:
                threading.Thread(target=self._watch, name="trainer", daemon=True).start()
            self.resharder = Resharder(
                source,
                sink,
                self._group,
                device=device,
                bucket_bytes=info.bucket_bytes,
                ranks=self.ranks,
                ranks_per_node=per_node,
            )
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the group, so that no member waits for this one. It is called once."""
        self._watching, group = False, self._group
        if self._cuda:
            group.abort()
        for name in ("_group", "resharder"):  # which refers to it
            vars(self).pop(name, None)
        dist.destroy_process_group(group)
        del group
        gc.collect()  # gloo closes its sockets when the last reference to a group and its operations is gone

    def _watch(self) -> None:
        """Abort the group once the trainer's store is gone: over NCCL nobody notices that a member is."""
        group, store = self._group, clone_store(self.store)
        while self._watching:
            try:
                ledger.check_answers(store)
            except dist.DistError:
                group.abort()
                return
            time.sleep(WATCH_SECONDS)


def number_by_node(nodes: Sequence[tuple[Sequence[int], str]], size: int) -> tuple[list[int], int]:
    """Return the rank of each member, and how many numbers each node has.

    Args:
        nodes: the members on each node, with the node's name.
        size: how many members there are.
    """
    per_node = max(len(members) for members, _ in nodes)
    ranks = [0] * size
    for node, (members, _) in enumerate(nodes):
        for place, member in enumerate(members):
            ranks[member] = node * per_node + place
    return ranks, per_node


def _make_group(store: Store, rank: int, info: WorkerInitInfo) -> dist.ProcessGroup:
    """Create the group, outside of the default group."""
    own = source_address(info.master_address)
    interface = interface_of(own)
    if interface is None:
        raise ValueError(
            f"{own}, this machine's address on the way to {info.master_address}, is no interface's first address"
        )
    with _gloo_listens_at(interface):
        backend, timeout = "cpu:gloo,cuda:nccl" if info.device == "cuda" else "gloo", timedelta(seconds=info.timeout)
        return group_outside(rank, info.world_size, backend, store, info.session, timeout, "weight transfer")


@contextmanager
def _gloo_listens_at(interface: str) -> Iterator[None]:
    """Set gloo's variable alone: other threads may change other ones meanwhile."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
