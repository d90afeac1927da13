"""Memory in which ranks of one machine read messages, instead of receiving them through a socket; and what lends it.

A message of a rank lies in one of its two staging buffers, or in the memory that it lends to other ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import struct
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d.reshard.exchange import JsonExchange
from hybrid3d.reshard.move.memory import DeviceBuffer
from hybrid3d.reshard.plan.layout import ITEMSIZE
from hybrid3d.reshard.plan.planner import Message, RankPlan


@dataclass(frozen=True)
class Place:
    """Where a message lies in the memory of a rank: in one of two staging buffers or, if it is lent, in one of two
    buffers of lent memory, in which the receiver reads it. The offset is in bytes.
    """

    buffer: int
    offset: int
    nbytes: int
    lent: bool


PlacedMessage = tuple[Message, Place | None]
"""A message, and its place; without one, the tensor's own memory is sent or filled directly, or it is borrowed."""


def place_messages(plan: RankPlan, can_share: Callable[[Message], bool]) -> list[list[PlacedMessage]]:
    """Return the messages of each bucket of a rank with their places.

    All messages whose two ranks share memory are lent, also those that could be sent directly. Their receivers copy
    them from there into their tensors.
    """
    placed = []
    for i, bucket in enumerate(plan.buckets):
        of_bucket: list[PlacedMessage] = []
        ends = {False: 0, True: 0}  # of staging memory, and of lent memory
        # widest dtype first, so that every message is aligned without padding
        for m in sorted(bucket.messages, key=lambda m: -ITEMSIZE[m.dtype]):
            lent = can_share(m)
            nbytes = m.staging_bytes_on(plan.rank) if not lent else m.nbytes if m.src == plan.rank else 0
            of_bucket.append((m, Place(i % 2, ends[lent], nbytes, lent) if nbytes else None))
            ends[lent] += nbytes
        placed.append(of_bucket)
    return placed


def lent_bytes(placed: list[list[PlacedMessage]]) -> tuple[int, int]:
    """Return the size of each buffer of lent memory."""
    nbytes = [0, 0]
    for place in (place for of_bucket in placed for _, place in of_bucket if place and place.lent):
        nbytes[place.buffer] = max(nbytes[place.buffer], place.offset + place.nbytes)
    return nbytes[0], nbytes[1]


NAME = "hybrid3d-messages"
LENT, RETURNED = range(2)
_NOTE = struct.Struct("<qqq")  # the number of a run, LENT or RETURNED, and the number of a bucket


class SharedBuffer(DeviceBuffer):
    """A CPU buffer that other processes can map while it exists. It has no name, so that nothing outlives its users."""

    def __init__(self, nbytes: int):
        super().__init__(0, "cpu")
        self.fd = os.memfd_create(NAME)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, max(nbytes, 1))  # nothing cannot be mapped
        self._bytes = torch.frombuffer(mmap.mmap(self.fd, 0), dtype=torch.uint8)[:nbytes]


def map_buffer(pid: int, fd: int, nbytes: int) -> torch.Tensor:
    """Return the memory [nbytes] of another process's `SharedBuffer`; it must not be written.

    Raises:
        OSError: this process cannot read it, or it is something else.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise OSError(f"{path} is no memory of messages")
    own = os.open(path, os.O_RDONLY)
    try:
        mapped = mmap.mmap(own, nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(own)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


class SharedMemory:
    """Lends messages to ranks of the same machine, which read them in this rank's memory.

    For each bucket the sender lends its messages to a receiver, which waits for that, reads them and gives them back.
    The sender waits for that before it writes there again. Both ends number the buckets alike.

    Attributes:
        peers: the ranks that lend to this one, and to which it can lend.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        near: Sequence[int],
        count: Callable[[int, int], None],
        timeout: timedelta | None = None,
    ):
        """Every rank of the group makes it together.

        Args:
            ranks: the plan's rank of each member of the group.
            near: the ranks, this one among them, that may share memory; the same on all of these.
            count: called with the size of each message that this rank borrows, and its sender.
            timeout: of a wait, by default the group's.
        """
        self.count = count
        self._group, self._ranks, self._rank = group, ranks, ranks[group.rank()]
        self._timeout = timeout or group._get_backend(torch.device("cpu")).options._timeout
        self._run = 0
        self._notes: set[tuple[int, ...]] = set()  # the rank and note of what has arrived and was not waited for yet
        self._waits_for: tuple[str, int] | None = None
        self.peers = self._find_peers(near)
        self._reads: dict[int, int] = {}  # the file descriptors of the pipes from and to each peer
        self._writes: dict[int, int] = {}
        with contextlib.ExitStack() as files:
            self._connect(files)
            weakref.finalize(self, files.pop_all().close)

    def _find_peers(self, near: Sequence[int]) -> frozenset[int]:
        """Find the peers by trying: another rank may be on another machine, in another container, or another user's."""
        secret, readable = secrets.token_bytes(16), set()
        probe = _make_probe(secret)
        offered = None if probe is None else (os.getpid(), probe.fd, secret.hex())
        for rank, other in zip(self._ranks, self._gather(offered), strict=True):
            if rank in near and rank != self._rank and probe is not None and other is not None:
                pid, fd, expected = other
                with contextlib.suppress(OSError, ValueError):  # it cannot be mapped, or is too small
                    if bytes(map_buffer(pid, fd, len(secret)).tolist()).hex() == expected:
                        readable.add(rank)
        by_rank = dict(zip(self._ranks, self._gather(readable), strict=True))
        return frozenset(rank for rank in readable if self._rank in by_rank[rank])

    def _connect(self, files: contextlib.ExitStack) -> None:
        with contextlib.ExitStack() as offered:
            writes = {}
            for rank in self.peers:
                self._reads[rank], writes[rank] = os.pipe()
                files.callback(os.close, self._reads[rank])
                offered.callback(os.close, writes[rank])
            for rank, (pid, of_rank) in zip(self._ranks, self._gather((os.getpid(), writes)), strict=True):
                if rank in self.peers:
                    with _expecting(rank):
                        self._writes[rank] = os.open(f"/proc/{pid}/fd/{of_rank[self._rank]}", os.O_WRONLY)
                    files.callback(os.close, self._writes[rank])
            self._gather(None)  # all have opened their ends; a pipe ends when its writer does, without the one here

    def _gather(self, value: object) -> list[Any]:
        by_member = {m: found for members, found in JsonExchange(self._group).unique(value) for m in members}
        return [by_member[member] for member in range(self._group.size())]

    def exchange(
        self, buffers: Sequence[SharedBuffer], places: Iterable[tuple[int, int, Place]]
    ) -> Mapping[tuple[int, int], torch.Tensor]:
        """Tell the peers where this rank's messages to them will lie, and return where theirs will.

        Every rank of the group calls this together, with the buffers that it lends, and (receiver, tag, place) of each
        message in them. It gets the memory [nbytes] of each message to it that lies in another's, by sender and tag.

        Raises:
            torch.distributed.DistNetworkError: a peer has gone.
        """
        shared = [(buffer.fd, buffer.nbytes) for buffer in buffers]
        lent = [(receiver, tag, astuple(place)) for receiver, tag, place in places]
        found = {}
        for rank, (pid, files, told) in zip(self._ranks, self._gather((os.getpid(), shared, lent)), strict=True):
            mapped: dict[int, torch.Tensor] = {}
            for receiver, tag, described in told:
                if receiver == self._rank:
                    place = Place(*described)
                    if place.buffer not in mapped:
                        with _expecting(rank):
                            mapped[place.buffer] = map_buffer(pid, *files[place.buffer])
                    found[rank, tag] = mapped[place.buffer][place.offset : place.offset + place.nbytes]
        return found

    def begin(self) -> None:
        """Begin a run, as every rank does; what is left of a failed run is not taken for this one's."""
        self._run += 1
        self._notes = {note for note in self._notes if note[1] >= self._run}  # another rank may be in this one already

    def lend(self, receiver: int, bucket: int) -> None:
        self._tell(receiver, LENT, bucket)

    def give_back(self, sender: int, bucket: int) -> None:
        """Tell a rank that its messages of a bucket have been read."""
        self._tell(sender, RETURNED, bucket)

    def wait_for_loan(self, sender: int, bucket: int) -> None:
        """Wait until the messages of a bucket may be read.

        Raises:
            torch.distributed.DistNetworkError: the other rank has gone, or does not answer.
        """
        self._wait("messages that are lent by", sender, LENT, bucket)

    def wait_for_return(self, receiver: int, bucket: int) -> None:
        """Wait until the messages of a bucket may be overwritten. Raises: as `wait_for_loan`."""
        self._wait("the return of messages by", receiver, RETURNED, bucket)

    def awaited(self) -> tuple[str, Sequence[int]] | None:
        """Return what this rank waits for, and the rank that it comes from; any thread may call it."""
        waits_for = self._waits_for
        return None if waits_for is None else (f"{waits_for[0]} rank {waits_for[1]}", (waits_for[1],))

    def _tell(self, rank: int, kind: int, bucket: int) -> None:
        with _expecting(rank):
            os.write(self._writes[rank], _NOTE.pack(self._run, kind, bucket))

    def _wait(self, what: str, rank: int, kind: int, bucket: int) -> None:
        awaited, fd = (rank, self._run, kind, bucket), self._reads[rank]
        self._waits_for = what, rank
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while awaited not in self._notes:
            if not poll.poll(self._timeout.total_seconds() * 1000):
                raise dist.DistNetworkError(f"waited {self._timeout} for {what} rank {rank}")
            told = os.read(fd, 1024 * _NOTE.size)  # notes are written whole
            if not told:
                raise dist.DistNetworkError(f"rank {rank} has ended")
            self._notes |= {(rank, *note) for note in _NOTE.iter_unpack(told)}
        self._notes.remove(awaited)
        self._waits_for = None


def _make_probe(content: bytes) -> SharedBuffer | None:
    """Return a buffer with this content, or None where the operating system has no such memory."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        probe = SharedBuffer(len(content))
    except OSError:  # forbidden, as in some containers
        return None
    probe.flat_view(0, len(content), torch.uint8).copy_(torch.tensor(list(content)))
    return probe


@contextlib.contextmanager
def _expecting(rank: int) -> Iterator[None]:
    """Raise that a rank has ended, which may have been lost at any time, if what it has open is not there."""
    try:
        yield
    except OSError:
        raise dist.DistNetworkError(f"rank {rank} has ended") from None


class CountingTransport:
    """Counts received bytes, and lends messages to other ranks of the node if it is asked to.

    Arguments: as for `make_transport`. With `shares_memory` every rank of the group makes it together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks_per_node: int,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        shares_memory: bool = False,
    ):
        self.received_bytes = self.network_bytes = 0
        self._group, self._timeout = group, timeout
        self._submitted: list[Any] = []  # what the next `run` starts
        ranks = ranks or range(group.size())
        self._members = {rank: member for member, rank in enumerate(ranks)}
        self._ranks_per_node, self._node = ranks_per_node, ranks[group.rank()] // ranks_per_node
        self.shared_memory: SharedMemory | None = None
        if shares_memory:
            near = [rank for rank in self._members if rank // ranks_per_node == self._node]
            self.shared_memory = SharedMemory(group, [*self._members], near, self._count, timeout)

    def _count(self, nbytes: int, src: int) -> None:
        self.received_bytes += nbytes
        if src // self._ranks_per_node != self._node:
            self.network_bytes += nbytes
