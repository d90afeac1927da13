"""The link model: how long a sync takes if every link and every memory runs at its full rate.

Packing, moving and unpacking overlap, and so do the two directions of a link, so the busiest of a rank's resources
decides, and the slowest rank. Latencies are left out: buckets are large, and there are two of them in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid3d.planning.hardware import Hardware


@dataclass(frozen=True)
class SyncTime:
    """Seconds that each resource of its busiest rank is busy; the longest is the sync's.

    Attributes:
        rank: the rank that decides.
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
    """Of a sync.

    Args:
        traffic: bytes by sender and receiver.
        local: bytes that each rank copies within its own memory.
    """
    far = inter_node_bytes(traffic, ranks_per_node)
    near = traffic - far
    # What is sent is packed and what is received unpacked: each byte is read and written once at either end.
    copied = 2 * (local + traffic.sum(0) + traffic.sum(1))
    busy = {
        "network": np.maximum(far.sum(0), far.sum(1)) / hardware.network_bandwidth,
        "nvlink": np.maximum(near.sum(0), near.sum(1)) / hardware.nvlink_bandwidth,
        "copies": copied / hardware.memory_bandwidth,
    }
    slowest = np.maximum.reduce(list(busy.values()))
    return SyncTime(**{name: float(s.max()) for name, s in busy.items()}, rank=int(slowest.argmax()))


def inter_node_bytes(traffic: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """The part of the traffic between ranks of different nodes."""
    node = np.arange(len(traffic)) // ranks_per_node
    return np.where(node[:, None] == node[None, :], 0, traffic)
