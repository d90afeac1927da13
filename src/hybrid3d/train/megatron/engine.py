"""Megatron-Core as the engine that trains (`train.trained_model.TrainEngine`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Optimizer, Recipe
from hybrid3d.families import Config
from hybrid3d.storage.manifest import Identity
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.train.megatron.model import MegatronModel
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.value_model import ValueModel
from hybrid3d.train.trained_model import TrainedModels
from hybrid3d.train.writing import CheckpointWriter


class MegatronEngine:
    """Builds models in Megatron, and keeps their checkpoints in its format."""

    def initialize(self, recipe: Recipe) -> None:
        runtime.initialize(recipe.train, recipe.run.seed)

    def policy(
        self,
        config: Config,
        recipe: Recipe,
        rank: int,
        path: str | None = None,
        trainable: bool = True,
        with_mtp: bool | None = None,
    ) -> Policy:
        return Policy(config, recipe, rank, path, trainable, with_mtp)

    def scoring_model(
        self,
        config: Config,
        recipe: Recipe,
        rank: int,
        optimizer: Optimizer | None = None,
        path: str | None = None,
    ) -> ValueModel:
        return ValueModel(config, recipe, rank, optimizer, path)

    def begin_checkpoint(
        self,
        models: TrainedModels,
        folder: Path,
        progress: Mapping[str, Any],
        group: dist.ProcessGroup,
        in_background: bool,
        identity: Identity | None,
        sharding: str,
    ) -> CheckpointWriter:
        return checkpoint.begin(_own(models), folder, progress, group, in_background, identity, sharding)

    def load_checkpoint(self, models: TrainedModels, folder: Path, group: dist.ProcessGroup) -> dict[str, Any]:
        return checkpoint.load(_own(models), folder, group)

    def load_weights(self, models: TrainedModels, folder: Path, group: dist.ProcessGroup) -> None:
        checkpoint.load_weights(_own(models), folder, group)

    def bytes_expected(self, models: TrainedModels, group: dist.ProcessGroup) -> int:
        return checkpoint.bytes_expected(_own(models), group)

    def host_bytes(self, models: TrainedModels, sharding: str) -> int:
        return checkpoint.host_bytes(_own(models), sharding)

    def can_shard_by_ranks(self, models: TrainedModels, group: dist.ProcessGroup) -> bool:
        return checkpoint.can_shard_by_ranks(_own(models), group)


def _own(models: TrainedModels) -> checkpoint.Models:
    """Return the models as those of Megatron, which this engine has built."""
    found = {name: model for name, model in models.items() if isinstance(model, MegatronModel)}
    assert found.keys() == models.keys(), "an engine keeps checkpoints of the models that it has built"
    return found
