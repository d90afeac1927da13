"""Weights of one version on their way from the train layout to the rollout layout, at once or bucket by bucket."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import EXCHANGE_TIMEOUT, weights_group
from hybrid3d.reshard.delta.executor import DeltaReport
from hybrid3d.reshard.ends import ChangeSource, Sink
from hybrid3d.reshard.move.executor import ExecutionReport, Executor, NamedTensors
from hybrid3d.reshard.move.transport import make_transport
from hybrid3d.reshard.plan.planner import RankPlan
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.sync.choice import ExpectedSeconds, SyncEstimate
from hybrid3d.sync.delta import DeltaSync
from hybrid3d.sync.plan import SyncPlan
from hybrid3d.sync.quantization import SyncQuantization
from hybrid3d.sync.verification import CorruptSync, corrupted_on_any, listed
from hybrid3d.train.megatron.runtime import SideStream, device, synchronize
from hybrid3d.train.megatron.source import MegatronWeights
from hybrid3d.train.megatron.stepping import BucketHook

if TYPE_CHECKING:  # a sync is between a source and a sink, so that ranks without vLLM can have one
    from hybrid3d.rollout.engine import RolloutEngine
    from hybrid3d.rollout.sink import RolloutWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncReport:
    """One sync on this rank. Bytes are counted by the transport and by allocations, not read off the plan.

    Attributes:
        seconds: from its beginning to its end.
        exposed_seconds: those of them in which this rank did nothing else.
        received_bytes: that this rank received.
        lower_bound_bytes: the fewest bytes that it must receive.
        network_bytes: of those received, the bytes that came from other nodes.
        network_bound_bytes: the fewest bytes that all ranks of its node must receive from other nodes, on the node's
            first rank; 0 on the others.
        staging_bytes: of staging buffers.
        lent_bytes: of the memory in which other ranks of the node read messages.
        finalize_bytes: that finalization took at most.
        corrupted: tensors that arrived corrupted on some rank and were sent again.
        phases: seconds by phase of the execution.
        dense_reason: why all elements were sent; empty if only those were that changed.
        expected: the seconds by which `sync.delta: auto` chose between both; None where it had no choice.
        delta_bound_bytes: entropy of the changes that this rank sent, in bytes.
        changed: how many of this rank's elements had changed, None where that is not known; and how many elements all
            ranks track.
    """

    seconds: float
    exposed_seconds: float
    received_bytes: int
    lower_bound_bytes: int
    network_bytes: int
    network_bound_bytes: int
    staging_bytes: int
    lent_bytes: int
    finalize_bytes: int
    corrupted: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    dense_reason: str = ""
    expected: ExpectedSeconds | None = None
    delta_bound_bytes: float = 0.0
    changed: tuple[int | None, int] = (None, 0)

    def after(self, before: SyncReport) -> SyncReport:
        """Return the report of a sync of other tensors and of this one as that of one sync."""
        sums = ("seconds", "exposed_seconds", "received_bytes", "lower_bound_bytes", "network_bytes")
        maxima = ("staging_bytes", "lent_bytes", "finalize_bytes")
        phases = {
            key: before.phases.get(key, 0.0) + self.phases.get(key, 0.0) for key in {*before.phases, *self.phases}
        }
        return replace(
            self,
            **{key: getattr(before, key) + getattr(self, key) for key in (*sums, "network_bound_bytes")},
            **{key: max(getattr(before, key), getattr(self, key)) for key in maxima},
            corrupted=(*before.corrupted, *self.corrupted),
            phases=phases,
        )

    @property
    def choice(self) -> Mapping[str, Any]:
        """What `sync.delta: auto` chose and why, with the measured seconds; empty where it had no choice."""
        if self.expected is None:
            return {}
        sends = "changed elements" if not self.dense_reason else "all elements"
        return {"sends": sends, **self.expected.fields, "exposed_seconds": self.exposed_seconds}

    def metrics(self) -> StepMetrics:
        """Return this rank's share of the metrics `sync/*`."""
        sums = {
            "sync/received_bytes": self.received_bytes,
            "sync/lower_bound_bytes": self.lower_bound_bytes,
            "sync/network_bytes": self.network_bytes,
            "sync/network_bound_bytes": self.network_bound_bytes,
            "sync/delta_bytes": 0 if self.dense_reason else self.received_bytes,
            "sync/delta_bound_bytes": self.delta_bound_bytes,
        }
        maxima = {
            "sync/seconds": self.seconds,
            "sync/exposed_seconds": self.exposed_seconds,
            "sync/max_staging_bytes": self.staging_bytes,
            "sync/max_lent_bytes": self.lent_bytes,
            "sync/max_finalize_bytes": self.finalize_bytes,
        }
        changed, elements = self.changed
        if changed is not None and elements:
            sums["sync/changed_fraction"] = changed / elements
        of_all = {"sync/dense": float(bool(self.dense_reason))}
        if self.expected is not None:
            of_all["sync/expected_dense_seconds"] = self.expected.dense
            of_all["sync/expected_delta_seconds"] = self.expected.delta
        return StepMetrics(sums=dict(sums), maxima=dict(maxima), replicated=of_all)


class WeightSync:
    """Syncs the weights of a group of ranks, each of which has a source (Megatron), a sink (vLLM) or both.

    Every rank of the group calls every method together: `run`, or `begin`, `bucket_ready` with each optimizer bucket
    that the rank has, and `finish`.

    Attributes:
        plan: what this rank sends, receives and copies.
        source, sink: the trained weights, and vLLM's.
        in_progress: the version of a sync that has begun and not finished.

    Raises (when made): as `SyncPlan`.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: dist.ProcessGroup,
        trained: MegatronWeights | None = None,
        engine: RolloutEngine | None = None,
        optimizer_buckets: Mapping[str, int] | None = None,
        changes: ChangeSource | None = None,
        transport_group: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
    ):
        """
        Args:
            group: the ranks of both layouts.
            trained: this rank's weights, if it trains.
            engine: this rank's engine, if it generates.
            optimizer_buckets: needed by `bucket_ready`: the optimizer bucket of each of the trainer's local tensors.
            changes: which of this rank's weights its updates have changed; without it every sync sends all.
            transport_group: the same ranks as `group`, for weights alone; needed if `group` is not within the default
                group.
            ranks: the rank of each member of the group, which says what node it is on; by default that in the group.
        """
        self._group, self._engine = group, engine
        self._quantization: SyncQuantization | None = None
        discards = engine is not None and engine.discards_weights
        if recipe.quantizes:
            keep = recipe.sync.delta != "never" and not discards
            self._quantization = made = SyncQuantization(group, trained, optimizer_buckets or {}, changes, keep)
            trained, optimizer_buckets, changes = made.trained, made.optimizer_buckets, made.changes
        self._plan = SyncPlan(recipe, group, trained, engine, optimizer_buckets or {}, ranks)
        if self._quantization is not None:
            self._quantization.share(self._plan.holders, self._plan.rounded_scales)
        self.holders, self.lower_bound = self._plan.holders, self._plan.lower_bound
        self._trained = {} if trained is None else trained.tensors
        self.source = NamedTensors(self._trained)
        if transport_group is None:
            transport_group = weights_group(group, device())
        timeout = None if ranks is None else EXCHANGE_TIMEOUT  # such a group's own timeout is that of its creation
        self.transport = make_transport(
            *(device(), transport_group, recipe.machine.gpus_per_node, ranks, timeout),
            shares_memory=recipe.sync.shared_memory == "auto",
        )
        names = {name for _, signature in self.holders for held in signature.values() for name in held}
        estimate = SyncEstimate(recipe, group, self.transport, overlaps=bool(optimizer_buckets))
        self._delta = DeltaSync(recipe, group, trained, changes, self._plan.sink, discards, names, estimate)
        self._stream = SideStream()
        self._executor: Executor | None = None
        self.in_progress: int | None = None
        self._reported_overlap = False

    @property
    def plan(self) -> RankPlan:
        return self._plan.current

    @property
    def sink(self) -> RolloutWeights:
        """vLLM's weights on this rank, which must have an engine."""
        assert self._plan.sink is not None, "a rank without an engine has no sink"
        return self._plan.sink

    @property
    def sparse(self) -> frozenset[str]:
        """The canonical tensors of which a sync may send only the changed elements; known after the first sync."""
        return self._delta.sparse

    @property
    def network_bound(self) -> int:
        """The fewest bytes that must reach this rank's node from others: see `SyncPlan`."""
        return self._plan.network_bound

    def require_dense(self) -> None:
        """Send all elements in the next sync, also if it is known which have changed. Any one rank may call it."""
        self._delta.require_dense()

    def run(self, version: int, verify: bool = False) -> SyncReport:
        """Sync the weights as they are now; until it returns the engine refuses to generate.

        Args:
            version: of these weights: how many updates they have behind them.
            verify: compare checksums of all boxes at both ends; where some differ, send everything again, once.

        Raises:
            CorruptSync: checksums differed twice.
        """
        self.begin(version, verify)
        return self.finish()

    def begin(self, version: int, verify: bool = False) -> None:
        """Begin a sync of weights that are about to be updated, one optimizer bucket after another.

        Every rank then calls `bucket_ready` with each of its buckets, and `finish`. Arguments: as for `run`.
        """
        self.in_progress, self._began, self._exposed = version, time.perf_counter(), 0.0
        self._received_before, self._early_bytes = self.transport.received_bytes, 0
        if self._engine is not None:
            self._engine.weight_version = None
        self._verifying = verify
        if self._quantization is not None:
            with self._on_side_stream():
                self._quantization.begin()
        if self._delta.begin(self._plan):
            self._executor = None  # its staging memory is needed by another
            return
        with self._on_side_stream():
            if self._plan.sink is not None:
                self._plan.sink.begin()
            self._executing.begin(verify or self._delta.probes)

    def begin_when_ready(self, version: int, verify: bool, prepare: Callable[[], None]) -> BucketHook:
        """Return a hook for a step's last update, which syncs each optimizer bucket that it is called with.

        Args:
            version: of the weights after the update.
            prepare: called before the sync begins, with the first bucket.
        """

        def hook(bucket: int, last: bool) -> None:
            if bucket == 0:
                prepare()
                self.begin(version, verify)
            self.bucket_ready(bucket, last)

        return hook

    def bucket_ready(self, bucket: int, last: bool) -> None:
        """Send what this rank's optimizer buckets up to this one allow, without waiting for it to arrive.

        Args:
            last: it was the last of this rank; others, which may have more, wait for all that this rank sends.
        """
        if not self._delta.reason:
            return  # little is sent, and how much is known only after the last update
        self._early_bytes = self.transport.received_bytes - self._received_before
        with self._on_side_stream():
            if self._quantization is not None and not self._quantization.bucket_ready(bucket):
                return
            ready = self._plan.ready
            self._executing.start_ready_buckets(len(ready) if last else bisect_right(ready, bucket))

    def finish(self) -> SyncReport:
        """Send the remaining buckets, wait for all of them, and verify the sync if `begin` requested it.

        Raises:
            CorruptSync: checksums differed twice.
        """
        with self._on_side_stream():
            if self._quantization is not None:
                self._quantization.finish()
            done = self._executing.finish() if self._delta.reason else self._send_changes()
            if self._plan.sink is not None:
                self._plan.sink.end()
            corrupted = corrupted_on_any(done.corrupted, self._group) if self._verifying else ()
            if corrupted:
                done = self._send_again(corrupted)
            if self._engine is not None:
                self._engine.reset_cache()
            synchronize()
        changed = self._delta.count()
        if self._delta.probes:
            self._delta.find_sparse(self._executing)
        self._delta.end(intact=not corrupted)
        if self._quantization is not None:
            self._quantization.end()
        self._report_overlap(done.received_bytes)
        if self._engine is not None:
            self._engine.weight_version = self.in_progress
        self.in_progress = None
        return SyncReport(
            seconds=time.perf_counter() - self._began,
            exposed_seconds=self._exposed,
            received_bytes=done.received_bytes,
            lower_bound_bytes=self.lower_bound,
            network_bytes=done.network_bytes,
            network_bound_bytes=self._plan.network_bound,
            staging_bytes=done.staging_bytes,
            lent_bytes=done.lent_bytes,
            finalize_bytes=0 if self._plan.sink is None else self._plan.sink.finalize_bytes,
            corrupted=corrupted,
            phases=done.seconds,
            dense_reason=str(self._delta.reason),
            expected=self._delta.expected,
            delta_bound_bytes=done.bound_bytes if isinstance(done, DeltaReport) else 0.0,
            changed=changed,
        )

    def abandon(self) -> None:
        """Give up the sync in progress, if there is one, so that another session can sync this rank's engine."""
        if self._plan.sink is not None:
            self._plan.sink.abandon()

    @property
    def _sink(self) -> Sink:
        return NamedTensors({}) if self._plan.sink is None else self._plan.sink

    @property
    def _executing(self) -> Executor:
        """The executor that sends all elements."""
        if self._executor is None:  # not earlier: before the first sync the trainer may be offloaded
            self._executor = Executor(self._plan.current, self.source, self._sink, self.transport, device())
        return self._executor

    def _send_changes(self) -> DeltaReport:
        if self._plan.sink is not None:
            self._plan.sink.begin()
        return self._delta.run(self._plan.current, self.source, self._sink, self.transport, self._verifying)

    def _send_again(self, corrupted: tuple[str, ...]) -> ExecutionReport:
        logger.warning("%d tensors arrived corrupted: %s; sending everything again", len(corrupted), listed(corrupted))
        if self._plan.sink is not None:
            self._plan.sink.begin()
        done = self._executing.run(verify=True)
        if self._plan.sink is not None:
            self._plan.sink.end()
        still = corrupted_on_any(done.corrupted, self._group)
        if still:
            raise CorruptSync(still)
        return done

    def _report_overlap(self, received: int) -> None:
        """Log once how much had arrived before the last optimizer bucket was updated."""
        if self._early_bytes and not self._reported_overlap:
            logger.info(
                "overlapped sync: %d of %d received bytes were in flight before the last weights were updated",
                self._early_bytes,
                received,
            )
            self._reported_overlap = True

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Run on the side stream; the time of this thread counts as exposed."""
        start = time.perf_counter()
        with self._stream.behind():
            yield
        self._exposed += time.perf_counter() - start
