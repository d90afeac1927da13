"""Placement against every other placement of small worlds, and against what theory says of the known cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import classify_tensors, rank_groups, signature_of
from hybrid3d.reshard.plan.coverage import lower_bound
from hybrid3d.reshard.plan.layout import Demand, Holdings, Piece, View
from hybrid3d.reshard.plan.placement import (
    NETWORK_WEIGHT,
    MissingBytes,
    assign_slots,
    consecutive_slots,
    count_missing_bytes,
)

ROWS = 64  # of each tensor; an element is 4 bytes


def shard(name: str, part: int, parts: int, rows: int = ROWS) -> Piece:
    each = rows // parts
    return Piece(name, Box((part * each,), (each,)), View(name, 0, (1,)), "float32")


def lacking_of(held: dict[int, list[Piece]], slots: list[list[Piece]], per_node: int) -> MissingBytes:
    groups = rank_groups({rank: Holdings(tuple(pieces)) for rank, pieces in held.items()})
    readers = [signature_of(Demand(tuple(pieces))) for pieces in slots]
    classes = classify_tensors([side for _, side in groups], readers)
    return count_missing_bytes(classes, [ranks for ranks, _ in groups], len(slots), len(held), per_node)


@pytest.mark.parametrize(("train", "rollout"), [(8, 4), (8, 2), (4, 2), (8, 8), (2, 1)])
def test_tp_to_smaller_tp_is_hybridflow_s_strided_grouping(train: int, rollout: int) -> None:
    """A rank receives (t - t_g) / (t_g t) of the model (arXiv 2409.19256, table 2, no pipeline): nothing twice."""
    held = {rank: [shard("w", rank, train)] for rank in range(train)}
    missing = lacking_of(held, [[shard("w", slot, rollout)] for slot in range(rollout)], 8)
    slots = assign_slots(missing, rollout, rollout, 8)
    assert (slots % rollout).tolist() == [rank * rollout // train for rank in range(train)]
    assert sorted(slots) == list(range(train))
    model = ROWS * 4
    assert missing.received_bytes(slots % rollout) == train * (train - rollout) / (rollout * train) * model
    if rollout < train and rollout > 1:
        assert missing.received_bytes(slots % rollout) < missing.received_bytes(consecutive_slots(train) % rollout)


@pytest.mark.parametrize("stages", [2, 4])
def test_rank_receives_what_other_pipeline_stages_hold(stages: int) -> None:
    """(t p - t_g) / (t_g t p) of the model, p stages, over t_g = 2 (arXiv 2409.19256, table 2)."""
    tp, rollout = 4, 2
    ranks = tp * stages
    held = {rank: [shard(f"stage{rank // tp}", rank % tp, tp)] for rank in range(ranks)}
    wanted = [[shard(f"stage{stage}", slot, rollout) for stage in range(stages)] for slot in range(rollout)]
    missing = lacking_of(held, wanted, 8)
    slots = assign_slots(missing, rollout, rollout, 8)
    model = stages * ROWS * 4
    assert missing.received_bytes(slots % rollout) == ranks * (ranks - rollout) / (rollout * ranks) * model


def test_experts_go_where_they_are_held() -> None:
    """EP4, with two replicas, to experts over eight: on consecutive ranks one in four has the expert that it wants."""
    held = {rank: [shard("experts", rank % 4, 4)] for rank in range(8)}
    missing = lacking_of(held, [[shard("experts", slot, 8)] for slot in range(8)], 8)
    slots = assign_slots(missing, 8, 1, 8)
    assert missing.received_bytes(slots) == 0
    assert missing.received_bytes(consecutive_slots(8)) == 6 * ROWS // 8 * 4
    assert sorted(slots) == list(range(8))


def test_tp_group_stays_within_its_node() -> None:
    """Engines of two nodes of four: each node gets whole groups of two, those of the experts that its ranks hold."""
    held = {rank: [shard("experts", (rank // 4 + 1) % 2, 2)] for rank in range(8)}
    missing = lacking_of(held, [[shard("experts", slot, 8)] for slot in range(8)], 4)
    slots = assign_slots(missing, 8, 2, 4)
    assert missing.network_bytes(slots) == 0 < missing.network_bytes(consecutive_slots(8))
    for group in range(4):
        nodes = {rank // 4 for rank in range(8) if slots[rank] // 2 == group}
        assert len(nodes) == 1


def test_placement_stays_consecutive_where_nothing_is_better() -> None:
    held = {rank: [shard("w", rank % 2, 2)] for rank in range(4)}
    missing = lacking_of(held, [[shard("w", slot, 2)] for slot in range(2)], 4)
    assert assign_slots(missing, 2, 2, 4).tolist() == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([(4, 2), (4, 4), (2, 2), (6, 3), (4, 1)]))
def test_assigned_slots_move_least_of_all_placements_of_a_node(data: st.DataObject, sizes: tuple[int, int]) -> None:
    """All placements of up to six ranks, with random holdings: none costs less, and what is counted is the bound."""
    ranks, slots = sizes
    parts = st.integers(0, 3)
    held = {rank: [shard(name, data.draw(parts), 4) for name in ("a", "b")] for rank in range(ranks)}
    wanted = [[shard("a", slot, slots, 48), shard("b", data.draw(parts), 4)] for slot in range(slots)]
    missing = lacking_of(held, wanted, ranks)

    def cost(placed: np.ndarray) -> int:
        return NETWORK_WEIGHT * missing.network_bytes(placed % slots) + missing.received_bytes(placed % slots)

    best = assign_slots(missing, slots, slots, ranks)
    assert sorted(best) == list(range(ranks))
    assert cost(best) == min(cost(np.array(every)) for every in itertools.permutations(range(ranks)))
    demand = {rank: Demand(tuple(wanted[slot % slots])) for rank, slot in enumerate(best)}
    holdings = {rank: Holdings(tuple(pieces)) for rank, pieces in held.items()}
    assert missing.received_bytes(best % slots) == sum(lower_bound(holdings, demand).values())


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([(16, 8, 2, 4), (16, 8, 4, 4), (8, 8, 8, 4), (16, 16, 4, 8), (12, 4, 2, 4)]))
def test_over_several_nodes_nothing_is_lost_and_nothing_gets_worse(
    data: st.DataObject, sizes: tuple[int, int, int, int]
) -> None:
    ranks, slots, tp, per_node = sizes
    held = {rank: [shard("a", data.draw(st.integers(0, 15)), 16)] for rank in range(ranks)}
    missing = lacking_of(held, [[shard("a", slot, slots, 48)] for slot in range(slots)], per_node)
    placed, usual = assign_slots(missing, slots, tp, per_node), consecutive_slots(ranks)

    def cost(of: np.ndarray) -> int:
        return NETWORK_WEIGHT * missing.network_bytes(of % slots) + missing.received_bytes(of % slots)

    assert sorted(placed) == list(range(ranks))
    assert cost(placed) <= cost(usual)
    for engine in range(ranks // slots):
        assert {slot // slots for slot in placed[engine * slots : (engine + 1) * slots]} == {engine} or slots < per_node
    if tp <= per_node:
        for group in range(ranks // tp):
            assert len({rank // per_node for rank in range(ranks) if placed[rank] // tp == group}) == 1
