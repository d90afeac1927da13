"""Checks for settings of a recipe that contradict each other, independent of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid3d.config.algorithms import TOKEN_ADVANTAGES
from hybrid3d.config.generation_rules import (
    check_agents,
    check_async,
    check_evaluation,
    check_reward_ranks,
    check_router_replay,
    check_split,
)
from hybrid3d.config.quantization_rules import check_fp8
from hybrid3d.config.refusals import VLLM, Refusal, arithmetic, by_engine, definition, not_built, unused_settings
from hybrid3d.config.schema import MAX_RANKS

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe
    from hybrid3d.config.sections.learning import Optimizer

TOKEN_CORRECTIONS = ("truncate", "mask")
OF_TOKENS = ("clip_cov", "kl_cov")  # which select tokens
WITHOUT_RATIO = ("reinforce", "gmpo", "dppo_tv", "dppo_kl")  # or with one of their own


def validate_recipe(recipe: Recipe) -> Iterator[Refusal]:
    """Yield a record of each contradiction between settings of a recipe, independent of the model."""
    for check in _CHECKS:
        yield from check(recipe)


def _check_ranks(recipe: Recipe) -> Iterator[Refusal]:
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
        yield not_built(
            "Megatron-Core 0.16.1 exchanges shapes in this schedule too (`variable_seq_lengths`)",
            f"train.max_tokens_per_micro_batch={budget}: padded micro batches differ in shape, which the interleaved "
            f"schedule (train.vpp={train.vpp}) does not support: set train.packed=true, or train.vpp=1",
        )


def _check_optimizers(recipe: Recipe) -> Iterator[Refusal]:
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
    """Yield the contradictions between settings of the optimizer in the section `key`.

    Args:
        steps: number of steps that the optimizer takes, which follows from `steps_setting`.
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
    rollout, buffer = recipe.rollout, recipe.reward.overlong_buffer
    if rollout is not None and buffer >= rollout.max_new_tokens:
        yield arithmetic(
            f"reward.overlong_buffer={buffer} penalizes every answer of rollout.max_new_tokens="
            f"{rollout.max_new_tokens}: at most {rollout.max_new_tokens - 1}"
        )


def _check_lora(recipe: Recipe) -> Iterator[Refusal]:
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
            "each rank would need its rows or columns of an adapter, as with tensor parallelism",
            f"train.etp={recipe.train.etp}: adapters (lora) of experts are not sharded over ranks: set train.etp=1",
        )


def _check_mtp(recipe: Recipe) -> Iterator[Refusal]:
    setting = f"train.mtp_loss_coef={recipe.train.mtp_loss_coef:g}"
    if not recipe.train.mtp_loss_coef:
        return
    if recipe.algorithm.uses_pairs:
        yield not_built(
            "the loss could be of the chosen answers alone",
            f"{setting}: algorithm.name={recipe.algorithm.name} has rejected answers, which it would learn too: set 0",
        )
    if recipe.lora is not None:
        yield definition(
            f"{setting} trains layers, and with lora all but the adapters stays as it is: leave one of them out"
        )
    if recipe.train.cp > 1:
        yield not_built(
            "Megatron-Core 0.16.1 exchanges these tokens between ranks (`roll_tensor`)",
            f"{setting}: with train.cp={recipe.train.cp} a rank lacks tokens that they predict: set train.cp=1, or 0",
        )


def _check_teacher(recipe: Recipe) -> Iterator[Refusal]:
    kl, rollout = recipe.algorithm.kl, recipe.rollout
    if kl.endpoint is None:
        return
    if kl.reference is not None:
        yield definition(
            f"algorithm.kl.endpoint={kl.endpoint} and algorithm.kl.reference={kl.reference}: set one of both"
        )
    if recipe.algorithm.uses_pairs:
        yield not_built(
            "a server can be asked for the log-probabilities of both answers of a pair",
            "algorithm.kl.endpoint: algorithm.name=dpo compares with a checkpoint only: set algorithm.kl.reference",
        )
    if rollout is not None and rollout.temperature != 1:
        yield definition(  # that of OpenAI's API, whichever server it is
            f"rollout.temperature={rollout.temperature}: the server of algorithm.kl.endpoint computes "
            "log-probabilities at temperature 1: set 1, or algorithm.kl.reference"
        )


def _check_kl(recipe: Recipe) -> Iterator[Refusal]:
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


def _check_algorithm(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.algorithm.uses_pairs:
        yield from _check_pairs(recipe)
    if not recipe.algorithm.generates:
        return
    yield from _check_advantage(recipe)
    yield from _check_loss(recipe)
    extra = recipe.algorithm.combination.dynamic_sampling
    if recipe.algorithm.uses_greedy_answers and extra:
        yield definition(
            f"algorithm.advantage=greedy_answer: algorithm.dynamic_sampling={extra} replaces groups of equal rewards, "
            "which have advantages here: set it to 0"
        )
    reward, kl = recipe.reward, recipe.algorithm.kl
    scheduled = any("algorithm.kl.coef" in settings for settings in recipe.schedule.values())
    if reward.coef == kl.coef == recipe.algorithm.entropy_coef == 0 and not scheduled:
        yield definition("reward.coef=0 and algorithm.kl.coef=0 leave nothing to learn from: set one of them above 0")
    if reward.min is not None and reward.max is not None and reward.min >= reward.max:
        yield arithmetic(f"reward.min={reward.min:g} is not below reward.max={reward.max:g}")


def _check_pairs(recipe: Recipe) -> Iterator[Refusal]:
    seen: dict[str, str] = {}
    for setting in ("data.prompt", "data.chosen", "data.rejected"):
        column = getattr(recipe.data, setting.removeprefix("data."))
        if column in seen:
            yield definition(f"{setting}={column} is the column of {seen[column]} too: name the column of each")
        seen.setdefault(column, setting)


def _check_advantage(recipe: Recipe) -> Iterator[Refusal]:
    combined = recipe.algorithm.combination
    scale = f"algorithm.advantage_scale={combined.advantage_scale}"
    if combined.advantage in TOKEN_ADVANTAGES and combined.advantage_scale not in ("none", "whiten"):
        yield definition(
            f"{scale}: with algorithm.advantage={combined.advantage} each token has an advantage of its own, which is "
            "not divided by that of rewards: set whiten or none"
        )
    if combined.advantage_scale == "batch_std" and recipe.sequences_per_step < 2:
        yield arithmetic(
            f"{scale}: the {recipe.sequences_per_step} answer of a step has no standard deviation: set "
            "algorithm.prompts_per_step to 2 or more, or algorithm.advantage_scale to none"
        )


def _check_loss(recipe: Recipe) -> Iterator[Refusal]:
    algorithm = recipe.algorithm
    combined, correction = algorithm.combination, algorithm.correction
    one_ratio, others = "", ""  # what gives all tokens of an answer one ratio, and what would not
    if combined.ratio == "sequence":
        one_ratio, others = "algorithm.ratio=sequence", "algorithm.ratio=sequence_straight_through or token"
    elif combined.policy_loss == "gmpo":
        one_ratio, others = "algorithm.policy_loss=gmpo", "algorithm.policy_loss=ppo"
    if one_ratio and correction.kind in TOKEN_CORRECTIONS:
        yield definition(
            f"algorithm.correction.kind={correction.kind} weights tokens, but with {one_ratio} an answer has one "
            f"ratio: set algorithm.correction.kind=sequence_{correction.kind}, or {others}"
        )
    if one_ratio and algorithm.high_entropy_fraction is not None:
        yield definition(
            f"algorithm.high_entropy_fraction={algorithm.high_entropy_fraction:g} selects tokens, but with "
            f"{one_ratio} an answer has one ratio: set {others}"
        )
    if one_ratio and combined.policy_loss in OF_TOKENS:
        yield definition(
            f"algorithm.policy_loss={combined.policy_loss} selects tokens, but with {one_ratio} an answer has one "
            f"ratio: set {others}"
        )
    if combined.ratio != "token" and combined.policy_loss in WITHOUT_RATIO:
        yield definition(
            f"algorithm.ratio={combined.ratio}: algorithm.policy_loss={combined.policy_loss} does not use it: set "
            "algorithm.ratio=token"
        )
    if correction.bypass and correction.kind not in ("none", "sequence_mean_mask"):
        yield definition(
            f"algorithm.correction.kind={correction.kind}: with algorithm.correction.bypass=true the ratio of "
            f"algorithm.policy_loss={combined.policy_loss} already is that to the policy that sampled: set "
            "algorithm.correction.kind=none or sequence_mean_mask"
        )
    if correction.bypass and combined.policy_loss == "reinforce":
        yield definition(
            "algorithm.correction.bypass=true: algorithm.policy_loss=reinforce has no ratio: leave it out, and set "
            "algorithm.correction.kind=truncate to weight its tokens"
        )
    if combined.policy_loss == "clip_cov" and algorithm.loss.cov_low >= algorithm.loss.cov_high:
        yield arithmetic(
            f"algorithm.loss.cov_low={algorithm.loss.cov_low:g} is not below "
            f"algorithm.loss.cov_high={algorithm.loss.cov_high:g}"
        )
    if combined.policy_loss == "gmpo" and combined.loss_agg_mode != "sequence":
        yield definition(
            f"algorithm.loss_agg_mode={combined.loss_agg_mode}: with algorithm.policy_loss=gmpo an answer has one "
            "loss, which this would multiply by its length: set sequence"
        )


_CHECKS = (  # in the order of the messages
    *(unused_settings, _check_ranks, _check_algorithm, _check_kl, _check_learning, check_split, check_reward_ranks),
    *(check_async, check_agents, check_evaluation, check_router_replay, _check_mtp, _check_lora, _check_teacher),
    *(check_fp8, _check_training, _check_optimizers, _check_guard, _check_overlong),
)
