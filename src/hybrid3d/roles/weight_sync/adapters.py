"""Syncs of a policy with adapters: of the adapters alone, or of weights that they are added to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.reshard.layout import Shape
from hybrid3d.roles.weight_sync.session import SyncReport, WeightSync
from hybrid3d.train.policy import Policy
from hybrid3d.train.stepping import BucketHook

if TYPE_CHECKING:
    from hybrid3d.rollout.adapters import RolloutAdapters
    from hybrid3d.rollout.engine import RolloutEngine


def policy_sync(
    recipe: Recipe, group: dist.ProcessGroup, policy: Policy, engine: RolloutEngine, buckets: Mapping[str, int] | None
) -> WeightSync | AdapterSync | MergedSync:
    """Return the sync of a policy and an engine, both of which every rank of the group has.

    Args:
        buckets: the optimizer bucket of each of the policy's local tensors, if syncs overlap the last update.
    """
    if recipe.lora is None:
        return WeightSync(recipe, group, policy.weights, engine, buckets, policy.changes)
    return (AdapterSync if recipe.lora.sync == "adapter" else MergedSync)(recipe, group, policy, engine)


class AdapterSync:
    """Sends the policy's own weights once, and its adapters in each sync, to vLLM's slot for them."""

    in_progress: int | None = None  # they never overlap an update

    def __init__(self, recipe: Recipe, group: dist.ProcessGroup, policy: Policy, engine: RolloutEngine):
        self._engine, self._base_is_there = engine, False
        self._base = WeightSync(recipe, group, policy.weights, engine)
        settings = dataclasses.replace(recipe.sync, delta="never", share_storage=False, keep_loader_layout=False)
        apart = dataclasses.replace(recipe, sync=settings)
        self._adapters = WeightSync(apart, group, policy.adapters, _AdapterSlot(engine))

    @property
    def lower_bound(self) -> int:
        """The fewest bytes that this rank must receive in a sync after the first one."""
        return self._adapters.lower_bound

    def run(self, version: int, verify: bool = False) -> SyncReport:
        """Sync the adapters as they are now, before the first time also the policy's own weights.

        These are sent again only where vLLM frees its weights while it sleeps. Arguments and errors: as for
        `WeightSync.run`.
        """
        base = None
        if not self._base_is_there or self._engine.discards_weights:
            base, self._base_is_there = self._base.run(version, verify), True
        report = self._adapters.run(version, verify)
        return report if base is None else report.after(base)

    def finish(self) -> SyncReport:
        raise NotImplementedError("a sync of adapters does not overlap an update")

    def begin_when_ready(self, version: int, verify: bool, prepare: Callable[[], None]) -> BucketHook:
        raise NotImplementedError("a sync of adapters does not overlap an update")


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
