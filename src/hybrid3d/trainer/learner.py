"""What is learned from a step's samples: advantages before the update, then the updates."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.generation.samples import Sample
from hybrid3d.rewards.registry import overlong_penalty
from hybrid3d.rl.advantages import Moments, gae, returns_to_go, token_rewards
from hybrid3d.rl.algorithms import METHODS
from hybrid3d.rl.balance import balanced_shares
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.correction import correction_weights, mismatch
from hybrid3d.rl.kl import KlController, token_kl
from hybrid3d.rl.losses import answer_weights
from hybrid3d.rl.objective import PolicyObjective, ValueObjective
from hybrid3d.run.health import Guard
from hybrid3d.train.runtime import device
from hybrid3d.train.stepping import BucketHook
from hybrid3d.train.trained import StepReport
from hybrid3d.trainer.metrics import StepMetrics
from hybrid3d.trainer.models import Models

Shares = list[list[int]]
"""By data-parallel rank, the numbers of its sequences."""


@dataclass(frozen=True, eq=False)
class Experience:
    """This data-parallel rank's samples, and what is known of them before the update; tensors are [b, T].

    What a model says is there only on ranks that have the output layer.

    Attributes:
        lengths: [data-parallel ranks, b], loss tokens of every answer.
        rollout, old, reference: log-probabilities by vLLM, by the policy and by the reference policy.
        kl_coef: of the KL to the reference.
        values, returns: what the critic expected, and what it should have.
        correction: what each token's loss is multiplied by for the disagreement of vLLM and training.
    """

    batch: Batch
    lengths: Tensor
    rollout: Tensor
    old: Tensor | None
    reference: Tensor | None
    kl_coef: float
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    correction: Tensor | None = None


class _Updates:
    """What the updates of a step, or those that were made of them, have reported."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._norms: list[float] = []
        self._tokens = 0
        self._lr = 0.0

    def add(self, report: StepReport, tokens: int) -> None:
        """One of them, on so many of all ranks' tokens."""
        self._sums.update(report.sums)
        self._norms.append(report.grad_norm)
        self._tokens += tokens
        self._lr = report.lr

    def row(self, group: str) -> dict[str, float]:
        """What is the same on every rank."""
        norms = self._norms
        return {f"{group}/lr": self._lr, f"{group}/grad_norm": sum(norms) / len(norms)} if norms else {}

    def means(self) -> dict[str, float]:
        """This rank's part of means over tokens."""
        return {key: value / self._tokens for key, value in self._sums.items()}


class Learner:
    """Makes experience of samples, and updates the policy by it. Every rank calls every method together.

    Attributes:
        kl: the coefficient of the KL to the reference policy.
    """

    def __init__(self, recipe: Recipe, models: Models, guard: Guard, pad_id: int):
        self._recipe = recipe
        self._policy, self._reference = models.policy, models.reference
        self._critic, self._judge = models.critic, models.judge
        self._trained = models.trained.values()
        self._guard = guard
        self._pad_id = pad_id
        self._method = METHODS[recipe.algorithm.name]
        kl = recipe.algorithm.kl
        self.kl = KlController(kl.coef, kl.target, kl.horizon)

    def adopt(self, recipe: Recipe) -> None:
        """Go on by the settings of this recipe. The coefficient of the KL stays where its target has brought it."""
        before, kl = self._recipe.algorithm.kl, recipe.algorithm.kl
        self._recipe = recipe
        if kl.coef != before.coef:
            self.kl.coef = kl.coef
        if kl.target != before.target:
            self.kl.target = kl.target

    @property
    def further_batches(self) -> int:
        """Of prompts, that a step may draw for groups which teach something."""
        setting = self._recipe.algorithm.dynamic_sampling
        return (self._method.dynamic_sampling if self._judge is None else 0) if setting is None else setting

    def progress(self, batch: int) -> dict[str, Any]:
        """What a resumed run must know besides models, as JSON; `batch` is the number of the next batch of prompts."""
        kl = {"coef": self.kl.coef, "target": self.kl.target}
        return {"batch": batch, "kl": kl, "guard": self._guard.progress}

    def restore(self, progress: Mapping[str, Any]) -> int:
        """Go on from there; returns the number of the next batch of prompts."""
        self.kl.coef, self.kl.target = progress["kl"]["coef"], progress["kl"]["target"]
        self._guard.restore(progress["guard"])
        return int(progress["batch"])

    def experience(
        self, samples: Sequence[Sample], step: int, measured: StepMetrics
    ) -> tuple[Experience, list[Sample], dict[str, float]]:
        """What is known of this rank's share of a step's samples.

        Returns:
            Also the samples, with the reward model's scores as rewards where there is one, and metrics: the same on
            every rank.
        """
        policy = self._policy
        lengths = [len(sample.prompt_ids) + len(sample.tokens) for sample in samples]
        shares = shares_of(self._recipe, lengths, self._recipe.algorithm.minibatches)
        mine = [samples[i] for i in shares[policy.data_parallel_rank]]
        sequences, prompts = [s.prompt_ids + s.tokens for s in mine], [len(s.prompt_ids) for s in mine]
        batch = Batch.from_sequences(sequences, prompts, loss_mask=[s.loss_mask for s in mine], pad_id=self._pad_id)
        samples = self._judged(samples, batch, shares)
        known = Experience(
            batch=batch.to(device()),
            lengths=torch.tensor([[samples[i].num_loss_tokens for i in share] for share in shares]),
            rollout=batch.align([sample.logprobs for sample in mine]).to(device()),
            old=policy.logprobs(batch),
            reference=self._reference.logprobs(batch) if self._reference is not None else None,
            kl_coef=self.kl.coef,
            values=self._critic.values(batch) if self._critic is not None else None,
        )
        scores, row = self._scores(samples, step)
        kl, penalties = self._kl_to_reference(known), torch.zeros(len(samples))
        if self._reference is not None:
            answer_kl = torch.tensor(self._of_all(None if kl is None else kl.sum(1), shares))
            row |= {"train/answer_kl": float(answer_kl.mean()), "train/kl_coef": known.kl_coef}
            if self._trains_policy(step):
                self.kl.observe(float(answer_kl.mean()), len(samples))
            self._guard.freeze_kl_coef(step, float(answer_kl.mean()), self.kl, self._recipe.algorithm.kl.coef)
            in_reward = self._recipe.algorithm.kl.where == "reward" and not self._method.by_token
            penalties = known.kl_coef * answer_kl if in_reward else penalties
        of_answers = self._method.advantages(scores, self._recipe.algorithm.samples_per_prompt, penalties)
        mine_of_answers = of_answers[shares[policy.data_parallel_rank]].to(device())
        advantages, returns = self._advantages(known, mine_of_answers, kl)
        correction = self._correct(known, measured)
        if self._guard.compares_engines:
            self._guard.compare_engines(step, measured.over_ranks(), self._policy.has_experts)
        return replace(known, advantages=advantages, returns=returns, correction=correction), samples, row

    def update(
        self, known: Experience, step: int, measured: StepMetrics, ready: BucketHook | None = None
    ) -> dict[str, float]:
        """Update the policy, and the critic where there is one, `epochs` x `minibatches` times.

        Args:
            ready: told of each part of the policy's last update.
        """
        algorithm = self._recipe.algorithm
        updates = algorithm.epochs * algorithm.minibatches
        trains_policy = self._trains_policy(step)
        done = {"critic": _Updates(), "train": _Updates()}
        for number in range(updates):
            rows = self._minibatch(known, number % algorithm.minibatches)
            batch, tokens = known.batch[rows], int(known.lengths[:, rows].sum())
            if self._critic is not None:
                accepts_grad_norm = partial(self._guard.accepts_grad_norm, of="critic")
                report = self._critic.train_step(
                    batch, self._value_objective(known, rows), accepts_grad_norm=accepts_grad_norm
                )
                done["critic"].add(report, tokens)
                if not report.updated:
                    self._guard.record_skip(step, report.grad_norm, of="critic")
                    break
            if trains_policy:
                ended = ready if number == updates - 1 else None
                report = self._policy.train_step(
                    batch, self._objective(known, rows), ended, self._guard.accepts_grad_norm
                )
                done["train"].add(report, tokens)
                if not report.updated:
                    self._guard.record_skip(step, report.grad_norm)
                    break
        for model in self._trained:
            if trains_policy or model is not self._policy:
                model.end_step()
        row: dict[str, float] = {}
        for group, its in done.items():
            row |= its.row(group)
            for key, value in its.means().items() if self._policy.counts else ():
                measured.add(f"{group}/{key}", value)
        return row

    def _trains_policy(self, step: int) -> bool:
        return self._critic is None or step >= self._recipe.critic.warmup_steps

    def _value_objective(self, known: Experience, rows: slice) -> ValueObjective | None:
        if known.returns is None or known.values is None:
            return None
        mask, clip = known.batch.response_mask[rows], self._recipe.critic.clip
        return ValueObjective(known.values[rows], known.returns[rows], mask, clip)

    def _minibatch(self, known: Experience, number: int) -> slice:
        """This rank's rows of a minibatch: `shares_of` has put each rank's part of them one after the other."""
        each = len(known.batch) // self._recipe.algorithm.minibatches
        return slice(number * each, (number + 1) * each)

    def _objective(self, known: Experience, rows: slice) -> PolicyObjective | None:
        algorithm, method, mask = self._recipe.algorithm, self._method, known.batch.response_mask
        if known.old is None or known.advantages is None:
            return None
        lengths = known.lengths[:, rows]
        weights = answer_weights(
            algorithm.loss_agg_mode or method.loss_agg_mode, lengths.flatten(), self._recipe.rollout.max_new_tokens
        ).reshape(lengths.shape)[self._policy.data_parallel_rank]
        clip = method.clip if algorithm.clip is None else algorithm.clip
        high = (
            algorithm.clip_high if algorithm.clip_high is not None or algorithm.clip is not None else method.clip_high
        )

        in_loss = known.reference is not None and algorithm.kl.where == "loss"
        return PolicyObjective(
            advantages=known.advantages[rows],
            mask=mask[rows],
            old=known.old[rows],
            weights=weights.to(mask.device),
            correction=None if known.correction is None else known.correction[rows],
            clip=clip,
            clip_high=high or clip,
            dual_clip=algorithm.dual_clip,
            ratio=method.ratio,
            reference=known.reference[rows] if in_loss else None,
            kl_estimator=algorithm.kl.estimated_by,
            kl_coef=known.kl_coef,
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
        estimator = self._recipe.algorithm.kl.estimated_by
        return token_kl(estimator, known.old, known.reference, known.batch.response_mask)

    def _advantages(self, known: Experience, mine: Tensor, kl: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """[b, T], and returns where there is a critic; where the output layer is.

        Args:
            mine: [b] of this rank's answers.
            kl: [b, T], taken off where it arises, if the method says so.
        """
        algorithm, method, mask = self._recipe.algorithm, self._method, known.batch.response_mask
        advantages = returns = None
        if known.old is not None and method.by_token:
            in_reward = kl is not None and algorithm.kl.where == "reward"
            rewards = token_rewards(mine, known.kl_coef * kl if in_reward else torch.zeros_like(mask), mask)
            if known.values is None:
                advantages = returns_to_go(rewards, mask, algorithm.gamma)
            else:
                advantages, returns = gae(rewards, known.values, mask, algorithm.gamma, algorithm.lam)
        elif known.old is not None:
            advantages = mine[:, None] * mask
        if method.normalised:
            counts = advantages is not None and self._policy.counts
            parts = distributed.gather(Moments.of(advantages, mask) if counts else Moments(0.0, 0.0, 0.0))
            moments = Moments.over(parts)
            advantages = None if advantages is None else moments.normalise(advantages, mask)
        return advantages, returns

    def _correct(self, known: Experience, measured: StepMetrics) -> Tensor | None:
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
            tokens = int(known.lengths.sum())
            measured.sums["mismatch/kl"] = divergence / tokens
            gaps = torch.where(mask.bool(), known.old - known.rollout, 0.0).abs()
            measured.sums["mismatch/logprob_abs_mean"] = float(gaps.sum(dtype=torch.float64)) / tokens
            if weights is not None:
                measured.sums["mismatch/weight"] = float(weights.sum()) / tokens
        return weights

    def _judged(self, samples: Sequence[Sample], batch: Batch, shares: Shares) -> list[Sample]:
        if self._judge is None:
            return list(samples)
        scores = self._of_all(self._judge.scores(batch), shares)
        return [replace(sample, reward=score) for sample, score in zip(samples, scores, strict=True)]

    def _of_all(self, values: Tensor | None, shares: Shares) -> list[float]:
        """A number of every sample, on every rank; from [b] of each rank's share, where the output layer is."""
        counts = values is not None and self._policy.counts
        told = distributed.gather((self._policy.data_parallel_rank, values.tolist()) if counts else None)
        found: dict[int, float] = {}
        for (_, numbers), share in zip(sorted(filter(None, told)), shares, strict=True):
            found |= zip(share, numbers, strict=True)
        return [found[i] for i in range(len(found))]


def shares_of(recipe: Recipe, lengths: Sequence[int], minibatches: int = 1) -> Shares:
    """Deal sequences to data-parallel ranks: consecutive ones where all are padded alike, else balanced in tokens.

    The sequences are cut into minibatches in their order first, and each minibatch is dealt to all ranks. So the same
    sequences are in an update whatever the number of ranks, packed or not.

    Args:
        lengths: of each sequence, in tokens.

    Returns:
        By rank, its part of the first minibatch, then of the second and so on, all of the same count.

    Raises:
        ValueError: the sequences do not divide into minibatches and ranks.
    """
    dp, count = recipe.train.dp, len(lengths)
    if count % (minibatches * dp):
        raise ValueError(f"{count} sequences do not divide into {minibatches} minibatches on {dp} data-parallel ranks")
    balanced = recipe.train.packed or recipe.train.max_tokens_per_micro_batch is not None
    of_all, each = count // minibatches, count // (minibatches * dp)
    shares: Shares = [[] for _ in range(dp)]
    for first in range(0, count, of_all):
        dealt = (
            balanced_shares(lengths[first : first + of_all], dp)
            if balanced
            else [range(rank * each, (rank + 1) * each) for rank in range(dp)]
        )
        for share, numbers in zip(shares, dealt, strict=True):
            share += [first + i for i in numbers]
    return shares
