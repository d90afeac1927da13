"""A recipe: YAML in, frozen dataclasses out, and every mistake in it answered at once, before anything starts.

A setting is one annotated field below: its name, type, range and default stand there and nowhere else. `load_recipe`
checks what the file alone can tell, `check_layout` (in `shape.py`) how the recipe fits a model; both list all that is
wrong in one `RecipeError`. Standard library and yaml only, so that the command line answers fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from hybrid3d.contradictions import contradictions
from hybrid3d.schema import (
    AboveOne,
    Count,
    Decay,
    Fraction,
    Name,
    Natural,
    NonNegative,
    Number,
    Positive,
    RecipeError,
    Schedule,
    Share,
    Text,
    Verified,
    apply_overrides,
    read_section,
    read_yaml,
)
from hybrid3d.shape import ModelShape, check_layout

__all__ = ["ModelShape", "Recipe", "RecipeError", "check_layout", "load_recipe", "recipe_to_yaml"]

OFFLOADS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Hugging Face checkpoint's folder, and the dtype both engines compute in."""

    path: Text
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class Train:
    """The train layout: sizes of Megatron's mesh axes, and what a micro batch is.

    The first and the last pipeline stage have as many layers as the others, if nothing else is said. A micro batch has
    `micro_batch_size` sequences, or as many as have `max_tokens_per_micro_batch` together with their padding; `packed`,
    they lie one behind the other and have none. Under full `recompute` a layer keeps its input only, and goes forward
    once more before it goes backward. While vLLM generates, the host has what is offloaded; of gradients nobody.
    """

    tp: Count = 1
    pp: Count = 1
    vpp: Count = 1
    ep: Count = 1
    etp: Count = 1
    cp: Count = 1
    dp: Count = 1
    first_stage_layers: Count | None = None
    last_stage_layers: Count | None = None
    expert_bias_update_rate: NonNegative = 0.0
    micro_batch_size: Count = 8
    packed: bool = False
    max_tokens_per_micro_batch: Count | None = None
    recompute: Literal["none", "full"] = "none"
    offload_parameters: bool = False
    offload_gradients: bool = False
    offload_optimizer: bool = False

    @property
    def offloads(self) -> tuple[str, ...]:
        """What is offloaded, of `OFFLOADS`."""
        return tuple(kind for kind in OFFLOADS if getattr(self, f"offload_{kind}"))


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The rollout layout; lengths in tokens; what vLLM may take of a GPU's memory, and its KV cache's GiB on CPU.

    `dp` engines of `tp` ranks share one set of experts under `expert_parallel`; without it each engine has its own.
    `placement` deals out shards so that they overlap most with what a rank holds, or in the order of ranks. Where it
    may `sleep`, vLLM gives a GPU's memory to training between its turns.

    An `environment` by its name, or a function of one's own as `module:function`, replies to the policy within an
    answer, `max_turns` times at most (`rl/environments.py`). What it writes counts among the `max_new_tokens`.
    """

    tp: Count = 1
    dp: Count = 1
    expert_parallel: bool = False
    max_model_len: Count
    max_new_tokens: Count
    temperature: Positive = 1.0
    placement: Literal["overlap", "consecutive"] = "overlap"
    memory_fraction: Fraction = 0.5
    kv_cache_gib: Positive = 1.0
    sleep: bool = True
    environment: Text | None = None
    max_turns: Count = 8


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How trained weights come to the rollout engine.

    `bucket_mib` is the size of a staging buffer. `verify` says which syncs are verified: `always`, `every-N` from the
    first on, or `never`. A `hidden` sync begins with the first weights that are updated, while the rest still is. Under
    `share_storage` vLLM's tensors lie in Megatron's memory, where layout and dtype are the same.
    """

    bucket_mib: Positive = 64.0
    verify: Verified = "never"
    hidden: bool = True
    share_storage: bool = False

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mib * 2**20)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Two parquet files, the columns in them, and whether prompts go through the tokenizer's chat template.

    A column within a struct is named with dots: `reward_model.ground_truth`.

    `overlong` says what becomes of a prompt that leaves no room for an answer: an error, the row is dropped, or the
    prompt loses its beginning. `max_broken` is the share of rows that may be null, blank or without tokens: they are
    skipped.
    """

    train: Text
    eval: Text
    prompt: Text = "question"
    answer: Text = "answer"
    chat_template: bool = False
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    max_broken: Share = 0.01


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward by its name, or a function of one's own as `module:function`, and what is done where it fails.

    It runs in `workers` processes for every replica, `timeout_seconds` a sample at most; an environment of one's own
    in as many others, `timeout_seconds` a reply. A sample whose reward fails gets `default`; a step in which more than
    `max_failures` of the samples do (or their environment) ends the run, at 1 none does. An answer that comes within
    `overlong_buffer` tokens of the longest loses reward in proportion (arXiv 2503.14476, eq. 13); 0 takes none away.
    With a `model`, a sequence classifier of one label that reads the policy's tokens, its score is the reward that is
    trained on, and the reward by name only judges held-out answers. `shuffle` deals rewards out at random within a
    step, as a control experiment.
    """

    name: Text = "gsm8k"
    model: Text | None = None
    shuffle: bool = False
    workers: Count = 2
    timeout_seconds: Positive = 10.0
    default: Number = 0.0
    max_failures: Share = 1.0
    overlong_buffer: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Kl:
    """KL to the frozen reference policy. `coef` has no default: a `kl` section that does nothing must say so.

    Without an `estimator` it is k1 in the reward and k3 in the loss. With a `target` (nats of an answer, summed over
    its tokens) the coefficient follows it, at a rate given by `horizon` (answers).
    """

    where: Literal["reward", "loss", "none"]
    estimator: Literal["k1", "k2", "k3"] | None = None
    coef: NonNegative
    target: Positive | None = None
    horizon: Count = 10_000

    @property
    def estimated_by(self) -> str:
        return self.estimator or ("k1" if self.where == "reward" else "k3")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What is done where training and rollout give a sampled token, or a whole answer, unlike probabilities.

    Their ratio, train / rollout, weighs the loss, up to `high`; or what is not in [`low`, `high`] is masked.
    """

    kind: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"] = "none"
    low: NonNegative = 0.5
    high: Positive = 2.0


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What a step optimizes, and by how many updates. `sft` reads `prompts_per_step` only, as its sequences a step.

    A step's samples are learned from in `epochs` x `minibatches` updates. Settings without a value are the algorithm's
    own (`rl/algorithms.py`): the `clip` of the ratio on both sides or, with `clip_high`, on the lower; over which mean
    losses are summed; up to how many further batches `dynamic_sampling` draws for groups whose rewards differ. `gamma`
    and `lam` are those of GAE.
    """

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo", "sft"]
    prompts_per_step: Count
    samples_per_prompt: Count = 1
    epochs: Count = 1
    minibatches: Count = 1
    clip: Fraction | None = None
    clip_high: Positive | None = None
    dual_clip: AboveOne | None = None
    aggregation: Literal["token", "sequence", "constant"] | None = None
    entropy_coef: NonNegative = 0.0
    gamma: Share = 1.0
    lam: Share = 1.0
    dynamic_sampling: Natural | None = None
    kl: Kl = Kl(where="none", coef=0.0)
    correction: Correction = Correction()

    @property
    def generates(self) -> bool:
        return self.name != "sft"

    @property
    def critic(self) -> bool:
        """Whether what is to come is estimated by a model that is trained too."""
        return self.name == "ppo"

    @property
    def grouped(self) -> bool:
        """Whether answers to one prompt are compared."""
        return self.generates and self.name not in ("ppo", "reinforce_pp")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Adam, with Megatron's defaults; `clip_grad: 0` does not clip."""

    lr: NonNegative
    clip_grad: NonNegative = 1.0
    weight_decay: NonNegative = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    warmup_steps: Natural = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Critic:
    """PPO's estimate of what is to come: a model of the policy's layout, from `path` or from the policy's checkpoint.

    Its values move by `clip` at most in a step (`null`: by any amount). For `warmup_steps` it alone is trained.
    Without an `optimizer` of its own it has the policy's settings.
    """

    path: Text | None = None
    clip: Positive | None = 0.2
    warmup_steps: Natural = 0
    optimizer: Optimizer | None = None


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Bounds of a healthy run, which says so when one is left; and what is done about faults, `acts` times at most.

    `max_kl` and `kl_explosion` are nats of an answer: beyond the latter an adaptive coefficient becomes a fixed one. A
    batch is skipped whose gradient is not finite, or has a norm over `clip_grad` and over `spike` times what is usual.
    """

    max_kl: Positive | None = None
    max_clip_fraction: Share | None = None
    max_grad_norm: Positive | None = None
    min_entropy: Positive | None = None
    max_mismatch_kl: Positive | None = None
    max_sync_share: Share | None = None
    max_memory_gb: Positive | None = None
    min_tokens_per_second: Positive | None = None
    spike: AboveOne | None = None
    kl_explosion: Positive | None = None
    acts: Natural = 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps, and what happens at which; `checkpoint_every: 0` writes a checkpoint at the end only.

    Of checkpoints the last `keep_last` are kept, at 0 all. With `async_checkpoints` training goes on while one is
    written, from a copy in the host's memory.
    """

    steps: Count
    eval_every: Count = 10
    checkpoint_every: Natural = 0
    keep_last: Natural = 0
    async_checkpoints: bool = False
    seed: Natural = 1
    dir: Text = "runs"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What predictions are made for: a named machine, and numbers of its own in place of that one's.

    GB are 10^9 bytes; rates of links are those of one GPU in each direction.
    """

    gpus_per_node: Count = 8
    kind: Literal["a100-8x200g", "h100-8x400g", "h200-8x400g"] = "h100-8x400g"
    memory_gb: Positive | None = None
    copies_gb_per_s: Positive | None = None
    nvlink_gb_per_s: Positive | None = None
    network_gb_per_s: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run, and those that change at a step. Only `sft` may do without `rollout`."""

    name: Name
    model: Model
    train: Train = Train()
    rollout: Rollout | None = None
    sync: Sync = Sync()
    data: Data
    reward: Reward = Reward()
    algorithm: Algorithm
    optimizer: Optimizer
    critic: Critic = Critic()
    guard: Guard = Guard()
    run: Run
    schedule: Schedule = field(default_factory=dict, hash=False)
    machine: Machine = Machine()

    @property
    def world_size(self) -> int:
        """Ranks in all; EP and ETP regroup these ranks and add none."""
        return self.train.tp * self.train.pp * self.train.cp * self.train.dp

    @property
    def sequences_per_step(self) -> int:
        """Sequences that a step trains on, over all data-parallel ranks."""
        samples = self.algorithm.samples_per_prompt if self.algorithm.generates else 1
        return self.algorithm.prompts_per_step * samples


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; each override is `section.key=value`, its value YAML. RecipeError lists everything wrong."""
    raw = read_yaml(Path(path))
    problems: list[str] = []
    apply_overrides(raw, overrides, problems)
    return read_recipe(raw, str(path), problems)


def read_recipe(raw: object, subject: str, problems: list[str]) -> Recipe:
    """A recipe from what its YAML says. RecipeError, about `subject`: the problems so far, and all that it has."""
    recipe = read_section(Recipe, raw, "", problems)
    if recipe is not None:
        problems.extend(contradictions(recipe))
    if recipe is None or problems:
        raise RecipeError(subject, problems)
    return recipe


def recipe_to_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out; `load_recipe` reads an equal one from it."""
    return str(yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True))
