"""Makes experience from a step's samples: log-probabilities, values, advantages and the weights of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid3d.config import Recipe, sequences_multiple
from hybrid3d.config.algorithms import TOKEN_ADVANTAGES
from hybrid3d.distributed import gather_objects
from hybrid3d.generation.samples import Sample, answer_numbers, filled_up, is_truncated
from hybrid3d.rewards.registry import overlong_penalty
from hybrid3d.rl.advantages import Answers, Moments, answer_advantages, gae, returns_to_go, token_rewards, whitened
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.correction import OffPolicy, correction_weights, mismatch, mismatch_by_position, tokens_by_position
from hybrid3d.rl.kl import token_kl
from hybrid3d.rl.selection import covariances, high_covariance, high_entropy, within
from hybrid3d.roles.expert_choices import expert_metrics, replaying_updates, with_expert_choices
from hybrid3d.roles.models import Models
from hybrid3d.roles.shares import Shares, shares_of, spread_over
from hybrid3d.run.health import Guard
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.runtime import device

T = TypeVar("T")


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
        trained: [data-parallel ranks, b], whether each row is trained on: see `algorithm.mask_truncated`.
        rollout, old, reference: log-probabilities by vLLM, by the policy and by the reference policy.
        kl_coef: coefficient of the KL to the reference.
        entropy: of the policy's distributions, where tokens are selected by it.
        answer_kl: the mean KL of an answer to the reference, nats; None without a reference.
        values, returns: the critic's values, and the returns that it is trained to predict.
        correction: weight of each token's policy loss for the mismatch of vLLM's and training's log-probabilities, zero
            where `algorithm.high_entropy_fraction` excludes the token; None if all are 1.
        selected: the tokens that a policy loss by covariance treats apart.
    """

    samples: list[Sample]
    metrics: StepMetrics
    rows: list[int]
    batch: Batch
    lengths: Tensor
    answers: Tensor
    trained: Tensor
    rollout: Tensor
    old: Tensor | None
    reference: Tensor | None
    kl_coef: float
    entropy: Tensor | None = None
    answer_kl: float | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    correction: Tensor | None = None
    selected: Tensor | None = None


@dataclass
class ExperienceMaker:
    """Makes experience from samples. All ranks of the group call `make` together."""

    models: Models
    guard: Guard
    pad_id: int
    group: dist.ProcessGroup
    _shares: Shares = field(default_factory=list, init=False)  # the rows of each data-parallel rank in this step

    def make(self, samples: Sequence[Sample], step: int, recipe: Recipe, kl_coef: float) -> Experience:
        """Compute what an update needs of this rank's share of a step's samples.

        Raises:
            EngineMismatch: at the first step, training and vLLM do not compute the same model.
        """
        policy, metrics = self.models.policy, StepMetrics()
        rows = filled_up(samples, sequences_multiple(recipe))
        answers = answer_numbers(rows)
        trained = [not (recipe.algorithm.mask_truncated and is_truncated(row, recipe.rollout)) for row in rows]
        shares = self._shares = self._divide(rows, len(samples), recipe)
        local = [rows[i] for i in shares[policy.data_parallel_rank]]
        sequences, prompts = [s.prompt_ids + s.tokens for s in local], [len(s.prompt_ids) for s in local]
        batch = Batch.from_sequences(sequences, prompts, loss_mask=[s.loss_mask for s in local], pad_id=self.pad_id)
        samples = self._with_model_scores(samples, batch, recipe)
        batch = with_expert_choices(batch, local, policy, recipe)
        old, entropy = self._policy_scores(batch, recipe)
        metrics.sums |= expert_metrics(rows, policy, recipe)
        reference, critic = self.models.reference, self.models.critic
        experience = Experience(
            samples=samples,
            metrics=metrics,
            rows=shares[policy.data_parallel_rank],
            batch=replaying_updates(batch, policy, recipe).to(device()),
            lengths=torch.tensor([[rows[i].num_loss_tokens for i in share] for share in shares]),
            trained=torch.tensor([[trained[i] for i in share] for share in shares]),
            answers=torch.tensor([[answers[i] for i in share] for share in shares]),
            rollout=batch.align([sample.logprobs for sample in local]).to(device()),
            old=old,
            entropy=entropy,
            reference=reference.logprobs(batch, recipe) if reference is not None else None,
            kl_coef=kl_coef,
            values=critic.values(batch, recipe) if critic is not None else None,
        )
        experience = self._with_advantages(experience, answers, step, recipe)
        experience = self._with_weights(experience, step, recipe)
        if self.guard.must_compare_engines(recipe) and all(s.weight_version == step for s in samples):
            self.guard.compare_engines(step, metrics.reduce(self.group), policy.has_experts, recipe)
        return experience

    def _divide(self, rows: Sequence[Sample], samples: int, recipe: Recipe) -> Shares:
        """Return the rows of each data-parallel rank; those from the number `samples` on only fill the batch."""
        minibatches = recipe.algorithm.minibatches
        lengths = [len(row.prompt_ids) + len(row.tokens) for row in rows]
        order = spread_over(minibatches, samples, len(rows))
        placed = shares_of(recipe, [lengths[row] for row in order], minibatches)
        return [[order[place] for place in share] for share in placed]

    def _policy_scores(self, batch: Batch, recipe: Recipe) -> tuple[Tensor | None, Tensor | None]:
        """Return the policy's log-probabilities, and its entropies where tokens are selected by them."""
        if recipe.algorithm.high_entropy_fraction is None:
            return self.models.policy.logprobs(batch, recipe), None
        scores = self.models.policy.logprobs_and_entropies(batch, recipe)
        return scores if scores is not None else (None, None)

    def _with_model_scores(self, samples: Sequence[Sample], batch: Batch, recipe: Recipe) -> list[Sample]:
        """Return the samples with the reward model's scores as rewards, where there is one."""
        if self.models.reward_model is None:
            return list(samples)
        found = self.models.reward_model.scores(batch, recipe)
        scores = self._gather_rows(None if found is None else found.tolist())
        return [replace(sample, reward=score) for sample, score in zip(samples, scores, strict=True)]

    def _with_advantages(self, experience: Experience, answers: list[int], step: int, recipe: Recipe) -> Experience:
        """Return experience with advantages, with returns where there is a critic, and with the KL to the reference.

        Args:
            answers: the number of the answer of each row, of all ranks.
        """
        combined, metrics = recipe.algorithm.combination, experience.metrics
        firsts = [sample for sample in experience.samples if not sample.branch]
        scores = self._scores(firsts, step, recipe, metrics)
        kl, penalties, mean_kl = _kl_to_reference(experience, recipe), None, None
        if self.models.reference is not None:
            row_kl = torch.tensor(self._gather_rows(None if kl is None else kl.sum(1).tolist()))
            answer_kl = torch.zeros(len(scores)).index_add(0, torch.tensor(answers), row_kl)
            mean_kl = float(answer_kl.mean())
            metrics.replicated |= {"train/answer_kl": mean_kl, "train/kl_coef": experience.kl_coef}
            if recipe.algorithm.kl.where == "reward" and combined.advantage not in TOKEN_ADVANTAGES:
                penalties = experience.kl_coef * answer_kl
        lengths = torch.zeros(len(scores)).index_add(
            0, experience.answers.flatten(), experience.lengths.flatten().float()
        )
        compared = Answers(
            scores,
            recipe.algorithm.samples_per_prompt,
            penalties,
            lengths,
            torch.tensor([sample.baseline for sample in firsts]),
            recipe.reward.coef,
        )
        found = answer_advantages(combined.advantage, combined.advantage_scale, compared)
        if recipe.algorithm.uses_greedy_answers:
            metrics.replicated["reward/greedy_mean"] = float(compared.baselines.mean())
        local = found[experience.answers[self.models.policy.data_parallel_rank]].to(device())
        advantages, returns = self._token_advantages(experience, local, kl, recipe)
        return replace(experience, answer_kl=mean_kl, advantages=advantages, returns=returns)

    def _scores(self, samples: Sequence[Sample], step: int, recipe: Recipe, metrics: StepMetrics) -> Tensor:
        """Return [B], the rewards as `reward` shapes them. `reward.shuffle`, a control, permutes the rewards."""
        reward, rewards = recipe.reward, [sample.reward for sample in samples]
        if reward.shuffle:
            random.Random(f"{recipe.run.seed}/{step}").shuffle(rewards)
        scores = torch.tensor(rewards)
        if reward.overlong_buffer:
            max_tokens, buffer = recipe.rollout.max_new_tokens, reward.overlong_buffer
            penalties = [overlong_penalty(len(sample.tokens), max_tokens, buffer) for sample in samples]
            metrics.replicated["reward/overlong_penalty"] = sum(penalties) / len(penalties)
            scores = scores + torch.tensor(penalties)
        scores = scores.clamp(reward.min, reward.max) if (reward.min, reward.max) != (None, None) else scores
        return whitened(scores) if reward.whiten else scores

    def _token_advantages(
        self, experience: Experience, answer_values: Tensor, kl: Tensor | None, recipe: Recipe
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return advantages [b, T], and returns where there is a critic; None on ranks without the output layer.

        Args:
            answer_values: [b], the advantage of the answer of each of this rank's rows.
            kl: [b, T], subtracted from the rewards of tokens with `kl.where: reward`, where tokens have advantages of
                their own.
        """
        algorithm, mask = recipe.algorithm, experience.batch.response_mask
        combined = algorithm.combination
        advantages = returns = None
        if experience.old is not None and combined.advantage in TOKEN_ADVANTAGES:
            in_reward = kl is not None and algorithm.kl.where == "reward"
            rewards = token_rewards(
                answer_values, experience.kl_coef * kl if in_reward else torch.zeros_like(mask), mask
            )
            if experience.values is None:
                advantages = returns_to_go(rewards, mask, algorithm.gamma)
            else:
                advantages, returns = gae(rewards, experience.values, mask, algorithm.gamma, algorithm.lam)
        elif experience.old is not None:
            advantages = answer_values[:, None] * mask
        if combined.advantage_scale == "whiten":
            reports = advantages is not None and self.models.policy.is_reporting_rank
            local = Moments.from_values(advantages, mask) if reports else Moments(0.0, 0.0, 0.0)
            moments = Moments.merge(gather_objects(local, self.group))
            advantages = None if advantages is None else moments.normalise(advantages, mask)
        return advantages, returns

    def _with_weights(self, experience: Experience, step: int, recipe: Recipe) -> Experience:
        """Measure the mismatch of vLLM and training; return experience with the weights of tokens that it implies."""
        algorithm, setting, mask = recipe.algorithm, recipe.algorithm.correction, experience.batch.response_mask
        weights = None
        if experience.old is not None and setting.kind != "none":
            weights = correction_weights(
                setting.kind, experience.old, experience.rollout, mask, setting.low, setting.high
            )
        reports = experience.old is not None and self.models.policy.is_reporting_rank
        local = OffPolicy.of(experience.old, experience.rollout, mask, weights) if reports else OffPolicy()
        total = sum(gather_objects(local, self.group), OffPolicy())
        experience.metrics.replicated |= {f"mismatch/{name}": value for name, value in total.metrics.items()}
        if weights is not None and setting.normalize and total.weight > 0:
            weights = weights * (total.tokens / total.weight)
        if reports:
            self._measure_mismatch(experience, weights, recipe)
        fraction, kind = algorithm.high_entropy_fraction, algorithm.combination.policy_loss
        if fraction is not None:
            kept = self._select(experience, experience.entropy, lambda values, _: high_entropy(values, fraction))
            weights = kept if weights is None or kept is None else weights * kept
        selected = None
        if kind in ("clip_cov", "kl_cov"):
            selected = self._select(experience, experience.old, partial(_by_covariance, recipe=recipe, step=step))
        return replace(experience, correction=weights, selected=selected)

    def _measure_mismatch(self, experience: Experience, weights: Tensor | None, recipe: Recipe) -> None:
        """Add this rank's share of the metrics of the mismatch, on a rank that reports."""
        mask, metrics, tokens = experience.batch.response_mask, experience.metrics, int(experience.lengths.sum())
        assert experience.old is not None, "on a rank that reports"
        assert recipe.rollout is not None, "samples were generated"
        found, divergence = mismatch(experience.old, experience.rollout, mask)
        metrics.maxima |= {f"mismatch/logprob_abs_{name}": value for name, value in found.items()}
        gaps = torch.where(mask.bool(), experience.old - experience.rollout, 0.0).abs()
        metrics.sums["mismatch/kl"] = divergence / tokens
        metrics.sums["mismatch/logprob_abs_mean"] = float(gaps.sum(dtype=torch.float64)) / tokens
        longest = recipe.rollout.max_new_tokens
        by_position = mismatch_by_position(gaps, mask, longest).tolist()
        for i, in_quarter in enumerate(tokens_by_position(experience.lengths, longest)):
            if in_quarter:
                metrics.sums[f"mismatch/logprob_abs_quarter_{i + 1}"] = by_position[i] / in_quarter
        if weights is not None:
            metrics.sums["mismatch/weight"] = float(weights.sum()) / tokens

    def _select(
        self, experience: Experience, values: Tensor | None, select: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor | None:
        """Return which of this rank's tokens are selected among those of the step, [b, T]; None without `values`.

        Args:
            values: [b, T].
            select: called on every rank with the values and the advantages of all tokens, in the order of samples;
                returns which are selected.
        """
        mask, rows = experience.batch.response_mask.bool(), None
        if values is not None:
            tokens = torch.stack([values, experience.advantages], -1)[mask].cpu().numpy()
            rows = np.split(tokens, mask.sum(1).cumsum(0)[:-1].cpu().numpy())
        by_row = [torch.from_numpy(row) for row in self._gather_rows(rows)]
        everything = torch.cat(by_row)
        chosen = select(everything[:, 0], everything[:, 1]).split([len(row) for row in by_row])
        if values is None:
            return None
        local = torch.cat([chosen[row] for row in experience.rows]).to(values)
        return torch.zeros_like(values).masked_scatter(mask, local)

    def _gather_rows(self, values: Sequence[T] | None) -> list[T]:
        """Gather a value for each row of each data-parallel rank's share; return those of all rows, on every rank.

        Args:
            values: None on ranks without the output layer.
        """
        policy, found = self.models.policy, dict[int, T]()
        reports = values is not None and policy.is_reporting_rank
        for share in gather_objects((policy.data_parallel_rank, values) if reports else None, self.group):
            if share is not None:
                found |= zip(self._shares[share[0]], share[1], strict=True)
        return [found[row] for row in range(len(found))]


def _by_covariance(logprobs: Tensor, advantages: Tensor, recipe: Recipe, step: int) -> Tensor:
    """Return the tokens that the recipe's policy loss treats apart, of all tokens of the step."""
    loss, values = recipe.algorithm.loss, covariances(logprobs, advantages)
    if recipe.algorithm.combination.policy_loss == "kl_cov":
        return high_covariance(values, loss.cov_fraction)
    return within(values, loss.cov_low, loss.cov_high, loss.cov_fraction, seed=recipe.run.seed * 1_000_003 + step)


def _kl_to_reference(experience: Experience, recipe: Recipe) -> Tensor | None:
    """Return the KL [b, T] of the policy before the update; None on ranks without the output layer."""
    if experience.old is None or experience.reference is None:
        return None
    kl, mask = recipe.algorithm.kl, experience.batch.response_mask
    return token_kl(kl.effective_estimator, experience.old, experience.reference, mask, kl.clamp)
