"""Which slot of which engine each rank generates with: the one that overlaps most with what the rank holds.

An engine has as many slots as ranks; two engines' slots want the same. The slots of one node's ranks are exchanged
among them where engines fit into a node, else among the ranks of the nodes that an engine spans, a TP group staying
within a node where it fits. Consecutive ranks take consecutive slots where no exchange is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from hybrid3d.reshard.box import Box, union_numel
from hybrid3d.reshard.classes import Boxes, TensorClass
from hybrid3d.reshard.layout import ITEMSIZE

# What a byte over the network counts against one within a node: enough to come first wherever the two disagree.
NETWORK_WEIGHT = 1000

Costs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MissingBytes:
    """Bytes that a group of ranks, or all ranks of a node, lack of what a slot wants.

    Attributes:
        by_group, by_node: bytes by group, or by node, and slot; nodes whose ranks hold the same count as one.
        group, node: of each rank.
    """

    by_group: Costs
    by_node: Costs
    group: np.ndarray
    node: np.ndarray

    def received_bytes(self, slots: np.ndarray) -> int:
        """Bytes received where rank r has `slots[r]`."""
        return int(self.by_group[self.group, slots].sum())

    def network_bytes(self, slots: np.ndarray) -> int:
        """Of these, the bytes that no rank of the reader's node holds."""
        return int(self.by_node[self.node, slots].sum())

    def cost(self, ranks: np.ndarray) -> Costs:
        found: Costs = NETWORK_WEIGHT * self.by_node[self.node[ranks]] + self.by_group[self.group[ranks]]
        return found


def count_missing_bytes(
    classes: Sequence[TensorClass], holders: Sequence[Sequence[int]], slots: int, ranks: int, ranks_per_node: int
) -> MissingBytes:
    """Count what is lacking.

    Args:
        classes: of all tensors; readers' groups are the slots of one engine.
        holders: the ranks of each group that holds.
        slots: of an engine.
    """
    group = np.empty(ranks, np.int64)
    for number, members in enumerate(holders):
        group[list(members)] = number
    kinds: dict[frozenset[int], int] = {}
    node = np.empty(ranks, np.int64)
    for first in range(0, ranks, ranks_per_node):
        those = slice(first, min(first + ranks_per_node, ranks))
        node[those] = kinds.setdefault(frozenset(group[those].tolist()), len(kinds))
    by_group, by_node = np.zeros((len(holders), slots), np.int64), np.zeros((len(kinds), slots), np.int64)
    for one in classes:
        around = {number: {box for g in groups for box in one.held.get(g, ())} for groups, number in kinds.items()}
        near = [(number, tuple(sorted(boxes, key=lambda b: b.start))) for number, boxes in around.items() if boxes]
        for slot, wanted in one.wanted.items():
            whole = _missing(wanted, ())
            by_group[:, slot] += whole * one.count
            by_node[:, slot] += whole * one.count
            for counts, having in ((by_group, one.held.items()), (by_node, near)):
                for number, held in having:
                    counts[number, slot] -= (whole - _missing(wanted, held)) * one.count
    return MissingBytes(by_group, by_node, group, node)


def _missing(wanted: Boxes, held: tuple[Box, ...]) -> int:
    return sum(union_numel((box,), held) * ITEMSIZE[dtype] for box, dtype in wanted)


def consecutive_slots(ranks: int) -> np.ndarray:
    """Slots over all engines, one engine after the other, in the order of ranks."""
    return np.arange(ranks)


def assign_slots(missing: MissingBytes, slots: int, tp: int, ranks_per_node: int) -> np.ndarray:
    """The slot of each rank, counted over all engines: engine e has slots e * `slots` and on.

    Args:
        slots: of one engine.
        tp: consecutive slots that are one TP group.
    """
    ranks = len(missing.group)
    found = consecutive_slots(ranks)
    node = min(ranks_per_node, ranks)
    pool = max(slots, node)
    if node % slots and slots % node:
        return found  # engines that straddle nodes
    for first in range(0, ranks, pool):
        members = np.arange(first, min(first + pool, ranks))
        cost = missing.cost(members)
        if slots <= node:
            chosen = _assign(np.tile(cost, len(members) // slots))
            within = _in_engines(chosen % slots, slots)
        elif node % tp == 0:
            within = _assign_groups(cost, tp, node)
        elif tp == slots:
            within = _assign(cost)
        else:
            continue  # TP groups of several nodes, several to an engine: exchanged, they would span more
        usual = np.arange(len(members))
        if cost[usual, within % slots].sum() < cost[usual, usual % slots].sum():
            found[members] = first + within
    return found


def _assign(cost: Costs) -> np.ndarray:
    """The column of each row, so that the sum is the least."""
    rows, columns = linear_sum_assignment(cost)
    of_row: np.ndarray = columns[np.argsort(rows)]
    return of_row


def _in_engines(chosen: np.ndarray, slots: int) -> np.ndarray:
    """Several ranks have each slot: the first of them in the first engine, and so on."""
    seen = [0] * slots
    found = np.empty(len(chosen), np.int64)
    for rank, slot in enumerate(chosen):
        found[rank] = seen[slot] * slots + slot
        seen[slot] += 1
    return found


def _assign_groups(cost: Costs, tp: int, node: int) -> np.ndarray:
    """Slots for the ranks of several nodes: each node gets whole TP groups, then each rank of it a slot of these."""
    ranks = len(cost)
    nodes, groups, per_node = ranks // node, ranks // tp, node // tp
    by_group = np.empty((nodes, groups))
    for n in range(nodes):
        for g in range(groups):
            part = cost[n * node : (n + 1) * node, g * tp : (g + 1) * tp]
            by_group[n, g] = part[linear_sum_assignment(part)].sum()
    of_place = _assign(np.repeat(by_group, per_node, axis=0))
    found = np.empty(ranks, np.int64)
    for n in range(nodes):
        columns = np.concatenate([np.arange(g * tp, (g + 1) * tp) for g in of_place[n * per_node : (n + 1) * per_node]])
        part = cost[n * node : (n + 1) * node][:, columns]
        found[n * node : (n + 1) * node] = columns[_assign(part)]
    return found
