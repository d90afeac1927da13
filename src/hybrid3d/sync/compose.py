"""What a sync of a recipe consists of: the one place that reads adapters, quantization and changes together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import EXCHANGE_TIMEOUT, weights_group
from hybrid3d.families import is_quantized
from hybrid3d.reshard.ends import NOTHING_TRACKED, NoSink, NoSource, WeightSink, WeightSource
from hybrid3d.reshard.exchange import JsonExchange
from hybrid3d.reshard.move.device import device
from hybrid3d.reshard.move.transport import make_transport
from hybrid3d.reshard.plan.layout import Piece
from hybrid3d.reshard.quantized import Quantized
from hybrid3d.reshard.sources import Compared, Merged
from hybrid3d.sync.delta import SyncEstimate, SyncSettings
from hybrid3d.sync.session import Sync, SyncReport, WeightSync


class SyncedModel(Protocol):
    """A model in the train layout, as far as a sync reads it."""

    def source(self) -> WeightSource:
        """Return the source of the model's own weights that the rollout engine generates with."""

    def trained_source(self) -> WeightSource:
        """Return the source of the weights that updates change: the adapters of a model that has some."""

    def merged(self) -> AbstractContextManager[None]:
        """Hold in its own weights the sums with its adapters."""


class SyncedEngine(Protocol):
    """A rollout engine, as far as a sync writes it."""

    def sink(self) -> WeightSink: ...

    def adapter_sink(self) -> WeightSink: ...


class ChainedSync(Sync):
    """Two syncs one after the other, of which the first happens once: what it sends does not change."""

    def __init__(self, once: Sync, then: Sync):
        self._once: Sequence[Sync] = (once,)  # empty after the first sync
        self._before: Sequence[SyncReport] = ()  # of `once`, in the first sync
        self._then = then

    @property
    def in_progress(self) -> int | None:
        return self._then.in_progress

    def begin(self, version: int, verify: bool = False) -> None:
        """Begin a sync, the first time after a whole one of what is sent once."""
        self._before = [sync.run(version, verify) for sync in self._once]
        self._once = ()
        self._then.begin(version, verify)

    def bucket_ready(self, bucket: int, last: bool) -> None:
        self._then.bucket_ready(bucket, last)

    def finish(self) -> SyncReport:
        report = self._then.finish()
        for before in self._before:
            report = report.after(before)
        self._before = ()
        return report

    def require_dense(self) -> None:
        self._then.require_dense()

    def interrupt(self) -> None:
        for sync in (*self._once, self._then):
            sync.interrupt()

    def abandon(self) -> None:
        for sync in (*self._once, self._then):
            sync.abandon()


def policy_sync(
    recipe: Recipe,
    group: dist.ProcessGroup,
    policy: SyncedModel | None = None,
    engine: SyncedEngine | None = None,
    *,
    overlaps: bool = False,
    transport_group: dist.ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
) -> Sync:
    """Return the sync of a policy, with its adapters if it has some, between ranks that train, generate or do both.

    Without a `policy` this rank does not train, without an `engine` it does not generate. The other arguments are those
    of `weight_sync`.
    """
    sync = partial(weight_sync, recipe, group, overlaps=overlaps, transport_group=transport_group, ranks=ranks)
    source, sink = policy.source() if policy else NoSource(), engine.sink() if engine else NoSink()
    if recipe.merges_adapters:
        source = Merged(source, policy.merged if policy else nullcontext)
        if recipe.compares_changes and sink.keeps_weights:
            source = Compared(source, partial(_changes_alone, recipe))
    own = sync(source, sink)
    if not recipe.syncs_adapters:
        return own
    adapters = sync(policy.trained_source() if policy else NoSource(), engine.adapter_sink() if engine else NoSink())
    return ChainedSync(once=own, then=adapters)


def _changes_alone(recipe: Recipe, piece: Piece) -> bool:
    """Return whether updates change a piece that is sent as it is, and not as FP8 values."""
    is_made = recipe.quantizes and is_quantized(piece.name)
    return not is_made and recipe.adapts(piece.name, len(piece.box.size))


def weight_sync(
    recipe: Recipe,
    group: dist.ProcessGroup,
    source: WeightSource | None = None,
    sink: WeightSink | None = None,
    *,
    overlaps: bool = False,
    transport_group: dist.ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
) -> WeightSync:
    """Return the sync between this rank's source and sink, quantized if the recipe says so. All ranks call it together.

    Args:
        group: the ranks of both layouts.
        source, sink: of this rank; without one it does not train, or does not generate.
        overlaps: syncs of all elements overlap the last update of a step.
        transport_group: the same ranks as `group`, for weights alone; needed if `group` is not within the default
            group.
        ranks: the rank of each member of the group, which says what node it is on; by default that in the group.
    """
    settings, source, sink = SyncSettings.of(recipe), source or NoSource(), sink or NoSink()
    if recipe.quantizes:
        keep = not settings.always_dense and sink.keeps_weights and source.changes is not NOTHING_TRACKED
        source = Quantized(source, is_quantized, device(), keep)
    transport = make_transport(
        device(),
        transport_group or weights_group(group, device()),
        settings.ranks_per_node,
        ranks,
        EXCHANGE_TIMEOUT if ranks else None,  # such a group's own timeout is that of its creation
        shares_memory=recipe.sync.shared_memory == "auto",
        kind=recipe.sync.transport,
    )
    exchange = JsonExchange(group, ranks)
    chooses = recipe.sync.delta == "auto"
    estimate = SyncEstimate(recipe, exchange, transport, overlaps) if chooses else None
    return WeightSync(source, sink, settings, exchange, transport, estimate)
