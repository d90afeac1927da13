"""Recipe sections about learning: data, reward, optimizer, adapters, critic, guard, evaluation and the run itself."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Annotated, Literal

from hybrid3d.config import schema
from hybrid3d.config.refusals import (
    IN_PROCESS,
    ONLY_IF,
    of_answers,
    of_own,
    of_pairs,
    of_recipe,
    of_sampling,
    only_if,
)


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


Day = Annotated[str, schema.Rule(_is_day, "a day as '2024-07-26', in quotation marks")]


READS_PAIRS = of_pairs("reads no preference pairs")
READS_ANSWERS = of_recipe(
    lambda recipe: not recipe.algorithm.uses_pairs or bool(recipe.evaluation.data),
    "algorithm.name={recipe.algorithm.name} takes the chosen answer, data.chosen, as the reference answer",
)
HAS_TEMPLATE = of_recipe(
    lambda recipe: recipe.data.chat_template or (recipe.rollout is not None and recipe.rollout.agents is not None),
    "without data.chat_template no template writes a date",
)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts and reference answers. A dotted name selects a column in a struct: `reward_model.ground_truth`.

    Attributes:
        train: File with the training problems, parquet or JSON Lines (`.jsonl`).
        eval: File with the held-out problems; with `dpo`, of pairs like `train`.
        prompt: Column with the prompt.
        answer: Column with the reference answer that rewards compare with; `sft` trains on it. With `dpo` it is that of
            `evaluation.data` only.
        chosen: With `dpo`, column with the answer that is preferred, which is also the reference answer.
        rejected: With `dpo`, column with the other answer.
        chat_template: Format prompts with the tokenizer's chat template, and with `sft` and `dpo` the answers after
            them; prompts, chosen and rejected answers may then be chat turns. A prompt may not end with a turn of the
            assistant. Prompts that are formatted already are used as they are, without a second BOS, if this is false.
        overlong: What to do with a prompt that leaves no room for an answer, with `sft` and `dpo` for those of its row:
            raise an error, drop its row, or cut tokens off its beginning.
        max_invalid_fraction: Maximum fraction of a file's rows that are skipped because they are null, blank or
            without tokens. The file is refused if these rows and those that `overlong: drop` drops exceed half of it
            (or this fraction, if larger).
        date: Day that chat templates take for today's, of which some write the date (Llama 3): the same whenever a run
            starts, resumes, is evaluated or replayed. The default is that of Llama 3.2's template.
    """

    train: schema.FilePath
    eval: schema.FilePath
    prompt: schema.Text = "question"
    answer: schema.Text = only_if("answer", READS_ANSWERS)
    chosen: schema.Text = only_if("chosen", READS_PAIRS)
    rejected: schema.Text = only_if("rejected", READS_PAIRS)
    chat_template: bool = False
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    max_invalid_fraction: schema.ClosedFraction = 0.01
    date: Day = only_if("2024-07-26", HAS_TEMPLATE)


DIVIDED = ("group_std", "batch_std")  # by what normalized rewards have been divided by already
SCORED = of_answers("has no answers to score")
HAS_ADVANTAGES = of_sampling("has no advantages")
NOT_DIVIDED = of_recipe(
    lambda recipe: recipe.algorithm.combination.advantage_scale not in DIVIDED,
    "algorithm.advantage_scale={recipe.algorithm.combination.advantage_scale} divides by the deviation",
)
HAS_WORKERS = of_recipe(
    lambda recipe: (
        recipe.reward.name not in IN_PROCESS
        or (recipe.rollout is not None and recipe.rollout.environment not in (None, *IN_PROCESS))
    ),
    "reward.name={recipe.reward.name} is computed without worker processes",
)
MAY_FAIL = of_recipe(
    lambda recipe: (
        recipe.reward.name not in IN_PROCESS
        or recipe.rollout is None
        or recipe.rollout.environment is not None
        or recipe.rollout.agents is not None
    ),
    "reward.name={recipe.reward.name} never fails",
)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """How answers are scored, and what happens when scoring fails.

    Attributes:
        name: `gsm8k`, `math`, `code`, or your own function as `module:function`.
        model: Checkpoint of a sequence classifier with one label that reads the policy's tokens. Its score is the
            training reward; `name` then scores held-out answers only.
        workers: Worker processes per rollout replica, or per rank that only computes rewards; your own environment gets
            as many again.
        timeout_seconds: Time limit for scoring one answer, or for one reply of an environment.
        default: Reward of an answer whose scoring failed.
        max_failures: Maximum fraction of a step's samples whose reward or environment may fail before the run ends.
            Whatever its value, the run ends if all samples of a step fail, or all held-out problems.
        min: Lower bound that lower rewards are set to before advantages are computed; `null`: none.
        max: Upper bound that higher rewards are set to; `null`: none.
        whiten: Normalize the rewards of a step to mean 0 and standard deviation 1 before advantages are computed.
        coef: Factor of rewards, but not of the KL to the reference, in advantages; with 0 only the KL is learned from.
        overlong_buffer: Number of tokens before the maximum answer length within which the reward decreases linearly,
            by up to 1 (arXiv 2503.14476, eq. 13); 0 disables the penalty.
    """

    name: schema.Text = only_if("gsm8k", SCORED)
    model: schema.FilePath | None = only_if(None, SCORED)
    workers: schema.Processes = only_if(2, SCORED, HAS_WORKERS)
    timeout_seconds: schema.Seconds = only_if(10.0, SCORED, HAS_WORKERS)
    default: schema.Reward = only_if(0.0, SCORED, MAY_FAIL)
    max_failures: schema.ClosedFraction = only_if(1.0, SCORED, MAY_FAIL)
    min: schema.Reward | None = only_if(None, HAS_ADVANTAGES)
    max: schema.Reward | None = only_if(None, HAS_ADVANTAGES)
    whiten: bool = only_if(False, HAS_ADVANTAGES, NOT_DIVIDED)
    coef: schema.Coefficient = only_if(1.0, HAS_ADVANTAGES)
    overlong_buffer: schema.TokensOrZero = only_if(0, SCORED)


DECAYS = of_own(
    lambda optimizer: optimizer.schedule != "constant",
    "with {path}.schedule=constant the rate never decays: set linear or cosine",
)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Settings of the Adam optimizer and its learning rate schedule.

    Attributes:
        lr: Peak learning rate, reached after warmup.
        clip_grad: Maximum gradient norm; 0 disables clipping.
        weight_decay: Decoupled weight decay (AdamW).
        beta1: Adam's beta1.
        beta2: Adam's beta2.
        eps: Adam's epsilon.
        warmup_steps: Steps over which the learning rate rises linearly to `lr`.
        schedule: Decay of the learning rate from `lr` to `min_lr` until the last step of the run.
        min_lr: Final learning rate of the decay.
    """

    lr: schema.LearningRate
    clip_grad: schema.NonNegative = 1.0
    weight_decay: schema.NonNegative = 0.0
    beta1: schema.Decay = 0.9
    beta2: schema.Decay = 0.999
    eps: schema.Positive = 1e-8
    warmup_steps: schema.StepsOrZero = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr: schema.LearningRate = only_if(0.0, DECAYS)


@dataclass(frozen=True, kw_only=True)
class Critic:
    """PPO's value model, which uses the train layout of the policy.

    Attributes:
        path: Initial checkpoint of the value model; `null`: the policy's.
        clip: Clip range of value updates within a step; `null`: no clipping.
        warmup_steps: Steps at the start of a run in which only the value model is trained.
        optimizer: Optimizer settings of the value model, with the keys of the section `optimizer`; `null`: the
            policy's.
    """

    path: schema.FilePath | None = None
    clip: schema.Positive | None = 0.2
    warmup_steps: schema.StepsOrZero = 0
    optimizer: Optimizer | None = None


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Bounds on metrics, which are reported when violated, and automatic interventions. `null`: no bound.

    Attributes:
        max_kl: Maximum KL of an answer to the reference, in nats.
        max_clip_fraction: Maximum fraction of tokens whose ratio is clipped.
        max_grad_norm: Maximum gradient norm before clipping.
        min_entropy: Minimum entropy, in nats per token.
        max_mismatch_kl: Maximum KL of the rollout's to the trainer's probabilities, in nats per token.
        max_sync_share: Maximum fraction of a step's time that the sync adds.
        max_memory_gb: Maximum memory used in a phase of a step (`docs/report.md`), in 10^9 bytes.
        min_tokens_per_second: Minimum throughput of all ranks together.
        initial_mismatch: What to do if the log-probabilities of training and vLLM differ at the first step by more
            than the dtype explains (`docs/algorithms.md`): end the run with exit code 1, warn and continue, or skip
            the check.
        spike: Skip a batch whose gradient norm exceeds both `optimizer.clip_grad` and this multiple of the median of
            recent norms.
        kl_explosion: KL of an answer, in nats, above which an adaptive KL coefficient is reset to `algorithm.kl.coef`
            and fixed.
        max_interventions: Maximum number of interventions (skipped batches and fixed KL coefficients together), and
            maximum number of restarts after running out of memory; one more ends the run.
    """

    max_kl: schema.Positive | None = None
    max_clip_fraction: schema.ClosedFraction | None = None
    max_grad_norm: schema.Positive | None = None
    min_entropy: schema.Positive | None = None
    max_mismatch_kl: schema.Positive | None = None
    max_sync_share: schema.ClosedFraction | None = None
    max_memory_gb: schema.Positive | None = None
    min_tokens_per_second: schema.Positive | None = None
    initial_mismatch: Literal["stop", "warn", "ignore"] = "stop"
    spike: schema.AboveOne | None = None
    kl_explosion: schema.Positive | None = None
    max_interventions: schema.RepeatsOrZero = 3


EVALUATES = of_recipe(
    lambda recipe: recipe.algorithm.generates or recipe.algorithm.uses_pairs,
    "algorithm.name={recipe.algorithm.name} does not evaluate during training",
    not_built="the loss of held-out rows is that of a batch without an update",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Length of the run, evaluation, checkpoints, seed and output folder.

    Attributes:
        steps: Number of steps.
        eval_every: Steps between evaluations on the held-out problems; the final policy is always evaluated.
        checkpoint_every: Steps between checkpoints; 0: only at the end.
        keep_last: Number of most recent checkpoints to keep; 0: all.
        async_checkpoints: Write checkpoints in the background from a copy in host memory while training continues.
        optimizer_sharding: How checkpoints save optimizers. `fully_reshardable`: every layout can load them, and each
            rank makes the state of its data-parallel group in host memory. `dp_reshardable`: each rank writes its own
            shard, and only `train.dp` can differ where it is loaded. `auto`: the former, if it takes no more than half
            of a node's memory (`hybrid3d plan` says how much).
        record: Which steps are recorded, so that `hybrid3d replay` can do them again and compare runs: `always`, every
            N-th step from the first one on (`every-N`), or `never`.
        max_restarts: How often ranks are started again from the last checkpoint after one of them has failed or was
            killed: with `roles.generation.ranks` those that train, also under torchrun and srun; otherwise all, by
            `hybrid3d train`, also with `--ray` (torchrun has an option of its own).
        seed: Seed of all random numbers.
        dir: Folder that contains the folder of the run, which is called `name`.
    """

    steps: schema.Steps
    eval_every: schema.Steps = only_if(10, EVALUATES)
    checkpoint_every: schema.StepsOrZero = 0
    keep_last: schema.StepsOrZero = 0
    async_checkpoints: bool = False
    optimizer_sharding: Literal["auto", "fully_reshardable", "dp_reshardable"] = "auto"
    record: schema.Interval = only_if("never", of_sampling("has no samples to record"))
    max_restarts: schema.RepeatsOrZero = 0
    seed: schema.Seed = 1
    dir: schema.FilePath = "runs"


ANSWERS = of_answers("cannot answer held-out problems")
SAMPLED = of_own(
    lambda evaluation: evaluation.temperature != 0,
    "with evaluation.temperature=0 held-out answers are greedy",
    "evaluation.temperature",
)
SEVERAL = of_own(
    lambda evaluation: evaluation.samples != 1,
    "with evaluation.samples=1 there is no pass@k beside the accuracy",
    "evaluation.samples",
)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out problems are answered: before, during (`run.eval_every`) and after training, and by `hybrid3d eval`.

    Attributes:
        samples: Answers per problem, n.
        temperature: Temperature of these answers; with 0 they are greedy.
        top_p: Of these answers, as `rollout.top_p`.
        k: With n > 1, the numbers of answers for which `eval/pass@k` is estimated (arXiv 2107.03374, eq. 1), each at
            most n; `[]`: n.
        data: More files with held-out problems, by name, with the columns of `data.eval`; their metrics are
            `eval/NAME/...`.
    """

    samples: schema.Repeats = only_if(1, ANSWERS)
    temperature: schema.TemperatureOrZero = only_if(0.0, ANSWERS)
    top_p: schema.PositiveFraction = only_if(1.0, ANSWERS, SAMPLED)
    k: tuple[schema.Repeats, ...] = only_if((), ANSWERS, SEVERAL)
    data: dict[str, schema.FilePath] = field(default_factory=dict, hash=False, metadata={ONLY_IF: (ANSWERS,)})

    @property
    def ks(self) -> tuple[int, ...]:
        """Return the numbers of answers for which `pass@k` is estimated."""
        return () if self.samples == 1 else self.k or (self.samples,)


MAX_RANK = 512  # the largest that vLLM 0.32.0 has slots for (`rollout/adapters.py`)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (LoRA, arXiv:2106.09685), which are trained instead of the policy's own weights.

    A linear layer W computes W x + alpha / rank * B A x. Names and initial values are those of PEFT.

    Attributes:
        rank: Rank of each adapter (PEFT's `r`).
        alpha: Its scale, divided by the rank (PEFT's `lora_alpha`).
        target_modules: Last names of the layers with an adapter, such as `q_proj`; `null`: all linear layers of the
            model's blocks, which does not include routers.
        path: Folder of adapters in PEFT's format to begin with; `null`: A is random and B is 0.
        sync: `adapter` sends the adapters alone to vLLM's own slots for them; `merged` adds them to the weights that
            are sent, which is slower, and works for experts and latent attention too.
    """

    rank: Annotated[int, schema.within(1, MAX_RANK)] = 16
    alpha: schema.Positive = 32.0
    target_modules: tuple[schema.Text, ...] | None = None
    path: schema.FilePath | None = None
    sync: Literal["adapter", "merged"] = "adapter"
