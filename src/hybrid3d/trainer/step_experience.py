"""Experience: what an update needs of a step's samples, what is measured with the policy before it, and router replay.

The policy's log-probabilities before an update take a pass of their own, unless the update's forward pass is the only
one and nothing needs them before: then that pass computes them. The two passes compute the same, so that the first
update's ratio is 1 with either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid3d.config import Recipe
from hybrid3d.generation.samples import Sample
from hybrid3d.rl.batch import Batch, Rows
from hybrid3d.rl.correction import OffPolicy, correction_weights, mismatch, mismatch_by_position, tokens_by_position
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.trained_model import PolicyModel

COVARIANCE = ("clip_cov", "kl_cov")  # policy losses that treat tokens apart by their covariance


@dataclass(frozen=True, eq=False)
class Experience:
    """The input of an update: the samples of all ranks, and tensors [b, T] of this data-parallel rank's share.

    Outputs of models are None on ranks without the output layer.

    Attributes:
        samples: the samples of all ranks, with the rewards that training uses.
        metrics: this rank's share of the step's metrics so far.
        rows: the sample of each row of this rank's tensors; rows that only fill the batch have numbers beyond them.
        lengths: [data-parallel ranks, b], loss tokens of every row.
        answers: [data-parallel ranks, b], the number of the answer that each row is a branch of, negative where it only
            fills the batch.
        trained: [data-parallel ranks, b], whether each row is trained on: not what only fills the batch, and see
            `algorithm.mask_truncated`.
        mask: 1 at the tokens that are trained: those of the policy in the rows that are.
        rollout, old, reference: log-probabilities by vLLM, by the policy before the update and by the reference policy.
        kl_coef: coefficient of the KL to the reference.
        old_from_update: whether the update's own forward pass fills in `old` and `correction` (`fill_old_logprobs`).
        entropy: of the policy's distributions, where tokens are selected by it.
        answer_kl: the mean KL of an answer to the reference, nats; None without a reference, or before `old` is known.
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
    mask: Tensor
    rollout: Tensor
    old: Tensor | None
    reference: Tensor | None
    kl_coef: float
    old_from_update: bool = False
    entropy: Tensor | None = None
    answer_kl: float | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    correction: Tensor | None = None
    selected: Tensor | None = None

    @property
    def trained_lengths(self) -> Tensor:
        """The number of tokens of every row that are trained, [data-parallel ranks, b]."""
        return self.lengths * self.trained


def come_from_update(step: int, recipe: Recipe) -> bool:
    """Return whether the update of a step computes `old`: it is the only one, and nothing needs them before.

    It depends on the step and its settings only, so that a replay, or a run that goes on, does the same passes.
    """
    algorithm = recipe.algorithm
    updates = algorithm.epochs * algorithm.minibatches if step < recipe.run.steps else 0
    if algorithm.uses_critic and step < recipe.critic.warmup_steps:
        updates = 0
    selects_tokens = algorithm.high_entropy_fraction is not None or algorithm.combination.policy_loss in COVARIANCE
    compares_weights = algorithm.correction.kind != "none" and algorithm.correction.normalize
    replays = recipe.train.router_replay != "none"  # of what the pass before has recorded
    return updates == 1 and not (replays or algorithm.kl.where == "reward" or selects_tokens or compares_weights)


def fill_old_logprobs(logprobs: Tensor, rows: Rows, experience: Experience, recipe: Recipe) -> None:
    """Fill in an experience's `old` and `correction` with the log-probabilities of rows of the batch, [b, T]."""
    assert experience.old is not None, "on ranks with the output layer"
    experience.old[rows] = logprobs
    if experience.correction is not None:
        experience.correction[rows] = weights_of(experience, logprobs, rows, recipe)


def weights_of(experience: Experience, logprobs: Tensor, rows: Rows, recipe: Recipe) -> Tensor:
    """Return the weights of `algorithm.correction` for these log-probabilities of rows of the batch, [b, T]."""
    setting, rollout, mask = recipe.algorithm.correction, experience.rollout[rows], experience.mask[rows]
    return correction_weights(setting.kind, logprobs, rollout, mask, setting.low, setting.high)


def off_policy(experience: Experience) -> OffPolicy:
    """Return how far this rank's samples are from the policy."""
    assert experience.old is not None, "on a rank that reports"
    mask, trained = experience.batch.response_mask, float(experience.mask.sum())
    return OffPolicy.of(experience.old, experience.rollout, mask, experience.correction, trained)


def measure_mismatch(experience: Experience, recipe: Recipe) -> StepMetrics:
    """Return this rank's share of the metrics of the mismatch, on a rank that reports.

    It is that of all tokens that the policy generated, whether they are trained or not; the weights are of those that
    are.
    """
    assert experience.old is not None, "on a rank that reports"
    assert recipe.rollout is not None, "samples were generated"
    mask, metrics, tokens = experience.batch.response_mask, StepMetrics(), int(experience.lengths.sum())
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
    if experience.correction is not None:
        trained = max(1, int(experience.trained_lengths.sum()))
        metrics.sums["mismatch/weight"] = float(experience.correction.sum()) / trained
    return metrics


# Router replay: choices of experts stay with the rank that got a sample from vLLM (`ExpertChoices.held_by`) until it
# is known which ranks train the sample: these get them, and no others


def with_expert_choices(batch: Batch, samples: Sequence[Sample], policy: PolicyModel, recipe: Recipe) -> Batch:
    """Return the batch of samples with vLLM's choices, if they are replayed; where there are none, routers choose."""
    if recipe.train.router_replay != "rollout" or policy.router_replay is None:
        return batch
    experts = torch.full((*batch.tokens.shape, *policy.router_replay.shape), -1, dtype=torch.int16)
    for row, sample in enumerate(samples):
        chosen = torch.from_numpy(sample.experts.array.astype("int16"))
        if len(chosen):
            experts[row, : len(chosen)] = chosen
    return replace(batch, experts=experts)


def replaying_updates(batch: Batch, policy: PolicyModel, recipe: Recipe) -> Batch:
    """Return the batch for the policy's updates, after the pass that computed the old log-probabilities."""
    if recipe.train.router_replay != "old" or policy.router_replay is None:
        return batch
    return replace(batch, experts=policy.router_replay.recorded)


def expert_metrics(samples: Sequence[Sample], policy: PolicyModel, recipe: Recipe) -> dict[str, float]:
    """Return the metrics of vLLM's choices of all ranks' samples, after the pass that computed old log-probabilities.

    Returns:
        This rank's share of
        `mismatch/expert_agreement`: the fraction of choices that the policy's routers would have made too, with the
            same choices in the layers before.
        `mismatch/missing_expert_choices`: the fraction of tokens without choices. Nothing depends on those of a
            sequence's last token, which is not counted.
    """
    replay = policy.router_replay
    if recipe.train.router_replay != "rollout" or replay is None:
        return {}
    layers, per_token = replay.shape
    given = sum(len(sample.experts) for sample in samples)
    needed = [len(sample.prompt_ids) + len(sample.tokens) - 1 for sample in samples]
    missing = sum(max(0, n - len(sample.experts)) for n, sample in zip(needed, samples, strict=True))
    found = {"mismatch/expert_agreement": replay.equal_choices() / max(1, given * layers * per_token)}
    if policy.is_reporting_rank and policy.data_parallel_rank == 0:
        found["mismatch/missing_expert_choices"] = missing / sum(needed)
    return found
