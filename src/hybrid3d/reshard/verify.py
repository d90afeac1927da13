"""Whether what has landed is what was sent: checksums of every box, taken at both ends and compared."""

from __future__ import annotations

from collections import defaultdict

import torch

from hybrid3d.reshard.checksum import checksum
from hybrid3d.reshard.layout import Piece
from hybrid3d.reshard.planner import CHECKSUM_TAG, RankPlan, Transfer
from hybrid3d.reshard.protocols import Sink, Source
from hybrid3d.reshard.transport import Transport, as_bytes


class TransferChecksums:
    """One rank's checksums of a plan: of each box in the memory that it is read from, and in that where it has landed.

    What is compared with nothing in between are the two engines' own tensors, in the dtype that was wanted.
    """

    def __init__(self, plan: RankPlan, source: Source, sink: Sink, transport: Transport, device: torch.device | str):
        self._transport = transport
        self._device = torch.device(device)
        self._boxes: dict[tuple[Piece, str], torch.Tensor] = {}
        self._given: dict[int, list[tuple[Piece, str]]] = defaultdict(list)
        self._taken: dict[int, list[Transfer]] = defaultdict(list)
        self._landing: dict[int | None, list[tuple[Transfer, torch.Tensor]]] = defaultdict(list)
        self._landed: dict[int, torch.Tensor] = {}  # by the transfer's id
        for bucket in plan.buckets:
            for t in bucket.transfers:
                if t.src == plan.rank and t.source is not None:
                    self._boxes[t.source, t.dtype] = source.read(t.source)
                    self._given[t.dst].append((t.source, t.dtype))
                if t.dst == plan.rank and t.target is not None:
                    self._landing[bucket.layer].append((t, sink.write(t.target)))
                    self._taken[t.src].append(t)
        self._rank = plan.rank

    def landed(self, layer: int | None) -> None:
        """All of this layer has been written, and nothing of it has been finalized yet."""
        for transfer, box in self._landing[layer]:
            self._landed[id(transfer)] = checksum(box)

    def compare(self) -> list[str]:
        """Tensors of which something has not landed as it was sent. Every rank of the plan calls this together."""
        sums = {key: checksum(box.to(getattr(torch, key[1]))) for key, box in self._boxes.items()}
        given = {dst: torch.stack([sums[key] for key in keys]) for dst, keys in self._given.items()}
        told = {
            src: torch.empty(len(transfers), dtype=torch.int64, device=self._device)
            for src, transfers in self._taken.items()
            if src != self._rank
        }
        for src, numbers in told.items():
            self._transport.submit_recv(as_bytes(numbers), src, CHECKSUM_TAG)
        for dst, numbers in given.items():
            if dst != self._rank:
                self._transport.submit_send(as_bytes(numbers), dst, CHECKSUM_TAG)
        self._transport.run().wait()
        wrong: list[str] = []
        for src, transfers in self._taken.items():
            landed = torch.stack([self._landed[id(t)] for t in transfers])
            differ = landed != (given[src] if src == self._rank else told[src])
            wrong += [transfers[i].name for i in differ.nonzero().flatten().tolist()]
        return sorted(set(wrong))
