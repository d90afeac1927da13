"""The learner: makes experience from a step's samples, and updates the models with it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid3d.config import Recipe, sequences_multiple
from hybrid3d.distributed import gather_objects
from hybrid3d.generation.samples import Sample, answer_numbers, filled_up
from hybrid3d.rewards.registry import overlong_penalty
from hybrid3d.rl.advantages import Moments, gae, returns_to_go, token_rewards
from hybrid3d.rl.algorithms import ALGORITHMS
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.correction import correction_weights, mismatch, mismatch_by_position, tokens_by_position
from hybrid3d.rl.kl import KlController, token_kl
from hybrid3d.rl.losses import answer_weights
from hybrid3d.rl.objective import PolicyObjective, ValueObjective
from hybrid3d.roles.expert_choices import expert_metrics, replaying_updates, with_expert_choices
from hybrid3d.roles.models import Models
from hybrid3d.roles.shares import Shares, shares_of, spread_over
from hybrid3d.run.health import Guard
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.megatron_model import StepReport
from hybrid3d.train.runtime import device
from hybrid3d.train.stepping import BucketHook


@dataclass(frozen=True, eq=False)
class Experience:
    """The input of an update: the samples of all ranks, and tensors [b, T] of this data-parallel rank's share.

    Outputs of models are None on ranks without the output layer.

    Attributes:
        samples: the samples of all ranks, with the rewards that training uses.
        metrics: this rank's share of the step's metrics so far.
        rows: the sample of each row of this rank's tensors; rows that only fill the batch have numbers beyond them.
        lengths: [data-parallel ranks, b], loss tokens of every row.
        answers: [data-parallel ranks, b], the number of the answer that each row is a branch of.
        rollout, old, reference: log-probabilities by vLLM, by the policy and by the reference policy.
        kl_coef: coefficient of the KL to the reference.
        answer_kl: the mean KL of an answer to the reference, nats; None without a reference.
        values, returns: the critic's values, and the returns that it is trained to predict.
        correction: weight of each token's loss for the mismatch of vLLM's and training's log-probabilities.
    """

    samples: list[Sample]
    metrics: StepMetrics
    rows: list[int]
    batch: Batch
    lengths: Tensor
    answers: Tensor
    rollout: Tensor
    old: Tensor | None
    reference: Tensor | None
    kl_coef: float
    answer_kl: float | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    correction: Tensor | None = None


class _Updates:
    """The reports of a model's updates within one step."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._norms: list[float] = []
        self._tokens = 0
        self._lr = 0.0

    def add(self, report: StepReport, tokens: int) -> None:
        """Add an update on this many tokens of all ranks."""
        self._sums.update(report.sums)
        self._norms.append(report.grad_norm)
        self._tokens += tokens
        self._lr = report.lr

    def metrics(self, group: str, reports: bool) -> StepMetrics:
        """Return the metrics `<group>/*`; means over tokens on a rank that reports."""
        found, norms = StepMetrics(), self._norms
        if norms:
            found.replicated = {f"{group}/lr": self._lr, f"{group}/grad_norm": sum(norms) / len(norms)}
        if reports:
            found.sums = {f"{group}/{key}": value / self._tokens for key, value in self._sums.items()}
        return found


class Learner:
    """Makes experience from samples, and updates the models with it. All ranks of the group call every method together.

    Each method takes the recipe with the settings of its step.
    """

    def __init__(self, recipe: Recipe, models: Models, guard: Guard, pad_id: int, group: dist.ProcessGroup):
        self._policy, self._reference = models.policy, models.reference
        self._critic, self._reward_model = models.critic, models.reward_model
        self._trained = models.trained.values()
        self._guard, self._pad_id, self._group = guard, pad_id, group
        self._method = ALGORITHMS[recipe.algorithm.name]
        kl = recipe.algorithm.kl
        self._kl = KlController(kl.coef, kl.target, kl.horizon)

    @property
    def progress(self) -> dict[str, Any]:
        """The state besides models that a checkpoint saves, as JSON."""
        return {"kl": self._kl.state, "guard": self._guard.progress}

    def restore(self, progress: Mapping[str, Any], recipe: Recipe) -> None:
        """Restore the state from a checkpoint's progress; `recipe` has the settings with which it was saved."""
        self._kl.restore(progress["kl"], recipe.algorithm.kl.coef, recipe.algorithm.kl.target)
        self._guard.restore(progress["guard"])

    def make_experience(self, samples: Sequence[Sample], step: int, recipe: Recipe) -> Experience:
        """Compute log-probabilities, values, advantages and corrections of this rank's share of a step's samples.

        Raises:
            EngineMismatch: at the first step, training and vLLM do not compute the same model.
        """
        policy, metrics = self._policy, StepMetrics()
        rows = filled_up(samples, sequences_multiple(recipe))
        answers = answer_numbers(rows)
        lengths = [len(sample.prompt_ids) + len(sample.tokens) for sample in rows]
        minibatches = recipe.algorithm.minibatches
        order = spread_over(minibatches, len(samples), len(rows))
        placed = shares_of(recipe, [lengths[row] for row in order], minibatches)
        shares = [[order[place] for place in share] for share in placed]
        local = [rows[i] for i in shares[policy.data_parallel_rank]]
        sequences, prompts = [s.prompt_ids + s.tokens for s in local], [len(s.prompt_ids) for s in local]
        batch = Batch.from_sequences(sequences, prompts, loss_mask=[s.loss_mask for s in local], pad_id=self._pad_id)
        samples = self._with_model_scores(samples, batch, shares, recipe)
        batch = with_expert_choices(batch, local, policy, recipe)
        old = policy.logprobs(batch, recipe)
        metrics.sums |= expert_metrics(rows, policy, recipe)
        experience = Experience(
            samples=samples,
            metrics=metrics,
            rows=shares[policy.data_parallel_rank],
            batch=replaying_updates(batch, policy, recipe).to(device()),
            lengths=torch.tensor([[rows[i].num_loss_tokens for i in share] for share in shares]),
            answers=torch.tensor([[answers[i] for i in share] for share in shares]),
            rollout=batch.align([sample.logprobs for sample in local]).to(device()),
            old=old,
            reference=self._reference.logprobs(batch, recipe) if self._reference is not None else None,
            kl_coef=self._kl.coef_under(recipe.algorithm.kl.coef),
            values=self._critic.values(batch, recipe) if self._critic is not None else None,
        )
        scores = self._scores([sample for sample in samples if not sample.branch], step, recipe, metrics)
        kl, penalties, mean_kl = _kl_to_reference(experience, recipe), torch.zeros(len(scores)), None
        if self._reference is not None:
            row_kl = torch.tensor(self._gather_by_sample(None if kl is None else kl.sum(1), shares))
            answer_kl = torch.zeros(len(scores)).index_add(0, torch.tensor(answers), row_kl)
            mean_kl = float(answer_kl.mean())
            metrics.replicated |= {"train/answer_kl": mean_kl, "train/kl_coef": experience.kl_coef}
            in_reward = recipe.algorithm.kl.where == "reward" and not self._method.token_level
            penalties = experience.kl_coef * answer_kl if in_reward else penalties
        answer_advantages = self._method.advantages(scores, recipe.algorithm.samples_per_prompt, penalties)
        local_advantages = answer_advantages[experience.answers[policy.data_parallel_rank]].to(device())
        advantages, returns = self._advantages(experience, local_advantages, kl, recipe)
        correction = self._correction(experience, recipe, metrics)
        if self._guard.must_compare_engines(recipe) and all(s.weight_version == step for s in samples):
            self._guard.compare_engines(step, metrics.reduce(self._group), policy.has_experts, recipe)
        return replace(experience, answer_kl=mean_kl, advantages=advantages, returns=returns, correction=correction)

    def update(
        self, experience: Experience, step: int, recipe: Recipe, bucket_hook: BucketHook | None = None
    ) -> StepMetrics:
        """Update the policy, and the critic where there is one, `epochs` x `minibatches` times.

        An adaptive KL coefficient is adjusted here, for the next step's experience.

        Args:
            bucket_hook: called with each optimizer bucket of the policy's last update.

        Raises:
            TooManyInterventions: a gradient was not accepted or the KL exploded more often than `max_interventions`.
        """
        algorithm = recipe.algorithm
        updates = algorithm.epochs * algorithm.minibatches
        trains_policy = self._trains_policy(step, recipe)
        self._update_kl_coef(experience, step, recipe, trains_policy)
        done = {"critic": _Updates(), "train": _Updates()}
        for number in range(updates):
            rows = _minibatch(experience, number % algorithm.minibatches, algorithm.minibatches)
            batch, tokens = experience.batch[rows], int(experience.lengths[:, rows].sum())
            if self._critic is not None:
                accepts = partial(self._guard.accepts_grad_norm, recipe=recipe, model="critic")
                objective = _value_objective(experience, rows, recipe)
                report = self._critic.train_step(batch, objective, recipe, accepts_grad_norm=accepts)
                done["critic"].add(report, tokens)
                if not report.updated:
                    self._guard.record_skip(step, report.grad_norm, recipe, model="critic")
                    break
            if trains_policy:
                hook = bucket_hook if number == updates - 1 else None
                accepts = partial(self._guard.accepts_grad_norm, recipe=recipe)
                objective = self._policy_objective(experience, rows, recipe)
                report = self._policy.train_step(batch, objective, recipe, hook, accepts)
                done["train"].add(report, tokens)
                if not report.updated:
                    self._guard.record_skip(step, report.grad_norm, recipe)
                    break
        for model in self._trained:
            if trains_policy or model is not self._policy:
                model.end_step()
        metrics = StepMetrics()
        for group, group_updates in done.items():
            metrics.update(group_updates.metrics(group, self._policy.is_reporting_rank))
        return metrics

    def _update_kl_coef(self, experience: Experience, step: int, recipe: Recipe, trains_policy: bool) -> None:
        kl = recipe.algorithm.kl
        self._kl.configure(kl.coef, kl.target)
        if experience.answer_kl is not None:
            if trains_policy:
                self._kl.observe(experience.answer_kl, sum(not sample.branch for sample in experience.samples))
            self._guard.freeze_kl_coef(step, experience.answer_kl, self._kl, recipe)

    def _trains_policy(self, step: int, recipe: Recipe) -> bool:
        return self._critic is None or step >= recipe.critic.warmup_steps

    def _policy_objective(self, experience: Experience, rows: slice, recipe: Recipe) -> PolicyObjective | None:
        algorithm, method, mask = recipe.algorithm, self._method, experience.batch.response_mask
        if experience.old is None or experience.advantages is None:
            return None
        lengths = experience.lengths[:, rows]
        weights = answer_weights(
            algorithm.loss_agg_mode or method.loss_agg_mode,
            lengths.flatten(),
            recipe.rollout.max_new_tokens,
            experience.answers[:, rows].flatten(),
        ).reshape(lengths.shape)[self._policy.data_parallel_rank]
        clip = method.clip if algorithm.clip is None else algorithm.clip
        high = (
            algorithm.clip_high if algorithm.clip_high is not None or algorithm.clip is not None else method.clip_high
        )

        in_loss = experience.reference is not None and algorithm.kl.where == "loss"
        return PolicyObjective(
            advantages=experience.advantages[rows],
            mask=mask[rows],
            old_logprobs=experience.old[rows],
            answer_weights=weights.to(mask.device),
            correction=None if experience.correction is None else experience.correction[rows],
            clip=clip,
            clip_high=high or clip,
            dual_clip=algorithm.dual_clip,
            ratio=method.ratio,
            ref_logprobs=experience.reference[rows] if in_loss else None,
            kl_estimator=algorithm.kl.effective_estimator,
            kl_coef=experience.kl_coef,
            entropy_coef=algorithm.entropy_coef,
        )

    def _scores(self, samples: Sequence[Sample], step: int, recipe: Recipe, metrics: StepMetrics) -> Tensor:
        """Return [B], the rewards with the overlong penalty. `reward.shuffle`, a control, permutes the rewards."""
        rewards = [sample.reward for sample in samples]
        if recipe.reward.shuffle:
            random.Random(f"{recipe.run.seed}/{step}").shuffle(rewards)
        if not recipe.reward.overlong_buffer:
            return torch.tensor(rewards)
        max_tokens, buffer = recipe.rollout.max_new_tokens, recipe.reward.overlong_buffer
        penalties = [overlong_penalty(len(sample.tokens), max_tokens, buffer) for sample in samples]
        metrics.replicated["reward/overlong_penalty"] = sum(penalties) / len(penalties)
        return torch.tensor(rewards) + torch.tensor(penalties)

    def _advantages(
        self, experience: Experience, answer_advantages: Tensor, kl: Tensor | None, recipe: Recipe
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return advantages [b, T], and returns where there is a critic; None on ranks without the output layer.

        Args:
            answer_advantages: [b], the advantage of each of this rank's answers.
            kl: [b, T], subtracted from token rewards with `kl.where: reward`; used by token-level methods only.
        """
        algorithm, method, mask = recipe.algorithm, self._method, experience.batch.response_mask
        advantages = returns = None
        if experience.old is not None and method.token_level:
            in_reward = kl is not None and algorithm.kl.where == "reward"
            rewards = token_rewards(
                answer_advantages, experience.kl_coef * kl if in_reward else torch.zeros_like(mask), mask
            )
            if experience.values is None:
                advantages = returns_to_go(rewards, mask, algorithm.gamma)
            else:
                advantages, returns = gae(rewards, experience.values, mask, algorithm.gamma, algorithm.lam)
        elif experience.old is not None:
            advantages = answer_advantages[:, None] * mask
        if method.normalize:
            reports = advantages is not None and self._policy.is_reporting_rank
            local = Moments.from_values(advantages, mask) if reports else Moments(0.0, 0.0, 0.0)
            moments = Moments.merge(gather_objects(local, self._group))
            advantages = None if advantages is None else moments.normalise(advantages, mask)
        return advantages, returns

    def _correction(self, experience: Experience, recipe: Recipe, metrics: StepMetrics) -> Tensor | None:
        """Measure the mismatch of vLLM and training, and return the correcting weights [b, T] of tokens, if any."""
        if experience.old is None:
            return None
        mask, setting = experience.batch.response_mask, recipe.algorithm.correction
        weights = None
        if setting.kind != "none":
            weights = correction_weights(
                setting.kind, experience.old, experience.rollout, mask, setting.low, setting.high
            )
        if self._policy.is_reporting_rank:
            found, divergence = mismatch(experience.old, experience.rollout, mask)
            metrics.maxima |= {f"mismatch/logprob_abs_{name}": value for name, value in found.items()}
            tokens = int(experience.lengths.sum())
            metrics.sums["mismatch/kl"] = divergence / tokens
            gaps = torch.where(mask.bool(), experience.old - experience.rollout, 0.0).abs()
            metrics.sums["mismatch/logprob_abs_mean"] = float(gaps.sum(dtype=torch.float64)) / tokens
            assert recipe.rollout is not None, "old log-probabilities are of answers that were generated"
            longest = recipe.rollout.max_new_tokens
            by_position = mismatch_by_position(gaps, mask, longest).tolist()
            for i, in_quarter in enumerate(tokens_by_position(experience.lengths, longest)):
                if in_quarter:
                    metrics.sums[f"mismatch/logprob_abs_quarter_{i + 1}"] = by_position[i] / in_quarter
            if weights is not None:
                metrics.sums["mismatch/weight"] = float(weights.sum()) / tokens
        return weights

    def _with_model_scores(
        self, samples: Sequence[Sample], batch: Batch, shares: Shares, recipe: Recipe
    ) -> list[Sample]:
        """Return the samples with the reward model's scores as rewards, where there is one."""
        if self._reward_model is None:
            return list(samples)
        scores = self._gather_by_sample(self._reward_model.scores(batch, recipe), shares)
        return [replace(sample, reward=score) for sample, score in zip(samples, scores, strict=True)]

    def _gather_by_sample(self, values: Tensor | None, shares: Shares) -> list[float]:
        """Gather values [b] of each data-parallel rank's share; return one number for every sample, on every rank."""
        reports = values is not None and self._policy.is_reporting_rank
        local = (self._policy.data_parallel_rank, values.tolist()) if reports else None
        gathered = gather_objects(local, self._group)
        found: dict[int, float] = {}
        for (_, numbers), share in zip(sorted(filter(None, gathered)), shares, strict=True):
            found |= zip(share, numbers, strict=True)
        return [found[i] for i in range(len(found))]


def _minibatch(experience: Experience, number: int, minibatches: int) -> slice:
    """Return this rank's rows of a minibatch; `shares_of` orders a rank's samples by minibatch."""
    each = len(experience.batch) // minibatches
    return slice(number * each, (number + 1) * each)


def _value_objective(experience: Experience, rows: slice, recipe: Recipe) -> ValueObjective | None:
    if experience.returns is None or experience.values is None:
        return None
    return ValueObjective(
        experience.values[rows], experience.returns[rows], experience.batch.response_mask[rows], recipe.critic.clip
    )


def _kl_to_reference(experience: Experience, recipe: Recipe) -> Tensor | None:
    """Return the KL [b, T] of the policy before the update; None on ranks without the output layer."""
    if experience.old is None or experience.reference is None:
        return None
    estimator = recipe.algorithm.kl.effective_estimator
    return token_kl(estimator, experience.old, experience.reference, experience.batch.response_mask)
