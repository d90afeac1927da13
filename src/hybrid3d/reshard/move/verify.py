"""Verification of a sync: checksums of every box at both ends of its transfer.

A checksum depends on the contents of a box, and not on its strides or its address in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

import torch

from hybrid3d.reshard.ends import Sink, Source
from hybrid3d.reshard.move.transport import Transport, as_bytes
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Piece
from hybrid3d.reshard.plan.planner import CHECKSUM_TAG, RankPlan, Transfer

_WORD = 8  # bytes
_BLOCK = 32  # words


def checksum(box: torch.Tensor) -> torch.Tensor:
    """Return a checksum (int64 scalar on the box's device) of the bytes of a tensor in row-major order.

    Words are summed within blocks, and the block sums with an odd weight each, modulo 2^64. Any single flipped bit
    changes the checksum, and so does swapping two blocks; swapping two words within 256 bytes does not.
    """
    blocks = _blocks_in_place(box)
    if blocks is not None:
        return _weighted_sum(blocks.sum(-1).flatten())
    flat = box.contiguous().view(-1).as_strided((box.numel(),), (1,))
    if flat.storage_offset() * flat.itemsize % _WORD:
        flat = flat.clone()
    full_blocks = flat.numel() * flat.itemsize // (_WORD * _BLOCK) * (_WORD * _BLOCK) // flat.itemsize
    tail = torch.zeros(_WORD * _BLOCK // flat.itemsize, dtype=flat.dtype, device=flat.device)
    tail[: flat.numel() - full_blocks] = flat[full_blocks:]
    return _weighted_sum(
        torch.cat([flat[:full_blocks].view(torch.int64).view(-1, _BLOCK).sum(-1), tail.view(torch.int64).sum(-1, True)])
    )


def _blocks_in_place(box: torch.Tensor) -> torch.Tensor | None:
    """Return a view of shape [..., blocks, words] if each row is a multiple of the block size, else None."""
    per_word = _WORD // box.itemsize
    if box.dim() == 0 or box.stride(-1) != 1 or box.shape[-1] * box.itemsize % (_WORD * _BLOCK):
        return None
    if any(n % per_word for n in (box.storage_offset(), *box.stride()[:-1])):
        return None
    blocks: torch.Tensor = box.view(torch.int64).unflatten(-1, (-1, _BLOCK))
    return blocks


def _weighted_sum(sums: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, 2 * sums.numel(), 2, dtype=torch.int64, device=sums.device)
    return (sums * weights).sum()


class TransferChecksums:
    """Compares the checksum of each box in the sender's memory with that in the receiver's.

    Both are taken on the engines' own tensors, in the wanted dtype. A rank that hands on a box compares it with what
    its sender has, and sends the checksum of what has landed here.
    """

    def __init__(self, plan: RankPlan, source: Source, sink: Sink, transport: Transport, device: torch.device | str):
        self._transport = transport
        self._device = torch.device(device)
        self._boxes: dict[tuple[Piece, str], torch.Tensor] = {}
        self._to_send: dict[int, list[tuple[Piece, str] | int]] = defaultdict(list)  # of `_boxes`, or a transfer's id
        self._to_receive: dict[int, list[Transfer]] = defaultdict(list)
        self._targets: dict[int | None, list[tuple[Transfer, torch.Tensor]]] = defaultdict(list)
        self._received_sums: dict[int, torch.Tensor] = {}  # by the transfer's id
        landed: dict[tuple[str, Box], int] = {}
        for bucket in plan.buckets:
            for t in bucket.transfers:
                if t.src == plan.rank and t.relayed:
                    self._to_send[t.dst].append(landed[t.name, t.box])
                elif t.src == plan.rank and t.source is not None:
                    self._boxes[t.source, t.dtype] = source.read(t.source)
                    self._to_send[t.dst].append((t.source, t.dtype))
                if t.dst == plan.rank and t.target is not None:
                    self._targets[bucket.layer].append((t, sink.write(t.target)))
                    self._to_receive[t.src].append(t)
                    if t.handed_on:
                        landed[t.name, t.box] = id(t)
        self._rank = plan.rank

    def record_layer(self, layer: int | None) -> None:
        """Take the checksums of a layer that has been written and not yet finalized."""
        for transfer, box in self._targets[layer]:
            self._received_sums[id(transfer)] = checksum(box)

    def changed_since_landed(self, kept: Container[str]) -> set[str]:
        """Return the tensors with a box that differs from what `record_layer` saw, such as by its finalization.

        Only local tensors of the sink that are still allocated, those in `kept`, are looked at.
        """
        boxes = [
            (t, box)
            for layer in self._targets.values()
            for t, box in layer
            if id(t) in self._received_sums and t.target is not None and t.target.view.tensor in kept
        ]
        differ = [checksum(box) != self._received_sums[id(t)] for t, box in boxes]
        found = torch.stack(differ).tolist() if differ else ()
        return {t.name for (t, _), differs in zip(boxes, found, strict=True) if differs}

    def compare(self) -> list[str]:
        """Return the tensors whose checksums differ between sender and receiver. Every rank of the plan calls this."""
        sums = {key: checksum(box.to(getattr(torch, key[1]))) for key, box in self._boxes.items()} | self._received_sums
        sent = {dst: torch.stack([sums[key] for key in keys]) for dst, keys in self._to_send.items()}
        received = {
            src: torch.empty(len(transfers), dtype=torch.int64, device=self._device)
            for src, transfers in self._to_receive.items()
            if src != self._rank
        }
        for src, numbers in received.items():
            self._transport.submit_recv(as_bytes(numbers), src, CHECKSUM_TAG)
        for dst, numbers in sent.items():
            if dst != self._rank:
                self._transport.submit_send(as_bytes(numbers), dst, CHECKSUM_TAG)
        self._transport.run().wait()
        corrupted: list[str] = []
        for src, transfers in self._to_receive.items():
            local = torch.stack([self._received_sums[id(t)] for t in transfers])
            differ = local != (sent[src] if src == self._rank else received[src])
            corrupted += [transfers[i].name for i in differ.nonzero().flatten().tolist()]
        return sorted(set(corrupted))
