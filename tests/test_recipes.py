"""Every recipe in the repository that trains and generates: planned in full, as `hybrid3d plan` does it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, hybrid3d
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.planning.hardware import hardware_of
from hybrid3d.planning.peers import gathered
from hybrid3d.planning.sides import ask
from hybrid3d.planning.traffic import planned
from hybrid3d.preflight import check_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if "models/" in path.read_text())
LARGE = {"deepseek-v3-671b", "deepseek-v3-671b-wide-ep"}


def recipe_of(name: str, *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_there_is_a_recipe_of_every_size() -> None:
    models = {Path(recipe_of(name).model.path).name for name in RECIPES}
    assert models == {path.parent.name for path in (ROOT / "recipes" / "models").glob("*/config.json")}
    assert len(RECIPES) >= 9


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_reasoned_in_two_lines(name: str) -> None:
    lines = (ROOT / "recipes" / f"{name}.yaml").read_text().splitlines()
    assert [line.startswith("# ") for line in lines[:3]] == [True, True, False]
    assert lines[2] == f"name: {name}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_plan_is_exact_and_its_memory_fits(name: str) -> None:
    """On one core; DeepSeek-V3 over 1,024 GPUs within a minute of it and 8 GiB."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "hybrid3d", "plan", f"recipes/{name}.yaml", "--json"]
    done = subprocess.run(["taskset", "-c", "0", *command], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    numbers: dict[str, Any] = json.loads(done.stdout)
    after, recipe = resource.getrusage(resource.RUSAGE_CHILDREN), recipe_of(name)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name}: {seconds:.0f} s of one core, {time.monotonic() - start:.0f} s of the clock")
    assert seconds < 60
    assert after.ru_maxrss < 8 * 2**20  # KiB, of the largest child so far
    assert numbers["coverage"] == "exact"
    assert numbers["ranks"] == recipe.world_size
    assert numbers["received_bytes"] == numbers["lower_bound_bytes"]
    assert numbers["received_bytes"] + numbers["local_bytes"] == numbers["wanted_bytes"]
    assert numbers["placement"]["received_bytes"] == numbers["received_bytes"]
    assert numbers["placement"]["network_bytes"] == numbers["received_over_network_bytes"]
    for key in ("received_bytes", "network_bytes"):
        assert numbers["placement"][key] <= numbers["placement"]["consecutive"][key]
    memory = numbers["memory"]
    assert max(memory[phase] for phase in ("train", "sync", "generate")) <= memory["gpu"]
    assert memory["kv_cache_tokens"] >= recipe.rollout.max_model_len
    seconds = numbers["seconds"]
    assert seconds["sync"] == max(seconds["network"], seconds["nvlink"], seconds["copies"]) > 0


def test_deepseek_v3_is_hybridflow_s_table_2() -> None:
    """671B, TP8 PP12 EP8 -> TP32 (arXiv 2409.19256, table 2): the peers' way brings a rank the model less its share.

    By hand: 1,342 GB of which experts are 1,308; a rank of 96 holds 1,308 / 96 + 34 / 96 = 14.0 GB, so it receives
    1,328; it wants 1,342 / 32 = 41.9 GB, what latent attention has on every rank aside: 0.84 s at 50 GB/s.
    """
    layers = ["train.first_stage_layers=6", "train.last_stage_layers=5"]
    recipe = recipe_of("deepseek-v3-671b", "train.tp=8", "train.pp=12", "train.ep=8", "train.dp=1", *layers)
    plan = planned(recipe, ask(recipe, check_model(recipe, planned=True)))
    peers = gathered(recipe, plan)
    assert plan.model / 1e9 == pytest.approx(1342, abs=0.5)
    assert plan.model_experts / 1e9 == pytest.approx(1308, abs=0.5)
    assert peers.received.mean() / 1e9 == pytest.approx(1328, abs=1)
    sharded = plan.model / 32
    assert sharded / 1e9 == pytest.approx(41.9, abs=0.05)
    assert sharded / hardware_of(recipe.machine).network == pytest.approx(0.84, abs=0.005)
    assert (plan.wanted >= sharded).all()
    assert plan.wanted.max() / sharded < 1.06  # compressed queries and keys are whole on every rank
    assert (plan.traffic.sum(0) == plan.lower_bound).all()


def test_wide_expert_parallelism_over_512_gpus_worked_by_hand() -> None:
    """EP128 over TP8: two experts of each of 58 layers, and an eighth of the rest."""
    recipe = recipe_of("deepseek-v3-671b-wide-ep")
    assert recipe.world_size == 512
    plan = planned(recipe, ask(recipe, check_model(recipe, planned=True)))
    experts = 58 * 2 * 3 * 7168 * 2048 * 2
    assert plan.model_experts == experts * 128
    rest = plan.wanted - experts
    assert rest.min() / 1e9 == pytest.approx((plan.model - plan.model_experts) / 8e9, rel=0.35)
    received = plan.traffic.sum(0)
    assert (received == plan.lower_bound).all()
    assert received.max() / 1e9 < 20.8
    assert received.max() / hardware_of(recipe.machine).network < 0.42


def test_what_does_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    arguments = ["recipes/qwen2.5-7b.yaml", "train.tp=1", "train.dp=8", "rollout.tp=1"]
    done = subprocess.run(
        [sys.executable, "-m", "hybrid3d", "plan", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "recipe qwen2.5-7b does not fit a GPU of h100-8x400g" in done.stderr
    assert "GB of a GPU's 80.0 GB" in done.stderr
    offer = done.stderr.split("nearest that fit: ")[1].splitlines()[0].split("; ")
    assert 1 <= len(offer) <= 3
    for changes in offer:  # each is then accepted
        hybrid3d(ROOT, "plan", *arguments, *changes.split(), "--json")
