"""Models with one number a token in place of a vocabulary: the critic that PPO trains, and a frozen reward model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from hybrid3d.config import Optimizer, Recipe
from hybrid3d.families import VALUE_HEAD, Config, with_value_head, family_of
from hybrid3d.reshard.files import CheckpointError, read_index
from hybrid3d.rl.batch import Batch
from hybrid3d.train.megatron_model import MegatronModel
from hybrid3d.train.micro import MicroBatch
from hybrid3d.train.model import build_model
from hybrid3d.train.runtime import device, on_device


class ValueModel(MegatronModel):
    """A model with a value head in the train layout; `train_step` gives its loss values.

    The head comes from the checkpoint where that is a sequence classifier of one label (`score.weight` [1, hidden]),
    and starts at zero where that is a language model.

    Raises (when made):
        CheckpointError: the checkpoint's head is of another shape.
    """

    def __init__(
        self,
        config: Config,
        recipe: Recipe,
        rank: int,
        optimizer: Optimizer | None = None,
        path: str | None = None,
    ):
        """
        Args:
            config: of the checkpoint: a language model's, or a sequence classifier's.
            optimizer: its own; None for a model that stays as it is.
            path: the checkpoint; None is the policy's.
        """
        path = path or recipe.model.path
        config, head = language_model(config), read_index(path).get(VALUE_HEAD)
        if head is not None and head.shape != (1, config["hidden_size"]):
            raise CheckpointError(
                f"{path}: {VALUE_HEAD} has shape {list(head.shape)}, a value of a token takes "
                f"{[1, config['hidden_size']]}: only classifiers of one label (num_labels=1) give one"
            )
        stages = build_model(config, recipe.train, getattr(torch, recipe.model.dtype))
        with on_device():
            for stage in stages:
                if stage.post_process:
                    stage.output_layer = ValueHead(stage.config).to(device())
        super().__init__(
            config,
            stages,
            recipe,
            rank,
            path=path,
            optimizer=optimizer,
            family=with_value_head(family_of(config)),
            fresh=() if head is not None else (VALUE_HEAD,),
        )

    def _optimizer_settings(self, recipe: Recipe) -> Optimizer:
        return recipe.critic.optimizer or recipe.optimizer

    def values(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        """Return the value before each token is sampled, [B, T] float32; None on ranks without the output layer.

        The value at a token is read where the one before it is, as its log-probability is; at position 0 it is 0.
        """
        return self._read(batch, lambda output, micro: self._per_token(output, micro, recipe), recipe)

    def scores(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        """Return a reward model's score of each sequence, at its last token, [B] float32; None as for `values`."""
        return self._read(batch, lambda output, micro: micro.last(output).squeeze(-1), recipe)

    def _per_token(self, output: torch.Tensor, micro: MicroBatch, recipe: Recipe) -> torch.Tensor:
        return micro.aligned(micro.before(output).squeeze(-1))


def language_model(config: Config) -> Config:
    """A checkpoint's config as that of the language model whose layers it has, with a head of its own."""
    names = [name.replace("ForSequenceClassification", "ForCausalLM") for name in config.get("architectures") or []]
    return {**config, "architectures": names, "tie_word_embeddings": False}


class ValueHead(torch.nn.Module):
    """One number a token, float32, in the place of Megatron's output layer and with its signature.

    It is whole on every TP rank. Each computes all of its gradient, or under sequence parallelism that of its own
    tokens, which Megatron adds up for parameters marked so; the gradient of the hidden states is added up for none.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self._gathers = config.sequence_parallel

    def forward(self, hidden: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """[T' or, under sequence parallelism, T' / TP, b, hidden] to [T', b, 1]."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self._gathers:  # numbers, not hidden states
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
