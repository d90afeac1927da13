"""Experience: what an update needs of a step's samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybrid3d.generation.samples import Sample
from hybrid3d.rl.batch import Batch
from hybrid3d.run.metrics import StepMetrics


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
        old_from_update: whether the update's own forward pass fills in `old` and `correction` (`old_logprobs.py`).
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
