"""The predicted sync of changed elements, worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.planning import page, report
from hybrid3d.planning.estimates import predict_changed_sync
from hybrid3d.planning.hardware import hardware_of
from hybrid3d.reshard.delta.encoding_work import EncodingWork

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


SPLIT = ["machine.gpus_per_node=1", "roles.generation.ranks=8"]
WORK = {rank: EncodingWork(launches=1000, host_waits=50, counted=8e9, found=8e9, encoded=1e9) for rank in range(2)}


def test_changed_sync_of_two_percent_bfloat16_matches_hand_numbers(recipe: Recipe) -> None:
    """Of 50 elements one: 16 bits of its value, 5 low bits, 1 + 50 / 32 high bits; entropy H(0.02) / 0.02 = 7.072."""
    found = predict_changed_sync(recipe, traffic(), hardware_of(recipe.machine), 0.02, WORK)
    assert found.delta_bytes == pytest.approx(6e9 * 0.02 * (16 + 5 + 1 + 50 / 32) / 8, rel=1e-4)
    entropy = -(0.02 * math.log2(0.02) + 0.98 * math.log2(0.98)) / 0.02
    assert found.delta_bound_bytes == pytest.approx(6e9 * 0.02 * (16 + entropy) / 8, rel=1e-4)
    assert found.delta_network_bytes == found.delta_bytes
    assert found.bitmap_bytes == 1_000_000_000
    assert found.wire.network == pytest.approx(found.delta_bytes * 8 / 12 / 50e9, rel=1e-3)  # 400 Gb/s a rank


def test_changed_sync_of_all_elements_is_a_full_sync(recipe: Recipe) -> None:
    found = predict_changed_sync(recipe, traffic(), hardware_of(recipe.machine), 1.0, WORK)
    assert found.delta_bytes == found.delta_network_bytes == 12_000_000_000
    assert found.wire.network == pytest.approx(8e9 / 50e9)


def test_seconds_have_encoding_in_them(recipe: Recipe) -> None:
    """By hand: 1,000 launches of 5 us and 50 waits of 20 us; 4.125 + 0.625 bytes an element, and 166 a changed one.

    Of a changed element that is sent, 88 bytes and 45.5 for each of the 5 low bits of its position; all at half of
    3,350 GB/s.
    """
    hardware = hardware_of(recipe.machine)
    found = predict_changed_sync(recipe, traffic(), hardware, 0.02, WORK)
    touched = 8e9 * (4.125 + 0.625 + 0.02 * 166) + 1e9 * 0.02 * (88 + 5 * 45.5)
    assert found.encoding_seconds == pytest.approx(1000 * 5e-6 + 50 * 20e-6 + touched / (3350e9 / 2), rel=1e-6)
    assert found.seconds == found.encoding_seconds > found.wire.seconds
    assert found.dense_seconds <= 8e9 / 50e9


def test_auto_sends_what_is_expected_sooner(recipe: Recipe) -> None:
    """The same changes: where messages are few and the network slow, and where all of it is in a node."""
    work = dict.fromkeys(range(2), EncodingWork(launches=10_000, host_waits=500))
    far = predict_changed_sync(recipe, traffic(), hardware_of(recipe.machine), 0.005, work)
    assert far.is_faster == (far.seconds < far.dense_seconds)
    slow = replace(recipe, sync=replace(recipe.sync, overlap=False))
    found = predict_changed_sync(slow, traffic(), hardware_of(recipe.machine), 0.005, work)
    assert found.is_faster  # 60 ms, and 160 of the network
    near = replace(slow, machine=replace(recipe.machine, gpus_per_node=2))
    found = predict_changed_sync(near, traffic(), hardware_of(recipe.machine), 0.005, work)
    assert not found.is_faster  # 60 ms, and 18 of NVLink


def test_sync_that_begins_with_no_update_is_not_hidden(recipe: Recipe) -> None:
    """Ranks that generate ahead of those that train are still generating then."""
    ahead = [*SPLIT, "async.max_staleness=1", "algorithm.correction.kind=truncate"]
    together, apart = (load_recipe("recipes/qwen2.5-7b.yaml", settings) for settings in (SPLIT, ahead))
    seconds = [
        predict_changed_sync(one, traffic(), hardware_of(recipe.machine), 0.005, WORK).dense_seconds
        for one in (together, apart)
    ]
    assert seconds[0] < seconds[1] == pytest.approx(8e9 / 50e9)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ([], "vLLM frees its weights while it sleeps: set rollout.keep_weights=true"),
        (["rollout.keep_weights=true"], ""),
        (["rollout.sleep=false"], ""),
        (SPLIT, ""),
        (["rollout.keep_weights=true", "sync.delta=never"], "sync.delta=never"),
        (["rollout.keep_weights=true", "model.dtype=float32"], "model.dtype is not bfloat16"),
    ],
)
def test_plan_promises_changed_elements_only_where_syncs_can_send_them(settings: list[str], why: str) -> None:
    recipe = load_recipe("recipes/qwen2.5-7b.yaml", ["machine.gpus_per_node=1", *settings])
    work = dict.fromkeys(range(2), EncodingWork(launches=0))
    found = predict_changed_sync(recipe, traffic(), hardware_of(recipe.machine), 0.005, work)
    assert found.is_faster
    assert report._changed_numbers(found, recipe)["delta_chosen"] == (not why)
    said = page._changed(SimpleNamespace(recipe=recipe, changed=found))
    assert ("sync.delta=auto sends the changed elements" in said) == (not why)
    assert f"no sync of this recipe sends them alone ({why}" in said or not why
