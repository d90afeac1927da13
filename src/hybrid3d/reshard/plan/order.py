"""The global order of all transfers, which every rank computes identically.

A reader receives layer by layer, so that each layer can be finalized when it is complete: the first layers of all
pipeline stages, then the second ones, and so on, which is the order in which training finishes updating them. Readers
start at different stages, and within a layer at different tensors, so that all stages send at the same time and no rank
has to serve every reader at once.

With relays, the readers of one node take the layers in the same order, and each layer in two phases: first from the
ranks that hold it, then what other readers of the node hand on. A rank thus has all that it hands on of a layer, and
has it still, when its turn comes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from hybrid3d.reshard.plan.classes import layer_of, natural_sort_key

_MAX_PARTS = 1 << 20  # parts of one tensor that one reader receives

Layer = int | None
"""The number of a layer; None stands for the tensors outside of all layers."""


class Order:
    """Assigns a key to each transfer; transfers run in ascending order of their keys.

    In one *round* each reader receives all that it wants of one layer. Tensors outside of all layers come last.

    Args:
        stages: a number for each layer, equal for layers that the same ranks hold.
        ranks_per_node: the number of consecutive ranks that share a node; None without relays.

    Attributes:
        round, phase: the number of keys in one round, and in one phase of it; without relays a round is one phase.
        end: one more than the largest key.
    """

    def __init__(
        self,
        names: Iterable[str],
        readers: Iterable[int],
        stages: Mapping[Layer, int],
        ranks_per_node: int | None = None,
    ):
        by_layer: dict[Layer, list[str]] = defaultdict(list)
        for name in names:
            by_layer[layer_of(name)].append(name)
        self._number = {rank: number for number, rank in enumerate(sorted(readers))}
        self._together = ranks_per_node or 1
        nodes = sorted({rank // self._together for rank in self._number})
        self._node = {node: number for number, node in enumerate(nodes)}
        self._place = {
            name: (place, len(layer_names))
            for layer_names in by_layer.values()
            for place, name in enumerate(sorted(layer_names, key=natural_sort_key))
        }
        self._layers = _layer_orders(by_layer, stages)
        self._turn = [{layer: turn for turn, layer in enumerate(layers)} for layers in self._layers]
        self._tensor = len(self._number) * _MAX_PARTS
        self.phase = max(map(len, by_layer.values()), default=0) * self._tensor
        self.round = self.phase if ranks_per_node is None else 2 * self.phase
        self.end = len(by_layer) * self.round

    def key(self, name: str, reader: int, part: int, relayed: bool = False) -> int:
        """Return the key of the `part`-th part of a tensor that a reader receives, from a relay or from a holder."""
        assert part < _MAX_PARTS, f"{name}: rank {reader} receives more than {_MAX_PARTS} parts"
        place, tensors = self._place[name]
        number = self._number[reader]
        place = (place - number * tensors // len(self._number)) % tensors
        turn = self._turn[self._first(reader)][layer_of(name)]
        phase = turn * self.round + relayed * self.phase
        return phase + place * self._tensor + number * _MAX_PARTS + part

    def __contains__(self, reader: int) -> bool:
        return reader in self._number

    def layer(self, reader: int, key: int) -> Layer:
        """Return the layer that a reader receives in the round of this key."""
        return self._layers[self._first(reader)][key // self.round]

    def _first(self, reader: int) -> int:
        """Return the index of the stage at which a reader starts."""
        return self._node[reader // self._together] * len(self._layers) // len(self._node)


def _layer_orders(layers: Iterable[Layer], stages: Mapping[Layer, int]) -> list[list[Layer]]:
    """Return the order of all layers for each stage at which a reader may start."""
    layers_of_stage: dict[int, list[int]] = defaultdict(list)
    for layer in sorted(layer for layer in layers if layer is not None):
        layers_of_stage[stages[layer]].append(layer)
    in_order = [layers_of_stage[stage] for stage in sorted(layers_of_stage)]
    last: list[Layer] = [None] if None in layers else []
    orders = []
    for first in range(max(1, len(in_order))):
        # The first layers of all stages, then the second ones, and so on
        turns = zip_longest(*in_order[first:], *in_order[:first])
        orders.append([*(layer for turn in turns for layer in turn if layer is not None), *last])
    return orders
