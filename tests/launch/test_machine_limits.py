"""A recipe of more ranks than this machine can start is refused before, with the numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.launch import launcher
from hybrid3d.planning.hardware import total_memory

DEMO = Path(__file__).parents[2] / "recipes/demo-cpu.yaml"  # 4 ranks with 0.25 GiB of KV cache each


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(launcher, "total_memory", lambda: 8_000_000_000)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def test_check_devices_accepts_as_many_ranks_as_fit() -> None:
    launcher.check_devices(load_recipe(DEMO))
    launcher.check_devices(load_recipe(DEMO, ["train.dp=2"]))


def test_memory() -> None:
    """450 MB and 0.25 GiB = 268 MB of KV cache a rank: 8 GB have room for 11."""
    with pytest.raises(RecipeError) as caught:
        launcher.check_devices(load_recipe(DEMO, ["train.dp=1024"]))
    assert list(caught.value.problems) == [
        "train.tp x pp x cp x dp = 4096 ranks exceed the 11 that this machine can start with 8.0 GB of memory and "
        "2 cores: a rank needs at least 0.7 GB (0.3 GB of it for rollout.kv_cache_gib), and a core runs 32 ranks: "
        "lower train.dp, or start it with torchrun or srun on several machines"
    ]


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "total_memory", lambda: 10**13)
    launcher.check_devices(load_recipe(DEMO, ["train.dp=16"]))
    with pytest.raises(RecipeError, match=r"68 ranks exceed the 64 that this machine can start .* 2 cores"):
        launcher.check_devices(load_recipe(DEMO, ["train.dp=17"]))


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    launcher.check_devices(load_recipe(DEMO, ["train.dp=2", "rollout.kv_cache_gib=16000"]))
    with pytest.raises(RecipeError, match="16 ranks exceed this machine's 8 GPUs"):
        launcher.check_devices(load_recipe(DEMO, ["train.dp=4"]))


def test_memory_of_this_machine() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < total_memory() <= int(lines["MemTotal"].split()[0]) * 1024
