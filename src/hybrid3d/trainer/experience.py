"""Makes experience from a step's samples: log-probabilities, values, advantages and the weights of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid3d.config import Recipe, sequences_multiple
from hybrid3d.config.algorithms import TOKEN_ADVANTAGES
from hybrid3d.distributed import gather_objects
from hybrid3d.generation.exchange import deliver_choices
from hybrid3d.generation.samples import (
    NO_ANSWER,
    RolloutBatch,
    Sample,
    answer_numbers,
    answers_of,
    filled_up,
    queries_of,
    with_baselines,
    with_rewards,
)
from hybrid3d.reshard.move.device import device
from hybrid3d.rl.advantages import Answers, Moments, answer_advantages, gae, returns_to_go, token_rewards, whitened
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.correction import OffPolicy, covariances, high_covariance, high_entropy, within
from hybrid3d.rl.kl import token_kl
from hybrid3d.run.health import Guard
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.scoring.functions import LARGEST_REWARD, overlong_penalty
from hybrid3d.scoring.scorer import Given
from hybrid3d.train.dp_split import Shares, shares_of, spread_over
from hybrid3d.train.trained_model import ModelScorer
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.step_experience import (
    COVARIANCE,
    Experience,
    come_from_update,
    expert_metrics,
    measure_mismatch,
    off_policy,
    replaying_updates,
    weights_of,
    with_expert_choices,
)

T = TypeVar("T")


class UnusableScore(RuntimeError):
    """The reward model gives an answer a score that is not finite, or so large that training cannot compute with it."""

    raised_on_all_ranks = True  # every rank has all scores


@dataclass
class ExperienceMaker:
    """Makes experience from samples. All ranks of the group call `make` and `measure_update` together."""

    models: Models
    guard: Guard
    pad_id: int
    group: dist.ProcessGroup
    _shares: Shares = field(default_factory=list, init=False)  # the rows of each data-parallel rank in this step
    _replicas: dict[int, list[int]] = field(default_factory=dict, init=False)  # the ranks of each data-parallel rank

    def make(self, generated: RolloutBatch, step: int, recipe: Recipe, kl_coef: float) -> Experience:
        """Compute what an update needs of this rank's share of a step's samples.

        Raises:
            EngineMismatch: at the first step, training and vLLM do not compute the same model.
        """
        policy, metrics = self.models.policy, StepMetrics()
        samples = self._scored(generated, recipe)
        rows = filled_up(samples, sequences_multiple(recipe))
        answers, masks_truncated = answer_numbers(rows), recipe.algorithm.mask_truncated
        trained = [
            number != NO_ANSWER and not (masks_truncated and row.truncated)
            for number, row in zip(answers, rows, strict=True)
        ]
        shares = self._shares = self._divide(rows, len(samples), recipe)
        rows = self._with_choices(rows, shares, recipe)
        local = [rows[i] for i in shares[policy.data_parallel_rank]]
        sequences, prompts = [s.sequence for s in local], [len(s.prompt_ids) for s in local]
        batch = Batch.from_sequences(sequences, prompts, loss_mask=[s.loss_mask for s in local], pad_id=self.pad_id)
        local_trained = torch.tensor([trained[i] for i in shares[policy.data_parallel_rank]])
        batch = with_expert_choices(batch, local, policy, recipe)
        compares = self.guard.must_compare_engines(recipe) and all(s.weight_version == step for s in samples)
        old_from_update = come_from_update(step, recipe)
        old, entropy = self._policy_scores(batch, recipe, needed=compares or not old_from_update)
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
            mask=(batch.response_mask * local_trained[:, None]).to(device()),
            rollout=batch.align([sample.logprobs for sample in local]).to(device()),
            old=old,
            old_from_update=old_from_update,
            entropy=entropy,
            reference=reference.logprobs(batch, recipe) if reference is not None else None,
            kl_coef=kl_coef,
            values=critic.values(batch, recipe) if critic is not None else None,
        )
        experience = self._with_advantages(experience, step, recipe)
        experience = self._with_weights(experience, step, recipe)
        if compares:
            if old_from_update:  # by a pass that is made for this alone
                metrics.update(self.measure_update(experience, recipe).metrics)
            self.guard.compare_engines(step, metrics.reduce(self.group), policy.has_experts, recipe)
        return experience

    def _with_choices(self, rows: Sequence[Sample], shares: Shares, recipe: Recipe) -> Sequence[Sample]:
        """Return the rows, those of this data-parallel rank with the choices of experts that its passes replay."""
        if recipe.train.router_replay != "rollout" or self.models.policy.router_replay is None:
            return rows
        if not self._replicas:
            for rank, place in enumerate(gather_objects(self.models.policy.data_parallel_rank, self.group)):
                self._replicas.setdefault(place, []).append(rank)
        wanted = [(share, self._replicas[place]) for place, share in enumerate(shares)]
        return deliver_choices(rows, wanted, self.group, recipe.machine.gpus_per_node)

    def _divide(self, rows: Sequence[Sample], samples: int, recipe: Recipe) -> Shares:
        """Return the rows of each data-parallel rank; those from the number `samples` on only fill the batch."""
        minibatches = recipe.algorithm.minibatches
        lengths = [len(row.prompt_ids) + len(row.tokens) for row in rows]
        order = spread_over(minibatches, samples, len(rows))
        placed = shares_of(recipe, [lengths[row] for row in order], minibatches)
        return [[order[place] for place in share] for share in placed]

    def _policy_scores(self, batch: Batch, recipe: Recipe, needed: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the policy's log-probabilities, and its entropies where tokens are selected by them.

        If the former are not `needed`, they are zeros, which the update is to replace.
        """
        if not needed:
            policy = self.models.policy
            return torch.zeros_like(batch.response_mask, device=device()) if policy.has_output else None, None
        if recipe.algorithm.high_entropy_fraction is None:
            return self.models.policy.logprobs(batch, recipe), None
        scores = self.models.policy.logprobs_and_entropies(batch, recipe)
        return scores if scores is not None else (None, None)

    def _scored(self, generated: RolloutBatch, recipe: Recipe) -> list[Sample]:
        """Return the samples with rewards, those of the reward model if it shares the memory of the trained ones."""
        if self.models.reward_model is None:
            return generated.samples
        answers, size = answers_of(generated.samples), recipe.algorithm.samples_per_prompt
        greedy = answers_of(generated.greedy)
        if greedy:
            of_prompts = [answers[start : start + size] for start in range(0, len(answers), size)]
            answers = [answer for some, last in zip(of_prompts, greedy, strict=True) for answer in (*some, last)]
            size += 1
        scorer = Given(ModelScorer(self.models.reward_model, recipe, self.pad_id, self.group))
        scores = scorer.score(queries_of(answers, size))
        if scores.failures:
            told = ", ".join(f"{n} of them {kind} ({scores.examples[kind]})" for kind, n in scores.failures.items())
            raise UnusableScore(
                f"reward.model={recipe.reward.model} gives answers to data.train scores that are no rewards: {told}: a "
                f"reward is a number of at most {LARGEST_REWARD:g} in magnitude. Check the checkpoint of the reward "
                "model, or try model.dtype=float32"
            )
        scored = with_rewards(answers, scores.rewards)
        return [sample for answer in (with_baselines(scored, size) if greedy else scored) for sample in answer]

    def _with_advantages(self, experience: Experience, step: int, recipe: Recipe) -> Experience:
        """Return experience with advantages, with returns where there is a critic, and with the KL to the reference."""
        combined, metrics = recipe.algorithm.combination, experience.metrics
        firsts = [sample for sample in experience.samples if not sample.branch]
        scores, baselines = self._scores(firsts, step, recipe, metrics)
        kl, penalties, mean_kl = None, None, None
        if not experience.old_from_update:
            kl = _kl_to_reference(experience, recipe)
            answer_kl, mean_kl = self._answer_kl(experience, kl)
            if recipe.algorithm.kl.where == "reward" and combined.advantage not in TOKEN_ADVANTAGES:
                assert answer_kl is not None, "there is a reference"
                penalties = experience.kl_coef * answer_kl
        lengths = torch.zeros(len(scores), dtype=torch.float64).index_add(
            0, experience.answers.clamp(min=0).flatten(), experience.lengths.flatten().double()
        )
        compared = Answers(
            scores, recipe.algorithm.samples_per_prompt, penalties, lengths, baselines, recipe.reward.coef
        )
        found = answer_advantages(combined.advantage, combined.advantage_scale, compared)
        if recipe.algorithm.uses_greedy_answers:
            metrics.replicated["reward/greedy_mean"] = fmean(sample.baseline for sample in firsts)
        local = found[experience.answers.clamp(min=0)[self.models.policy.data_parallel_rank]].to(device())
        advantages, returns = self._token_advantages(experience, local, kl, recipe)
        return replace(experience, answer_kl=mean_kl, advantages=advantages, returns=returns)

    def _answer_kl(self, experience: Experience, kl: Tensor | None) -> tuple[Tensor | None, float | None]:
        """Return the KL of each answer to the reference, of all ranks, from that of this rank's tokens, and its mean.

        Add the mean to the metrics. Both are None without a reference.
        """
        if self.models.reference is None:
            return None, None
        of_rows = torch.tensor(self._gather_rows(None if kl is None else kl.sum(1, dtype=torch.float64).tolist()))
        numbers = torch.empty(len(of_rows), dtype=torch.long)
        for share, of_share in zip(self._shares, experience.answers, strict=True):
            numbers[share] = of_share
        answers = sum(not sample.branch for sample in experience.samples)
        found = torch.zeros(answers, dtype=torch.float64)
        found = found.index_add(0, numbers.clamp(min=0), of_rows.double())  # of what only fills the batch it is zero
        mean_kl = float(found.mean())
        experience.metrics.replicated |= {"train/answer_kl": mean_kl, "train/kl_coef": experience.kl_coef}
        return found, mean_kl

    def _scores(
        self, samples: Sequence[Sample], step: int, recipe: Recipe, metrics: StepMetrics
    ) -> tuple[Tensor, Tensor]:
        """Return the rewards as `reward` shapes them, and those of the greedy answers, shaped alike; each [B], float64.

        Where rewards are normalized, it is by the mean and the standard deviation of both together: their difference
        keeps its sign, and is not scaled up where only one of them varies. `debug.shuffle_rewards` permutes the
        rewards.
        """
        reward, rewards = recipe.reward, [sample.reward for sample in samples]
        if recipe.debug.shuffle_rewards:
            random.Random(f"{recipe.run.seed}/{step}").shuffle(rewards)
        lengths = [len(sample.tokens) for sample in samples]
        if reward.overlong_buffer:
            penalties = _overlong_penalties(lengths, recipe)
            metrics.replicated["reward/overlong_penalty"] = sum(penalties) / len(penalties)
        scores = _bounded_rewards(rewards, lengths, recipe)
        if not recipe.algorithm.uses_greedy_answers:
            return whitened(scores) if reward.whiten else scores, torch.zeros_like(scores)
        greedy_lengths = [sample.baseline_tokens for sample in samples]
        baselines = _bounded_rewards([sample.baseline for sample in samples], greedy_lengths, recipe)
        if reward.whiten:
            scores, baselines = whitened(torch.cat([scores, baselines])).chunk(2)
        return scores, baselines

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
            in_reward = kl if algorithm.kl.where == "reward" else None
            penalties = torch.zeros_like(mask) if in_reward is None else experience.kl_coef * in_reward
            rewards = token_rewards(answer_values, penalties, mask.double())
            if experience.values is None:
                advantages = returns_to_go(rewards, mask, algorithm.gamma)
            else:
                advantages, returns = gae(rewards, experience.values, mask, algorithm.gamma, algorithm.lam)
        elif experience.old is not None:
            advantages = answer_values[:, None] * mask
        if combined.advantage_scale == "whiten":
            local = Moments(0.0, 0.0, 0.0)
            if advantages is not None and self.models.policy.is_reporting_rank:
                local = Moments.from_values(advantages, experience.mask)
            moments = Moments.merge(gather_objects(local, self.group))
            advantages = None if advantages is None else moments.normalise(advantages, mask)
        return (
            None if advantages is None else advantages.float(),
            None if returns is None else returns.float(),
        )

    def _with_weights(self, experience: Experience, step: int, recipe: Recipe) -> Experience:
        """Return experience with the weights of tokens that the mismatch of vLLM and training implies, and a selection.

        The mismatch is measured too, unless the update is to tell the log-probabilities.
        """
        algorithm, old = recipe.algorithm, experience.old
        if old is not None and algorithm.correction.kind != "none":
            weights = weights_of(experience, old, slice(None), recipe)
            experience = replace(experience, correction=weights)
        if not experience.old_from_update:
            experience = self._measure_mismatch(experience, recipe)
        fraction, kind = algorithm.high_entropy_fraction, algorithm.combination.policy_loss
        if fraction is not None:
            kept = self._select(experience, experience.entropy, lambda values, _: high_entropy(values, fraction))
            before = experience.correction
            experience = replace(experience, correction=kept if before is None or kept is None else before * kept)
        selected = None
        if kind in COVARIANCE:
            selected = self._select(experience, experience.old, partial(_by_covariance, recipe=recipe, step=step))
        return replace(experience, selected=selected)

    def _measure_mismatch(self, experience: Experience, recipe: Recipe) -> Experience:
        """Add the metrics of how far the samples of all ranks are from the policy; return normalized weights."""
        metrics, weights = experience.metrics, experience.correction
        reports = experience.old is not None and self.models.policy.is_reporting_rank
        local = off_policy(experience) if reports else OffPolicy()
        total = sum(gather_objects(local, self.group), OffPolicy())
        metrics.replicated |= {f"mismatch/{name}": value for name, value in total.metrics.items()}
        if weights is not None and recipe.algorithm.correction.normalize and total.weight > 0:
            experience = replace(experience, correction=weights * (total.trained / total.weight))
        if reports:
            metrics.update(measure_mismatch(experience, recipe))
        return experience

    def measure_update(self, experience: Experience, recipe: Recipe) -> Experience:
        """Return experience with the KL of an answer, after the update has filled in `old`, and its metrics only."""
        experience = replace(experience, metrics=StepMetrics())
        _, mean_kl = self._answer_kl(experience, _kl_to_reference(experience, recipe))
        self._measure_mismatch(experience, recipe)
        return replace(experience, answer_kl=mean_kl)

    def _select(
        self, experience: Experience, values: Tensor | None, select: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor | None:
        """Return which of this rank's tokens are selected among those of the step, [b, T]; None without `values`.

        Args:
            values: [b, T].
            select: called on every rank with the values and the advantages of all tokens that are trained, in the order
                of samples; returns which are selected.
        """
        mask, rows = experience.mask.bool(), None
        if values is not None:
            assert experience.advantages is not None, "where there are values, there are these"
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

        Ranks without the output layer have no `values`.
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
    return token_kl(kl.effective_estimator, experience.old, experience.reference, mask, kl.effective_clamp)


def _overlong_penalties(lengths: Sequence[int], recipe: Recipe) -> list[float]:
    assert recipe.rollout is not None, "checked when the recipe was read"
    buffer, longest = recipe.reward.overlong_buffer, recipe.rollout.max_new_tokens
    return [overlong_penalty(length, longest, buffer) for length in lengths]


def _bounded_rewards(rewards: Sequence[float], lengths: Sequence[int], recipe: Recipe) -> Tensor:
    """Return [B] float64, the rewards of answers of these lengths with penalties and bounds."""
    reward, scores = recipe.reward, torch.tensor(rewards, dtype=torch.float64)
    if reward.overlong_buffer:
        scores = scores + torch.tensor(_overlong_penalties(lengths, recipe), dtype=torch.float64)
    return scores.clamp(reward.min, reward.max) if (reward.min, reward.max) != (None, None) else scores
