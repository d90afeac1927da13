"""Models with one number per token in place of logits: the critic that PPO trains, and a frozen reward model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from hybrid3d.config import Optimizer, Recipe
from hybrid3d.families import VALUE_HEAD, Config, family_of, with_value_head
from hybrid3d.reshard.file_index import CheckpointError, read_index
from hybrid3d.reshard.move.device import device
from hybrid3d.rl.batch import Batch
from hybrid3d.train.megatron.build import build_model
from hybrid3d.train.megatron.model import MegatronModel
from hybrid3d.train.megatron.runtime import on_device
from hybrid3d.train.megatron.versions import set_in_megatron
from hybrid3d.train.micro_batches import MicroBatch


class ValueModel(MegatronModel):
    """A model with a value head in the train layout; `train_step` calls the loss with values.

    The head is loaded from a sequence classifier's checkpoint with one label (`score.weight` [1, hidden]); for that of
    a language model it starts at zero.

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
        """Build it from a language model's or a classifier's config; `path` None is the policy's checkpoint."""
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
                    set_in_megatron(stage, output_layer=ValueHead(stage.config).to(device()))
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
        return self._read(batch, lambda output, micro: self._per_token(output, micro, recipe), recipe)

    def scores(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        return self._read(batch, lambda output, micro: micro.last(output).squeeze(-1), recipe)

    def _per_token(self, output: torch.Tensor, micro: MicroBatch, recipe: Recipe) -> torch.Tensor:
        return micro.aligned(micro.before(output).squeeze(-1))


def language_model(config: Config) -> Config:
    """Return a checkpoint's config as that of the language model with the same layers and an untied head."""
    names = [name.replace("ForSequenceClassification", "ForCausalLM") for name in config.get("architectures") or []]
    return {**config, "architectures": names, "tie_word_embeddings": False}


class ValueHead(torch.nn.Module):
    """One float32 number per token, in place of Megatron's output layer and with its signature.

    It is replicated on every TP rank. Each rank computes all of its gradient or, under sequence parallelism, that of
    its own tokens, which Megatron sums for parameters marked so; the gradient of the hidden states is not summed.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._gathers = config.sequence_parallel

    def forward(self, hidden: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """Map [T' (under sequence parallelism T' / TP), b, hidden] to [T', b, 1]."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self._gathers:  # numbers, not hidden states
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
