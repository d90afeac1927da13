"""Executes a rank's part of a plan: packs, moves and unpacks one bucket at a time, with two staging buffers.

The views, messages and batched copies of every bucket are set up once and reused in every run.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from hybrid3d.reshard.ends import NamedTensors, Sink, Source
from hybrid3d.reshard.move.lent_memory import (
    Place,
    PlacedMessage,
    SharedBuffer,
    SharedMemory,
    lent_bytes,
    place_messages,
)
from hybrid3d.reshard.move.memory import BatchedCopies, DeviceBuffer
from hybrid3d.reshard.move.transport import Pending, Transport, as_bytes
from hybrid3d.reshard.move.verify import TransferChecksums
from hybrid3d.reshard.plan.planner import Bucket, Message, RankPlan, Transfer


@dataclass(frozen=True)
class ExecutionReport:
    """The measurements of one execution on this rank.

    Attributes:
        corrupted: tensors whose checksums differ between sender and receiver; None without verification.
        seconds: by phase; on a GPU what launching took.
        network_bytes: of those received, the bytes that came from other nodes.
        lent_bytes: of the memory in which other ranks of the node read messages.
    """

    received_bytes: int
    staging_bytes: int
    corrupted: tuple[str, ...] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    network_bytes: int = 0
    lent_bytes: int = 0


class _PhaseTimer:
    """Measures the seconds of each phase; a phase starts where the last one ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._at = time.perf_counter()

    def resume(self) -> None:
        """Start the next phase now: the time since the last one ended is not counted."""
        self._at = time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now


@torch.no_grad()
def run_local_plan(plan: RankPlan, source: Source, sink: NamedTensors) -> None:
    """Execute the plan of a load or an export on one rank: copy one box after another, without communication."""
    for t in plan.transfers:
        assert t.source is not None
        assert t.target is not None
        sink.write(t.target).copy_(source.read(t.source))


@dataclass
class Step:
    """The operations of one bucket on this rank: packing, sends, receives, unpacking and local copies.

    Attributes:
        index, number: of the bucket among those of this rank, and among those of the plan.
        awaits: the index of the last bucket that must be finished before this one starts; -1 for none.
        sends, receives: the memory of each message, the other rank, and the tag.
        lends: the ranks that read messages of the bucket in this rank's memory.
        borrows: the bytes of messages that this rank reads in that of others, by sender.
    """

    index: int
    awaits: int
    layer: int | None
    opens: bool
    closes: bool
    number: int
    sends: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)
    receives: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)
    lends: set[int] = field(default_factory=set)
    borrows: dict[int, int] = field(default_factory=dict)
    packing: BatchedCopies = field(default_factory=BatchedCopies)
    unpacking: BatchedCopies = field(default_factory=BatchedCopies)
    local: BatchedCopies = field(default_factory=BatchedCopies)


class Executor:
    """Executes one rank's part of a plan any number of times between the same tensors.

    Every rank of the plan makes it together, and calls `run` together, or `begin`, `start_ready_buckets` and `finish`.
    Bucket k+1 is packed and posted before the executor waits for bucket k, so two are in flight, and local copies run
    in the meantime. Before a rank packs again in memory that it lends, all that was lent of it has been returned.

    A bucket that hands on what the rank has received starts once the buckets that bring it are finished, which are
    earlier ones in the plan. A layer is finalized after the last bucket that writes it or hands on parts of it. This
    cannot deadlock: a rank starts a bucket after waiting for earlier ones only, and for their return; a bucket is
    finished once all of its ranks have started it, and returned when its receivers finish it. So by induction over the
    buckets of the plan all ranks start, finish and return each of them.
    """

    _step_type: type[Step] = Step

    def __init__(
        self, plan: RankPlan, source: Source, sink: Sink, transport: Transport, device: torch.device | str = "cpu"
    ):
        self._rank = plan.rank
        self._plan = plan
        self._device = device
        self._source = source
        self._sink = sink
        self._transport = transport
        self._shared = shared = transport.shared_memory
        self._staging = [DeviceBuffer(nbytes, device) for nbytes in plan.staging_bytes]
        self._lent: list[SharedBuffer] = []
        self._borrowed: Mapping[tuple[int, int], torch.Tensor] = {}  # by sender and tag
        places = place_messages(plan, self._can_share)
        if shared is not None:
            self._lent = [SharedBuffer(nbytes) for nbytes in lent_bytes(places)] if shared.peers else []
            lent = [(m.dst, m.tag, place) for of_bucket in places for m, place in of_bucket if place and place.lent]
            self._borrowed = shared.exchange(self._lent, lent)
        using = [any(t.dst == plan.rank or t.relayed for t in bucket.transfers) for bucket in plan.buckets]
        opening = {bucket.layer: i for i, bucket in reversed(list(enumerate(plan.buckets))) if using[i]}
        closing = {bucket.layer: i for i, bucket in enumerate(plan.buckets) if using[i]}
        self._steps = []
        for i, bucket in enumerate(plan.buckets):
            opens, closes = opening.get(bucket.layer) == i, closing.get(bucket.layer) == i
            step = self._step_type(i, plan.awaited[i], bucket.layer, opens, closes, bucket.number)
            self._bind(step, bucket, places[i])
            self._steps.append(step)
        self._release_staging()
        self._in_flight: deque[tuple[Step, Pending]] = deque()
        self._finishing: Step | None = None

    def _can_share(self, message: Message) -> bool:
        other = message.dst if message.src == self._rank else message.src
        return self._shared is not None and other in self._shared.peers

    @property
    def _lender(self) -> SharedMemory:
        assert self._shared is not None, "without shared memory nothing is lent"
        return self._shared

    def _bind(self, step: Step, bucket: Bucket, places: Iterable[PlacedMessage]) -> None:
        for m, place in places:
            self._bind_message(step, m, place)
        for t in bucket.transfers:
            if t.is_local:
                self._bind_local(step, t)
        for copies in (step.packing, step.unpacking, step.local):
            copies.merge()

    def _bind_message(self, step: Step, m: Message, place: Place | None) -> None:
        if m.src == self._rank:
            flat = self._read(m.transfers[0]) if place is None else self._staged(m, place, step.packing)
            if place is not None and place.lent:
                step.lends.add(m.dst)
            else:
                step.sends.append((as_bytes(flat), m.dst, m.tag))
        elif (m.src, m.tag) in self._borrowed:
            self._add_copies(m, self._borrowed[m.src, m.tag], step.unpacking)
            step.borrows[m.src] = step.borrows.get(m.src, 0) + m.nbytes
        else:
            flat = self._write(m.transfers[0]) if place is None else self._staged(m, place, step.unpacking)
            step.receives.append((as_bytes(flat), m.src, m.tag))

    def _staged(self, message: Message, place: Place, copies: BatchedCopies) -> torch.Tensor:
        """Return the memory of a message at its place, and add the copies that pack or unpack it."""
        buffer = (self._lent if place.lent else self._staging)[place.buffer]
        return self._add_copies(message, buffer.flat_view(place.offset, place.nbytes, torch.uint8), copies)

    def _add_copies(self, message: Message, memory: torch.Tensor, copies: BatchedCopies) -> torch.Tensor:
        """Add the copies that pack or unpack a message that lies in this memory; return it in the message's dtype."""
        flat = memory.view(getattr(torch, message.dtype))
        parts = torch.split(flat, [t.box.numel for t in message.transfers])
        for t, part in zip(message.transfers, parts, strict=True):
            part = part.view(t.box.size)
            if message.src == self._rank:
                copies.add(part, self._read(t))
            else:
                copies.add(self._write(t), part)
        return flat

    def _bind_local(self, step: Step, transfer: Transfer) -> None:
        step.local.add(self._write(transfer), self._read(transfer))

    def _read(self, transfer: Transfer) -> torch.Tensor:
        assert transfer.source is not None, "every rank knows where its own pieces lie"
        return self._sink.write(transfer.source) if transfer.relayed else self._source.read(transfer.source)

    def _write(self, transfer: Transfer) -> torch.Tensor:
        assert transfer.target is not None, "every rank knows where its own pieces lie"
        return self._sink.write(transfer.target)

    @property
    def operations(self) -> int:
        """The number of sends, receives, loans and copies of one run."""
        messages = sum(len(s.sends) + len(s.receives) + len(s.lends) + len(s.borrows) for s in self._steps)
        return messages + sum(len(s.packing) + len(s.unpacking) + len(s.local) for s in self._steps)

    @cached_property
    def _checks(self) -> TransferChecksums:
        return TransferChecksums(self._plan, self._source, self._sink, self._transport, self._device)

    def changed_since_landed(self, kept: Container[str]) -> set[str]:
        """See `TransferChecksums.changed_since_landed`."""
        return self._checks.changed_since_landed(kept)

    def run(self, verify: bool = False) -> ExecutionReport:
        """Move all weights as they are now.

        Args:
            verify: compare checksums of both ends of every transfer, taken before the sink finalizes a layer.
        """
        self.begin(verify)
        return self.finish()

    def begin(self, verify: bool = False) -> None:
        """Begin a run whose buckets are started by `start_ready_buckets` and `finish`."""
        self._received_before, self._network_before = self._transport.received_bytes, self._transport.network_bytes
        self._timer = _PhaseTimer()
        self._verifying = self._checks if verify else None
        for staging in self._staging:
            staging.allocate()
        self._next = 0
        self._in_flight.clear()  # a failed run may have left some
        if self._shared is not None:
            self._shared.begin()
        self._finishing = None

    @torch.no_grad()
    def start_ready_buckets(self, num_ready: int) -> None:
        """Start the first `num_ready` buckets of this rank that are not started yet; up to two stay in flight.

        Their weights are sent as they are now. Every rank of the plan must start the same buckets without waiting for
        what this rank does next. With a transport that blocks the host, at most two buckets are started, and none that
        hands on what is still in flight.
        """
        self._start_buckets(num_ready, self._transport.blocks_host)

    def _start_buckets(self, num_ready: int, never_wait: bool) -> None:
        self._timer.resume()
        while self._next < num_ready:
            step = self._steps[self._next]
            while len(self._in_flight) == 2 or (self._in_flight and self._in_flight[0][0].index <= step.awaits):
                if never_wait:
                    return
                self._finish(*self._in_flight.popleft())
            self._in_flight.append((step, self._start(step)))
            self._next += 1

    @torch.no_grad()
    def finish(self) -> ExecutionReport:
        """Start the remaining buckets, wait for all of them, and return what was measured."""
        self._start_buckets(len(self._steps), never_wait=False)
        while self._in_flight:
            self._finish(*self._in_flight.popleft())
        for step in self._steps[-2:]:
            self._reclaim(step)
        self._release_staging()
        received = self._transport.received_bytes - self._received_before
        network = self._transport.network_bytes - self._network_before
        corrupted = tuple(self._verifying.compare()) if self._verifying else None
        self._timer("check")
        staging = sum(s.nbytes for s in self._staging[:2])
        lent = sum(s.nbytes for s in self._lent)
        return ExecutionReport(received, staging, corrupted, self._timer.seconds, network, lent)

    def _start(self, step: Step) -> Pending:
        """Post the bucket's receives, pack and post its sends, then run its local copies."""
        timer = self._timer
        if step.opens:
            self._sink.open(step.layer)
            timer("open")
        for flat, src, tag in step.receives:
            self._transport.submit_recv(flat, src, tag)
        for src, nbytes in step.borrows.items():
            self._lender.count(nbytes, src)
        timer("post")
        if step.index >= 2:  # it packs in the same buffers
            self._reclaim(self._steps[step.index - 2])
        step.packing.run()
        timer("pack")
        for dst in step.lends:
            self._lender.lend(dst, step.number)
        for flat, dst, tag in step.sends:
            self._transport.submit_send(flat, dst, tag)
        pending = self._transport.run()
        timer("post")
        step.local.run()
        timer("copy")
        return pending

    def awaited_bucket(self) -> str:
        """Return which of this rank's buckets it waits for, or is finishing; any thread may call it."""
        step = self._finishing
        return "" if step is None else f"bucket {step.index + 1} of {len(self._steps)}"

    def _finish(self, step: Step, pending: Pending) -> None:
        self._finishing = step
        pending.wait()
        for src in step.borrows:
            self._lender.wait_for_loan(src, step.number)
        self._timer("wait")
        self._complete(step)
        self._finishing = None

    def _complete(self, step: Step) -> None:
        """Unpack what a bucket has received, and close the layer that it was the last of."""
        timer = self._timer
        step.unpacking.run()
        timer("unpack")
        for src in step.borrows:
            self._lender.give_back(src, step.number)
        timer("post")
        if step.closes and self._verifying:
            self._verifying.record_layer(step.layer)
            timer("check")
        if step.closes:
            self._sink.close(step.layer)
            timer("finalize")

    def _reclaim(self, step: Step) -> None:
        """Wait until no rank reads a bucket's messages in this rank's memory any more."""
        self._finishing = step
        for dst in step.lends:
            self._lender.wait_for_return(dst, step.number)
        self._finishing = None
        self._timer("wait")

    def _release_staging(self) -> None:
        for staging in self._staging:
            staging.release()
