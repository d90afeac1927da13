"""When each reader takes each tensor: the one order of all transfers, which every rank counts alike.

A reader takes layer after layer, so that one layer after the other can be finalized. Readers begin at different layers,
and within a layer at different tensors: all stages send at the same time, and no rank is asked by all at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from hybrid3d.reshard.classes import natural
from hybrid3d.reshard.stamp import layer_of

_PARTS = 1 << 20  # of one tensor for one reader


class Order:
    """Keys of transfers: of two, the smaller goes first.

    In a *round* each reader takes all that it wants of one layer (or of what is in none).

    Args:
        names: of all tensors that are wanted.
        readers: all ranks that want something.
    """

    def __init__(self, names: Iterable[str], readers: Iterable[int]):
        by_layer: dict[int | None, list[str]] = defaultdict(list)
        for name in names:
            by_layer[layer_of(name)].append(name)
        self._layers = sorted(by_layer, key=lambda layer: (layer is None, layer))
        self._number = {rank: number for number, rank in enumerate(sorted(readers))}
        self._sizes = [len(by_layer[layer]) for layer in self._layers]
        self._place = {
            name: (number, place)
            for number, layer in enumerate(self._layers)
            for place, name in enumerate(sorted(by_layer[layer], key=natural))
        }
        self._tensor = len(self._number) * _PARTS
        self.round = max(self._sizes, default=0) * self._tensor
        self.end = len(self._layers) * self.round

    def key(self, name: str, reader: int, part: int) -> int:
        """Of the `part`-th part that a reader takes of a tensor."""
        assert part < _PARTS, f"{name}: rank {reader} takes {part} parts of it, which keys have no room for"
        layer, place = self._place[name]
        number = self._number[reader]
        turn = (layer - self._first(reader)) % len(self._layers)
        place = (place - number * self._sizes[layer] // len(self._number)) % self._sizes[layer]
        return turn * self.round + place * self._tensor + number * _PARTS + part

    def __contains__(self, reader: int) -> bool:
        return reader in self._number

    def layer(self, reader: int, key: int) -> int | None:
        """Which layer a reader takes in the round of this key; None stands for all that is in no layer."""
        return self._layers[(key // self.round + self._first(reader)) % len(self._layers)]

    def _first(self, reader: int) -> int:
        return self._number[reader] * len(self._layers) // len(self._number)
