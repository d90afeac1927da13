"""Checks for settings of a recipe that contradict each other, independent of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid3d.config.algorithm_rules import check_algorithm
from hybrid3d.config.generation_rules import check_agents, check_async, check_evaluation, check_router_replay
from hybrid3d.config.only_if import unused_settings
from hybrid3d.config.quantization_rules import check_fp8_training, check_quantization
from hybrid3d.config.refusals import VLLM, Refusal, arithmetic, by_engine, definition, not_built
from hybrid3d.config.role_rules import check_reward_ranks, check_split
from hybrid3d.config.schema import MAX_RANKS

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe
    from hybrid3d.config.sections.learning import Optimizer


def validate_recipe(recipe: Recipe) -> Iterator[Refusal]:
    """Yield a record of each contradiction between settings of a recipe, independent of the model."""
    for check in _CHECKS:
        yield from check(recipe)


def _check_ranks(recipe: Recipe) -> Iterator[Refusal]:
    """Yield too many ranks, and ranks that generate without knowing how."""
    if recipe.world_size > MAX_RANKS:
        yield arithmetic(
            f"{recipe.ranks_formula} = {recipe.world_size} ranks are more than {MAX_RANKS}: lower one of them"
        )
    if recipe.algorithm.generates and recipe.rollout is None:
        yield definition(
            f"rollout: missing, and algorithm.name={recipe.algorithm.name} generates: give max_model_len and "
            "max_new_tokens"
        )


def _check_learning(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what corrections, rewards and the critic cannot be."""
    algorithm = recipe.algorithm
    if algorithm.correction.kind.endswith("mask") and algorithm.correction.low >= algorithm.correction.high:
        low, high = algorithm.correction.low, algorithm.correction.high
        yield arithmetic(f"algorithm.correction.low={low} is not below algorithm.correction.high={high}")
    if recipe.reward.model is not None and algorithm.dynamic_sampling:
        yield definition(
            "algorithm.dynamic_sampling replaces groups whose rewards are all equal, which does not happen with "
            "reward.model: set 0"
        )
    if recipe.critic != type(recipe.critic)() and not algorithm.uses_critic:
        given = "name" if algorithm.advantage is None else "advantage"
        fix = "ppo" if algorithm.advantage is None else "gae"
        value = getattr(algorithm, given)
        yield definition(f"critic: algorithm.{given}={value} has no critic: leave the section out, or set {fix}")


def _check_training(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what offloading and budgets of tokens cannot be combined with."""
    train, algorithm, rollout = recipe.train, recipe.algorithm, recipe.rollout
    if train.offloads and not algorithm.generates:
        yield definition(
            f"train.offload_{train.offloads[0]}: algorithm.name={algorithm.name} never generates: leave it out"
        )
    budget = train.max_tokens_per_micro_batch
    if budget is not None and rollout is not None and budget < rollout.max_model_len:
        yield arithmetic(
            f"train.max_tokens_per_micro_batch={budget} has no room for a sequence of "
            f"rollout.max_model_len={rollout.max_model_len} tokens: at least {rollout.max_model_len}"
        )
    if budget is not None and train.vpp > 1 and not train.packed:
        yield not_built(  # Megatron-Core 0.16.1 exchanges shapes in this schedule too (`variable_seq_lengths`)
            f"train.max_tokens_per_micro_batch={budget}: padded micro batches differ in shape, which the interleaved "
            f"schedule (train.vpp={train.vpp}) does not support: set train.packed=true, or train.vpp=1"
        )


def _check_optimizers(recipe: Recipe) -> Iterator[Refusal]:
    """Yield the contradictions between settings of both optimizers and the steps that they take."""
    steps, critic_warmup = recipe.run.steps, recipe.critic.warmup_steps
    if recipe.critic.optimizer is not None:
        yield from _check_optimizer(recipe.critic.optimizer, "critic.optimizer", steps, "run.steps")
    if critic_warmup < steps:
        setting = f"run.steps={steps} minus critic.warmup_steps" if critic_warmup else "run.steps"
        yield from _check_optimizer(recipe.optimizer, "optimizer", steps - critic_warmup, setting)
    else:
        yield arithmetic(
            f"critic.warmup_steps={critic_warmup} leaves no step of run.steps={steps} to train the policy: "
            f"at most {steps - 1}"
        )


def _check_optimizer(optimizer: Optimizer, key: str, steps: int, steps_setting: str) -> Iterator[Refusal]:
    """Yield the contradictions between settings of an optimizer.

    Args:
        key: dotted name of the section.
        steps: number of steps that the optimizer takes.
        steps_setting: the settings that `steps` follows from, for messages.
    """
    if optimizer.min_lr > optimizer.lr and optimizer.schedule != "constant":
        yield arithmetic(
            f"{key}.min_lr={optimizer.min_lr} is more than {key}.lr={optimizer.lr}, but the rate only decays: lower it"
        )
    warmup = optimizer.warmup_steps
    if warmup >= steps:
        yield arithmetic(
            f"{key}.warmup_steps={warmup} leaves no step of {steps_setting}={steps} after warmup: at most {steps - 1}"
        )


def _check_overlong(recipe: Recipe) -> Iterator[Refusal]:
    """Yield a penalty that each answer would have."""
    rollout, buffer = recipe.rollout, recipe.reward.overlong_buffer
    if rollout is not None and buffer >= rollout.max_new_tokens:
        yield arithmetic(
            f"reward.overlong_buffer={buffer} penalizes every answer of rollout.max_new_tokens="
            f"{rollout.max_new_tokens}: at most {rollout.max_new_tokens - 1}"
        )


def _check_lora(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what cannot be combined with adapters."""
    if recipe.lora is None:
        return
    if recipe.syncs_adapters and recipe.rollout is not None and recipe.rollout.dp > 1:
        yield by_engine(
            VLLM,
            f"lora.sync=adapter: rollout.dp={recipe.rollout.dp} joins engines, and while one of them waits for the "
            "others vLLM removes all adapters: set lora.sync=merged, or rollout.dp=1",
        )
    if recipe.train.expert_bias_update_rate:
        yield definition(
            f"train.expert_bias_update_rate={recipe.train.expert_bias_update_rate:g} changes routers, and with lora "
            "all but the adapters stays as it is: set 0"
        )
    if recipe.train.etp > 1:
        yield not_built(
            f"train.etp={recipe.train.etp}: adapters (lora) of experts are not sharded over ranks: set train.etp=1"
        )


def _check_mtp(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what layers for multi-token prediction cannot be trained with."""
    setting = f"train.mtp_loss_coef={recipe.train.mtp_loss_coef:g}"
    if not recipe.train.mtp_loss_coef:
        return
    if recipe.algorithm.uses_pairs:
        yield not_built(  # the loss could be of the chosen answers alone
            f"{setting}: algorithm.name={recipe.algorithm.name} has rejected answers, which it would learn too: set 0"
        )
    if recipe.lora is not None:
        yield definition(
            f"{setting} trains layers, and with lora all but the adapters stays as it is: leave one of them out"
        )
    if recipe.train.cp > 1:
        yield not_built(  # Megatron-Core 0.16.1 exchanges these tokens between ranks (`roll_tensor`)
            f"{setting}: with train.cp={recipe.train.cp} a rank lacks tokens that they predict: set train.cp=1, or 0"
        )


def _check_teacher(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what a server cannot compute as the reference."""
    kl, rollout = recipe.algorithm.kl, recipe.rollout
    if kl.endpoint is None:
        return
    if kl.reference is not None:
        yield definition(
            f"algorithm.kl.endpoint={kl.endpoint} and algorithm.kl.reference={kl.reference}: set one of both"
        )
    if recipe.algorithm.uses_pairs:
        yield not_built(
            "algorithm.kl.endpoint: algorithm.name=dpo compares with a checkpoint only: set algorithm.kl.reference"
        )
    if rollout is not None and rollout.temperature != 1:
        yield definition(  # that of OpenAI's API, whichever server it is
            f"rollout.temperature={rollout.temperature}: the server of algorithm.kl.endpoint computes "
            "log-probabilities at temperature 1: set 1, or algorithm.kl.reference"
        )


def _check_kl(recipe: Recipe) -> Iterator[Refusal]:
    """Yield the contradictions between settings of the KL."""
    kl, answers = recipe.algorithm.kl, recipe.sequences_per_step
    if kl.where == "none" and kl.coef > 0:
        yield definition(
            f"algorithm.kl.coef={kl.coef} has no effect with algorithm.kl.where=none: set where: loss, or coef: 0"
        )
    if kl.where == "loss" and kl.estimator == "k1" and not kl.ratio_weighted:
        yield arithmetic(
            "algorithm.kl.estimator=k1 has no gradient in the loss: set k1+, k2 or k3, ratio_weighted: true, or where: "
            "reward"
        )
    if kl.where == "reward" and kl.effective_estimator.endswith("+"):
        yield definition(
            f"algorithm.kl.estimator={kl.estimator}: with algorithm.kl.where=reward the KL has no gradient: set "
            f"{kl.effective_estimator.removesuffix('+')}"
        )
    if kl.ratio_weighted and kl.effective_estimator not in ("k1", "k3"):
        yield arithmetic(
            "algorithm.kl.ratio_weighted=true: its gradient is that of the KL with algorithm.kl.estimator=k1 or k3 "
            f"only, not with {kl.effective_estimator}"
        )
    if kl.target is not None and answers >= 5 * kl.horizon:  # a step's smallest factor, 1 - 0.2 answers / horizon, <= 0
        yield arithmetic(
            f"algorithm.kl.horizon={kl.horizon} is too short for the {answers} answers of a step, which could change "
            f"the coefficient's sign: at least {answers // 5 + 1}; {10 * answers} is ten steps"
        )
    if kl.target is not None and kl.coef == 0:
        yield arithmetic(
            f"algorithm.kl.target={kl.target} is approached by multiplying algorithm.kl.coef=0, which stays 0: "
            "set it above 0"
        )


def _check_guard(recipe: Recipe) -> Iterator[Refusal]:
    """Yield a record of each bound on a metric that this recipe does not have."""
    guard, kl, given = recipe.guard, recipe.algorithm.kl, f"algorithm.name={recipe.algorithm.name}"
    if not recipe.algorithm.generates:
        for name in ("max_kl", "max_clip_fraction", "min_entropy", "max_mismatch_kl", "max_sync_share", "kl_explosion"):
            bound = getattr(guard, name)
            if bound is not None:
                yield definition(f"guard.{name}={bound}: {given} has no metric that it bounds: leave it out")
        if guard.initial_mismatch != type(guard)().initial_mismatch:
            yield definition(
                f"guard.initial_mismatch={guard.initial_mismatch}: {given} generates nothing: leave it out"
            )
        return
    loss = recipe.algorithm.combination.policy_loss
    if guard.max_clip_fraction is not None and loss in ("sapo", "reinforce", "kl_cov"):
        bound = f"guard.max_clip_fraction={guard.max_clip_fraction:g}"
        yield definition(f"{bound}: algorithm.policy_loss={loss} clips nothing: leave it out")
    if kl.where == "none" and guard.max_kl is not None:
        yield definition(
            f"guard.max_kl={guard.max_kl}: algorithm.kl.where=none measures no KL: leave it out, or set where: loss"
        )
    if kl.target is None and guard.kl_explosion is not None:
        yield definition(
            f"guard.kl_explosion={guard.kl_explosion}: without algorithm.kl.target the coefficient is already fixed: "
            "leave it out, or set a target"
        )


_CHECKS = (  # in the order of the messages
    *(unused_settings, _check_ranks, check_algorithm, _check_kl, _check_learning, check_split, check_reward_ranks),
    *(check_async, check_agents, check_evaluation, check_router_replay, _check_mtp, _check_lora, _check_teacher),
    *(check_quantization, check_fp8_training, _check_training, _check_optimizers, _check_guard, _check_overlong),
)
