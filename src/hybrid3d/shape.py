"""Whether a recipe fits a model: each rule that an engine would otherwise enforce with a traceback of its own.

A rule is stated once, as a predicate and its words. The values that a message offers are searched for among the values
that keep every rule of that key, so what it offers is never refused by the next rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybrid3d.schema import Count, RecipeError, Rule, read_value

if TYPE_CHECKING:
    from hybrid3d.config import Recipe

# `CPUAttentionBackend.get_supported_head_sizes()` of vLLM 0.32.0: its kernels refuse others when the engine starts.
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# `DEFAULT_VOCAB_PADDING_SIZE` of vLLM 0.32.0: it pads the vocabulary to this multiple, then splits it evenly over TP.
_VOCAB_PADDING = 64


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

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelShape:
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
        )
        if problems:
            raise RecipeError("config.json of the model", problems)
        return shape


def check_layout(recipe: Recipe, model: ModelShape, *, device: Literal["cpu", "cuda"]) -> None:
    """RecipeError listing every way in which the recipe does not fit the model on this device.

    What follows from a wrong layout is not held against the rest: its count of ranks, for one, means nothing.
    """
    problems = [*_not_yet(recipe), *_train_layout(recipe, model)]
    ranks = None if problems else recipe.world_size
    problems += _rollout_layout(recipe, model, ranks)
    replicas = ranks // recipe.rollout.tp if ranks and recipe.rollout and not problems else None
    problems += [*_rollout_limits(recipe, model, device), *_batch(recipe, replicas)]
    if problems:
        raise RecipeError(f"recipe {recipe.name} does not fit its model", problems)


def _not_yet(recipe: Recipe) -> Iterator[str]:
    """Layouts that no model family in this version can use."""
    experts = "shards experts, and the model families of this version have none"
    reasons = {"ep": experts, "etp": experts, "cp": "shards sequences, which this version does not"}
    for axis, reason in reasons.items():
        if getattr(recipe.train, axis) > 1:
            yield f"train.{axis}={getattr(recipe.train, axis)} {reason}: the only valid value is 1"
    if recipe.rollout is not None and recipe.rollout.expert_parallel:
        yield f"rollout.expert_parallel=true {experts}: the only valid value is false"


def _train_layout(recipe: Recipe, model: ModelShape) -> Iterator[str]:
    tp, pp, vpp = recipe.train.tp, recipe.train.pp, recipe.train.vpp
    layers = model.num_layers
    yield from _broken("train.tp", tp, _head_rules(model), range(1, model.num_attention_heads + 1))
    stages = Rule(lambda n: layers % n == 0, f"does not divide num_hidden_layers={layers}")
    yield from _broken("train.pp", pp, [stages], range(1, layers + 1))
    if layers % pp == 0:
        share = layers // pp
        chunks = Rule(lambda n: share % n == 0, f"does not divide num_hidden_layers/train.pp={layers}/{pp}={share}")
        yield from _broken("train.vpp", vpp, [chunks], range(1, share + 1))
    if vpp > 1 and pp == 1:
        yield f"train.vpp={vpp} interleaves pipeline stages, and train.pp=1 has one: set train.vpp=1, or train.pp=2"


def _rollout_layout(recipe: Recipe, model: ModelShape, ranks: int | None) -> Iterator[str]:
    if recipe.rollout is None:
        return
    padded = math.ceil(model.vocab_size / _VOCAB_PADDING) * _VOCAB_PADDING
    rules = [
        Rule(lambda n: ranks is None or ranks % n == 0, f"does not divide the train.tp*pp*cp*dp={ranks} ranks"),
        *_head_rules(model),
        Rule(lambda n: padded % n == 0, f"does not divide vocab_size={model.vocab_size} as vLLM pads it, {padded}"),
    ]
    yield from _broken("rollout.tp", recipe.rollout.tp, rules, range(1, model.num_attention_heads + 1))


def _rollout_limits(recipe: Recipe, model: ModelShape, device: str) -> Iterator[str]:
    if recipe.rollout is None:
        return
    if device == "cpu":
        attention = Rule(lambda n: n in _CPU_HEAD_DIMS, "is not supported by vLLM's attention on CPU")
        yield from _broken("head_dim", model.head_dim, [attention], _CPU_HEAD_DIMS)
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
    if algorithm.name == "grpo" and samples < 2:
        yield f"algorithm.samples_per_prompt={samples}: grpo compares samples of one prompt, so it needs 2 or more"

    factors = {"train.dp": train.dp, "train.micro_batch_size": train.micro_batch_size}
    if train.vpp > 1:  # Megatron's interleaved schedule takes micro batches in rounds of one per stage
        factors["train.pp"] = train.pp
    unit = math.prod(factors.values())
    product = f"{'*'.join(factors)}={'*'.join(map(str, factors.values()))}={unit}"
    sequences = f"of {samples} samples each is {prompts * samples} sequences, " if samples > 1 else "is "
    rules = [Rule(lambda n: n * samples % unit == 0, f"{sequences}no multiple of {product}")]
    step = unit // math.gcd(unit, samples)
    if algorithm.name == "grpo" and replicas is not None:
        ratio = f"{recipe.world_size}/{recipe.world_size // replicas}={replicas}"
        words = f"is no multiple of the rollout replicas, ranks/rollout.tp={ratio}"
        rules.append(Rule(lambda n: n % replicas == 0, words))
        step = math.lcm(step, replicas)
    around = range(max(step, prompts // step * step), prompts + step + 1, step)
    yield from _broken("algorithm.prompts_per_step", prompts, rules, around)


def _head_rules(model: ModelShape) -> list[Rule]:
    """What tensor parallelism asks of a dense model, in Megatron and in vLLM alike."""
    heads, groups, inner = model.num_attention_heads, model.num_key_value_heads, model.intermediate_size
    return [
        Rule(lambda n: heads % n == 0, f"does not divide num_attention_heads={heads}"),
        Rule(
            lambda n: groups % n == 0 or n % groups == 0,
            f"and num_key_value_heads={groups}: one must divide the other",
        ),
        Rule(lambda n: inner % n == 0, f"does not divide intermediate_size={inner}"),
    ]


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
