"""Both engines in one process: the default way to run, one process per GPU and no server between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.generation.rollouts import Rollouts
from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
from hybrid3d.roles.weight_sync import SyncReport, WeightSync
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.train import checkpoint
from hybrid3d.train.policy import Policy
from hybrid3d.train.stepping import BucketHook


class Colocated:
    """One rank's policy and rollout engine, and what runs between them.

    Attributes:
        policy: the trained model.
        engine: vLLM, in the same process.
        sync: brings the policy's weights to the engine.
        rollouts: draws samples and measures accuracy with the weights that the engine has.

    `slots` has every rank's place in the rollout layout. With `weights_of`, a run's checkpoint, the policy has its
    weights and cannot be trained.

    Raises:
        BrokenCheckpoint: `weights_of` is not what was written; on every rank, and before vLLM starts.
    """

    def __init__(self, recipe: Recipe, rank: int, slots: Sequence[int], weights_of: Path | None = None):
        trainable = weights_of is None
        self.config = read_config(recipe.model.path)
        self.tokenizer = read_tokenizer(recipe)
        self.policy = Policy(self.config, recipe, rank, trainable)
        if weights_of is not None:
            checkpoint.load_weights({"policy": self.policy}, weights_of)
        self.policy.offload()  # vLLM takes its share of what is free when it starts
        self.engine = RolloutEngine(recipe, rank, distributed.run_id(), slots)
        self._hidden = trainable and recipe.sync.overlap
        parts = self.policy.parts if self._hidden else None
        self.sync = WeightSync(recipe, self.policy.weights, self.engine, rank, parts)
        train, held_out = read_data(recipe, self.config, self.tokenizer)
        self.rollouts = Rollouts(recipe, self.engine, self.tokenizer, train, held_out)

    def sync_weights(self, number: int) -> SyncReport:
        """Bring the policy's weights, which have so many updates behind them, or end the bringing that has begun."""
        if self.sync.in_progress == number:
            return self.sync.finish()
        self.policy.onload("parameters")
        self.engine.wake("weights")
        return self.sync.run(number)

    def overlap_hook(self, number: int) -> BucketHook | None:
        """What is called with each part of the policy as it is updated, so that it is on its way at once."""
        if not self._hidden:
            return None

        def ready(part: int, last: bool) -> None:
            if part == 0:
                self.engine.wake("weights")
                self.sync.begin(number)
            self.sync.advance(part, last)

        return ready

    def close(self) -> None:
        """Every rank calls this when it is done; the default process group is gone afterwards."""
        dist.barrier()
        self.rollouts.close()
        self.engine.close()
