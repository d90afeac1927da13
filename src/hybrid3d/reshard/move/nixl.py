"""A one-sided transport by NIXL: a sender writes its messages into the memory of their receivers.

A receiver tells the sender by a note where its messages belong. Once the sender has started them it writes them there,
and a note follows that they have landed. Ranks need no common order for that, and talk only to those that they have
messages for or from. Notes have a fixed form, and nothing that comes from another process is unpickled.

NIXL moves bytes over what its backend UCX finds: InfiniBand, shared memory or TCP.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d.reshard.move.lent_memory import CountingTransport
from hybrid3d.reshard.move.nixl_agent import (
    GPU,
    NAME,
    Place,
    RegisteredMemory,
    gather_bytes,
    kind_of,
    make_agent,
    start_of,
)

PING_SECONDS = 1.0  # after which a rank that waits for another one finds out whether it is still there
PAUSES = (20e-6, 1e-3)  # seconds between looks at what has arrived: at first, and at most

GRANT, LANDED = range(2)
_GRANT = struct.Struct("<BBI")  # GRANT, whether the metadata replace older ones, and the number of messages
_PLACE = struct.Struct("<QqQQI")  # of a message: its number and tag; address, size and device of its memory
_LANDED = struct.Struct("<BQI")  # LANDED, the number of the first message, and how many have landed


@dataclass(frozen=True)
class _Message:
    number: int
    tag: int
    tensor: torch.Tensor

    @property
    def place(self) -> Place:
        return self.tensor.data_ptr(), self.tensor.nbytes, max(self.tensor.get_device(), 0)


@dataclass
class _Peer:
    """Another rank.

    Attributes:
        name: of its agent.
        address: by which NIXL reaches it; empty once NIXL has been told.
        sends, receives: how many messages were submitted to it, and from it.
        outgoing: messages that this rank has started, and that it has not written yet.
        grants: the tag of messages that it waits for, and their place at the peer, by number.
        writes: the handle of each write that is under way, and the numbers of its messages.
        arrived: the direction and number of messages that have arrived, and were not waited for yet.
        told: the addresses of the regions of this rank that it knows.
        outdated: it knows of regions that are not registered any more.
    """

    rank: int
    name: str
    address: bytes
    sends: int = 0
    receives: int = 0
    outgoing: deque[_Message] = field(default_factory=deque)
    grants: dict[int, tuple[int, Place]] = field(default_factory=dict)
    writes: deque[tuple[Any, range]] = field(default_factory=deque)
    arrived: set[tuple[str, int]] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    outdated: bool = False


class NixlTransport(CountingTransport):
    """Writes messages into the memory of their receivers by NIXL. Every rank of the group makes it together.

    A message moves while its sender is in `run` or waits for any message; over TCP its receiver must be, too. Storages
    stay registered as long as they exist, and on GPUs while messages are under way.

    Arguments: as for `make_transport`.

    Raises:
        NoNixl: it cannot be imported.
    """

    blocks_host = True
    _submitted: list[tuple[str, _Peer, _Message]]
    _timeout: timedelta

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks_per_node: int,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        shares_memory: bool = False,
    ):
        super().__init__(group, ranks_per_node, ranks, timeout, shares_memory)
        self._agent, self._lost = make_agent(group)
        self._memory = RegisteredMemory(self._agent)
        self._timeout = timeout or group._get_backend(torch.device("cpu")).options._timeout
        self._running: set[_Pending] = set()
        told = gather_bytes(self._agent.name.encode() + self._agent.get_agent_metadata(), group)
        self._peers = {
            rank: _Peer(rank, of_rank[:NAME].decode(), of_rank[NAME:])
            for rank, of_rank in zip(self._members, told, strict=True)
        }
        self._by_name = {peer.name: peer for peer in self._peers.values()}
        self._met: list[_Peer] = []  # those that it has had messages for or from

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        peer = self._peers[dst]
        self._submitted.append(("to", peer, _Message(peer.sends, tag, tensor)))
        peer.sends += 1

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._count(tensor.nbytes, src)
        peer = self._peers[src]
        self._submitted.append(("from", peer, _Message(peer.receives, tag, tensor)))
        peer.receives += 1

    def run(self) -> _Pending:
        messages, self._submitted = self._submitted, []
        if any(message.tensor.is_cuda for _, _, message in messages):
            torch.cuda.current_stream().synchronize()  # what packs messages, and what reads the memory of others
        self._forget(self._memory.register(message.tensor for _, _, message in messages))
        receives: dict[int, list[_Message]] = {}
        for direction, peer, message in messages:
            self._meet(peer)
            (peer.outgoing if direction == "to" else receives.setdefault(peer.rank, [])).append(message)
        for rank, of_peer in receives.items():
            self._grant(self._peers[rank], of_peer)
        self._advance()
        started = _Pending(self, messages)
        self._running.add(started)
        return started

    def finish(self, pending: _Pending) -> None:
        """End a run whose messages have all arrived."""
        self._running.discard(pending)
        if not self._running:  # the memory of a GPU may be freed now, and another be mapped at its address
            self._forget(self._memory.release(GPU))

    def wait_for(self, direction: str, peer: _Peer, number: int) -> None:
        """Wait until a message has arrived. Raises: as `SharedMemory.wait_for_loan`."""
        start = time.monotonic()
        deadline, ping, pause = start + self._timeout.total_seconds(), start + PING_SECONDS, PAUSES[0]
        while (direction, number) not in peer.arrived:
            if self._advance():
                pause = PAUSES[0]
                continue
            now = time.monotonic()
            if now > deadline:
                raise dist.DistNetworkError(f"waited {self._timeout} for a message {direction} rank {peer.rank}")
            if now > ping:  # a rank that has gone is not told of otherwise
                self._tell(peer, b"")
                ping = now + PING_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
        peer.arrived.remove((direction, number))

    def _advance(self) -> bool:
        """Read the notes that have come, and write and finish what can be; return whether there was anything."""
        notes = self._agent.get_new_notifs()
        for name, of_peer in notes.items():
            for note in of_peer if name in self._by_name else ():  # others are no ranks
                self._read_note(self._by_name[name], note)
        moved = [self._write(peer) + self._finish_writes(peer) for peer in self._met]
        return bool(notes) or any(moved)

    def _read_note(self, peer: _Peer, note: bytes) -> None:
        if note[:1] == bytes([GRANT]):
            _, replaces, count = _GRANT.unpack_from(note)
            end = _GRANT.size + count * _PLACE.size
            self._learn(peer, note[end:], bool(replaces))
            for number, tag, *place in _PLACE.iter_unpack(note[_GRANT.size : end]):
                peer.grants[number] = tag, tuple(place)
        elif note[:1] == bytes([LANDED]):
            _, first, count = _LANDED.unpack(note)
            peer.arrived |= {("from", number) for number in range(first, first + count)}

    def _learn(self, peer: _Peer, metadata: bytes, replaces: bool) -> None:
        """Let NIXL know of regions of a peer."""
        self._meet(peer)
        with self._expecting(peer):
            if replaces:  # it keeps what it knows of an address
                while peer.writes:
                    self._finish_writes(peer)
                    time.sleep(PAUSES[0])
                self._agent.remove_remote_agent(peer.name)
            if metadata:
                self._agent.add_remote_agent(metadata)

    def _meet(self, peer: _Peer) -> None:
        """Let NIXL know how it reaches a peer."""
        if peer.address:
            self._agent.add_remote_agent(peer.address)
            peer.address = b""
            self._met.append(peer)

    def _grant(self, peer: _Peer, messages: Sequence[_Message]) -> None:
        """Tell a peer where messages from it belong, and of the regions there that it does not know."""
        starts = {start_of(message.tensor) for message in messages if message.tensor.nbytes}
        if peer.outdated:
            starts, metadata = self._memory.starts, self._agent.get_agent_metadata()
        else:
            metadata = self._memory.metadata_of(starts - peer.told)
        head = _GRANT.pack(GRANT, peer.outdated, len(messages))
        peer.told, peer.outdated = peer.told | starts, False
        self._tell(peer, head + b"".join(_PLACE.pack(m.number, m.tag, *m.place) for m in messages) + metadata)

    def _write(self, peer: _Peer) -> bool:
        """Write the messages that the peer waits for; return whether there were any."""
        messages, places = list[_Message](), list[Place]()
        while peer.outgoing and peer.outgoing[0].number in peer.grants:
            message = peer.outgoing.popleft()
            tag, place = peer.grants.pop(message.number)
            if (message.tag, message.place[1]) != (tag, place[1]):
                raise RuntimeError(
                    f"message {message.number} to rank {peer.rank} has tag {message.tag} and {message.place[1]:,} "
                    f"bytes here, and tag {tag} and {place[1]:,} bytes there: submit the messages between two ranks in "
                    "the same order on both"
                )
            messages.append(message)
            places.append(place)
        if messages:
            numbers = range(messages[0].number, messages[-1].number + 1)
            filled = [(message.place, place) for message, place in zip(messages, places, strict=True) if place[1]]
            note = _LANDED.pack(LANDED, numbers.start, len(numbers))
            with self._expecting(peer):
                peer.writes.append((self._start_write(peer, filled, kind_of(messages[0].tensor), note), numbers))
        return bool(messages)

    def _start_write(self, peer: _Peer, places: Sequence[tuple[Place, Place]], kind: str, note: bytes) -> Any:
        """Start a write from places here to places there and return its handle; None if nothing is to be written."""
        if not places:
            return self._agent.send_notif(peer.name, note)
        ends = [self._agent.get_xfer_descs([*end], kind) for end in zip(*places, strict=True)]
        handle = self._agent.initialize_xfer("WRITE", *ends, peer.name, note)
        self._agent.transfer(handle)
        return handle

    def _finish_writes(self, peer: _Peer) -> bool:
        """Note the oldest writes to a peer that are complete; return whether there were any."""
        before = len(peer.writes)
        while peer.writes and self._is_complete(peer, peer.writes[0][0]):
            _, numbers = peer.writes.popleft()
            peer.arrived |= {("to", number) for number in numbers}
        return len(peer.writes) < before

    def _is_complete(self, peer: _Peer, handle: Any) -> bool:
        if handle is None:
            return True
        with self._expecting(peer):
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                handle.release()
        if state == "ERR":
            raise dist.DistNetworkError(f"rank {peer.rank} has ended: a message to it could not be written")
        return bool(state == "DONE")

    def _tell(self, peer: _Peer, note: bytes) -> None:
        with self._expecting(peer):
            self._agent.send_notif(peer.name, note)

    @contextmanager
    def _expecting(self, peer: _Peer) -> Iterator[None]:
        """Raise that a rank has ended, which may happen at any time, where NIXL says that it cannot be reached."""
        try:
            yield
        except self._lost as error:
            raise dist.DistNetworkError(f"rank {peer.rank} has ended ({error})") from None

    def _forget(self, starts: set[int]) -> None:
        """Note that regions are not registered any more, of which peers may know."""
        for peer in self._met:
            peer.outdated |= not starts.isdisjoint(peer.told)
            peer.told -= starts


class _Pending:
    """Messages that were started together."""

    def __init__(self, transport: NixlTransport, messages: Sequence[tuple[str, _Peer, _Message]]):
        self._transport, self._messages = transport, deque(messages)

    def wait(self) -> None:
        while self._messages:
            direction, peer, message = self._messages[0]
            self._transport.wait_for(direction, peer, message.number)
            self._messages.popleft()
        self._transport.finish(self)

    def awaited(self) -> tuple[str, Sequence[int]] | None:
        """Return the message that `wait` is waiting for, and the rank at its other end; any thread may call it."""
        for direction, peer, _ in [*self._messages][:1]:
            return f"a message {direction} rank {peer.rank}", (peer.rank,)
        return None
