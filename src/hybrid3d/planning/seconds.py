"""Predicts the time of a sync with every link and every memory at its full bandwidth.

Packing, sending and unpacking overlap, and so do the two directions of a link. The time is therefore that of the
busiest resource of the slowest rank. Latencies are ignored: buckets are large, and two of them are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid3d.planning.hardware import Hardware


@dataclass(frozen=True)
class SyncTime:
    """The predicted time of a sync: the maximum over ranks of the seconds that each resource is busy.

    Attributes:
        rank: the slowest rank.
    """

    network: float
    nvlink: float
    copies: float
    rank: int

    @property
    def seconds(self) -> float:
        return max(self.network, self.nvlink, self.copies)

    @property
    def bottleneck(self) -> str:
        return max(("network", "nvlink", "copies"), key=lambda name: getattr(self, name))


def estimate_sync_time(traffic: np.ndarray, local: np.ndarray, hardware: Hardware, ranks_per_node: int) -> SyncTime:
    """Predict the time of a sync.

    Args:
        traffic: bytes by sender and receiver, [ranks, ranks].
        local: bytes that each rank copies within its own memory, [ranks].
    """
    far = inter_node_bytes(traffic, ranks_per_node)
    near = traffic - far
    # Sent bytes are packed and received bytes unpacked: each is read and written once at both ends.
    copied = 2 * (local + traffic.sum(0) + traffic.sum(1))
    busy = {
        "network": np.maximum(far.sum(0), far.sum(1)) / hardware.network_bandwidth,
        "nvlink": np.maximum(near.sum(0), near.sum(1)) / hardware.nvlink_bandwidth,
        "copies": copied / hardware.memory_bandwidth,
    }
    slowest = np.maximum.reduce(list(busy.values()))
    return SyncTime(**{name: float(s.max()) for name, s in busy.items()}, rank=int(slowest.argmax()))


def inter_node_bytes(traffic: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """Return the part of the traffic that is between ranks of different nodes."""
    node = np.arange(len(traffic)) // ranks_per_node
    return np.where(node[:, None] == node[None, :], 0, traffic)
