"""The predicted sync of changed elements, worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.planning.changed import predict_changed_sync
from hybrid3d.planning.hardware import hardware_of

pytestmark = pytest.mark.engines  # planning imports the engines


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("recipes/qwen2.5-7b.yaml", ["machine.gpus_per_node=1"])


def traffic() -> SimpleNamespace:
    """Two ranks that send each other 8 and 4 GB, and hold 16 GB each."""
    return SimpleNamespace(
        traffic=np.array([[0, 8_000_000_000], [4_000_000_000, 0]]),
        local=np.zeros(2, np.int64),
        held=np.full(2, 16_000_000_000),
    )


def test_two_percent_of_bfloat16(recipe: Recipe) -> None:
    """Of 50 elements one: 16 bits of its value, 5 low bits, 1 + 50 / 32 high bits; entropy H(0.02) / 0.02 = 7.072."""
    found = predict_changed_sync(recipe, traffic(), 12_000_000_000, hardware_of(recipe.machine), 0.02)
    assert found.delta_bytes == pytest.approx(6e9 * 0.02 * (16 + 5 + 1 + 50 / 32) / 8, rel=1e-4)
    entropy = -(0.02 * math.log2(0.02) + 0.98 * math.log2(0.98)) / 0.02
    assert found.delta_bound_bytes == pytest.approx(6e9 * 0.02 * (16 + entropy) / 8, rel=1e-4)
    assert found.delta_network_bytes == found.delta_bytes
    assert found.bitmap_bytes == 1_000_000_000
    assert found.time.network == pytest.approx(found.delta_bytes * 8 / 12 / 50e9, rel=1e-3)  # 400 Gb/s a rank


def test_all_elements_are_a_full_sync(recipe: Recipe) -> None:
    found = predict_changed_sync(recipe, traffic(), 12_000_000_000, hardware_of(recipe.machine), 1.0)
    assert found.delta_bytes == found.delta_network_bytes == 12_000_000_000
    assert found.time.network == pytest.approx(8e9 / 50e9)
