"""The training loop of what learns from answers in the data, `sft` and `dpo`; imports no rollout engine.

Supervised updates minimize the negative log-likelihood of the answers; updates from preference pairs have the losses
of `rl/preferences.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.inputs.models import read_data, read_tokenizer
from hybrid3d.reshard.move.device import device
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.data import Example, PromptData
from hybrid3d.rl.objective import sft_loss
from hybrid3d.rl.preferences import PairObjective, PairScores, PreferenceSettings, score_pairs, token_weights
from hybrid3d.run.health import Guard
from hybrid3d.run.live_settings import LiveSettings
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.metrics import PhaseTimer, StepMetrics, peak_gb
from hybrid3d.train.dp_split import shares_of
from hybrid3d.train.trained_model import PolicyModel, StepReport
from hybrid3d.trainer.checkpoints import Checkpoints, Progress
from hybrid3d.trainer.models import BaseOfPolicy
from hybrid3d.watch.work_meter import record as work_record

Update: TypeAlias = tuple[StepReport, StepMetrics, int]
"""A step's update: its report, the metrics of the policy before it, and the step's tokens, over all ranks."""


class DataUpdates(Protocol):
    """Updates the policy with a step's data. All ranks call both methods together.

    Attributes:
        data: the files, by the names of `RunLogger.data`.
    """

    @property
    def data(self) -> Mapping[str, PromptData]: ...

    def update(self, step: int, recipe: Recipe, accepts_grad_norm: Callable[[float], bool]) -> Update:
        """Update the policy once."""

    def evaluate(self, recipe: Recipe) -> StepMetrics:
        """Return metrics of the held-out data, of which only preference pairs have some."""


def train_on_data(
    updates: DataUpdates,
    policy: PolicyModel,
    live: LiveSettings,
    guard: Guard,
    checkpoints: Checkpoints,
    record: RunLogger,
    group: dist.ProcessGroup,
) -> None:
    """Train from the last checkpoint in the run's folder, or from the start, to the recipe's last step.

    Row s of the metrics has the loss of policy version s, computed before update s + 1. The last version has a row only
    if it is evaluated.
    """
    record.data(updates.data)
    evaluates = live.recipe.algorithm.uses_pairs
    work_record.trains(live.recipe, group.rank())
    with checkpoints:
        step, progress = checkpoints.resume()
        live.restore(progress.control)
        if progress.guard:
            guard.restore(progress.guard)
        while step < (recipe := live.settings_for_step(step)).run.steps:
            work_record.begin_step(step)
            timer, row = PhaseTimer(), dict[str, float](step=step)
            if evaluates and step % recipe.run.eval_every == 0:
                with timer("eval"):
                    row |= updates.evaluate(recipe).reduce(group)
            with timer("train"):
                accepts = partial(guard.accepts_grad_norm, recipe=recipe)
                report, metrics, tokens = updates.update(step, recipe, accepts)
                policy.end_step()
            if not report.updated:
                guard.record_skip(step, report.grad_norm, recipe)
            row |= {"train/grad_norm": report.grad_norm, "train/lr": report.lr} | metrics.reduce(group)
            row |= timer.row(tokens)
            record.step(row, recipe.run.steps)
            _, peaks = timer.gather(group)
            record.memory(step, peaks)
            guard.check_bounds(row, peak_gb(peaks), recipe)
            step += 1
            checkpoints.save_if_due(step, Progress(guard=guard.progress, control=live.control), recipe.run)
        if evaluates:
            with PhaseTimer()("eval"):
                held_out = updates.evaluate(recipe).reduce(group)
            record.step({"step": step} | held_out, recipe.run.steps)


class SftUpdates:
    """Updates the policy with the answers of the training data: see `DataUpdates`."""

    def __init__(self, recipe: Recipe, policy: PolicyModel):
        self._policy, self._tokenizer = policy, read_tokenizer(recipe)
        self._train, held_out = read_data(recipe, policy.config, self._tokenizer)
        self.data = {"train": self._train, **held_out}

    def update(self, step: int, recipe: Recipe, accepts_grad_norm: Callable[[float], bool]) -> Update:
        policy, tokenizer = self._policy, self._tokenizer
        examples = self._train.batch(step, recipe.sequences_per_step)
        sequences = [tokens for example in examples for tokens in example.trained]
        local = shares_of(recipe, list(map(len, sequences)))[policy.data_parallel_rank]
        prompts = [len(examples[i].prompt_ids) for i in local]
        batch = Batch.from_sequences([sequences[i] for i in local], prompts, pad_id=tokenizer.pad_token_id)
        report = policy.train_step(batch, sft_loss, recipe, accepts_grad_norm=accepts_grad_norm)
        num_answer_tokens, metrics = sum(len(example.answer_ids) for example in examples), StepMetrics()
        if policy.is_reporting_rank:
            metrics.sums = {f"train/{key}": value / num_answer_tokens for key, value in report.sums.items()}
        return report, metrics, sum(map(len, sequences))

    def evaluate(self, recipe: Recipe) -> StepMetrics:
        return StepMetrics()


class DpoUpdates:
    """Updates the policy with preference pairs: see `DataUpdates`.

    The pairs of a step, not their sequences, are distributed over data-parallel ranks, so that each rank has both
    sequences of its pairs. A rank computes the log-probabilities of all its sequences before the update.
    """

    def __init__(self, recipe: Recipe, policy: PolicyModel, reference: PolicyModel | BaseOfPolicy | None):
        self._policy, self._tokenizer, self._reference = policy, read_tokenizer(recipe), reference
        train, held_out = read_data(recipe, policy.config, self._tokenizer)
        self._train, self._held_out = train, held_out["eval"]
        self.data = {"train": train, **held_out}

    def update(self, step: int, recipe: Recipe, accepts_grad_norm: Callable[[float], bool]) -> Update:
        pairs = self._train.batch(step, recipe.algorithm.prompts_per_step)
        settings, numbers = _settings(recipe), self._local(pairs, recipe)
        batch = self._batch([pairs[i] for i in numbers])
        scores = self._score(batch, recipe)
        chosen_tokens = sum(len(pair.answer_ids) for pair in pairs)
        tokens = chosen_tokens + sum(len(pair.rejected_ids) for pair in pairs)
        objective = None  # on ranks without the output layer
        if scores is not None:
            weights = token_weights(scores.slopes, settings, len(pairs), chosen_tokens, tokens)
            objective = PairObjective(weights.to(device()))
        report = self._policy.train_step(batch, objective, recipe, accepts_grad_norm=accepts_grad_norm)
        metrics = StepMetrics()
        if self._policy.is_reporting_rank and scores is not None:
            sums = {key: value / len(pairs) for key, value in scores.sums().items()}
            nll = -sums["chosen_logprob"] * len(pairs) / chosen_tokens
            loss = sums.pop("loss") + settings.sft_coef * nll
            metrics.sums = {"train/loss": loss} | {f"preference/{key}": value for key, value in sums.items()}
        return report, metrics, sum(len(tokens) for pair in pairs for tokens in pair.trained)

    def evaluate(self, recipe: Recipe) -> StepMetrics:
        """Return the means over all held-out pairs, which are read in batches of a step's size."""
        held_out, size, found = self._held_out.examples, recipe.algorithm.prompts_per_step, Counter[str]()
        for first in range(0, len(held_out), size):
            pairs = held_out[first : first + size]
            count = len(pairs)
            filled = [*pairs, *[pairs[0]] * (size - count)]  # with pairs that are not counted
            numbers = sorted(self._local(filled, recipe))
            scores = self._score(self._batch([filled[i] for i in numbers]), recipe)
            if self._policy.is_reporting_rank and scores is not None:
                found.update(scores.sums(sum(i < count for i in numbers)))
        return StepMetrics({f"eval/preference_{key}": value / len(held_out) for key, value in found.items()})

    def _local(self, pairs: Sequence[Example], recipe: Recipe) -> list[int]:
        """Return the numbers of this data-parallel rank's pairs."""
        shares = shares_of(recipe, [sum(map(len, pair.trained)) for pair in pairs])
        return shares[self._policy.data_parallel_rank]

    def _batch(self, pairs: Sequence[Example]) -> Batch:
        """Return the sequences of pairs, the chosen one of each before the rejected one."""
        sequences = [tokens for pair in pairs for tokens in pair.trained]
        prompts = [len(pair.prompt_ids) for pair in pairs for _ in range(2)]
        return Batch.from_sequences(sequences, prompts, pad_id=self._tokenizer.pad_token_id)

    def _score(self, batch: Batch, recipe: Recipe) -> PairScores | None:
        """Return what is known of a batch's pairs; None on ranks without the output layer."""
        reference = None if self._reference is None else self._reference.logprobs(batch, recipe)
        logprobs = self._policy.logprobs(batch, recipe)
        return None if logprobs is None else score_pairs(batch, logprobs, reference, _settings(recipe))


def _settings(recipe: Recipe) -> PreferenceSettings:
    given = recipe.algorithm.preference
    return PreferenceSettings(
        given.loss_type, given.beta, given.label_smoothing, given.simpo_gamma, sft_coef=given.sft_coef
    )
