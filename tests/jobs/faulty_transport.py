"""A transport whose messages are corrupted, or whose process ends, as a fault says; without one it only looks on.

`use_faulty_transports` makes each sync that is built afterwards use one: `sync.transport`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybrid3d.reshard.move.lent_memory import Place, SharedBuffer, SharedMemory
from hybrid3d.reshard.move.transport import Pending, Transport, make_transport
from hybrid3d.reshard.plan.planner import RankPlan
from hybrid3d.sync import compose


class Fault:
    """No fault."""

    def run(self) -> Fault:
        """Called before messages of a bucket are sent and received; return the fault of those that arrive."""
        return self

    def change(self, messages: Sequence[torch.Tensor]) -> None:
        """Called with the bytes of messages that have arrived, or that this rank is about to lend."""


class FlippedBits(Fault):
    """The lowest bit of the first byte of every message flips."""

    def change(self, messages: Sequence[torch.Tensor]) -> None:
        for message in messages:
            message[0] ^= 1


class FlippedBit(Fault):
    """A bit flips in the first message of so many buckets, after so many runs; in lent memory from the first on."""

    def __init__(self, times: int, after: int = 0):
        self._left, self._runs_left = times, after

    def run(self) -> Fault:
        self._runs_left -= 1
        return self if self._runs_left < 0 else Fault()

    def change(self, messages: Sequence[torch.Tensor]) -> None:
        if messages and self._left:
            self._left -= 1
            messages[0][0] ^= 1


class Killed(Fault):
    """The process is killed in place of this run, counted from 1."""

    def __init__(self, at: int):
        self._left = at

    def run(self) -> Fault:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return self


class FaultyTransport:
    """A transport between an executor and the real one."""

    def __init__(self, transport: Transport):
        self._transport, self._arriving, self.fault = transport, list[torch.Tensor](), Fault()
        self.shared_memory = None if transport.shared_memory is None else _FaultyMemory(transport.shared_memory, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._arriving.append(tensor)
        self._transport.submit_recv(tensor, src, tag)

    def run(self) -> Pending:
        fault, arriving, pending = self.fault.run(), self._arriving, self._transport.run()
        self._arriving = []

        class Arrived:
            def wait(self) -> None:
                pending.wait()
                fault.change(arriving)

        return Arrived()

    @contextmanager
    def failing(self, fault: Fault, plan: RankPlan) -> Iterator[None]:
        """Fail so, in syncs of all elements by this plan, until the end of the context."""
        self.fault, self.plan = fault, plan
        try:
            yield
        finally:
            self.fault = Fault()


class _FaultyMemory:
    """Memory that is lent: a fault changes it before its first loan of a bucket."""

    def __init__(self, memory: SharedMemory, transport: FaultyTransport):
        self._memory, self._transport = memory, transport
        self.borrowed: dict[int, int] = {}  # the rank whose memory is mapped, by address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def exchange(
        self, buffers: Sequence[SharedBuffer], places: Iterable[tuple[int, int, Place]]
    ) -> Mapping[tuple[int, int], torch.Tensor]:
        self._buffers, places = buffers, [*places]
        self._places = {(receiver, tag): place for receiver, tag, place in places}
        borrowed = self._memory.exchange(buffers, places)
        self.borrowed |= {memory.untyped_storage().data_ptr(): lender for (lender, _), memory in borrowed.items()}
        return borrowed

    def begin(self) -> None:
        self._changed = set[int]()
        self._memory.begin()

    def lend(self, receiver: int, bucket: int) -> None:
        if type(self._transport.fault) is not Fault and bucket not in self._changed:
            self._changed.add(bucket)
            self._transport.fault.change([*self._lent(bucket)])
        self._memory.lend(receiver, bucket)

    def _lent(self, number: int) -> Iterator[torch.Tensor]:
        """The bytes of the messages of a bucket that this rank lends."""
        (bucket,) = (one for one in self._transport.plan.buckets if one.number == number)
        for message in bucket.messages:
            if place := self._places.get((message.dst, message.tag)):
                yield self._buffers[place.buffer].flat_view(place.offset, place.nbytes, torch.uint8)


def use_faulty_transports() -> None:
    """Build each further sync of this process with a `FaultyTransport`."""

    def make(*arguments: Any, **settings: Any) -> FaultyTransport:
        return FaultyTransport(make_transport(*arguments, **settings))

    compose.make_transport = make
