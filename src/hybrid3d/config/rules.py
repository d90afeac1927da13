"""Checks for settings of a recipe that contradict each other, independent of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid3d.config.algorithm_rules import check_algorithm
from hybrid3d.config.quantization_rules import check_fp8_training, check_quantization
from hybrid3d.config.schema import MAX_PORT, MAX_RANKS
from hybrid3d.config.unused_settings import unused_settings

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe
    from hybrid3d.config.sections.algorithm import Kl
    from hybrid3d.config.sections.learning import Optimizer

RESERVED_NAMES = ("train", "eval", "accuracy", "reward")  # of files with held-out problems


def validate_recipe(recipe: Recipe) -> Iterator[str]:
    """Yield a message for each contradiction between settings of a recipe, independent of the model."""
    yield from unused_settings(recipe)
    if recipe.world_size > MAX_RANKS:
        yield f"{recipe.ranks_formula} = {recipe.world_size} ranks are more than {MAX_RANKS}: lower one of them"
    algorithm, kl, optimizer = recipe.algorithm, recipe.algorithm.kl, recipe.optimizer
    if algorithm.generates and recipe.rollout is None:
        yield f"rollout: missing, and algorithm.name={algorithm.name} generates: give max_model_len and max_new_tokens"
    yield from check_algorithm(recipe)
    yield from _check_kl(kl, recipe.sequences_per_step)
    if algorithm.correction.kind.endswith("mask") and algorithm.correction.low >= algorithm.correction.high:
        low, high = algorithm.correction.low, algorithm.correction.high
        yield f"algorithm.correction.low={low} is not below algorithm.correction.high={high}"
    if recipe.reward.model is not None and algorithm.dynamic_sampling:
        yield (
            "algorithm.dynamic_sampling replaces groups whose rewards are all equal, which does not happen with "
            "reward.model: set 0"
        )
    if recipe.critic != type(recipe.critic)() and not algorithm.uses_critic:
        given = "name" if algorithm.advantage is None else "advantage"
        fix = "ppo" if algorithm.advantage is None else "gae"
        value = getattr(algorithm, given)
        yield f"critic: algorithm.{given}={value} has no critic: leave the section out, or set {fix}"
    for check in _CHECKS:
        yield from check(recipe)
    if recipe.train.offloads and not algorithm.generates:
        yield f"train.offload_{recipe.train.offloads[0]}: algorithm.name={algorithm.name} never generates: leave it out"
    budget, rollout = recipe.train.max_tokens_per_micro_batch, recipe.rollout
    if budget is not None and rollout is not None and budget < rollout.max_model_len:
        yield (
            f"train.max_tokens_per_micro_batch={budget} has no room for a sequence of "
            f"rollout.max_model_len={rollout.max_model_len} tokens: at least {rollout.max_model_len}"
        )
    if budget is not None and recipe.train.vpp > 1 and not recipe.train.packed:
        yield (
            f"train.max_tokens_per_micro_batch={budget}: padded micro batches differ in shape, which the interleaved "
            f"schedule (train.vpp={recipe.train.vpp}) does not support: set train.packed=true, or train.vpp=1"
        )
    if recipe.critic.optimizer is not None:
        yield from _check_optimizer(recipe.critic.optimizer, "critic.optimizer", recipe.run.steps, "run.steps")
    critic_warmup = recipe.critic.warmup_steps
    if critic_warmup < recipe.run.steps:
        setting = f"run.steps={recipe.run.steps} minus critic.warmup_steps" if critic_warmup else "run.steps"
        yield from _check_optimizer(optimizer, "optimizer", recipe.run.steps - critic_warmup, setting)
    else:
        yield (
            f"critic.warmup_steps={critic_warmup} leaves no step of run.steps={recipe.run.steps} to train the policy: "
            f"at most {recipe.run.steps - 1}"
        )
    yield from _check_guard(recipe)
    max_new_tokens, buffer = recipe.rollout.max_new_tokens if recipe.rollout else 0, recipe.reward.overlong_buffer
    if recipe.rollout is not None and buffer >= max_new_tokens:
        yield (
            f"reward.overlong_buffer={buffer} penalizes every answer of rollout.max_new_tokens={max_new_tokens}: "
            f"at most {max_new_tokens - 1}"
        )


def _check_split(recipe: Recipe) -> Iterator[str]:
    """Yield settings that make no sense where ranks either train or generate."""
    ranks, train = recipe.roles.generation.ranks, recipe.train
    if ranks is None:
        return
    if not recipe.algorithm.generates:
        yield f"roles.generation.ranks={ranks}: algorithm.name={recipe.algorithm.name} never generates: leave it out"
    apart = "no rank has both engines"
    yield from _check_active_ranks(recipe)
    if recipe.rollout is not None:
        yield from _check_nodes(recipe, "generation", "rollout.tp", recipe.rollout.tp)
    if recipe.rollout is not None and recipe.rollout.keep_weights:
        yield f"rollout.keep_weights: {apart}, so that vLLM never sleeps: leave it out"
    for kind in train.offloads:
        yield f"train.offload_{kind}: {apart}, so that Megatron never makes room: leave it out"


def _check_active_ranks(recipe: Recipe) -> Iterator[str]:
    """Yield why this number of active ranks is not a number of whole engines."""
    active, ranks, rollout = recipe.roles.generation.active_ranks, recipe.roles.generation.ranks, recipe.rollout
    if active is None or ranks is None or rollout is None:
        return
    size = rollout.tp * rollout.dp
    if active > ranks or active % size:
        yield (
            f"roles.generation.active_ranks={active}: expected a multiple of rollout.tp x rollout.dp = {size}, up to "
            f"roles.generation.ranks={ranks}"
        )


def _check_reward_ranks(recipe: Recipe) -> Iterator[str]:
    """Yield why these ranks cannot compute rewards."""
    role, size = recipe.roles.reward, recipe.worker_group_size("reward")
    if role.ranks is None:
        return
    if not recipe.algorithm.generates:
        yield f"roles.reward.ranks={role.ranks}: algorithm.name={recipe.algorithm.name} has no rewards: leave it out"
    if role.ranks % size:
        yield f"roles.reward.ranks={role.ranks}: expected a multiple of roles.reward.tp x roles.reward.pp = {size}"
    if role.tp % role.ep:
        yield f"roles.reward.ep={role.ep} does not divide roles.reward.tp={role.tp}, whose ranks it regroups"
    yield from _check_nodes(recipe, "reward", "roles.reward.tp", role.tp)


def _check_async(recipe: Recipe) -> Iterator[str]:
    """Yield what generation ahead of training, and partial rollouts, cannot do."""
    ahead, rollout = recipe.async_, recipe.rollout
    staleness = f"async.max_staleness={ahead.max_staleness}"
    if not ahead.max_staleness and ahead.partial is not None:
        yield (
            f"async.partial={ahead.partial}: {staleness} lets no answer take longer than its step: set it to the "
            "number of steps that an answer may go on for"
        )
    if not ahead.max_staleness or not recipe.algorithm.generates:
        return
    if not recipe.is_split and ahead.partial is None:
        yield f"{staleness}: the ranks that train also generate: set roles.generation.ranks or async.partial"
    if recipe.algorithm.correction.kind == "none" and not recipe.algorithm.correction.bypass:
        yield (
            f"{staleness}: older weights than those that are trained generate the samples, and "
            "algorithm.correction.kind=none does not correct for it: set truncate, mask, "
            "sequence_truncate, sequence_mask or sequence_mean_mask, or bypass: true"
        )
    if ahead.partial is None or rollout is None:
        return
    if ahead.keep_cache and rollout.sleep and not recipe.is_split:
        yield "async.keep_cache=true: vLLM frees its KV cache while it sleeps: set rollout.sleep=false"
    if ahead.keep_cache and rollout.dp > 1:
        yield (
            f"async.keep_cache=true: with rollout.dp={rollout.dp} engines that share experts must end their requests "
            "together before a sync: leave it out"
        )
    if ahead.batches_in_flight > ahead.max_staleness + 1:
        yield (
            f"async.batches_in_flight={ahead.batches_in_flight}: more than async.max_staleness + 1 = "
            f"{ahead.max_staleness + 1}, so that prompts would be too old when they are trained: at most that"
        )
    if recipe.algorithm.combination.dynamic_sampling:
        extra = recipe.algorithm.dynamic_sampling
        setting = f"algorithm.dynamic_sampling={extra}" if extra else f"algorithm.name={recipe.algorithm.name}"
        yield (
            f"async.partial={ahead.partial}: {setting} replaces prompts of whole batches, for which no step waits: set "
            "algorithm.dynamic_sampling=0"
        )
    if rollout.environment is not None and rollout.dp > 1:
        yield (
            f"async.partial={ahead.partial}: engines that share experts (rollout.dp={rollout.dp}) step together, and "
            f"cannot wait for rollout.environment={rollout.environment} apart: set rollout.dp=1, or leave "
            "async.partial out"
        )


def _check_lora(recipe: Recipe) -> Iterator[str]:
    if recipe.lora is None:
        return
    if recipe.syncs_adapters and recipe.rollout is not None and recipe.rollout.dp > 1:
        yield (
            f"lora.sync=adapter: rollout.dp={recipe.rollout.dp} joins engines, and while one of them waits for the "
            "others vLLM 0.32.0 removes all adapters: set lora.sync=merged, or rollout.dp=1"
        )
    if recipe.train.expert_bias_update_rate:
        yield (
            f"train.expert_bias_update_rate={recipe.train.expert_bias_update_rate:g} changes routers, and with lora "
            "all but the adapters stays as it is: set 0"
        )
    if recipe.train.etp > 1:
        yield f"train.etp={recipe.train.etp}: adapters (lora) of experts are not sharded over ranks: set train.etp=1"


def _check_evaluation(recipe: Recipe) -> Iterator[str]:
    """Yield what cannot be measured on held-out problems, and files or names that stand there twice."""
    evaluation, samples = recipe.evaluation, f"evaluation.samples={recipe.evaluation.samples}"
    if recipe.rollout is None:
        return
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield (
            f"{samples}: with evaluation.temperature=0 all answers to a problem are the same: set a temperature, such "
            "as 1, or samples: 1"
        )
    for k in evaluation.k if evaluation.samples > 1 else ():
        if k > evaluation.samples:
            yield f"evaluation.k: pass@{k} needs at least {k} answers per problem, and {samples}: raise it, or lower k"
    files = {recipe.data.eval: "data.eval"}
    for name, path in evaluation.data.items():
        setting = f"evaluation.data.{name}"
        if name in RESERVED_NAMES:
            yield f"{setting}: {name} is a name that metrics have: choose another"
        if path in files:
            yield f"{setting}={path} is the file of {files[path]} too: leave one of them out"
        files.setdefault(path, setting)


def _check_agents(recipe: Recipe) -> Iterator[str]:
    """Yield what cannot be combined with agents."""
    rollout, ahead, reward = recipe.rollout, recipe.async_, recipe.reward
    if rollout is None or rollout.agents is None:
        return
    agents, last_port = "rollout.agents", rollout.agents.port + recipe.world_size - 1
    if last_port > MAX_PORT:
        yield (
            f"{agents}.port={rollout.agents.port}: the last of {recipe.world_size} ranks would listen at {last_port}: "
            f"at most {MAX_PORT - recipe.world_size + 1}"
        )
    if rollout.environment is not None:
        yield f"{agents}: agents take turns themselves: leave rollout.environment={rollout.environment} out"
    if ahead.partial is not None:
        yield f"{agents}: a step waits for its agents: leave async.partial={ahead.partial} out"
    if rollout.dp > 1:
        yield (
            f"{agents}: engines that share experts (rollout.dp={rollout.dp}) step together, and cannot wait for agents "
            "apart: set rollout.dp=1"
        )
    if reward.overlong_buffer:
        yield (
            f"{agents}: the length of an agent's answer is not that of one sequence: leave "
            f"reward.overlong_buffer={reward.overlong_buffer} out"
        )


def _check_router_replay(recipe: Recipe) -> Iterator[str]:
    """Yield where vLLM does not return the experts that it chose."""
    replay, rollout = recipe.train.router_replay, recipe.rollout
    if replay != "rollout" or rollout is None:
        return
    if rollout.agents is not None:
        yield (
            f"train.router_replay={replay}: the experts of agents' answers (rollout.agents) are not kept: set "
            "train.router_replay=old, or leave rollout.agents out"
        )
    if recipe.async_.keep_cache:
        yield (
            f"train.router_replay={replay}: vLLM 0.32.0 returns experts only with its prefix cache, which "
            "async.keep_cache=true turns off: leave async.keep_cache out, or set train.router_replay=old"
        )


def _check_mtp(recipe: Recipe) -> Iterator[str]:
    """Yield what layers for multi-token prediction cannot be trained with."""
    setting = f"train.mtp_loss_coef={recipe.train.mtp_loss_coef:g}"
    if not recipe.train.mtp_loss_coef:
        return
    if recipe.algorithm.uses_pairs:
        yield f"{setting}: algorithm.name={recipe.algorithm.name} has rejected answers, which it would learn too: set 0"
    if recipe.lora is not None:
        yield f"{setting} trains layers, and with lora all but the adapters stays as it is: leave one of them out"
    if recipe.train.cp > 1:
        yield f"{setting}: with train.cp={recipe.train.cp} a rank lacks tokens that they predict: set train.cp=1, or 0"


def _check_nodes(recipe: Recipe, role: str, setting: str, tp: int) -> Iterator[str]:
    """Yield the first TP group of the ranks of a role that would fit into a node, but would be on two.

    Args:
        setting: the name of `tp`.
    """
    ranks, per_node = recipe.role_ranks[role], recipe.machine.gpus_per_node
    for first in ranks[::tp] if tp <= per_node else ():
        if first % per_node + tp > per_node:
            yield (
                f"{setting}={tp}: the TP group of ranks {first} to {first + tp - 1} would be on two nodes of "
                f"machine.gpus_per_node={per_node} ranks: let the {ranks.start} ranks before it fill whole nodes, or "
                f"choose a {setting} that divides both numbers"
            )
            return


def _check_teacher(recipe: Recipe) -> Iterator[str]:
    """Yield what a server cannot compute as the reference."""
    kl, rollout = recipe.algorithm.kl, recipe.rollout
    if kl.endpoint is None:
        return
    if kl.reference is not None:
        yield f"algorithm.kl.endpoint={kl.endpoint} and algorithm.kl.reference={kl.reference}: set one of both"
    if recipe.algorithm.uses_pairs:
        yield "algorithm.kl.endpoint: algorithm.name=dpo compares with a checkpoint only: set algorithm.kl.reference"
    if rollout is not None and rollout.temperature != 1:
        yield (
            f"rollout.temperature={rollout.temperature}: the server of algorithm.kl.endpoint computes "
            "log-probabilities at temperature 1: set 1, or algorithm.kl.reference"
        )


def _check_kl(kl: Kl, answers: int) -> Iterator[str]:
    """Yield the contradictions between settings of the KL, for a step with this many answers."""
    if kl.where == "none" and kl.coef > 0:
        yield f"algorithm.kl.coef={kl.coef} has no effect with algorithm.kl.where=none: set where: loss, or coef: 0"
    if kl.where == "loss" and kl.estimator == "k1" and not (kl.straight_through or kl.ratio_weighted):
        yield (
            "algorithm.kl.estimator=k1 has no gradient in the loss: set k2 or k3, straight_through: true, "
            "ratio_weighted: true, or where: reward"
        )
    if kl.ratio_weighted and (kl.straight_through or kl.effective_estimator not in ("k1", "k3")):
        yield (
            f"algorithm.kl.ratio_weighted=true: its gradient is that of the KL with estimator k1 or k3 and "
            f"straight_through: false only, not with {kl.effective_estimator} and "
            f"straight_through: {str(kl.straight_through).lower()}"
        )
    if kl.target is not None and answers >= 5 * kl.horizon:  # a step's smallest factor, 1 - 0.2 answers / horizon, <= 0
        yield (
            f"algorithm.kl.horizon={kl.horizon} is too short for the {answers} answers of a step, which could change "
            f"the coefficient's sign: at least {answers // 5 + 1}; {10 * answers} is ten steps"
        )
    if kl.target is not None and kl.coef == 0:
        yield (
            f"algorithm.kl.target={kl.target} is approached by multiplying algorithm.kl.coef=0, which stays 0: "
            "set it above 0"
        )


def _check_optimizer(optimizer: Optimizer, key: str, steps: int, steps_setting: str) -> Iterator[str]:
    """Yield the contradictions between settings of an optimizer.

    Args:
        key: dotted name of the section.
        steps: number of steps that the optimizer takes.
        steps_setting: the settings that `steps` follows from, for messages.
    """
    if optimizer.min_lr > optimizer.lr and optimizer.schedule != "constant":
        yield (
            f"{key}.min_lr={optimizer.min_lr} is more than {key}.lr={optimizer.lr}, but the rate only decays: lower it"
        )
    warmup = optimizer.warmup_steps
    if warmup >= steps:
        yield f"{key}.warmup_steps={warmup} leaves no step of {steps_setting}={steps} after warmup: at most {steps - 1}"


def _check_guard(recipe: Recipe) -> Iterator[str]:
    """Yield a message for each bound on a metric that this recipe does not have."""
    guard, kl, given = recipe.guard, recipe.algorithm.kl, f"algorithm.name={recipe.algorithm.name}"
    if not recipe.algorithm.generates:
        for name in ("max_kl", "max_clip_fraction", "min_entropy", "max_mismatch_kl", "max_sync_share", "kl_explosion"):
            bound = getattr(guard, name)
            if bound is not None:
                yield f"guard.{name}={bound}: {given} has no metric that it bounds: leave it out"
        if guard.initial_mismatch != type(guard)().initial_mismatch:
            yield f"guard.initial_mismatch={guard.initial_mismatch}: {given} generates nothing: leave it out"
        return
    loss = recipe.algorithm.combination.policy_loss
    if guard.max_clip_fraction is not None and loss in ("sapo", "reinforce", "kl_cov"):
        bound = f"guard.max_clip_fraction={guard.max_clip_fraction:g}"
        yield f"{bound}: algorithm.policy_loss={loss} clips nothing: leave it out"
    if kl.where == "none" and guard.max_kl is not None:
        yield f"guard.max_kl={guard.max_kl}: algorithm.kl.where=none measures no KL: leave it out, or set where: loss"
    if kl.target is None and guard.kl_explosion is not None:
        yield (
            f"guard.kl_explosion={guard.kl_explosion}: without algorithm.kl.target the coefficient is already fixed: "
            "leave it out, or set a target"
        )


_CHECKS = (
    *(_check_split, _check_reward_ranks, _check_async, _check_agents, _check_evaluation, _check_router_replay),
    *(_check_mtp, _check_lora, _check_teacher, check_quantization, check_fp8_training),
)
