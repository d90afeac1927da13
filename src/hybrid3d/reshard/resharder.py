"""A move of weights between the ranks of a process group, planned once and run any number of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from hybrid3d.reshard.ends import Exchange, WeightSink, WeightSource
from hybrid3d.reshard.exchange import JsonExchange
from hybrid3d.reshard.move.device import synchronize
from hybrid3d.reshard.move.executor import ExecutionReport, Executor
from hybrid3d.reshard.move.transport import make_transport
from hybrid3d.reshard.plan.classes import canonical_shapes, signature_of
from hybrid3d.reshard.plan.coverage import check_arrivals, lower_bound, route_sync
from hybrid3d.reshard.plan.layout import LocalPieces
from hybrid3d.reshard.plan.planner import RankPlan

BUCKET_BYTES = 64 * 2**20
ONE_NODE = 1 << 30
LISTED = 5  # corrupted tensors that a message names


class CorruptTensors(RuntimeError):
    """Raised if tensors arrived otherwise than they were sent."""

    def __init__(self, names: Sequence[str]):
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        super().__init__(f"{len(names)} tensors arrived corrupted: {', '.join(names[:LISTED])}{more}")


class Resharder:
    """Moves weights from the sources of a group of ranks to their sinks. All ranks make and call it together.

    Attributes:
        plan: what this rank sends, receives and copies.
        lower_bound: the fewest bytes that this rank must receive, counted without the plan.
        exchange: the collectives of the ranks.
    """

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        group: dist.ProcessGroup,
        *,
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        ranks: Sequence[int] | None = None,
        ranks_per_node: int = ONE_NODE,
    ):
        """
        Args:
            source: what this rank sends; `NoSource()` if it sends nothing.
            sink: what this rank receives; `NoSink()` if it receives nothing.
            group: with a backend for tensors on CPUs, such as gloo, and one for those on `device`.
            device: of the tensors of all ranks.
            bucket_bytes: the size of each of two staging buffers.
            ranks: the rank of each member in plans, by default that in the group.
            ranks_per_node: how many consecutive ranks share a node; what several ranks of a node want crosses the
                network once. By default all ranks share one.

        Raises:
            PlanError: a rank wants what no rank holds, or ranks hold a tensor that none wants.
        """
        self.source, self.sink = source, sink
        self.exchange: Exchange = JsonExchange(group, ranks)
        self._device = torch.device(device)
        self._transport = make_transport(self._device, group, ranks_per_node, ranks)
        self.plan = self._make_plan(bucket_bytes, ranks_per_node)
        rank, held, wanted = self.exchange.rank, source.holdings, sink.demand
        self.lower_bound = lower_bound({rank: held}, {rank: wanted})[rank]
        self._executor: Executor | None = None

    def _make_plan(self, bucket_bytes: int, ranks_per_node: int) -> RankPlan:
        exchange, rank, held = self.exchange, self.exchange.rank, self.source.holdings
        holders = exchange.unique(signature_of(held))
        wanted = self.sink.demand_for(canonical_shapes(signature for _, signature in holders))
        readers = exchange.unique(signature_of(wanted))
        self.source.agree(
            holders, {kind for _, kinds in exchange.unique(set(self.sink.rounded_scales)) for kind in kinds}
        )
        routes = route_sync(holders, readers, bucket_bytes, ranks_per_node)
        transfers = routes.rank_transfers(rank, LocalPieces({rank: held}, {rank: wanted}))
        plan = routes.plan(rank, transfers, routes.bucket_boundaries([transfers], exchange.minimum))
        check_arrivals(plan, wanted)
        self.sink.prepare(plan.layers)
        return plan

    def bind(self) -> None:
        """Read and write the tensors where they are now: to be called by a rank whose tensors have moved in memory."""
        self._executor = None

    def run(self, version: int = 0, verify: bool = True) -> ExecutionReport:
        """Move the weights as they are now, and return what was measured on this rank.

        Args:
            version: which the sink has afterwards.
            verify: compare checksums of every box at both ends.

        Raises:
            CorruptTensors: checksums differ; the sinks have no version then.
        """
        if self._executor is None:
            self._executor = Executor(self.plan, self.source, self.sink, self._transport, self._device)
        self.source.begin()
        self.sink.begin()
        try:
            self.source.complete(self.exchange)
            report = self._executor.run(verify)
            self.sink.end()
            corrupted = self._corrupted_anywhere(report)
        except BaseException:
            self.source.abandon()
            self.sink.abandon()
            raise
        self.source.end()
        synchronize()
        if corrupted:
            raise CorruptTensors(corrupted)
        self.sink.commit(version)
        return replace(report, corrupted=corrupted if verify else None)

    def _corrupted_anywhere(self, report: ExecutionReport) -> tuple[str, ...]:
        """Return the tensors that arrived corrupted on some rank; the ranks also wait for each other here."""
        return tuple(sorted({name for _, names in self.exchange.unique(report.corrupted or ()) for name in names}))
