"""Staging memory that ranks of one machine read in place, instead of receiving it through a socket."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import struct
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d.reshard.memory import DeviceBuffer
from hybrid3d.reshard.staging import Place

NAME = "hybrid3d-staging"
TIMEOUT = timedelta(minutes=10)  # of a wait, by default

LENT, RETURNED = range(2)
_NOTE = struct.Struct("<qqq")  # the number of a run, LENT or RETURNED, and the number of a bucket


class SharedBuffer(DeviceBuffer):
    """A CPU buffer that other processes can map until `close`. It has no name, so that nothing outlives its users."""

    def __init__(self, nbytes: int):
        super().__init__(0, "cpu")
        self.fd = os.memfd_create(NAME)
        os.ftruncate(self.fd, nbytes)
        self._bytes = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)

    def close(self) -> None:
        """Let no more processes map the buffer; those that have mapped it, and this one, keep it."""
        os.close(self.fd)


def map_buffer(pid: int, fd: int, nbytes: int) -> torch.Tensor:
    """Return the memory [nbytes] of another process's `SharedBuffer`; it must not be written.

    Raises:
        OSError: this process cannot read it, or it is something else.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise OSError(f"{path} is no staging memory")
    own = os.open(path, os.O_RDONLY)
    try:
        mapped = mmap.mmap(own, nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(own)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


class SharedStaging:
    """Lends messages to ranks of the same machine, which read them in this rank's staging memory.

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
            timeout: of a wait.
        """
        self.count = count
        self._group, self._ranks, self._rank = group, ranks, ranks[group.rank()]
        self._timeout = timeout or TIMEOUT
        self._run = 0
        self._notes: set[tuple[int, ...]] = set()  # the rank and note of what has arrived and was not waited for yet
        self._waits_for: tuple[str, int] | None = None
        self._files: dict[int, tuple[int, int]] = {}  # of each peer, what its notes are read from, and written to
        with contextlib.ExitStack() as probes:
            self._connect(probes, [rank for rank in near if rank != self._rank])
        self.peers = frozenset(self._files)
        weakref.finalize(self, _close, [fd for files in self._files.values() for fd in files])

    def _connect(self, probes: contextlib.ExitStack, candidates: Sequence[int]) -> None:
        """Find the peers by trying: another rank may be on another machine, in another container, or another user's."""
        secret, offered, pipes = secrets.token_bytes(16), None, {}
        if hasattr(os, "memfd_create"):
            probe = SharedBuffer(len(secret))
            probes.callback(probe.close)
            probe.flat_view(0, len(secret), torch.uint8).copy_(torch.tensor(list(secret)))
            pipes = {rank: os.pipe() for rank in candidates}
            offered = (os.getpid(), probe.fd, secret, {rank: write for rank, (_, write) in pipes.items()})
        writing = {}
        for rank, other in zip(self._ranks, self._gather(offered), strict=True):
            if rank in pipes and other is not None:
                pid, fd, expected, writes = other
                with contextlib.suppress(OSError, ValueError):  # it cannot be mapped, or is too small
                    if bytes(map_buffer(pid, fd, len(expected)).tolist()) == expected:
                        writing[rank] = os.open(f"/proc/{pid}/fd/{writes[self._rank]}", os.O_WRONLY)
        reaching = dict(zip(self._ranks, self._gather(set(writing)), strict=True))
        for rank, (read, write) in pipes.items():
            os.close(write)  # the peer has its own, so that this end sees when it is gone
            if rank in writing and self._rank in reaching[rank]:
                self._files[rank] = read, writing[rank]
            else:
                _close([read, *([writing[rank]] if rank in writing else [])])

    def _gather(self, value: object) -> list[Any]:
        values: list[Any] = [None] * self._group.size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def buffer(self, nbytes: int) -> DeviceBuffer:
        """Return a staging buffer; it is shared only if there is a peer."""
        return SharedBuffer(nbytes) if nbytes and self.peers else DeviceBuffer(nbytes, "cpu")

    def exchange(
        self, buffers: Sequence[DeviceBuffer], places: Iterable[tuple[int, int, Place]]
    ) -> Mapping[tuple[int, int], torch.Tensor]:
        """Tell the peers where this rank's messages to them will lie, and return where theirs will. Once for a buffer.

        Every rank of the group calls this together.

        Args:
            buffers: from `buffer`.
            places: (receiver, tag, place) of each message that its receiver will read in place.

        Returns:
            The memory [nbytes] of each message to this rank that lies in another's, by sender and tag.
        """
        shared = {i: (buffer.fd, buffer.nbytes) for i, buffer in enumerate(buffers) if isinstance(buffer, SharedBuffer)}
        found = {}
        for rank, (pid, files, told) in zip(self._ranks, self._gather((os.getpid(), shared, [*places])), strict=True):
            mapped: dict[int, torch.Tensor] = {}
            for receiver, tag, place in told:
                if receiver == self._rank:
                    if place.buffer not in mapped:
                        mapped[place.buffer] = map_buffer(pid, *files[place.buffer])
                    found[rank, tag] = mapped[place.buffer][place.offset : place.offset + place.nbytes]
        self._gather(None)  # all have mapped what they need
        for buffer in buffers:
            if isinstance(buffer, SharedBuffer):
                buffer.close()
        return found

    def begin(self) -> None:
        """Begin a run, as every rank does; what is left of a failed run is not taken for this one's."""
        self._run += 1
        self._notes = {note for note in self._notes if note[1] >= self._run}  # another rank may be in this one already

    def lend(self, receiver: int, bucket: int) -> None:
        """Let a rank read the messages of a bucket."""
        self._tell(receiver, LENT, bucket)

    def give_back(self, sender: int, bucket: int) -> None:
        """Tell a rank that its messages of a bucket have been read."""
        self._tell(sender, RETURNED, bucket)

    def wait_for_loan(self, sender: int, bucket: int) -> None:
        """Wait until the messages of a bucket may be read.

        Raises:
            RuntimeError: the other rank has gone, or does not answer.
        """
        self._wait("messages that are lent by", sender, LENT, bucket)

    def wait_for_return(self, receiver: int, bucket: int) -> None:
        """Wait until the messages of a bucket may be overwritten.

        Raises:
            RuntimeError: as `wait_for_loan`.
        """
        self._wait("the return of messages by", receiver, RETURNED, bucket)

    def awaited(self) -> tuple[str, Sequence[int]] | None:
        """Return what this rank waits for, and the rank that it comes from; any thread may call it."""
        waits_for = self._waits_for
        return None if waits_for is None else (f"{waits_for[0]} rank {waits_for[1]}", (waits_for[1],))

    def _tell(self, rank: int, kind: int, bucket: int) -> None:
        try:
            os.write(self._files[rank][1], _NOTE.pack(self._run, kind, bucket))
        except BrokenPipeError:
            raise _gone(rank) from None

    def _wait(self, what: str, rank: int, kind: int, bucket: int) -> None:
        awaited, fd = (rank, self._run, kind, bucket), self._files[rank][0]
        self._waits_for = what, rank
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while awaited not in self._notes:
            if not poll.poll(self._timeout.total_seconds() * 1000):
                raise RuntimeError(f"waited {self._timeout} for {what} rank {rank}")
            told = os.read(fd, 1024 * _NOTE.size)  # notes are written whole
            if not told:
                raise _gone(rank)
            self._notes |= {(rank, *note) for note in _NOTE.iter_unpack(told)}
        self._notes.remove(awaited)
        self._waits_for = None


def _gone(rank: int) -> RuntimeError:
    return RuntimeError(f"Connection closed by peer: rank {rank} has ended")


def _close(files: Iterable[int]) -> None:
    for fd in files:
        os.close(fd)
