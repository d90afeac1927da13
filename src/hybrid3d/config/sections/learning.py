"""What is learned, from what, by how much, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hybrid3d.config import schema
from hybrid3d.config.schema import (
    NEEDED_UNLESS,
    AboveOne,
    Coefficient,
    Decay,
    ExtraSteps,
    ExtraTimes,
    ExtraTokens,
    FilePath,
    Fraction,
    LearningRate,
    NonNegative,
    Positive,
    Processes,
    Seconds,
    Seed,
    Sequences,
    Share,
    Steps,
    Text,
    Times,
)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts and what answers are judged by. A column within a struct is named with dots: `reward_model.ground_truth`.

    Attributes:
        train: a parquet file.
        eval: another, of held-out problems.
        prompt: column with the prompt.
        answer: column with the answer: the reference of rewards, and what `sft` learns.
        chat_template: prompts go through the tokenizer's.
        overlong: what becomes of a prompt that leaves no room for an answer: an error, its row is dropped, or it loses
            its beginning.
        max_invalid_fraction: share of a file's rows that may be null, blank or without tokens: they are skipped. Where
            these and the rows that `overlong: drop` drops are more than half of the file (or than this share, if that
            is larger), the file is refused.
    """

    train: FilePath
    eval: FilePath
    prompt: Text = "question"
    answer: Text = "answer"
    chat_template: bool = False
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    max_invalid_fraction: Share = 0.01


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What an answer is worth, and what is done where that cannot be said.

    Attributes:
        name: `gsm8k`, `math`, `code`, or a function of one's own as `module:function`.
        model: checkpoint of a sequence classifier of one label that reads the policy's tokens. Its score is trained on;
            `name` then judges held-out answers only.
        shuffle: deal rewards out at random within a step, as a control experiment.
        workers: processes a replica for rewards, and as many for an environment of one's own.
        timeout_seconds: for one answer, or one reply of an environment.
        default: reward of an answer whose reward failed.
        max_failures: share of a step's samples whose reward or environment may fail before the run ends. Where all of
            them fail, or all on held-out problems, it ends at any value.
        overlong_buffer: tokens before the longest answer within which an answer loses reward, in proportion and up to 1
            (arXiv 2503.14476, eq. 13); 0 takes none away.
    """

    name: Text = "gsm8k"
    model: FilePath | None = None
    shuffle: bool = False
    workers: Processes = 2
    timeout_seconds: Seconds = 10.0
    default: schema.Reward = 0.0
    max_failures: Share = 1.0
    overlong_buffer: ExtraTokens = 0


@dataclass(frozen=True, kw_only=True)
class Kl:
    """KL of the policy to the frozen model that it began as.

    Attributes:
        where: it is taken off the reward, added to the loss, or not measured.
        estimator: `null`: k1 in the reward and k3 in the loss.
        coef: what it is multiplied by. It must be given, but with `where: none`.
        target: nats of an answer, summed over its tokens, that the coefficient follows; `null`: it is fixed.
        horizon: answers in which it follows.
    """

    where: Literal["reward", "loss", "none"]
    estimator: Literal["k1", "k2", "k3"] | None = None
    coef: Coefficient = field(default=0.0, metadata={NEEDED_UNLESS: ("where", "none")})
    target: Positive | None = None
    horizon: Steps = 10_000

    @property
    def estimated_by(self) -> str:
        return self.estimator or ("k1" if self.where == "reward" else "k3")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What is done where training and rollout give a token, or a whole answer, unlike probabilities.

    Attributes:
        kind: their ratio, train / rollout, weighs the loss (`truncate`), or what is out of bounds is left out (`mask`);
            by tokens, or by whole answers (`sequence_`).
        low: bound of `mask`.
        high: bound of both.
    """

    kind: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"] = "none"
    low: NonNegative = 0.5
    high: Positive = 2.0


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What a step optimizes, and by how many updates. `null`: as the algorithm has it (`docs/algorithms.md`).

    Attributes:
        name: the algorithm.
        prompts_per_step: prompts; of `sft` sequences.
        samples_per_prompt: answers to each.
        epochs: how often a step's samples are gone through.
        minibatches: updates each time.
        clip: how far below 1 the ratio of probabilities may be; said alone, also how far above.
        clip_high: how far above 1.
        dual_clip: bound of the ratio where an advantage is negative (arXiv 1912.09729, c); `null`: none.
        loss_agg_mode: a loss is a mean over all tokens, a mean of answers' means, or a sum over what answers might have
            been long.
        entropy_coef: of the bonus for entropy.
        gamma: discount of what is to come, a token (`ppo`, `reinforce_pp`).
        lam: GAE's lambda (`ppo`).
        dynamic_sampling: up to so many further batches are drawn for groups whose rewards differ.
        kl, correction: sections, below.
    """

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo", "sft"]
    prompts_per_step: Sequences
    samples_per_prompt: Sequences = 1
    epochs: Times = 1
    minibatches: Times = 1
    clip: Fraction | None = None
    clip_high: Positive | None = None
    dual_clip: AboveOne | None = None
    loss_agg_mode: Literal["token", "sequence", "constant"] | None = None
    entropy_coef: Coefficient = 0.0
    gamma: Share = 1.0
    lam: Share = 1.0
    dynamic_sampling: ExtraTimes | None = None
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
    """Adam.

    Attributes:
        lr: learning rate that warm-up leads to.
        clip_grad: norm of the gradient at most; 0 does not clip.
        weight_decay: decoupled (AdamW).
        beta1, beta2, eps: Adam's.
        warmup_steps: in which the rate rises to `lr`.
        schedule: how it falls until the run's last step.
        min_lr: to which it falls.
    """

    lr: LearningRate
    clip_grad: NonNegative = 1.0
    weight_decay: NonNegative = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    warmup_steps: ExtraSteps = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: LearningRate = 0.0


@dataclass(frozen=True, kw_only=True)
class Critic:
    """PPO's estimate of what is to come: a model in the policy's layout.

    Attributes:
        path: a checkpoint to begin from; `null`: the policy's.
        clip: how far its values may move in a step; `null`: any amount.
        warmup_steps: in which it alone is trained.
        optimizer: settings of its own, as in the section `optimizer`; `null`: the policy's.
    """

    path: FilePath | None = None
    clip: Positive | None = 0.2
    warmup_steps: ExtraSteps = 0
    optimizer: Optimizer | None = None


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Bounds of a healthy run, which says so when one is left; and what is done about faults. `null`: no such bound.

    Attributes:
        max_kl: nats of an answer to the reference.
        max_clip_fraction: share of tokens whose ratio is clipped.
        max_grad_norm: before clipping.
        min_entropy: nats a token.
        max_mismatch_kl: nats a token, rollout to training.
        max_sync_share: of a step's seconds.
        max_memory_gb: of a GPU, in 10^9 bytes.
        min_tokens_per_second: of all ranks together.
        initial_mismatch: what happens where training and vLLM differ at the first step by more than the dtype explains
            (`docs/algorithms.md`): the run ends with exit code 1, it says so and goes on, or nobody looks.
        spike: a batch is skipped whose gradient's norm is over `clip_grad`, and so many times what is usual.
        kl_explosion: nats of an answer beyond which an adaptive coefficient of the KL becomes a fixed one.
        max_interventions: how often something is done about a fault; one more ends the run.
    """

    max_kl: Positive | None = None
    max_clip_fraction: Share | None = None
    max_grad_norm: Positive | None = None
    min_entropy: Positive | None = None
    max_mismatch_kl: Positive | None = None
    max_sync_share: Share | None = None
    max_memory_gb: Positive | None = None
    min_tokens_per_second: Positive | None = None
    initial_mismatch: Literal["stop", "warn", "ignore"] = "stop"
    spike: AboveOne | None = None
    kl_explosion: Positive | None = None
    max_interventions: ExtraTimes = 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps, and what happens at which.

    Attributes:
        steps: of the run.
        eval_every: steps between evaluations on held-out problems; there is one at the end, too.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        keep_last: how many checkpoints are kept; 0: all.
        async_checkpoints: training goes on while one is written, from a copy in the host's memory.
        seed: of everything that is drawn.
        dir: where the folder `name` of the run lies.
    """

    steps: Steps
    eval_every: Steps = 10
    checkpoint_every: ExtraSteps = 0
    keep_last: ExtraSteps = 0
    async_checkpoints: bool = False
    seed: Seed = 1
    dir: FilePath = "runs"
