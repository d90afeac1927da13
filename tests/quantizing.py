"""Ranks of one process that quantize their parts of weights together, as the ranks of a sync do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from hybrid3d.reshard.fp8 import split_blocks
from hybrid3d.reshard.plan.classes import Group, signature_of
from hybrid3d.reshard.quantized import Quantized


def quantize_together(ranks: list[Quantized]) -> int:
    """Let ranks quantize their parts; return how many blocks they agree on."""
    holders = [([number], signature_of(rank.holdings)) for number, rank in enumerate(ranks)]
    together = Together(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda rank: quantize(rank, holders, together), ranks))
    return sum(blocks.count for blocks in split_blocks(signature for _, signature in holders).values())


def quantize(rank: Quantized, holders: list[Group], exchange: Together) -> None:
    rank.agree(holders, ())
    rank.begin()
    rank.complete(exchange)


class Together:
    """The maximum over ranks that are threads."""

    def __init__(self, ranks: int):
        self._values: list[torch.Tensor] = []
        self._barrier = threading.Barrier(ranks, timeout=60)

    def maximum_of(self, values: torch.Tensor) -> None:
        self._values.append(values.clone())
        self._barrier.wait()
        values.copy_(torch.stack(self._values).amax(0))
        self._barrier.wait()
