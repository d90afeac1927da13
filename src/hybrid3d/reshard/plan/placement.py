"""Assigns a slot to each rank: the shard of the rollout layout that overlaps most with what the rank already holds.

An engine has as many slots as ranks, and the slots of two engines want the same weights. Slots are exchanged between
the ranks of one node if engines fit into a node, otherwise between the ranks of the nodes that an engine spans; a TP
group stays within a node if it fits into one. Where no exchange reduces the bytes, consecutive ranks have consecutive
slots.

The ranks of a TP group need not be in ascending order: where the order decides which shard a rank has, it is chosen by
bytes. vLLM numbers the members of a group by slot and works with any order, except in one function, which
`rollout/patches.py` replaces (`register_graph_buffers`). The alternatives would cost more: ascending groups move more
bytes with every sync, and vLLM without its custom all-reduce generates more slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from hybrid3d.reshard.plan.box import Box, union_numel
from hybrid3d.reshard.plan.classes import Boxes, TensorClass
from hybrid3d.reshard.plan.layout import ITEMSIZE

# Weight of a byte over the network relative to a byte within a node: large enough that network bytes decide first.
NETWORK_WEIGHT = 1000

Costs = npt.NDArray[np.int64]
"""A cost for each rank (row) and slot (column)."""


@dataclass(frozen=True)
class MissingBytes:
    """The bytes that ranks, and nodes, lack of what each slot wants.

    Attributes:
        by_group: bytes that a rank of each group lacks, [groups, slots]; the ranks of a group hold the same pieces.
        by_node: bytes that all ranks of a node together lack, [node kinds, slots]; nodes of a kind hold the same.
        group, node: the group of each rank, and the kind of its node.
    """

    by_group: Costs
    by_node: Costs
    group: np.ndarray
    node: np.ndarray

    def received_bytes(self, slots: np.ndarray) -> int:
        """Return the bytes that all ranks receive if rank r has the slot `slots[r]`."""
        return int(self.by_group[self.group, slots].sum())

    def network_bytes(self, slots: np.ndarray) -> int:
        """Return how many of the received bytes no rank of the receiver's node holds."""
        return int(self.by_node[self.node, slots].sum())

    def costs(self, ranks: np.ndarray) -> Costs:
        """Return the cost of each slot for each of these ranks: received bytes, network bytes weighted."""
        costs: Costs = NETWORK_WEIGHT * self.by_node[self.node[ranks]] + self.by_group[self.group[ranks]]
        return costs


def count_missing_bytes(
    classes: Sequence[TensorClass], holders: Sequence[Sequence[int]], slots: int, ranks: int, ranks_per_node: int
) -> MissingBytes:
    """Count the bytes that each group of ranks, and each kind of node, lacks of what each slot of one engine wants.

    Args:
        classes: all tensors, by class; the readers of a class are slots of one engine.
        holders: the ranks of each group of ranks that hold the same pieces.
    """
    group = np.empty(ranks, np.int64)
    for number, members in enumerate(holders):
        group[list(members)] = number
    groups_by_kind: dict[frozenset[int], int] = {}
    node = np.empty(ranks, np.int64)
    for first in range(0, ranks, ranks_per_node):
        members_of_node = slice(first, min(first + ranks_per_node, ranks))
        groups_of_node = frozenset(group[members_of_node].tolist())
        node[members_of_node] = groups_by_kind.setdefault(groups_of_node, len(groups_by_kind))
    by_group = np.zeros((len(holders), slots), np.int64)
    by_node = np.zeros((len(groups_by_kind), slots), np.int64)
    for tensor_class in classes:
        held_by_node = _boxes_by_node(tensor_class, groups_by_kind)
        for slot, wanted in tensor_class.wanted.items():
            total = _missing(wanted, ())
            for counts, held_boxes in ((by_group, tensor_class.held), (by_node, held_by_node)):
                counts[:, slot] += total * tensor_class.count
                for holder, held in held_boxes.items():
                    counts[holder, slot] -= (total - _missing(wanted, held)) * tensor_class.count
    return MissingBytes(by_group, by_node, group, node)


def _boxes_by_node(
    tensor_class: TensorClass, groups_by_kind: Mapping[frozenset[int], int]
) -> dict[int, tuple[Box, ...]]:
    """Return the distinct boxes that the ranks of each kind of node hold; kinds that hold none are left out."""
    boxes_by_node = {}
    for groups, kind in groups_by_kind.items():
        boxes = {box for group in groups for box in tensor_class.held.get(group, ())}
        if boxes:
            boxes_by_node[kind] = tuple(sorted(boxes, key=lambda box: box.start))
    return boxes_by_node


def _missing(wanted: Boxes, held: tuple[Box, ...]) -> int:
    """Return the bytes of the wanted boxes that are in none of the held ones."""
    return sum(union_numel((box,), held) * ITEMSIZE[dtype] for box, dtype in wanted)


def consecutive_slots(ranks: int) -> np.ndarray:
    """Return the slot of each rank, numbered over all engines, if slots are assigned in rank order."""
    return np.arange(ranks)


def assign_slots(missing: MissingBytes, slots: int, tp: int, ranks_per_node: int) -> np.ndarray:
    """Return the slot of each rank, numbered over all engines: engine e has the slots from e * `slots` on.

    Each `tp` consecutive slots form a TP group.
    """
    ranks = len(missing.group)
    assigned = consecutive_slots(ranks)
    node = min(ranks_per_node, ranks)
    if node % slots and slots % node:
        return assigned  # engines extend over parts of nodes
    exchanged = max(slots, node)  # number of ranks that exchange slots with each other
    for first in range(0, ranks, exchanged):
        members = np.arange(first, min(first + exchanged, ranks))
        costs = missing.costs(members)
        if slots <= node:
            slots_of_members = linear_sum_assignment(np.tile(costs, len(members) // slots))[1]
            within = _distribute_over_engines(slots_of_members % slots, slots)
        elif node % tp == 0:
            within = _assign_groups(costs, tp, node)
        elif tp == slots:
            within = linear_sum_assignment(costs)[1]
        else:
            continue  # an exchange would spread TP groups, which already span several nodes, over more nodes
        consecutive = np.arange(len(members))
        if costs[consecutive, within % slots].sum() < costs[consecutive, consecutive % slots].sum():
            assigned[members] = first + within
    return assigned


def _distribute_over_engines(slot_of_rank: np.ndarray, slots: int) -> np.ndarray:
    """Number slots over several engines: of the ranks with equal slots the first gets engine 0, the next engine 1."""
    engines_used = [0] * slots
    numbered = np.empty(len(slot_of_rank), np.int64)
    for rank, slot in enumerate(slot_of_rank):
        numbered[rank] = engines_used[slot] * slots + slot
        engines_used[slot] += 1
    return numbered


def _assign_groups(costs: Costs, tp: int, node: int) -> np.ndarray:
    """Return the slots of the ranks of several nodes: each node gets whole TP groups, and each rank one of their slots.

    The costs are [ranks, slots], for as many ranks as slots; `tp` divides `node`, the number of ranks of a node.
    """
    ranks = len(costs)
    nodes, groups, groups_per_node = ranks // node, ranks // tp, node // tp
    cost_of_group = np.empty((nodes, groups))
    for n in range(nodes):
        for g in range(groups):
            block = costs[n * node : (n + 1) * node, g * tp : (g + 1) * tp]
            cost_of_group[n, g] = block[linear_sum_assignment(block)].sum()
    # Each node is repeated as often as it takes groups, so that every row gets one group
    group_of_row = linear_sum_assignment(np.repeat(cost_of_group, groups_per_node, axis=0))[1]
    assigned = np.empty(ranks, np.int64)
    for n in range(nodes):
        groups_of_node = group_of_row[n * groups_per_node : (n + 1) * groups_per_node]
        columns = np.concatenate([np.arange(g * tp, (g + 1) * tp) for g in groups_of_node])
        of_node = slice(n * node, (n + 1) * node)
        assigned[of_node] = columns[linear_sum_assignment(costs[of_node, columns])[1]]
    return assigned
