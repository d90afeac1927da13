"""What is learned from a step's samples: advantages before the update, then the updates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid3d import ranks
from hybrid3d.config import Recipe
from hybrid3d.measure import Measured
from hybrid3d.rl.advantages import Moments, returns_to_go, token_rewards
from hybrid3d.rl.algorithms import METHODS
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.correction import correction_weights, mismatch
from hybrid3d.rl.kl import KlController, token_kl
from hybrid3d.rl.losses import answer_weights
from hybrid3d.rl.objective import PolicyObjective
from hybrid3d.rl.rewards import overlong_penalty
from hybrid3d.rollouts import Sample
from hybrid3d.train.policy import Policy
from hybrid3d.train.runtime import device
from hybrid3d.train.stepping import Ready


@dataclass(frozen=True, eq=False)
class Experience:
    """This data-parallel rank's samples, and what is known of them before the update; tensors are [b, T].

    What a model says is there only on ranks that have the output layer.

    Attributes:
        lengths: [data-parallel ranks, b], loss tokens of every answer.
        rollout, old, reference: log-probabilities by vLLM, by the policy and by the reference policy.
        kl_coef: of the KL to the reference.
    """

    batch: Batch
    lengths: Tensor
    rollout: Tensor
    old: Tensor | None
    reference: Tensor | None
    kl_coef: float
    advantages: Tensor | None = None
    correction: Tensor | None = None


class Learner:
    """Makes experience of samples, and updates the policy by it. Every rank calls every method together.

    Attributes:
        kl: the coefficient of the KL to the reference policy.
    """

    def __init__(self, recipe: Recipe, policy: Policy, reference: Policy | None, pad_id: int):
        self._recipe = recipe
        self._policy = policy
        self._reference = reference
        self._pad_id = pad_id
        self._method = METHODS[recipe.algorithm.name]
        kl = recipe.algorithm.kl
        self.kl = KlController(kl.coef, kl.target, kl.horizon)

    def experience(
        self, samples: Sequence[Sample], step: int, measured: Measured
    ) -> tuple[Experience, dict[str, float]]:
        """What is known of this rank's share of a step's samples; and metrics, the same on every rank."""
        policy = self._policy
        mine = samples[share_of(self._recipe, policy, len(samples))]
        sequences = [sample.prompt_ids + sample.tokens for sample in mine]
        batch = Batch.from_sequences(sequences, [len(sample.prompt_ids) for sample in mine], pad_id=self._pad_id)
        known = Experience(
            batch=batch.to(device()),
            lengths=torch.tensor([len(sample.tokens) for sample in samples]).reshape(self._recipe.train.dp, -1),
            rollout=batch.align([sample.logprobs for sample in mine]).to(device()),
            old=policy.logprobs(batch),
            reference=self._reference.logprobs(batch) if self._reference is not None else None,
            kl_coef=self.kl.coef,
        )
        scores, row = self._scores(samples, step)
        kl = self._kl_to_reference(known)
        if self._reference is not None:
            answer_kl = self._of_all_answers(kl)
            row |= {"train/answer_kl": float(answer_kl.mean()), "train/kl_coef": known.kl_coef}
            self.kl.observe(float(answer_kl.mean()), len(samples))
            if self._recipe.algorithm.kl.where == "reward" and not self._method.by_token:
                scores = scores - known.kl_coef * answer_kl
        advantages = self._advantages(known, scores, kl)
        return replace(known, advantages=advantages, correction=self._correct(known, measured)), row

    def update(self, experience: Experience, measured: Measured, ready: Ready | None = None) -> dict[str, float]:
        """Update the policy, `epochs` x `minibatches` times.

        Args:
            ready: told of each part of the policy's last update.
        """
        algorithm = self._recipe.algorithm
        updates = algorithm.epochs * algorithm.minibatches
        norm = 0.0
        for number in range(updates):
            last = number == updates - 1
            rows = self._minibatch(experience, number % algorithm.minibatches)
            loss = self._objective(experience, rows)
            report = self._policy.train_step(experience.batch[rows], loss, ready if last else None, ends_step=last)
            norm += report.grad_norm / updates
            if self._policy.counts:
                for key, value in report.sums.items():
                    measured.add(f"train/{key}", value / algorithm.epochs)
        return {"train/grad_norm": norm, "train/lr": report.lr}

    def _minibatch(self, experience: Experience, number: int) -> slice:
        each = len(experience.batch) // self._recipe.algorithm.minibatches
        return slice(number * each, (number + 1) * each)

    def _objective(self, experience: Experience, rows: slice) -> PolicyObjective:
        algorithm, method, mask = self._recipe.algorithm, self._method, experience.batch.response_mask
        lengths = experience.lengths[:, rows]
        weights = answer_weights(
            algorithm.aggregation or method.aggregation, lengths.flatten(), self._recipe.rollout.max_new_tokens
        ).reshape(lengths.shape)[self._policy.data_parallel_rank]
        clip = method.clip if algorithm.clip is None else algorithm.clip
        high = (
            algorithm.clip_high if algorithm.clip_high is not None or algorithm.clip is not None else method.clip_high
        )

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return PolicyObjective(
            advantages=of(experience.advantages),
            mask=mask[rows],
            old=of(experience.old),
            weights=weights.to(mask.device),
            correction=of(experience.correction),
            clip=clip,
            clip_high=high or clip,
            dual_clip=algorithm.dual_clip,
            ratio=method.ratio,
            reference=of(experience.reference) if algorithm.kl.where == "loss" else None,
            kl_estimator=algorithm.kl.estimator,
            kl_coef=experience.kl_coef,
            entropy_coef=algorithm.entropy_coef,
        )

    def _scores(self, samples: Sequence[Sample], step: int) -> tuple[Tensor, dict[str, float]]:
        """[B] of what an answer's advantage is made. With `reward.shuffle`, a control, each gets another's reward."""
        recipe = self._recipe
        rewards = [sample.reward for sample in samples]
        if recipe.reward.shuffle:
            random.Random(f"{recipe.run.seed}/{step}").shuffle(rewards)
        if not recipe.reward.overlong_buffer:
            return torch.tensor(rewards), {}
        longest, buffer = recipe.rollout.max_new_tokens, recipe.reward.overlong_buffer
        penalties = [overlong_penalty(len(sample.tokens), longest, buffer) for sample in samples]
        row = {"reward/overlong_penalty": sum(penalties) / len(penalties)}
        return torch.tensor(rewards) + torch.tensor(penalties), row

    def _kl_to_reference(self, known: Experience) -> Tensor | None:
        """[b, T], by the policy before the update; where the output layer is."""
        if known.old is None or known.reference is None:
            return None
        estimator = self._recipe.algorithm.kl.estimator
        return token_kl(estimator, known.old, known.reference, known.batch.response_mask)

    def _advantages(self, known: Experience, scores: Tensor, kl: Tensor | None) -> Tensor | None:
        """[b, T]; where the output layer is. `kl` [b, T] is taken off where it arises, if the method says so."""
        algorithm, method, mask = self._recipe.algorithm, self._method, known.batch.response_mask
        of_answers = method.advantages(scores, algorithm.samples_per_prompt)
        mine = of_answers[share_of(self._recipe, self._policy, len(scores))].to(mask.device)
        advantages = None
        if known.old is not None and method.by_token:
            in_reward = kl is not None and algorithm.kl.where == "reward"
            rewards = token_rewards(mine, known.kl_coef * kl if in_reward else torch.zeros_like(mask), mask)
            advantages = returns_to_go(rewards, mask, algorithm.gamma)
        elif known.old is not None:
            advantages = mine[:, None] * mask
        if method.normalised:
            counts = advantages is not None and self._policy.counts
            parts = ranks.gather(Moments.of(advantages, mask) if counts else Moments(0.0, 0.0, 0.0))
            moments = Moments.over(parts)
            advantages = None if advantages is None else moments.normalise(advantages, mask)
        return advantages

    def _correct(self, known: Experience, measured: Measured) -> Tensor | None:
        """Tells how far vLLM and training disagree, and what each token's loss is multiplied by for it, if anything."""
        if known.old is None:
            return None
        mask, setting = known.batch.response_mask, self._recipe.algorithm.correction
        weights = None
        if setting.kind != "none":
            weights = correction_weights(setting.kind, known.old, known.rollout, mask, setting.low, setting.high)
        if self._policy.counts:
            found, divergence = mismatch(known.old, known.rollout, mask)
            measured.maxima |= {f"mismatch/logprob_abs_{name}": value for name, value in found.items()}
            measured.sums["mismatch/kl"] = divergence
            if weights is not None:
                measured.sums["mismatch/weight"] = float(weights.sum())
        return weights

    def _of_all_answers(self, values: Tensor | None) -> Tensor:
        """The sums over tokens of everyone's answers, [B], on every rank; from [b, T] where the output layer is."""
        counts = values is not None and self._policy.counts
        shares = ranks.gather((self._policy.data_parallel_rank, values.sum(1).tolist()) if counts else None)
        return torch.tensor([sum_ for _, share in sorted(filter(None, shares)) for sum_ in share])


def share_of(recipe: Recipe, policy: Policy, sequences: int) -> slice:
    """This data-parallel rank's consecutive rows."""
    each = sequences // recipe.train.dp
    return slice(policy.data_parallel_rank * each, (policy.data_parallel_rank + 1) * each)
