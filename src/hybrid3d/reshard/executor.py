"""Runs a plan: pack, move and unpack, a bucket at a time, with two buckets of staging whatever the model's size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid3d.reshard.layout import Fill, Piece
from hybrid3d.reshard.planner import Bucket, Message, Plan, Transfer
from hybrid3d.reshard.transport import Pending, Transport


class Source(Protocol):
    """Where a rank reads what it holds."""

    def read(self, piece: Piece) -> torch.Tensor:
        """The piece's elements, shaped as its box; a view of live memory where that is possible."""
        ...


class Sink(Protocol):
    """Where a rank writes what it wants."""

    def write(self, piece: Piece) -> torch.Tensor:
        """A view to be written, shaped as the piece's box."""
        ...

    def landed(self, piece: Piece) -> None:
        """All of `piece` has been written."""
        ...


@dataclass(frozen=True)
class Report:
    """What one execution did on this rank, as measured, not as planned. Bytes."""

    received_bytes: int
    staging_bytes: int


class Tensors:
    """Source and sink over named tensors: a piece is the strided view that its `View` says."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def read(self, piece: Piece) -> torch.Tensor:
        tensor = self._tensors[piece.view.tensor]
        return tensor.as_strided(piece.box.size, piece.view.stride, tensor.storage_offset() + piece.view.offset)

    write = read

    def landed(self, piece: Piece) -> None:
        pass

    def fill(self, fill: Fill) -> None:
        tensor = self._tensors[fill.view.tensor]
        tensor.as_strided(fill.size, fill.view.stride, tensor.storage_offset() + fill.view.offset).fill_(fill.value)


class _InFlight:
    """A bucket whose messages are under way, and the tensors that they fill."""

    def __init__(self, bucket: Bucket, arrivals: dict[int, torch.Tensor], pending: Pending):
        self.bucket = bucket
        self.arrivals = arrivals
        self.pending = pending


class Executor:
    """Executes one rank's part of a plan, any number of times.

    Every rank of the plan calls `run` together. Bucket k+1 is packed and posted before bucket k is waited for, so
    that at most two are in flight. Local copies take no staging and are made in the order of the plan.
    """

    def __init__(self, plan: Plan, rank: int, transport: Transport, device: torch.device | str = "cpu"):
        self._rank = rank
        self._transport = transport
        self._device = torch.device(device)
        self._buckets = plan.of(rank)
        staged = [sum(m.staged_by(rank) for m in b.messages) for b in self._buckets]
        self._slot_bytes = [max(staged[slot::2], default=0) for slot in (0, 1)]

    @torch.no_grad()
    def run(self, source: Source, sink: Sink) -> Report:
        received_before = self._transport.received_bytes
        slots = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in self._slot_bytes]
        in_flight = None
        for i, bucket in enumerate(self._buckets):
            started = self._start(bucket, slots[i % 2], source, sink)
            if in_flight is not None:
                self._finish(in_flight, source, sink)
            in_flight = started
        if in_flight is not None:
            self._finish(in_flight, source, sink)
        return Report(self._transport.received_bytes - received_before, sum(s.nbytes for s in slots))

    def _start(self, bucket: Bucket, slot: torch.Tensor, source: Source, sink: Sink) -> _InFlight:
        """Post the bucket's receives, pack and post its sends."""
        staging = self._staging(bucket, slot)
        arrivals = {}
        for m in bucket.messages:
            if m.dst == self._rank:
                arrivals[m.tag] = staging[m.tag] if m.tag in staging else sink.write(m.transfers[0].target)
                self._transport.submit_recv(arrivals[m.tag], m.src, m.tag)
        for m in bucket.messages:
            if m.src == self._rank:
                packed = (
                    self._pack(m, staging[m.tag], source) if m.tag in staging else source.read(m.transfers[0].source)
                )
                self._transport.submit_send(packed, m.dst, m.tag)
        return _InFlight(bucket, arrivals, self._transport.run())

    def _staging(self, bucket: Bucket, slot: torch.Tensor) -> dict[int, torch.Tensor]:
        """Staging per message tag, widest dtype first, so that every message is aligned without padding."""
        staging, at = {}, 0
        for m in sorted(bucket.messages, key=lambda m: -getattr(torch, m.dtype).itemsize):
            nbytes = m.staged_by(self._rank)
            if nbytes:
                staging[m.tag] = slot[at : at + nbytes].view(getattr(torch, m.dtype))
                at += nbytes
        return staging

    @staticmethod
    def _pack(message: Message, staging: torch.Tensor, source: Source) -> torch.Tensor:
        for transfer, part in _parts(message, staging):
            part.copy_(source.read(transfer.source))
        return staging

    def _finish(self, in_flight: _InFlight, source: Source, sink: Sink) -> None:
        """Wait for the bucket, then write local and received boxes in the order in which they are wanted."""
        in_flight.pending.wait()
        received = {
            transfer.target: part
            for m in in_flight.bucket.messages
            if m.tag in in_flight.arrivals and m.staged_by(self._rank)
            for transfer, part in _parts(m, in_flight.arrivals[m.tag])
        }
        for t in in_flight.bucket.transfers:
            if t.is_local:
                sink.write(t.target).copy_(source.read(t.source))
            elif t.dst != self._rank:
                continue
            elif t.target in received:
                sink.write(t.target).copy_(received[t.target])
            sink.landed(t.target)


def _parts(message: Message, flat: torch.Tensor) -> list[tuple[Transfer, torch.Tensor]]:
    """The transfers of a message, each with its part of the message's contiguous elements."""
    sizes = [t.target.box.numel for t in message.transfers]
    pieces = torch.split(flat, sizes)
    return [(t, piece.view(t.target.box.size)) for t, piece in zip(message.transfers, pieces, strict=True)]
