"""TP groups whose slots are not on ascending ranks, as placement makes them, in vLLM's capture of CUDA graphs."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

from hybrid3d.config import load_recipe
from hybrid3d.planning.agreed_placement import compute_slots
from run_ranks import ROOT, run_ranks

pytestmark = pytest.mark.engines

JOB = Path(__file__).parents[1] / "jobs" / "graph_capture.py"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if "recipes/models" in path.read_text())


def check_capture(orders: list[tuple[int, ...]], out: Path) -> None:
    """Every rank must register, for each rank of the group, the addresses of the rank that has this place in it."""
    ranks = len(orders[0])
    run_ranks(JOB, ranks, [str(out), json.dumps(orders)], timeout=300)
    expected = [[[[rank] for rank in order], [[10 * rank] for rank in order]] for order in orders]
    assert [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)] == [expected] * ranks


def test_graph_capture_works_for_every_order_of_four_ranks(tmp_path: Path) -> None:
    check_capture(list(itertools.permutations(range(4))), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_groups_of_every_recipe_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the size that vLLM's custom all-reduce supports; larger groups use NCCL."""
    monkeypatch.chdir(ROOT)
    orders: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for name in RECIPES:
        recipe = load_recipe(f"recipes/{name}.yaml")
        assert recipe.rollout is not None
        tp, rank_of = recipe.rollout.tp, {slot: rank for rank, slot in enumerate(compute_slots(recipe))}
        groups = [[rank_of[first + i] for i in range(tp)] for first in range(0, recipe.world_size, tp)]
        if tp in CustomAllreduce._SUPPORTED_WORLD_SIZES:
            orders[tp] |= {tuple(sorted(group).index(rank) for rank in group) for group in groups}
    assert any(order != tuple(range(tp)) for tp in orders for order in orders[tp]), "no group tests anything"
    for tp in orders:
        (tmp_path / f"{tp}").mkdir()
        check_capture(sorted(orders[tp]), tmp_path / f"{tp}")
