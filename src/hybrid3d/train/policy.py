"""The policy: log-probabilities of tokens under the distribution that is sampled from."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import TokenScores
from hybrid3d.train.entropy import vocab_parallel_entropy
from hybrid3d.train.micro import MicroBatch
from hybrid3d.train.model import build_model
from hybrid3d.train.trained import MegatronModel


class Policy(MegatronModel):
    """A language model in the train layout; `train_step` gives its loss what it says of tokens."""

    def __init__(self, config: Config, recipe: Recipe, rank: int, trainable: bool = True):
        self._temperature = _temperature(recipe)
        stages = build_model(config, recipe.train, getattr(torch, recipe.model.dtype))
        optimizer = recipe.optimizer if trainable else None
        super().__init__(config, stages, recipe, rank, path=recipe.model.path, optimizer=optimizer)

    def adopt(self, recipe: Recipe) -> None:
        super().adopt(recipe)
        self._temperature = _temperature(recipe)

    @property
    def has_experts(self) -> bool:
        """Whether tokens are sent to experts, so that rounding may send one elsewhere."""
        return self.stages[0].config.num_moe_experts is not None

    def _steps_of(self, recipe: Recipe) -> int:
        return recipe.run.steps - recipe.critic.warmup_steps

    def logprobs(self, batch: Batch) -> torch.Tensor | None:
        """Log-probability of every token given those before it, [B, T]; None on ranks without the output layer."""
        return self._read(batch, lambda output, micro: self._per_token(output, micro).logprobs)

    def _per_token(self, output: torch.Tensor, micro: MicroBatch) -> TokenScores:
        """What logits [.., .., vocabulary / TP] say of the tokens, [b, T]; 0 at position 0."""
        scaled = partial(self._scaled, micro.before(output))  # the cross entropy works in what it is given
        return TokenScores(
            micro.aligned(-vocab_parallel_cross_entropy(scaled(), micro.after)),
            lambda: micro.aligned(vocab_parallel_entropy(scaled())),
        )

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy, of the distribution that is sampled from: at its temperature, without padding of the vocabulary."""
        scaled = logits.float() / self._temperature
        first = parallel_state.get_tensor_model_parallel_rank() * scaled.shape[-1]
        padding = torch.arange(first, first + scaled.shape[-1], device=scaled.device) >= self.config["vocab_size"]
        return scaled.masked_fill(padding, float("-inf"))


def _temperature(recipe: Recipe) -> float:
    """At which answers are drawn; 1 where none are."""
    return recipe.rollout.temperature if recipe.rollout is not None and recipe.algorithm.generates else 1.0
