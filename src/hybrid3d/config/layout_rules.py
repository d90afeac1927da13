"""What a layout must keep to: each rule that an engine would otherwise enforce with a traceback of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hybrid3d.config.schema import Rule

if TYPE_CHECKING:
    from hybrid3d.config.model_shape import ModelShape
    from hybrid3d.config.recipe import Recipe
    from hybrid3d.config.sections.engines import Rollout

Device = Literal["cpu", "cuda"]

# `CPUAttentionBackend.get_supported_head_sizes()` of vLLM 0.32.0: its kernels refuse others when the engine starts.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# `DEFAULT_VOCAB_PADDING_SIZE` of vLLM 0.32.0: it pads the vocabulary to this multiple, then splits it evenly over TP.
_VOCAB_PADDING = 64
# `CPUMLABackend.get_supported_head_sizes()` of vLLM 0.32.0: DeepSeek's latent of 512 and 64 rotated dims.
_CPU_LATENT_DIM = 576
# Tokens of a KV cache's block: `CpuPlatform.check_and_update_config()` of vLLM 0.32.0.
_CPU_BLOCK, _CPU_LATENT_BLOCK = 128, 16

STAGES = ("first_stage_layers", "last_stage_layers")
MAX_PROMPTS = 2**20


@dataclass(frozen=True)
class Problem:
    """A way in which a recipe does not fit its model.

    Attributes:
        keys: settings whose values are offered, the first being the one that is refused.
        says: what is wrong, with both values.
        fix: what is offered where it is not a value that can be searched for.
    """

    keys: tuple[str, ...]
    says: str
    fix: str = ""


def misfits(recipe: Recipe, model: ModelShape, device: Device | None) -> list[Problem]:
    """All ways in which a recipe does not fit a model; as `check_layout`, without values to offer."""
    problems = [*_unsupported(recipe, model, device), *_train_layout(recipe, model)]
    ranks = None if problems else recipe.world_size
    problems += _rollout_layout(recipe, model, ranks)
    replicas = ranks // recipe.rollout.tp if ranks and recipe.rollout and not problems else None
    return [*problems, *_rollout_limits(recipe, model, device), *_batch(recipe, replicas)]


def _unsupported(recipe: Recipe, model: ModelShape, device: Device | None) -> Iterator[Problem]:
    """What the model does not have, and what this version does not run."""
    train, rollout = recipe.train, recipe.rollout
    if model.experts is None:
        none = "shards experts, and this model has none"
        for axis in ("ep", "etp"):
            if getattr(train, axis) > 1:
                says = f"train.{axis}={getattr(train, axis)} {none}"
                yield Problem((f"train.{axis}",), says, "the only valid value is 1")
        if train.expert_bias_update_rate:
            says = f"train.expert_bias_update_rate={train.expert_bias_update_rate:g}: this model has no router to move"
            yield Problem(("train.expert_bias_update_rate",), says, "the only valid value is 0")
        if rollout is not None and rollout.expert_parallel:
            says = f"rollout.expert_parallel=true {none}"
            yield Problem(("rollout.expert_parallel",), says, "the only valid value is false")
    elif rollout is not None and rollout.expert_parallel and device == "cpu":
        yield Problem(
            ("rollout.expert_parallel",),
            "rollout.expert_parallel=true: vLLM 0.32.0 cannot generate so on a CPU",
            "the only valid value here is false, which shards experts over rollout.tp",
        )
    if train.cp > 1 and device is not None:
        says = f"train.cp={train.cp} shards sequences, which this version does not"
        yield Problem(("train.cp",), says, "the only valid value is 1")
    if rollout is not None and rollout.dp > 1 and not rollout.expert_parallel:
        yield Problem(
            ("rollout.dp",),
            f"rollout.dp={rollout.dp} joins engines that share experts, and rollout.expert_parallel=false",
            "set rollout.dp=1 (engines that share nothing need no setting)"
            + (", or expert_parallel: true" if model.experts is not None and device != "cpu" else ""),
        )


def _train_layout(recipe: Recipe, model: ModelShape) -> Iterator[Problem]:
    train, rules = recipe.train, [*_attention_rules(model), *_mlp_rules(model)]
    yield from _broken("train.tp", train.tp, rules)
    yield from _stages(recipe, model.num_layers)
    if model.experts is None:
        return
    whole = [_divides(model.experts.count, "the number of experts")]
    parts = [_divides(model.experts.width, "an expert's width")]
    broken = [*_broken("train.ep", train.ep, whole), *_broken("train.etp", train.etp, parts)]
    yield from broken
    stage, needed = train.tp * train.cp * train.dp, train.ep * train.etp
    if stage % needed and not broken:
        yield Problem(
            ("train.ep", "train.etp"),
            f"train.ep*etp={train.ep}*{train.etp}={needed} does not divide the train.tp*cp*dp={stage} ranks "
            "of a pipeline stage, over which experts are dealt out",
        )


def _stages(recipe: Recipe, layers: int) -> Iterator[Problem]:
    """Layers of the first and the last pipeline stage may be said; the others have equal shares of the rest."""
    pp, vpp = recipe.train.pp, recipe.train.vpp
    said = {f"train.{key}": getattr(recipe.train, key) for key in STAGES if getattr(recipe.train, key) is not None}
    if said and pp == 1:
        for key, value in said.items():
            yield Problem((key,), f"{key}={value} needs several stages, and train.pp=1 has one", "set it to null")
        return
    rest, others = layers - sum(said.values()), pp - len(said)
    share = rest // others if others else 0
    if said and (share * others != rest or (others and share < 1)):
        yield Problem(
            (*said, "train.pp"),
            f"{' and '.join(f'{key}={value}' for key, value in said.items())} leave {rest} of "
            f"num_hidden_layers={layers} to {others} other stages, which must have equal shares, of 1 or more",
        )
        return
    if not said:
        yield from _broken("train.pp", pp, [_divides(layers, "num_hidden_layers", "=")])
        if layers % pp:
            return
    if vpp > 1 and len(said) == pp:
        says = f"train.vpp={vpp}: Megatron interleaves said first and last stages only around others"
        yield Problem(("train.vpp",), says, "set train.vpp=1")
        return
    words = f"num_hidden_layers/train.pp={layers}/{pp}={share}" if not said else "the layers of each stage"
    sizes = [*said.values(), *([share] if others else [])]
    yield from _broken(
        "train.vpp", vpp, [Rule(lambda n: all(size % n == 0 for size in sizes), f"does not divide {words}")]
    )
    if vpp > 1 and pp == 1:
        says = f"train.vpp={vpp} interleaves pipeline stages, and train.pp=1 has one"
        yield Problem(("train.vpp",), says, "set train.vpp=1" + (", or train.pp=2" if layers % (2 * vpp) == 0 else ""))


def _rollout_layout(recipe: Recipe, model: ModelShape, ranks: int | None) -> Iterator[Problem]:
    """
    Args:
        ranks: how many there are; None where the train layout is wrong.
    """
    rollout = recipe.rollout
    if rollout is None:
        return
    padded = -(-model.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    all_ranks = f"the train.tp*pp*cp*dp={ranks} ranks"
    shared = model.experts if rollout.expert_parallel else None
    rules = [
        Rule(lambda n: ranks is None or ranks % n == 0, f"does not divide {all_ranks}"),
        *_attention_rules(model),
        *_mlp_rules(model),
        Rule(lambda n: padded % n == 0, f"does not divide vocab_size={model.vocab_size} as vLLM pads it, {padded}"),
    ]
    if model.experts is not None and not rollout.expert_parallel:
        rules.append(_divides(model.experts.width, "an expert's width"))
    if shared is not None:
        rules.append(Rule(lambda n: n <= shared.count, f"ranks of an engine share {shared.count} experts"))
    broken = [*_broken("rollout.tp", rollout.tp, rules)]
    yield from broken
    if broken or rollout.dp == 1:
        return
    slots = rollout.tp * rollout.dp
    if ranks is not None and ranks % slots:
        yield Problem(
            ("rollout.dp", "rollout.tp"),
            f"rollout.dp={rollout.dp}: rollout.tp*dp={rollout.tp}*{rollout.dp}={slots} does not divide {all_ranks} "
            "into engines",
        )
    elif shared is not None and slots > shared.count:
        yield Problem(
            ("rollout.dp", "rollout.tp"),
            f"rollout.dp={rollout.dp}: rollout.tp*dp={rollout.tp}*{rollout.dp}={slots} ranks of an engine share "
            f"{shared.count} experts, at most {shared.count} can",
        )


def _rollout_limits(recipe: Recipe, model: ModelShape, device: Device | None) -> Iterator[Problem]:
    if recipe.rollout is None:
        return
    if device == "cpu" and model.latents is None:
        attention = Rule(lambda n: n in CPU_HEAD_DIMS, "is not supported by vLLM's attention on CPU")
        yield from _broken("head_dim", model.head_dim, [attention])
    if device == "cpu" and model.latents is not None:
        latent = model.latents.kv_rank + model.latents.rope
        if latent != _CPU_LATENT_DIM:
            yield Problem(
                ("kv_lora_rank", "qk_rope_head_dim"),
                f"kv_lora_rank+qk_rope_head_dim={model.latents.kv_rank}+{model.latents.rope}={latent}",
                f"vLLM's latent attention on CPU has {_CPU_LATENT_DIM} only",
            )
    total, new, limit = recipe.rollout.max_model_len, recipe.rollout.max_new_tokens, model.max_position_embeddings
    if new >= total:
        keys = ("rollout.max_new_tokens", "rollout.max_model_len")
        says = f"rollout.max_new_tokens={new} leaves no room for a prompt in rollout.max_model_len={total}"
        yield Problem(keys, says, f"at most {total - 1}" if total > 1 else "set rollout.max_model_len to 2 or more")
    if total > limit:
        says = f"rollout.max_model_len={total} is more than max_position_embeddings={limit}"
        yield Problem(("rollout.max_model_len",), says, f"at most {limit}")
    if device == "cpu":
        yield from _kv_cache(recipe, recipe.rollout, model)


def _kv_cache(recipe: Recipe, rollout: Rollout, model: ModelShape) -> Iterator[Problem]:
    """vLLM 0.32.0 wants room for the longest sequence and one block (`check_enough_kv_cache_memory`)."""
    itemsize = 4 if recipe.model.dtype == "float32" else 2
    if model.latents is not None:
        block, numbers = _CPU_LATENT_BLOCK, model.latents.kv_rank + model.latents.rope
    else:
        heads = max(1, model.num_key_value_heads // rollout.tp)
        block, numbers = _CPU_BLOCK, 2 * heads * model.head_dim
    blocks = math.ceil(rollout.max_model_len / block) + 1
    needed = blocks * block * numbers * itemsize * model.num_layers
    if rollout.kv_cache_gib * 2**30 < needed:
        least = math.ceil(needed / 2**30 * 1_000) / 1_000
        says = (
            f"rollout.kv_cache_gib={rollout.kv_cache_gib:g} has no room for a sequence of "
            f"rollout.max_model_len={rollout.max_model_len} tokens, which takes {needed / 2**30:.4f} GiB"
        )
        yield Problem(("rollout.kv_cache_gib",), says, f"at least {least:g}")


def _batch(recipe: Recipe, replicas: int | None) -> Iterator[Problem]:
    """`replicas` is the number of vLLM engines, None where the layouts that give it are wrong or absent."""
    algorithm = recipe.algorithm
    prompts = algorithm.prompts_per_step
    samples = recipe.sequences_per_step // prompts
    if algorithm.grouped and samples < 2:
        fix = f"{algorithm.name} compares samples of one prompt, so it needs 2 or more"
        yield Problem(("algorithm.samples_per_prompt",), f"algorithm.samples_per_prompt={samples}", fix)
    factors = _factors(recipe)
    unit = math.prod(factors.values())
    product = f"{'*'.join(factors)}={'*'.join(map(str, factors.values()))}={unit}"
    sequences = f"of {samples} samples each is {prompts * samples} sequences, " if samples > 1 else "is "
    rules = [Rule(lambda n: n * samples % unit == 0, f"{sequences}no multiple of {product}")]
    if algorithm.generates and replicas is not None:
        ratio = f"{recipe.world_size}/{recipe.world_size // replicas}={replicas}"
        words = f"is no multiple of the rollout replicas, ranks/rollout.tp={ratio}"
        rules.append(Rule(lambda n: n % replicas == 0, words))
    broken = [*_broken("algorithm.prompts_per_step", prompts, rules)]
    if broken and prompts_step(recipe) > MAX_PROMPTS:
        fix = f"no value up to {MAX_PROMPTS:,} is: lower train.micro_batch_size, train.dp or algorithm.minibatches"
        broken = [replace(problem, fix=fix) for problem in broken]
    yield from broken


def _factors(recipe: Recipe) -> dict[str, int]:
    """What the sequences of a step must be a multiple of: the product of these."""
    algorithm, train = recipe.algorithm, recipe.train
    factors = {"train.dp": train.dp}
    if train.max_tokens_per_micro_batch is None:
        factors["train.micro_batch_size"] = train.micro_batch_size
    if algorithm.minibatches > 1:
        factors["algorithm.minibatches"] = algorithm.minibatches
    if train.vpp > 1:  # Megatron's interleaved schedule takes micro batches in rounds of one per stage
        factors["train.pp"] = train.pp
    return factors


def prompts_step(recipe: Recipe) -> int:
    """Of this the prompts of a step must be a multiple, as far as the layouts are right."""
    unit = math.prod(_factors(recipe).values())
    samples = recipe.sequences_per_step // recipe.algorithm.prompts_per_step
    step = unit // math.gcd(unit, samples)
    if recipe.algorithm.generates and recipe.rollout is not None and recipe.world_size % recipe.rollout.tp == 0:
        return math.lcm(step, recipe.world_size // recipe.rollout.tp)
    return step


def _attention_rules(model: ModelShape) -> list[Rule]:
    """What tensor parallelism asks of attention, in Megatron and in vLLM alike."""
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    rules = [Rule(lambda n: heads % n == 0, f"does not divide num_attention_heads={heads}")]
    if model.latents is None:
        words = f"and num_key_value_heads={groups}: one must divide the other"
        rules.append(Rule(lambda n: groups % n == 0 or n % groups == 0, words))
    return rules


def _mlp_rules(model: ModelShape) -> list[Rule]:
    """What tensor parallelism asks of dense layers and of shared experts, in Megatron and in vLLM alike."""
    rules = []
    if model.experts is None or not all(model.experts.sparse):
        rules.append(_divides(model.intermediate_size, "intermediate_size", "="))
    if model.experts is not None and model.experts.shared_width:
        rules.append(_divides(model.experts.shared_width, "the width of the shared experts"))
    return rules


def _divides(size: int, what: str, sign: str = " ") -> Rule:
    return Rule(lambda n: size % n == 0, f"does not divide {what}{sign}{size}")


def _broken(key: str, value: int, rules: Sequence[Rule]) -> Iterator[Problem]:
    """A problem for each rule that `value` breaks."""
    yield from (Problem((key,), f"{key}={value} {rule.says}") for rule in rules if not rule.holds(value))
