"""Rules that train and rollout layouts must satisfy, which the engines would otherwise enforce with tracebacks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from hybrid3d.config.algorithms import GROUP_ADVANTAGES
from hybrid3d.config.quantization_rules import BLOCK, misaligned_dims, quantized_shares
from hybrid3d.config.refusals import (
    MEGATRON,
    TRANSFORMER_ENGINE,
    VLLM,
    Refusal,
    arithmetic,
    by_engine,
    definition,
    not_built,
)
from hybrid3d.config.schema import Rule

if TYPE_CHECKING:
    from hybrid3d.config.model_shape import ModelShape
    from hybrid3d.config.recipe import Recipe
    from hybrid3d.config.sections.engines import Rollout

Device = Literal["cpu", "cuda"]

# `CPUAttentionBackend.get_supported_head_sizes()` of vLLM 0.32.0, whose kernels refuse others when the engine starts.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# `DEFAULT_VOCAB_PADDING_SIZE` of vLLM 0.32.0, which pads the vocabulary to this multiple and splits it evenly over TP.
_VOCAB_PADDING = 64
# `CPUMLABackend.get_supported_head_sizes()` of vLLM 0.32.0: DeepSeek's latent of 512 and 64 rotated dims.
_CPU_LATENT_DIM = 576
# Tokens per block of the KV cache: `CpuPlatform.check_and_update_config()` of vLLM 0.32.0.
_CPU_BLOCK, _CPU_LATENT_BLOCK = 128, 16

STAGE_SETTINGS = ("first_stage_layers", "last_stage_layers")
MAX_PROMPTS = 2**20


def find_layout_problems(recipe: Recipe, model: ModelShape, device: Device | None) -> list[Refusal]:
    """Return all problems that `check_layout` reports, without the suggested values."""
    problems = [*_check_support(recipe, model, device), *_check_train_layout(recipe, model)]
    ranks = None if problems else recipe.generation_ranks
    problems += _check_rollout_layout(recipe, model, ranks)
    replicas = ranks // recipe.rollout.tp if ranks and recipe.rollout and not problems else None
    return [*problems, *_check_rollout_limits(recipe, model, device), *_check_batch(recipe, replicas)]


def _check_support(recipe: Recipe, model: ModelShape, device: Device | None) -> Iterator[Refusal]:
    """Yield settings for features that the model does not have or this version does not support."""
    train, rollout = recipe.train, recipe.rollout
    if model.experts is None:
        reason = "shards experts, but this model has none"
        for axis, size in (("ep", train.ep), ("etp", train.etp)):
            if size > 1:
                yield definition(f"train.{axis}={size} {reason}", f"train.{axis}", "the only valid value is 1")
        if train.expert_bias_update_rate:
            message = f"train.expert_bias_update_rate={train.expert_bias_update_rate:g}: this model has no router"
            yield definition(message, "train.expert_bias_update_rate", "the only valid value is 0")
        if train.router_replay != "none":
            message = f"train.router_replay={train.router_replay}: this model has no experts to choose"
            yield definition(message, "train.router_replay", "the only valid value is none")
        if rollout is not None and rollout.expert_parallel:
            message = f"rollout.expert_parallel=true {reason}"
            yield definition(message, "rollout.expert_parallel", "the only valid value is false")
    elif rollout is not None and rollout.expert_parallel and device == "cpu":
        yield by_engine(
            VLLM,
            "rollout.expert_parallel=true: vLLM does not support expert parallelism on CPU",
            "rollout.expert_parallel",
            "the only valid value here is false, which shards experts over rollout.tp",
        )
    if recipe.syncs_adapters and model.experts is not None and device == "cpu":
        message = "lora.sync=adapter: vLLM has no adapters of models with experts on CPU"
        yield by_engine(VLLM, message, "lora.sync", "the only valid value here is merged")
    if recipe.syncs_adapters and recipe.model.dtype == "float32" and device == "cuda":
        message = "lora.sync=adapter: with model.dtype=float32 vLLM has no adapters on GPUs"
        yield by_engine(VLLM, message, "lora.sync model.dtype", "set model.dtype=bfloat16, or lora.sync=merged")
    if train.fp8 != "none" and device == "cpu":
        message = f"train.fp8={train.fp8}: Transformer Engine multiplies in FP8, on GPUs only"
        yield by_engine(TRANSFORMER_ENGINE, message, "train.fp8", "the only valid value here is none")
    if rollout is not None and rollout.dp > 1 and not rollout.expert_parallel:
        yield definition(
            f"rollout.dp={rollout.dp} joins engines that share experts, but rollout.expert_parallel=false",
            "rollout.dp rollout.expert_parallel",
            "set rollout.dp=1 (engines that share no experts need no setting)"
            + (", or expert_parallel: true" if model.experts is not None and device != "cpu" else ""),
        )


def _check_train_layout(recipe: Recipe, model: ModelShape) -> Iterator[Refusal]:
    train, rules = recipe.train, [*_attention_rules(model), *_mlp_rules(model)]
    yield from _check_rules("train.tp", train.tp, rules)
    yield from _check_stages(recipe, model.num_layers)
    yield from _check_context(recipe)
    if train.fp8 != "none":
        yield from misaligned_dims(train, model)
    if model.experts is None:
        return
    ep_rules = [_divides(model.experts.count, "the number of experts")]
    etp_rules = [_divides(model.experts.width, "an expert's width")]
    problems = [*_check_rules("train.ep", train.ep, ep_rules), *_check_rules("train.etp", train.etp, etp_rules)]
    yield from problems
    stage_ranks, expert_ranks = train.tp * train.cp * train.dp, train.ep * train.etp
    if stage_ranks % expert_ranks and not problems:
        yield arithmetic(
            f"train.ep*etp={train.ep}*{train.etp}={expert_ranks} does not divide the train.tp*cp*dp={stage_ranks} "
            "ranks of a pipeline stage, over which experts are distributed",
            "train.ep train.etp",
        )


def _check_context(recipe: Recipe) -> Iterator[Refusal]:
    """Check that the longest sequence divides into two chunks for each context-parallel rank, which have equal work."""
    cp, rollout = recipe.train.cp, recipe.rollout
    if rollout is not None and cp > 1 and rollout.max_model_len % (2 * cp):
        message = (
            f"train.cp={cp} divides sequences into 2*{cp}={2 * cp} chunks, and rollout.max_model_len="
            f"{rollout.max_model_len} is not a multiple of {2 * cp}"
        )
        yield arithmetic(message, "train.cp rollout.max_model_len")


def _check_stages(recipe: Recipe, layers: int) -> Iterator[Refusal]:
    """Check pipeline stages: first and last stage may have explicit layer counts, the others share the rest equally."""
    pp, vpp = recipe.train.pp, recipe.train.vpp
    settings = {f"train.{key}": getattr(recipe.train, key) for key in STAGE_SETTINGS}
    explicit = {key: value for key, value in settings.items() if value is not None}
    if explicit and pp == 1:
        for key, value in explicit.items():
            yield definition(f"{key}={value} needs several stages, but train.pp=1 has one", key, "set it to null")
        return
    rest, others = layers - sum(explicit.values()), pp - len(explicit)
    share = rest // others if others else 0
    if explicit and (share * others != rest or (others and share < 1)):
        yield arithmetic(
            f"{' and '.join(f'{key}={value}' for key, value in explicit.items())} leave {rest} of "
            f"num_hidden_layers={layers} to {others} other stages, which must have the same number of "
            "layers, 1 or more",
            f"{' '.join(explicit)} train.pp",
        )
        return
    if not explicit:
        yield from _check_rules("train.pp", pp, [_divides(layers, "num_hidden_layers", "=")])
        if layers % pp:
            return
    if vpp > 1 and len(explicit) == pp:
        message = (
            f"train.vpp={vpp}: with explicit layers of the first and last stage, Megatron interleaves only if there "
            "are other stages"
        )
        yield by_engine(MEGATRON, message, "train.vpp", "set train.vpp=1")
        return
    divided = f"num_hidden_layers/train.pp={layers}/{pp}={share}" if not explicit else "the layers of each stage"
    sizes = [*explicit.values(), *([share] if others else [])]
    yield from _check_rules(
        "train.vpp", vpp, [Rule(lambda n: all(size % n == 0 for size in sizes), f"does not divide {divided}")]
    )
    if vpp > 1 and pp == 1:
        message = f"train.vpp={vpp} interleaves pipeline stages, but train.pp=1 has one"
        fix = "set train.vpp=1" + (", or train.pp=2" if layers % (2 * vpp) == 0 else "")
        yield definition(message, "train.vpp", fix)


def _check_rollout_layout(recipe: Recipe, model: ModelShape, ranks: int | None) -> Iterator[Refusal]:
    """Check vLLM's layout over so many ranks; None if the train layout is invalid."""
    rollout = recipe.rollout
    if rollout is None:
        return
    padded_vocab = -(-model.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    setting = "roles.generation.ranks" if recipe.is_split else "train.tp*pp*cp*dp"
    all_ranks = f"the {setting}={ranks} ranks"
    shared_experts = model.experts if rollout.expert_parallel else None
    rules = [
        Rule(lambda n: ranks is None or ranks % n == 0, f"does not divide {all_ranks}"),
        *_attention_rules(model),
        *_mlp_rules(model),
        Rule(
            lambda n: padded_vocab % n == 0,
            f"does not divide vocab_size={model.vocab_size}, which vLLM pads to {padded_vocab}",
        ),
    ]
    if model.experts is not None and not rollout.expert_parallel:
        rules.append(_divides(model.experts.width, "an expert's width"))
    if shared_experts is not None:
        rules.append(
            Rule(
                lambda n: n <= shared_experts.count,
                f"ranks of an engine are more than the {shared_experts.count} experts that they share",
            )
        )
    problems = [*_check_rules("rollout.tp", rollout.tp, rules)]
    yield from problems or _check_blocks(rollout, model)
    if problems or rollout.dp == 1:
        return
    slots = rollout.tp * rollout.dp
    if ranks is not None and ranks % slots:
        yield arithmetic(
            f"rollout.dp={rollout.dp}: rollout.tp*dp={rollout.tp}*{rollout.dp}={slots} does not divide {all_ranks} "
            "into engines",
            "rollout.dp rollout.tp",
        )
    elif shared_experts is not None and slots > shared_experts.count:
        yield arithmetic(
            f"rollout.dp={rollout.dp}: rollout.tp*dp={rollout.tp}*{rollout.dp}={slots} ranks of an engine are more "
            f"than the {shared_experts.count} experts that they share",
            "rollout.dp rollout.tp",
        )


def _check_blocks(rollout: Rollout, model: ModelShape) -> Iterator[Refusal]:
    if rollout.quantization is None:
        return
    setting = f"rollout.quantization={rollout.quantization} has blocks of {BLOCK}, and"
    for share in quantized_shares(model, shards_experts=not rollout.expert_parallel):
        if share.fits(rollout.tp):
            continue
        if not share.fits(1):
            key, fix = "rollout.quantization", "leave rollout.quantization out"
            message = f"{setting} {share.what}={share.on_each(1):g} is not a multiple of it"
        else:
            key, fix = "rollout.tp", ""
            message = (
                f"rollout.tp={rollout.tp}: {setting} {share.what}={share.size} gives each rank "
                f"{share.on_each(rollout.tp):g}, which is not a multiple of it"
            )
        if share.is_expert:
            why = "vLLM can divide their blocks (`refine_fp8_moe_block_shape`); no sync plans that"
            yield not_built(why, message, key, fix)
        else:
            yield by_engine(VLLM, message, key, fix)


def _check_rollout_limits(recipe: Recipe, model: ModelShape, device: Device | None) -> Iterator[Refusal]:
    if recipe.rollout is None:
        return
    if device == "cpu" and model.latents is None and model.head_dim not in CPU_HEAD_DIMS:
        message = f"head_dim={model.head_dim} is not supported by vLLM's attention on CPU"
        yield by_engine(VLLM, message, "head_dim")
    if device == "cpu" and model.latents is not None:
        latent_dim = model.latents.kv_rank + model.latents.rope
        if latent_dim != _CPU_LATENT_DIM:
            yield by_engine(
                VLLM,
                f"kv_lora_rank+qk_rope_head_dim={model.latents.kv_rank}+{model.latents.rope}={latent_dim}",
                "kv_lora_rank qk_rope_head_dim",
                f"vLLM's latent attention on CPU supports only {_CPU_LATENT_DIM}",
            )
    total, new, limit = recipe.rollout.max_model_len, recipe.rollout.max_new_tokens, model.max_position_embeddings
    if new >= total:
        message = f"rollout.max_new_tokens={new} leaves no room for a prompt in rollout.max_model_len={total}"
        fix = f"at most {total - 1}" if total > 1 else "set rollout.max_model_len to 2 or more"
        yield arithmetic(message, "rollout.max_new_tokens rollout.max_model_len", fix)
    if total > limit:
        message = f"rollout.max_model_len={total} is more than max_position_embeddings={limit}"
        yield arithmetic(message, "rollout.max_model_len", f"at most {limit}")
    if device == "cpu":
        yield from _check_kv_cache(recipe, recipe.rollout, model)


def _check_kv_cache(recipe: Recipe, rollout: Rollout, model: ModelShape) -> Iterator[Refusal]:
    """Check that the longest sequence and one block fit, as vLLM 0.32.0 requires (`check_enough_kv_cache_memory`)."""
    itemsize = 4 if recipe.model.dtype == "float32" else 2
    if model.latents is not None:
        block, token_elements = _CPU_LATENT_BLOCK, model.latents.kv_rank + model.latents.rope
    else:
        heads = max(1, model.num_key_value_heads // rollout.tp)
        block, token_elements = _CPU_BLOCK, 2 * heads * model.head_dim
    blocks = math.ceil(rollout.max_model_len / block) + 1
    needed = blocks * block * token_elements * itemsize * model.num_layers
    if rollout.kv_cache_gib * 2**30 < needed:
        minimum = math.ceil(needed / 2**30 * 1_000) / 1_000
        message = (
            f"rollout.kv_cache_gib={rollout.kv_cache_gib:g} has no room for a sequence of "
            f"rollout.max_model_len={rollout.max_model_len} tokens, which takes {needed / 2**30:.4f} GiB"
        )
        yield arithmetic(message, "rollout.kv_cache_gib", f"at least {minimum:g}")


def _check_batch(recipe: Recipe, replicas: int | None) -> Iterator[Refusal]:
    """Check the sizes of a step's batches; `replicas` is None if there are none or the layouts are invalid."""
    algorithm = recipe.algorithm
    prompts = algorithm.prompts_per_step
    samples = recipe.sequences_per_step // prompts
    if algorithm.uses_groups and samples < 2:
        combined = algorithm.combination
        scale = f"algorithm.advantage_scale={combined.advantage_scale}"
        what = algorithm.name if combined.advantage in GROUP_ADVANTAGES else scale
        fix = f"{what} compares samples of one prompt, so it needs 2 or more"
        yield arithmetic(f"algorithm.samples_per_prompt={samples}", "algorithm.samples_per_prompt", fix)
    factors = _batch_factors(recipe)
    unit = sequences_multiple(recipe)
    product = f"{'*'.join(factors)}={'*'.join(map(str, factors.values()))}={unit}"
    each = "answers" if algorithm.uses_pairs else "samples"
    sequences = f"of {samples} {each} each is {prompts * samples} sequences, " if samples > 1 else "is "
    rules = [Rule(lambda n: n * samples % unit == 0, f"{sequences}not a multiple of {product}")]
    if algorithm.uses_pairs:
        dp = recipe.train.dp
        rules.append(Rule(lambda n: n % dp == 0, f"pairs is not a multiple of train.dp={dp}"))
    if algorithm.generates and replicas is not None:
        ratio = f"{recipe.generation_ranks}/{recipe.generation_ranks // replicas}={replicas}"
        description = f"is not a multiple of the rollout replicas, ranks/rollout.tp={ratio}"
        rules.append(Rule(lambda n: n % replicas == 0, description))
    problems = [*_check_rules("algorithm.prompts_per_step", prompts, rules)]
    if problems and prompts_multiple(recipe) > MAX_PROMPTS:
        fix = f"no value up to {MAX_PROMPTS:,} is: lower train.micro_batch_size, train.dp or algorithm.minibatches"
        problems = [replace(problem, fix=fix) for problem in problems]
    yield from problems


def _batch_factors(recipe: Recipe) -> dict[str, int]:
    """Return the factors, by setting, of the number that a step's sequences must be a multiple of."""
    algorithm, train = recipe.algorithm, recipe.train
    factors = {"train.dp": train.dp}
    if train.max_tokens_per_micro_batch is None:
        factors["train.micro_batch_size"] = train.micro_batch_size
    if algorithm.minibatches > 1:
        factors["algorithm.minibatches"] = algorithm.minibatches
    if train.vpp > 1:  # Megatron's interleaved schedule needs a multiple of pp micro batches
        factors["train.pp"] = train.pp
    return factors


def sequences_multiple(recipe: Recipe) -> int:
    """Return the number that a step's sequences must be a multiple of."""
    return math.prod(_batch_factors(recipe).values())


def prompts_multiple(recipe: Recipe) -> int:
    """Return the number that a step's prompts must be a multiple of, provided that the layouts are valid."""
    unit = sequences_multiple(recipe)
    samples = recipe.sequences_per_step // recipe.algorithm.prompts_per_step
    step = unit // math.gcd(unit, samples)
    if recipe.algorithm.uses_pairs:  # which are not divided over data-parallel ranks
        step = math.lcm(step, recipe.train.dp)
    if recipe.algorithm.generates and recipe.rollout is not None and recipe.generation_ranks % recipe.rollout.tp == 0:
        return math.lcm(step, recipe.generation_ranks // recipe.rollout.tp)
    return step


def _attention_rules(model: ModelShape) -> list[Rule]:
    """Return the rules of attention for the tensor parallel size, which are the same for Megatron and vLLM."""
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    rules = [Rule(lambda n: heads % n == 0, f"does not divide num_attention_heads={heads}")]
    if model.latents is None:
        description = f"and num_key_value_heads={groups}: one must divide the other"
        rules.append(Rule(lambda n: groups % n == 0 or n % groups == 0, description))
    return rules


def _mlp_rules(model: ModelShape) -> list[Rule]:
    """Return the rules of dense layers and shared experts for the tensor parallel size, for Megatron and vLLM."""
    experts, rules = model.experts, []
    if experts is None or not all(experts.sparse):
        rules.append(_divides(model.intermediate_size, "intermediate_size", "="))
    if experts is not None and experts.shared_width:
        rules.append(_divides(experts.shared_width, "the width of the shared experts"))
    return rules


def _divides(size: int, what: str, sign: str = " ") -> Rule:
    return Rule(lambda n: size % n == 0, f"does not divide {what}{sign}{size}")


def _check_rules(key: str, value: int, rules: Sequence[Rule]) -> Iterator[Refusal]:
    for rule in rules:
        if not rule.is_satisfied(value):
            yield arithmetic(f"{key}={value} {rule.description}", key)
