"""Where settings of a recipe contradict each other, whatever the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid3d.config import Recipe


def contradictions(recipe: Recipe) -> Iterator[str]:
    """What contradicts itself within a recipe, whatever the model."""
    algorithm, kl, optimizer = recipe.algorithm, recipe.algorithm.kl, recipe.optimizer
    if algorithm.generates and recipe.rollout is None:
        yield f"rollout: missing, and algorithm.name={algorithm.name} generates: give max_model_len and max_new_tokens"
    if kl.where == "none" and kl.coef > 0:
        yield f"algorithm.kl.coef={kl.coef} has no effect with algorithm.kl.where=none: set where: loss, or coef: 0"
    if kl.where == "loss" and kl.estimator == "k1":
        yield "algorithm.kl.estimator=k1 has no gradient in the loss: set k2 or k3, or where: reward"
    if kl.target is not None and kl.coef == 0:
        yield f"algorithm.kl.target={kl.target} is followed by multiplying algorithm.kl.coef=0: start it above 0"
    if algorithm.correction.low >= algorithm.correction.high:
        low, high = algorithm.correction.low, algorithm.correction.high
        yield f"algorithm.correction.low={low} is not below algorithm.correction.high={high}"
    if recipe.reward.model is not None and algorithm.dynamic_sampling:
        yield "algorithm.dynamic_sampling looks for rewards that are alike, as those of a reward.model never are: set 0"
    if recipe.critic != type(recipe.critic)() and not algorithm.critic:
        yield f"critic: algorithm.name={algorithm.name} has none: leave the section out, or set ppo"
    if recipe.sync.share_storage and recipe.rollout is not None and recipe.rollout.sleep:
        yield (
            "sync.share_storage: weights in memory that both engines use cannot be given away while vLLM sleeps: "
            "set rollout.sleep=false, or leave sync.share_storage out"
        )
    budget, rollout = recipe.train.max_tokens_per_micro_batch, recipe.rollout
    if budget is not None and rollout is not None and budget < rollout.max_model_len:
        yield (
            f"train.max_tokens_per_micro_batch={budget} has no room for a sequence of "
            f"rollout.max_model_len={rollout.max_model_len} tokens: at least {rollout.max_model_len}"
        )
    if budget is not None and recipe.train.vpp > 1 and not recipe.train.packed:
        yield (
            f"train.max_tokens_per_micro_batch={budget}: padded, micro batches differ in shape, and interleaved "
            f"stages (train.vpp={recipe.train.vpp}) would mix them up: set train.packed=true, or train.vpp=1"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} is more than optimizer.lr={optimizer.lr}: the rate only falls"
    if optimizer.warmup_steps >= recipe.run.steps:
        yield (
            f"optimizer.warmup_steps={optimizer.warmup_steps} leaves no step of run.steps={recipe.run.steps}: "
            f"at most {recipe.run.steps - 1}"
        )
