"""When each reader takes each tensor: the one order of all transfers, which every rank counts alike.

A reader takes layer after layer, so that one after the other can be finalized: the first layers of all stages, then the
second ones, and so on, which is the order in which training has them ready. Readers begin at different stages, and
within a layer at different tensors: all stages send at the same time, and no rank is asked by all at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hybrid3d.reshard.classes import natural_sort_key
from hybrid3d.reshard.stamp import layer_of

_PARTS = 1 << 20  # of one tensor for one reader

Layer = int | None
"""The number of a layer; None stands for all that is in none."""


class Order:
    """Keys of transfers: of two, the smaller goes first.

    In a *round* each reader takes all that it wants of one layer; what is in none comes last.

    Args:
        names: of all tensors that are wanted.
        readers: all ranks that want something.
        stages: by layer, any number that is the same for layers which the same ranks hold.
    """

    def __init__(self, names: Iterable[str], readers: Iterable[int], stages: Mapping[Layer, int]):
        by_layer: dict[Layer, list[str]] = defaultdict(list)
        for name in names:
            by_layer[layer_of(name)].append(name)
        self._number = {rank: number for number, rank in enumerate(sorted(readers))}
        self._place = {
            name: (place, len(together))
            for together in by_layer.values()
            for place, name in enumerate(sorted(together, key=natural_sort_key))
        }
        self._layers = _turns(by_layer, stages)
        self._turn = [{layer: turn for turn, layer in enumerate(layers)} for layers in self._layers]
        self._tensor = len(self._number) * _PARTS
        self.round = max(map(len, by_layer.values()), default=0) * self._tensor
        self.end = len(by_layer) * self.round

    def key(self, name: str, reader: int, part: int) -> int:
        """Of the `part`-th part that a reader takes of a tensor."""
        assert part < _PARTS, f"{name}: rank {reader} takes {part} parts of it, which keys have no room for"
        place, tensors = self._place[name]
        number = self._number[reader]
        place = (place - number * tensors // len(self._number)) % tensors
        return (
            self._turn[self._first(reader)][layer_of(name)] * self.round + place * self._tensor + number * _PARTS + part
        )

    def __contains__(self, reader: int) -> bool:
        return reader in self._number

    def layer(self, reader: int, key: int) -> Layer:
        """Which layer a reader takes in the round of this key."""
        return self._layers[self._first(reader)][key // self.round]

    def _first(self, reader: int) -> int:
        """The stage with which a reader begins."""
        return self._number[reader] * len(self._layers) // len(self._number)


def _turns(layers: Iterable[Layer], stages: Mapping[Layer, int]) -> list[list[Layer]]:
    """By the stage that a reader begins with, the order in which it takes all layers."""
    of_stage: dict[int, list[int]] = defaultdict(list)
    for layer in sorted(layer for layer in layers if layer is not None):
        of_stage[stages[layer]].append(layer)
    in_order = [of_stage[stage] for stage in sorted(of_stage)]
    last: list[Layer] = [None] if None in layers else []
    return [[*_dealt(in_order[first:] + in_order[:first]), *last] for first in range(max(1, len(in_order)))]


def _dealt(stages: Sequence[Sequence[int]]) -> list[Layer]:
    """The first layers of all stages, then the second ones, and so on."""
    longest = max(map(len, stages), default=0)
    return [layers[turn] for turn in range(longest) for layers in stages if turn < len(layers)]
