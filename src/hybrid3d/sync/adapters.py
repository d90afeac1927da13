"""Syncs of a policy with adapters: of the adapters alone, or of weights that they are added to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.reshard.plan.layout import Shape
from hybrid3d.sync.session import SyncReport, WeightSync
from hybrid3d.train.megatron.policy import Policy

if TYPE_CHECKING:
    from hybrid3d.rollout.adapters import RolloutAdapters
    from hybrid3d.rollout.engine import RolloutEngine


def policy_sync(
    recipe: Recipe,
    group: dist.ProcessGroup,
    policy: Policy | None = None,
    engine: RolloutEngine | None = None,
    *,
    overlaps: bool = False,
    transport_group: dist.ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
) -> WeightSync:
    """Return the sync of a group of ranks, each of which has a policy, an engine or both.

    Args:
        overlaps: syncs overlap the last update of a step.
        transport_group, ranks: as for `WeightSync`.
    """
    if recipe.lora is not None:
        kind = AdapterSync if recipe.syncs_adapters else MergedSync
        return kind(recipe, group, policy, engine, transport_group=transport_group, ranks=ranks)
    weights, changes = (None, None) if policy is None else (policy.rollout_weights, policy.changes)
    buckets = policy.optimizer_buckets if policy is not None and overlaps else None
    return WeightSync(recipe, group, weights, engine, buckets, changes, transport_group, ranks)


class AdapterSync(WeightSync):
    """Sends the policy's own weights once, and its adapters in each sync, to vLLM's slot for them."""

    def __init__(
        self,
        recipe: Recipe,
        group: dist.ProcessGroup,
        policy: Policy | None,
        engine: RolloutEngine | None,
        **members: Any,
    ):
        """Arguments: as for `policy_sync`; `members` are its `transport_group` and `ranks`."""
        weights, adapters = (None, None) if policy is None else (policy.weights, policy.adapters)
        self._base: WeightSync | None = WeightSync(recipe, group, weights, engine, **members)
        self._before: SyncReport | None = None  # of the policy's own weights, in the first sync
        settings = dataclasses.replace(recipe.sync, delta="never")
        apart = dataclasses.replace(recipe, sync=settings)
        slot: Any = None if engine is None else _AdapterSlot(engine)  # as much of an engine as a sync uses
        super().__init__(apart, group, adapters, slot, **members)

    def begin(self, version: int, verify: bool = False) -> None:
        """Begin a sync of the adapters, the first time after a sync of the policy's own weights.

        Arguments and errors: as for `WeightSync.run`.
        """
        if self._base is not None:
            self._before = self._base.run(version, verify)
            self._base = None
        super().begin(version, verify)

    def finish(self) -> SyncReport:
        report, before, self._before = super().finish(), self._before, None
        return report if before is None else report.after(before)

    def abandon(self) -> None:
        if self._base is not None:
            self._base.abandon()
        super().abandon()


class MergedSync(WeightSync):
    """Sends the sums of the policy's own weights and its adapters."""

    def __init__(
        self,
        recipe: Recipe,
        group: dist.ProcessGroup,
        policy: Policy | None,
        engine: RolloutEngine | None,
        **members: Any,
    ):
        """Arguments: as for `policy_sync`; `members` are its `transport_group` and `ranks`."""
        self._policy, self._merged = policy, ExitStack()
        weights = None if policy is None else policy.weights
        super().__init__(recipe, group, weights, engine, **members)

    def begin(self, version: int, verify: bool = False) -> None:
        if self._policy is not None:
            self._merged.enter_context(self._policy.merged())
        super().begin(version, verify)

    def finish(self) -> SyncReport:
        with self._merged:
            return super().finish()

    def abandon(self) -> None:
        self._merged.close()
        super().abandon()


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
