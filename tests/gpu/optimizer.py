"""The optimizer stepped bucket by bucket against a whole step, and a checkpoint before the first update."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpu import one_rank
from gpu.models import CONFIGS
from gpu.record import Record
from hybrid3d.certify.tiny_models import write_checkpoint
from hybrid3d.config import Recipe
from hybrid3d.rl.objective import sft_loss
from hybrid3d.train.megatron import checkpoint
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.runtime import in_use

STEPS = 3


class _KeepsGradients:
    """Copies a model's gradients before its optimizer steps."""

    def __init__(self, policy: Policy):
        self._stepping, self._buffers = policy._stepping, _gradients(policy)
        self.kept: list[torch.Tensor] = []

    def step(self, *arguments: Any) -> tuple[bool, float]:
        self.kept = [buffer.clone() for buffer in self._buffers]
        return self._stepping.step(*arguments)


class _UsesGradients:
    """Steps with the gradients that another model kept, because kernels may add up in another order each time."""

    def __init__(self, policy: Policy, kept: _KeepsGradients, whole: bool):
        self._stepping, self._optimizer, self._buffers = policy._stepping, policy.optimizer, _gradients(policy)
        self._kept, self._whole = kept, whole

    def step(self, *arguments: Any) -> tuple[bool, float]:
        for buffer, gradients in zip(self._buffers, self._kept.kept, strict=True):
            buffer.copy_(gradients)
        if not self._whole:
            return self._stepping.step(*arguments)
        updated, norm, _ = self._optimizer.step()
        return bool(updated), float(norm)


def _gradients(policy: Policy) -> list[torch.Tensor]:
    return policy._tensors_of("gradients")


def stepping(record: Record, device: str) -> None:
    """Step the optimizer in buckets and as a whole, with equal gradients: every bit of the weights must be equal."""
    record(kernels=in_use())
    with tempfile.TemporaryDirectory() as path:
        folders = {family: write_checkpoint(Path(path) / family, CONFIGS[family]) for family in ("dense", "experts")}
        one_rank.start()
        for family, folder in folders.items():
            for dtype in ("float32", "bfloat16"):
                recipe = one_rank.recipe_for(folder, dtype)
                parted, whole = (one_rank.make_policy(CONFIGS[family], recipe) for _ in "ab")
                buckets = len(parted._stepping)
                assert buckets >= 4, f"{family}: the optimizer has {buckets} buckets, expected 4 or more"
                norms = _step_both(parted, whole, recipe, whole_step=True)
                record(**{f"{family} {dtype}": {"buckets": buckets, "grad_norms": norms}})


def _step_both(first: Policy, second: Policy, recipe: Recipe, whole_step: bool, steps: int = STEPS) -> list[float]:
    """Update two models with the gradients of the first; return the gradient norms.

    Raises:
        AssertionError: weights or gradient norms differ in any bit.
    """
    kept: Any = _KeepsGradients(first)
    uses: Any = _UsesGradients(second, kept, whole_step)
    first._stepping, second._stepping = kept, uses
    norms = []
    for step in range(steps):
        batch = one_rank.make_batch(first.config, step)
        before = {name: tensor.detach().clone() for name, tensor in first.weights.tensors.items()}
        one, other = (policy.train_step(batch, sft_loss, recipe) for policy in (first, second))
        assert one.grad_norm == other.grad_norm, f"step {step}: gradient norms {one.grad_norm}, {other.grad_norm}"
        _expect_equal(first, second, f"step {step}")
        changed = _changed(first, before)
        # In bfloat16 the weights of norms, around 1, are too coarse for one update
        assert 2 * len(changed) >= len(before), f"step {step} changed only {len(changed)} of {len(before)} tensors"
        norms.append(one.grad_norm)
    return norms


def _changed(policy: Policy, before: Mapping[str, torch.Tensor]) -> list[str]:
    tensors = policy.weights.tensors.items()
    return [name for name, tensor in tensors if one_rank.bits_differ(tensor, before[name])]


def _expect_equal(first: Policy, second: Policy, when: str) -> None:
    differing = _changed(first, second.weights.tensors)
    assert not differing, f"{when}: the weights differ in {len(differing)} tensors, such as {differing[:1]}"


def first_checkpoint(record: Record, device: str) -> None:
    """Write a checkpoint before the first update, load it into another model, and step both: equal in every bit."""
    record(kernels=in_use())
    with tempfile.TemporaryDirectory() as path:
        config = CONFIGS["experts"]
        folders = [write_checkpoint(Path(path) / str(seed), config, seed) for seed in (0, 1)]
        group = one_rank.start()
        for dtype in ("float32", "bfloat16"):
            recipes = [one_rank.recipe_for(folder, dtype) for folder in folders]
            first, second = (one_rank.make_policy(config, recipe) for recipe in recipes)
            before = {name: tensor.detach().clone() for name, tensor in first.weights.tensors.items()}
            saved = Path(path) / f"saved-{dtype}"
            checkpoint.begin({"policy": first}, saved, {"step": 0}, group).finish()
            moved = [
                name for name, tensor in first.weights.tensors.items() if one_rank.bits_differ(tensor, before[name])
            ]
            assert not moved, f"{dtype}: writing a checkpoint changed {len(moved)} tensors, such as {moved[:1]}"
            progress = checkpoint.load({"policy": second}, saved, group)
            assert progress["step"] == 0, f"{dtype}: the progress that was loaded is {progress}"
            _expect_equal(first, second, f"{dtype}, after loading")
            for policy in (first, second):
                _expect_new_state(policy, dtype)
            norms = _step_both(first, second, recipes[0], whole_step=False, steps=2)
            nbytes = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
            record(**{dtype: {"checkpoint_bytes": nbytes, "grad_norms": norms}})


def _expect_new_state(policy: Policy, dtype: str) -> None:
    """Raise AssertionError unless Adam's moments are zero and no step is counted."""
    for one in policy.optimizer.chained_optimizers:
        groups, states = one.optimizer.param_groups, one.optimizer.state.values()
        assert states, f"{dtype}: the optimizer has no state to save"
        moments = [tensor for state in states for key, tensor in state.items() if key.startswith("exp_avg")]
        assert not any(tensor.any() for tensor in moments), f"{dtype}: Adam's moments are not zero before an update"
        counts = {float(counted["step"]) for counted in (*groups, *states) if "step" in counted}
        assert counts <= {0.0}, f"{dtype}: {sorted(counts)} steps are counted before the first update"
