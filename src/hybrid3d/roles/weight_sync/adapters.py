"""Syncs of a policy with adapters: of the adapters alone, or of weights that they are added to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.reshard.layout import Shape
from hybrid3d.roles.weight_sync.session import SyncReport, WeightSync
from hybrid3d.train.policy import Policy

if TYPE_CHECKING:
    from hybrid3d.rollout.adapters import RolloutAdapters
    from hybrid3d.rollout.engine import RolloutEngine


def policy_sync(
    recipe: Recipe, group: dist.ProcessGroup, policy: Policy, engine: RolloutEngine, buckets: Mapping[str, int] | None
) -> WeightSync:
    """Return the sync of a policy and an engine, both of which every rank of the group has.

    Args:
        buckets: the optimizer bucket of each of the policy's local tensors, if syncs overlap the last update.
    """
    if recipe.lora is None:
        return WeightSync(recipe, group, policy.weights, engine, buckets, policy.changes)
    return (AdapterSync if recipe.syncs_adapters else MergedSync)(recipe, group, policy, engine)


class AdapterSync(WeightSync):
    """Sends the policy's own weights once, and its adapters in each sync, to vLLM's slot for them."""

    def __init__(self, recipe: Recipe, group: dist.ProcessGroup, policy: Policy, engine: RolloutEngine):
        self._base: WeightSync | None = WeightSync(recipe, group, policy.weights, engine)
        settings = dataclasses.replace(recipe.sync, delta="never", share_storage=False, keep_loader_layout=False)
        apart = dataclasses.replace(recipe, sync=settings)
        super().__init__(apart, group, policy.adapters, _AdapterSlot(engine))

    def run(self, version: int, verify: bool = False) -> SyncReport:
        """Sync the adapters as they are now, the first time after the policy's own weights.

        Arguments and errors: as for `WeightSync.run`.
        """
        if self._base is None:
            return super().run(version, verify)
        before, self._base = self._base.run(version, verify), None
        return super().run(version, verify).after(before)


class MergedSync(WeightSync):
    """Sends the sums of the policy's own weights and its adapters."""

    def __init__(self, recipe: Recipe, group: dist.ProcessGroup, policy: Policy, engine: RolloutEngine):
        self._policy = policy
        super().__init__(recipe, group, policy.weights, engine)

    def run(self, version: int, verify: bool = False) -> SyncReport:
        with self._policy.merged():
            return super().run(version, verify)


class _AdapterSlot:
    """What a `WeightSync` needs of an engine, for the slot of its adapters."""

    discards_weights = False  # all that a slot has is sent in each sync

    def __init__(self, engine: RolloutEngine):
        self._engine = engine

    @property
    def weight_version(self) -> int | None:
        return self._engine.weight_version

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        self._engine.weight_version = version

    def weights(self, shapes: Mapping[str, Shape]) -> RolloutAdapters:
        return self._engine.adapters(shapes)

    def reset_cache(self) -> None:
        self._engine.reset_cache()
