"""Supervised updates, with the negative log-likelihood of the answers; imports no rollout engine."""

from __future__ import annotations

from collections.abc import Callable

from hybrid3d.config import Recipe
from hybrid3d.inputs.models import read_data, read_tokenizer
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.data import encode_pair
from hybrid3d.rl.objective import sft_loss
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.trainer.data_loops import Update
from hybrid3d.trainer.dp_split import shares_of


class SftUpdates:
    """Updates the policy with the answers of the training data: see `DataUpdates`."""

    evaluates = False

    def __init__(self, recipe: Recipe, policy: Policy):
        self._policy, self._tokenizer = policy, read_tokenizer(recipe)
        self._train, held_out = read_data(recipe, policy.config, self._tokenizer)
        self.data = {"train": self._train, **held_out}

    def update(self, step: int, recipe: Recipe, accepts_grad_norm: Callable[[float], bool]) -> Update:
        policy, tokenizer = self._policy, self._tokenizer
        examples = self._train.batch(step, recipe.sequences_per_step)
        pairs = [encode_pair(tokenizer, example, policy.config["max_position_embeddings"]) for example in examples]
        shares = shares_of(recipe, [len(tokens) for tokens, _ in pairs])
        local = [pairs[i] for i in shares[policy.data_parallel_rank]]
        batch = Batch.from_sequences([p[0] for p in local], [p[1] for p in local], pad_id=tokenizer.pad_token_id)
        report = policy.train_step(batch, sft_loss, recipe, accepts_grad_norm=accepts_grad_norm)
        num_answer_tokens, metrics = sum(len(tokens) - prompt for tokens, prompt in pairs), StepMetrics()
        if policy.is_reporting_rank:
            metrics.sums = {f"train/{key}": value / num_answer_tokens for key, value in report.sums.items()}
        return Update(report, metrics, sum(len(tokens) for tokens, _ in pairs))

    def evaluate(self, recipe: Recipe) -> StepMetrics:
        return StepMetrics()
