"""The optimizer's step in parts: bit for bit Megatron's own, first layers first, and final where it is ready."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from hybrid3d.train.megatron.stepping import only_groups
from run_ranks import run_ranks

pytestmark = pytest.mark.engines

LAYOUTS = {
    "llama": [{"tp": 2, "pp": 2, "vpp": 2}],
    "qwen2": [{"pp": 2, "tp": 2}],  # its head is its embedding
    "deepseek_v3": [{"tp": 2, "pp": 2, "ep": 2, "expert_bias_update_rate": 0.1}],
}
MORE = {"llama": [{"dp": 4}], "mixtral": [{"dp": 4, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2}]}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["", "more"])
def test_step_in_parts_is_the_step(layouts: dict[str, list[dict[str, int]]], tmp_path: Path) -> None:
    work = {str(make_checkpoint(tmp_path / family, family, seed=1)): of for family, of in layouts.items()}
    run_ranks(Path(__file__).parents[1] / "jobs" / "stepping.py", 4, [json.dumps(work)], 300)


class CountsByGroup(torch.optim.Optimizer):
    """As fused optimizers do: one count for a group, which grows where the group has parameters."""

    def __init__(self, groups):
        super().__init__(groups, {})
        self.used = []

    def step(self):
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self.used += [(id(p), group["step"]) for p in group["params"]]


def test_optimizer_that_counts_by_group_takes_parts_as_one_step() -> None:
    params = [torch.zeros(1) for _ in range(5)]
    optimizer = CountsByGroup([{"params": params[:3]}, {"params": params[3:]}])
    for step in (1, 2):
        optimizer.used = []
        counts = [group.get("step") for group in optimizer.param_groups]
        for part in ([0, 3], [1], [2, 4]):
            with only_groups(optimizer, {id(params[i]) for i in part}, counts):
                optimizer.step()
        assert sorted(optimizer.used) == sorted((id(p), step) for p in params)
        assert [group["params"] for group in optimizer.param_groups] == [params[:3], params[3:]]
        assert [group["step"] for group in optimizer.param_groups] == [step, step]
