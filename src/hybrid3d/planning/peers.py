"""Estimates the traffic of the method of other trainers, for comparison: every tensor is gathered on every rank.

Each stage broadcasts what it holds to the ranks at the same position of the other stages. All-gathers over TP, and over
EP for experts, then complete the tensors on each rank. Groups within a node use NVLink. Ranks that only
generate receive every tensor by a broadcast, which enters each of their nodes once, while the others still gather.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.planning.hardware import Hardware
from hybrid3d.planning.traffic import SyncTraffic


@dataclass(frozen=True)
class GatherTraffic:
    """The bytes that each rank receives from other nodes (`far`) and from its own node (`near`), [ranks]."""

    far: np.ndarray
    near: np.ndarray

    @property
    def received_bytes(self) -> np.ndarray:
        received: np.ndarray = self.far + self.near
        return received

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds of the slowest rank, with both kinds of links at their full bandwidth at the same time."""
        return float(np.maximum(self.far / hardware.network_bandwidth, self.near / hardware.nvlink_bandwidth).max())


def gather_traffic(recipe: Recipe, traffic: SyncTraffic) -> GatherTraffic:
    """Compute what ranks receive if every tensor is gathered on every rank."""
    train, per_node = recipe.train, recipe.machine.gpus_per_node
    node = (np.arange(recipe.train_ranks) // per_node).reshape(train.pp, -1)
    far, near = (np.zeros(node.shape) for _ in range(2))
    for held, model, group in (
        (traffic.held - traffic.held_experts, traffic.model - traffic.model_experts, train.tp),
        (traffic.held_experts, traffic.model_experts, train.ep * train.etp),
    ):
        of_stage = held[: recipe.train_ranks].reshape(node.shape)
        for stage in range(train.pp):
            broadcast = np.where(np.arange(train.pp)[:, None] == stage, 0, of_stage[stage])
            far += np.where(node != node[stage], broadcast, 0)
            near += np.where(node != node[stage], 0, broadcast)
        rest = np.maximum(model - of_stage.sum(0, keepdims=True), 0)
        inside = min(per_node, group)  # ranks of a group that are on one node
        outside = 1 - (inside - 1) / (group - 1) if group > 1 else 0
        far += outside * rest
        near += (1 - outside) * rest
    generating = np.arange(recipe.train_ranks, recipe.sync_ranks)
    members = np.bincount(generating // per_node)[generating // per_node]
    # A node that also trains has everything already
    broadcast_far = np.where(generating // per_node * per_node < recipe.train_ranks, 0, traffic.model / members)
    far = np.concatenate([far.reshape(-1), broadcast_far])
    near = np.concatenate([near.reshape(-1), traffic.model - broadcast_far])
    return GatherTraffic(far.round().astype(np.int64), near.round().astype(np.int64))
