"""The link model against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid3d.config import Machine
from hybrid3d.planning.estimates import estimate_sync_time
from hybrid3d.planning.hardware import GB, hardware_of

pytestmark = pytest.mark.engines  # the planner imports them

H100 = hardware_of(Machine(kind="h100-8x400g"))


def traffic(ranks: int, **bytes_between: int) -> np.ndarray:
    found = np.zeros((ranks, ranks), np.int64)
    for pair, nbytes in bytes_between.items():
        src, dst = pair.removeprefix("from").split("to")
        found[int(src), int(dst)] = nbytes
    return found


def test_network_sync_of_41_9_gb_takes_0_84_seconds() -> None:
    """DeepSeek-V3 at TP32: 1,342 GB / 32 = 41.9 GB a rank; 400 Gb/s are 50 GB/s."""
    found = estimate_sync_time(traffic(16, from0to8=41_900_000_000), np.zeros(16), H100, 8)
    assert found.seconds == pytest.approx(0.838)
    assert found.bottleneck == "network"
    assert found.rank in (0, 8)


def test_within_a_node_nvlink_decides() -> None:
    """70B in bfloat16 at TP8: 17.6 GB a rank, 450 GB/s in each direction."""
    found = estimate_sync_time(traffic(8, from0to1=17_600_000_000), np.zeros(8), H100, 8)
    assert found.bottleneck == "nvlink"
    assert found.seconds == pytest.approx(0.0391, rel=1e-3)
    assert found.copies == pytest.approx(2 * 17.6 / 3350)


def test_sync_time_counts_local_copies_of_the_slowest_rank() -> None:
    local = np.array([0, 335 * 10**9, 0, 0])
    found = estimate_sync_time(traffic(4), local, H100, 8)
    assert (found.bottleneck, found.rank) == ("copies", 1)
    assert found.seconds == pytest.approx(0.2)


def test_busier_direction_of_a_link_counts() -> None:
    """Rank 0 sends 10 GB to each of two nodes and receives 5 GB: its adapter is busy with 20 GB."""
    found = estimate_sync_time(traffic(24, from0to8=10 * GB, from0to16=10 * GB, from8to0=5 * GB), np.zeros(24), H100, 8)
    assert (found.rank, found.seconds) == (0, pytest.approx(0.4))


def test_recipe_numbers_replace_those_of_the_named_machine() -> None:
    own = hardware_of(Machine(kind="a100-8x200g", network_gb_per_s=100.0, memory_gb=40.0))
    assert (own.network_bandwidth, own.memory_bytes) == (100 * GB, 40 * GB)
    assert (own.nvlink_bandwidth, own.memory_bandwidth) == (300 * GB, 2039 * GB)
