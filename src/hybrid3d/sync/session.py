"""Weights of one version on their way from the train layout to the rollout layout, at once or bucket by bucket."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybrid3d.distributed import LostPeer
from hybrid3d.reshard.delta.executor import DeltaReport
from hybrid3d.reshard.ends import Exchange, WeightSink, WeightSource
from hybrid3d.reshard.move.device import SideStream, device, synchronize
from hybrid3d.reshard.move.executor import ExecutionReport, Executor
from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.sync_plan import corrupted_on_any, listed, plan_sync
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.sync.delta import DeltaSync, ExpectedSeconds, SyncEstimate, SyncSettings

logger = logging.getLogger(__name__)


class CorruptSync(RuntimeError):
    """Tensors arrived corrupted twice: memory or a link of a machine is faulty."""

    def __init__(self, tensors: Sequence[str]):
        super().__init__(f"{len(tensors)} tensors arrived corrupted twice: {listed(tensors)}")


@dataclass(frozen=True)
class SyncReport:
    """One sync on this rank. Bytes are counted by the transport and by allocations, not read off the plan.

    Attributes:
        exposed_seconds: those of `seconds` in which this rank did nothing else.
        lower_bound_bytes, network_bound_bytes: see `SyncPlan`.
        network_bytes, lent_bytes: see `ExecutionReport`; `phases` are its seconds.
        finalize_bytes: that finalization took at most.
        corrupted: tensors that arrived corrupted on some rank and were sent again.
        dense_reason: why all elements were sent; empty if only those were that changed.
        expected: the seconds by which `sync.delta: auto` chose between both; None where it had no choice.
        delta_bound_bytes: entropy of the changes that this rank sent, in bytes.
        changed: how many of this rank's elements had changed, None where that is not known; and how many elements all
            ranks track.
        of_engines: on the first rank that trains, the metrics of ranks that only generate, which reduce none.
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
    of_engines: StepMetrics = field(default_factory=StepMetrics)

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
        if not self.expected:
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
        of_all = {"sync/dense": float(bool(self.dense_reason)), **(self.expected.metrics if self.expected else {})}
        found = StepMetrics(sums=dict(sums), maxima=dict(maxima), replicated=of_all)
        found.add_rank(self.of_engines)
        return found


class Sync(Protocol):
    """A sync of weights, as trainers and workers use it. All of its ranks call each method together, but `abandon`.

    Either `run`, or `begin`, `bucket_ready` with each optimizer bucket that the rank has, and `finish`. The version of
    a sync that has begun and not finished is `in_progress`.
    """

    @property
    def in_progress(self) -> int | None: ...

    def begin(self, version: int, verify: bool = False) -> None:
        """Begin a sync of weights that are about to be updated, one optimizer bucket after another.

        Args:
            version: of these weights: how many updates they have behind them.
            verify: compare checksums of all boxes at both ends; where some differ, send everything again, once.
        """

    def bucket_ready(self, bucket: int, last: bool) -> None:
        """Send what this rank's optimizer buckets up to this one allow, without waiting for it to arrive.

        Args:
            last: it was the last of this rank; others, which may have more, wait for all that this rank sends.
        """

    def finish(self) -> SyncReport:
        """Send the rest, wait for all of it, and verify the sync if `begin` requested it.

        Raises:
            CorruptSync: checksums differed twice.
        """

    def require_dense(self) -> None:
        """Send all elements in the next sync, also if it is known which have changed. Any one rank may call it."""

    def interrupt(self) -> None:
        """Let the sync in progress fail on all ranks, as one of them is lost; any thread may call it."""

    def abandon(self) -> None:
        """Give up the sync in progress, if there is one, so that another can sync this rank's engine."""

    def run(self, version: int, verify: bool = False) -> SyncReport:
        """Sync the weights as they are now; until it returns the engine refuses to generate.

        Arguments: as for `begin`. Raises: as `finish`.
        """
        self.begin(version, verify)
        return self.finish()

    def begin_when_ready(self, version: int, verify: bool, prepare: Callable[[], None]) -> Callable[[int, bool], None]:
        """Return a hook for a step's last update, which syncs each optimizer bucket that it is called with.

        The version is that after the update. `prepare` is called before the sync begins, with the first bucket.
        """

        def hook(bucket: int, last: bool) -> None:
            if bucket == 0:
                prepare()
                self.begin(version, verify)
            self.bucket_ready(bucket, last)

        return hook


class WeightSync(Sync):
    """Syncs the weights of a group of ranks, each of which has a source, a sink or both.

    Nothing else uses its transport. The estimate is that of `DeltaSync`. `plan` is `SyncPlan.current`; for the other
    attributes see `SyncPlan`. Raises (when made): as `plan_sync`.
    """

    in_progress: int | None = None
    _interrupted = False

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        settings: SyncSettings,
        exchange: Exchange,
        transport: Transport,
        estimate: SyncEstimate | None = None,
    ):
        self.source, self.sink, self.transport = source, sink, transport
        self._exchange, self._stream = exchange, SideStream()
        self._plan = plan_sync(source, sink, exchange, settings.bucket_bytes, settings.ranks_per_node)
        self.plan, self.holders = self._plan.current, self._plan.holders
        self.lower_bound, self.network_bound = self._plan.lower_bound, self._plan.network_bound
        names = {name for _, signature in self.holders for held in signature.values() for name in held}
        self._delta = DeltaSync(source, sink, settings, exchange, names, estimate)
        self._executor: Executor | None = None
        self._reported_overlap = False

    @property
    def sparse(self) -> frozenset[str]:
        """The canonical tensors of which a sync may send only the changed elements; known after the first sync."""
        return self._delta.sparse

    def require_dense(self) -> None:
        self._delta.require_dense()

    def interrupt(self) -> None:
        self._interrupted = True

    def begin(self, version: int, verify: bool = False) -> None:
        if self.in_progress is not None:  # it failed
            self.abandon()
        self.in_progress = self._version = version
        self._began, self._exposed = time.perf_counter(), 0.0
        self._received_before, self._early_bytes = self.transport.received_bytes, 0
        self._verifying = verify
        with self._exposing():
            sends_changes = self._delta.begin(self._plan)
            if sends_changes:
                self._executor = None  # its staging memory is needed by another
            with self._stream.behind():
                self.source.begin()
                self.sink.begin()
                if not sends_changes:
                    self._executing.begin(verify or self._delta.probes)

    def bucket_ready(self, bucket: int, last: bool) -> None:
        if not self._delta.reason:
            return  # little is sent, and how much is known only after the last update
        self._early_bytes = self.transport.received_bytes - self._received_before
        with self._exposing(), self._stream.behind():
            if self.source.advance(bucket):
                ready = self._plan.ready
                self._executing.start_ready_buckets(len(ready) if last else bisect_right(ready, bucket))

    def finish(self) -> SyncReport:
        with self._exposing():
            with self._stream.behind():
                self.source.complete(self._exchange)
                if self._delta.reason:
                    done = self._executing.finish()
                else:
                    done = self._delta.run(self._plan, self.transport, self._verifying)
                self.sink.end()
                corrupted = corrupted_on_any(done.corrupted, self._exchange) if self._verifying else ()
                if corrupted:
                    done = self._send_again(corrupted)
                synchronize()
                # Kernels that are aborted as a rank is lost end without an error, and leave what was in memory: so all
                # members confirm that they have come this far, and that none of theirs was
                if not self.transport.blocks_host and not self._exchange.minimum(int(not self._interrupted)):
                    raise LostPeer("a rank was lost while weights were moved")
            changed = self._delta.count()
            if self._delta.probes:
                self._delta.find_sparse(self._executing)
            self._delta.end(intact=not corrupted)
            self.source.end()
            self._report_overlap(done.received_bytes)
            self.sink.commit(self._version)
        self.in_progress = None
        return SyncReport(
            seconds=time.perf_counter() - self._began,
            exposed_seconds=self._exposed,
            received_bytes=done.received_bytes,
            lower_bound_bytes=self.lower_bound,
            network_bytes=done.network_bytes,
            network_bound_bytes=self.network_bound,
            staging_bytes=done.staging_bytes,
            lent_bytes=done.lent_bytes,
            finalize_bytes=self.sink.finalize_bytes,
            corrupted=corrupted,
            phases=done.seconds,
            dense_reason=self._delta.dense_reason,
            expected=self._delta.expected,
            delta_bound_bytes=done.bound_bytes if isinstance(done, DeltaReport) else 0.0,
            changed=changed,
        )

    def abandon(self) -> None:
        synchronize()  # what has been launched on the side stream may still change the weights
        self.source.abandon()
        self.sink.abandon()
        self.in_progress = None

    @property
    def _executing(self) -> Executor:
        """The executor that sends all elements."""
        if self._executor is None:  # not earlier: before the first sync the trainer may be offloaded
            self._executor = Executor(self.plan, self.source, self.sink, self.transport, device())
        return self._executor

    def _send_again(self, corrupted: tuple[str, ...]) -> ExecutionReport:
        logger.warning("%d tensors arrived corrupted: %s; sending everything again", len(corrupted), listed(corrupted))
        self.sink.begin()
        done = self._executing.run(verify=True)
        self.sink.end()
        still = corrupted_on_any(done.corrupted, self._exchange)
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
    def _exposing(self) -> Iterator[None]:
        """Count the time of this thread as exposed."""
        start = time.perf_counter()
        yield
        self._exposed += time.perf_counter() - start
