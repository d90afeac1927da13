"""Whether a recipe fits a model: each rule that an engine would otherwise enforce with a traceback of its own.

A rule is stated once, as a predicate and its words. The values that a message offers are searched for among the values
that keep every rule of that key, so what it offers is never refused by the next rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hybrid3d.families import family_of
from hybrid3d.mistakes import UserMistake
from hybrid3d.schema import Count, RecipeError, Rule, read_value
from hybrid3d.user_files import read_json_file

if TYPE_CHECKING:
    from hybrid3d.config import Recipe
    from hybrid3d.families import Experts, Latents

Device = Literal["cpu", "cuda"]

# `CPUAttentionBackend.get_supported_head_sizes()` of vLLM 0.32.0: its kernels refuse others when the engine starts.
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# `DEFAULT_VOCAB_PADDING_SIZE` of vLLM 0.32.0: it pads the vocabulary to this multiple, then splits it evenly over TP.
_VOCAB_PADDING = 64
# `CPUMLABackend.get_supported_head_sizes()` of vLLM 0.32.0: DeepSeek's latent of 512 and 64 rotated dims.
_CPU_LATENT_DIM = 576


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that layouts must divide. In messages they bear their names in `config.json`."""

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    experts: Experts | None = None
    latents: Latents | None = None

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], experts: Experts | None = None, latents: Latents | None = None
    ) -> ModelShape:
        """From a Hugging Face `config.json`; the two sizes that may be absent there take that library's defaults."""
        problems: list[str] = []

        def size(key: str, default: int | None = None) -> int:
            if default is not None and config.get(key) is None:
                return default
            try:
                return int(read_value(Count, config[key]))
            except (KeyError, ValueError) as error:
                problems.append(f"{key}: {'missing' if isinstance(error, KeyError) else error}")
                return 1

        heads, hidden = size("num_attention_heads"), size("hidden_size")
        if config.get("head_dim") is None and hidden % heads:
            problems.append(f"head_dim: missing, and num_attention_heads={heads} does not divide hidden_size={hidden}")
        shape = cls(
            num_layers=size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=max(1, hidden // heads)),
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            vocab_size=size("vocab_size"),
            max_position_embeddings=size("max_position_embeddings"),
            experts=experts,
            latents=latents,
        )
        if problems:
            raise RecipeError("config.json of the model", problems)
        return shape


def check_layout(recipe: Recipe, model: ModelShape, *, device: Device | None) -> None:
    """RecipeError listing every way in which the recipe does not fit the model on this device.

    What follows from a wrong layout is not held against the rest: its count of ranks, for one, means nothing.

    Args:
        device: where it will run; None where it is only planned, and what this machine cannot run does not matter.
    """
    problems = [*_not_yet(recipe, model, device), *_train_layout(recipe, model)]
    ranks = None if problems else recipe.world_size
    problems += _rollout_layout(recipe, model, ranks)
    replicas = ranks // recipe.rollout.tp if ranks and recipe.rollout and not problems else None
    problems += [*_rollout_limits(recipe, model, device), *_batch(recipe, replicas)]
    if problems:
        raise RecipeError(f"recipe {recipe.name} does not fit its model", problems)


def check_layout_early(recipe: Recipe) -> None:
    """`check_layout` by the model's `config.json` alone: no torch is imported, so that a refusal comes at once.

    Raises:
        UserMistake: the config cannot be read, no family computes it, or the recipe does not fit it.
    """
    config = read_json_file(Path(recipe.model.path) / "config.json")
    try:
        family = family_of(config)
        shape = ModelShape.from_config(config, experts=family.experts(config), latents=family.latents(config))
    except UserMistake:
        raise
    except Exception:  # values of wrong types: the full check of the checkpoint names them
        return
    check_layout(recipe, shape, device=None)


def _not_yet(recipe: Recipe, model: ModelShape, device: Device | None) -> Iterator[str]:
    """What the model does not have, and what this version does not run."""
    train, rollout = recipe.train, recipe.rollout
    if model.experts is None:
        none = "shards experts, and this model has none"
        for axis in ("ep", "etp"):
            if getattr(train, axis) > 1:
                yield f"train.{axis}={getattr(train, axis)} {none}: the only valid value is 1"
        if rollout is not None and rollout.expert_parallel:
            yield f"rollout.expert_parallel=true {none}: the only valid value is false"
    elif rollout is not None and rollout.expert_parallel and device == "cpu":
        yield (
            "rollout.expert_parallel=true: vLLM 0.32.0 cannot generate so on a CPU; "
            "the only valid value here is false, which shards experts over rollout.tp"
        )
    if train.cp > 1 and device is not None:
        yield f"train.cp={train.cp} shards sequences, which this version does not: the only valid value is 1"
    if rollout is not None and rollout.dp > 1 and not rollout.expert_parallel:
        yield (
            f"rollout.dp={rollout.dp} joins engines that share experts, and rollout.expert_parallel=false: "
            "set rollout.dp=1 (engines that share nothing need no setting), or expert_parallel: true"
        )


def _train_layout(recipe: Recipe, model: ModelShape) -> Iterator[str]:
    train, rules = recipe.train, [*_attention_rules(model), *_mlp_rules(model)]
    yield from _broken("train.tp", train.tp, rules, range(1, model.num_attention_heads + 1))
    yield from _stages(recipe, model.num_layers)
    if model.experts is None:
        return
    yield from _broken(
        "train.ep",
        train.ep,
        [_divides(model.experts.count, "the number of experts")],
        range(1, model.experts.count + 1),
    )
    width = model.experts.width
    yield from _broken("train.etp", train.etp, [_divides(width, "an expert's width")], range(1, width + 1))
    stage, needed = train.tp * train.cp * train.dp, train.ep * train.etp
    if stage % needed:
        yield (
            f"train.ep*etp={train.ep}*{train.etp}={needed} does not divide the train.tp*cp*dp={stage} ranks "
            "of a pipeline stage, over which experts are dealt out"
        )


def _stages(recipe: Recipe, layers: int) -> Iterator[str]:
    """Layers of the first and the last pipeline stage may be said; the others have equal shares of the rest."""
    pp, vpp = recipe.train.pp, recipe.train.vpp
    said = {
        key: getattr(recipe.train, key)
        for key in ("first_stage_layers", "last_stage_layers")
        if getattr(recipe.train, key) is not None
    }
    if said and pp == 1:
        yield f"train.{next(iter(said))}={next(iter(said.values()))} needs several stages, and train.pp=1 has one"
        return
    rest, others = layers - sum(said.values()), pp - len(said)
    share = rest // others if others else 0
    if said and (share * others != rest or (others and share < 1)):
        yield (
            f"train.{' and train.'.join(f'{key}={value}' for key, value in said.items())} leave {rest} of "
            f"num_hidden_layers={layers} to {others} other stages: they must have equal shares, of 1 or more"
        )
        return
    if not said:
        rule = Rule(lambda n: layers % n == 0, f"does not divide num_hidden_layers={layers}")
        yield from _broken("train.pp", pp, [rule], range(1, layers + 1))
        if layers % pp:
            return
    if vpp > 1 and len(said) == pp:
        yield f"train.vpp={vpp}: Megatron interleaves said first and last stages only around others: set train.vpp=1"
        return
    words = f"num_hidden_layers/train.pp={layers}/{pp}={share}" if not said else "the layers of each stage"
    sizes = [*said.values(), *([share] if others else [])]
    chunks = Rule(lambda n: all(size % n == 0 for size in sizes), f"does not divide {words}")
    yield from _broken("train.vpp", vpp, [chunks], range(1, min(sizes) + 1))
    if vpp > 1 and pp == 1:
        yield f"train.vpp={vpp} interleaves pipeline stages, and train.pp=1 has one: set train.vpp=1, or train.pp=2"


def _rollout_layout(recipe: Recipe, model: ModelShape, ranks: int | None) -> Iterator[str]:
    rollout = recipe.rollout
    if rollout is None:
        return
    padded = math.ceil(model.vocab_size / _VOCAB_PADDING) * _VOCAB_PADDING
    together = "rollout.tp*dp" if rollout.dp > 1 else "rollout.tp"
    rules = [
        Rule(
            lambda n: ranks is None or ranks % (n * rollout.dp) == 0,
            f"does not divide the train.tp*pp*cp*dp={ranks} ranks"
            + (f" into engines of {together} ranks" if rollout.dp > 1 else ""),
        ),
        *_attention_rules(model),
        *_mlp_rules(model),
        Rule(lambda n: padded % n == 0, f"does not divide vocab_size={model.vocab_size} as vLLM pads it, {padded}"),
    ]
    if model.experts is not None and not rollout.expert_parallel:
        rules.append(_divides(model.experts.width, "an expert's width"))
    yield from _broken("rollout.tp", rollout.tp, rules, range(1, model.num_attention_heads + 1))
    slots = rollout.tp * rollout.dp
    if model.experts is not None and rollout.expert_parallel and slots > model.experts.count:
        yield (
            f"rollout.tp*dp={rollout.tp}*{rollout.dp}={slots} ranks of an engine share "
            f"{model.experts.count} experts: at most {model.experts.count}"
        )


def _rollout_limits(recipe: Recipe, model: ModelShape, device: Device | None) -> Iterator[str]:
    if recipe.rollout is None:
        return
    if device == "cpu" and model.latents is None:
        attention = Rule(lambda n: n in _CPU_HEAD_DIMS, "is not supported by vLLM's attention on CPU")
        yield from _broken("head_dim", model.head_dim, [attention], _CPU_HEAD_DIMS)
    if device == "cpu" and model.latents is not None:
        latent = model.latents.kv_rank + model.latents.rope
        if latent != _CPU_LATENT_DIM:
            yield (
                f"kv_lora_rank+qk_rope_head_dim={model.latents.kv_rank}+{model.latents.rope}={latent}: "
                f"vLLM's latent attention on CPU has {_CPU_LATENT_DIM} only"
            )
    total, new, limit = recipe.rollout.max_model_len, recipe.rollout.max_new_tokens, model.max_position_embeddings
    if new >= total:
        yield (
            f"rollout.max_new_tokens={new} leaves no room for a prompt in rollout.max_model_len={total}: "
            f"at most {total - 1}"
        )
    if total > limit:
        yield f"rollout.max_model_len={total} is more than max_position_embeddings={limit}: at most {limit}"


def _batch(recipe: Recipe, replicas: int | None) -> Iterator[str]:
    """`replicas` is the number of vLLM engines, None where the layouts that give it are wrong or absent."""
    algorithm, train = recipe.algorithm, recipe.train
    prompts = algorithm.prompts_per_step
    samples = recipe.sequences_per_step // prompts
    if algorithm.grouped and samples < 2:
        name = algorithm.name
        yield f"algorithm.samples_per_prompt={samples}: {name} compares samples of one prompt, so it needs 2 or more"

    factors = {"train.dp": train.dp}
    if train.max_tokens_per_micro_batch is None:
        factors["train.micro_batch_size"] = train.micro_batch_size
    if algorithm.minibatches > 1:
        factors["algorithm.minibatches"] = algorithm.minibatches
    if train.vpp > 1:  # Megatron's interleaved schedule takes micro batches in rounds of one per stage
        factors["train.pp"] = train.pp
    unit = math.prod(factors.values())
    product = f"{'*'.join(factors)}={'*'.join(map(str, factors.values()))}={unit}"
    sequences = f"of {samples} samples each is {prompts * samples} sequences, " if samples > 1 else "is "
    rules = [Rule(lambda n: n * samples % unit == 0, f"{sequences}no multiple of {product}")]
    step = unit // math.gcd(unit, samples)
    if algorithm.generates and replicas is not None:
        ratio = f"{recipe.world_size}/{recipe.world_size // replicas}={replicas}"
        words = f"is no multiple of the rollout replicas, ranks/rollout.tp={ratio}"
        rules.append(Rule(lambda n: n % replicas == 0, words))
        step = math.lcm(step, replicas)
    around = range(max(step, prompts // step * step), prompts + step + 1, step)
    yield from _broken("algorithm.prompts_per_step", prompts, rules, around)


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


def _broken(key: str, value: int, rules: Sequence[Rule], candidates: Iterable[int]) -> Iterator[str]:
    """A line for each rule that `value` breaks, with the nearest candidates on both sides that keep all of them."""
    broken = [rule for rule in rules if not rule.holds(value)]
    if not broken:
        return
    valid = [n for n in candidates if all(rule.holds(n) for rule in rules)]
    near = [*[n for n in valid if n < value][-1:], *[n for n in valid if n > value][:1]]
    values = f"value of {key} is" if len(near) == 1 else f"values of {key} are"
    for rule in broken:
        yield f"{key}={value} {rule.says}: nearest valid {values} {', '.join(map(str, near))}"
