"""Updates from preference pairs, with the losses of `rl/preferences.py`; imports no rollout engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hybrid3d.config import Recipe
from hybrid3d.inputs.models import read_data, read_tokenizer
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.preference_data import Pair, PairData
from hybrid3d.rl.preferences import PairObjective, PairScores, PreferenceSettings, score_pairs, token_weights
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.runtime import device
from hybrid3d.trainer.data_loops import Update
from hybrid3d.trainer.dp_split import shares_of
from hybrid3d.trainer.models import reference_of


class DpoUpdates:
    """Updates the policy with preference pairs: see `DataUpdates`.

    The pairs of a step, not their sequences, are distributed over data-parallel ranks, so that each rank has both
    sequences of its pairs. A rank computes the log-probabilities of all its sequences before the update.
    """

    evaluates = True

    def __init__(self, recipe: Recipe, policy: Policy, rank: int):
        self._policy, self._tokenizer = policy, read_tokenizer(recipe)
        self._reference = reference_of(recipe, policy, rank) if recipe.algorithm.uses_reference else None
        train, held_out = read_data(recipe, policy.config, self._tokenizer)
        assert isinstance(train, PairData)
        assert isinstance(held_out["eval"], PairData)
        self._train, self._held_out = train, held_out["eval"]
        self.data = {"train": train, **held_out}

    def update(self, step: int, recipe: Recipe, accepts_grad_norm: Callable[[float], bool]) -> Update:
        pairs = self._train.batch(step, recipe.algorithm.prompts_per_step)
        settings, numbers = _settings(recipe), self._local(pairs, recipe)
        batch = self._batch([pairs[i] for i in numbers])
        scores = self._score(batch, recipe)
        chosen_tokens = sum(len(pair.chosen) - len(pair.prompt_ids) for pair in pairs)
        tokens = chosen_tokens + sum(len(pair.rejected) - len(pair.prompt_ids) for pair in pairs)
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
        return Update(report, metrics, sum(len(pair.chosen) + len(pair.rejected) for pair in pairs))

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

    def _local(self, pairs: Sequence[Pair], recipe: Recipe) -> list[int]:
        """Return the numbers of this data-parallel rank's pairs."""
        shares = shares_of(recipe, [len(pair.chosen) + len(pair.rejected) for pair in pairs])
        return shares[self._policy.data_parallel_rank]

    def _batch(self, pairs: Sequence[Pair]) -> Batch:
        """Return the sequences of pairs, the chosen one of each before the rejected one."""
        sequences = [tokens for pair in pairs for tokens in (pair.chosen, pair.rejected)]
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
