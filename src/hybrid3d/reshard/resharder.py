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
from hybrid3d.reshard.sync_plan import listed, plan_sync

BUCKET_BYTES = 64 * 2**20
ONE_NODE = 1 << 30


class CorruptTensors(RuntimeError):
    """Raised if tensors arrived otherwise than they were sent."""

    def __init__(self, names: Sequence[str]):
        super().__init__(f"{len(names)} tensors arrived corrupted: {listed(names)}")


def corrupted_on_any(names: Sequence[str] | None, exchange: Exchange) -> tuple[str, ...]:
    """Return the corrupted tensors of all ranks, sorted; the ranks also wait for each other here."""
    return tuple(sorted({name for _, of_ranks in exchange.unique(names) for name in of_ranks or ()}))


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
            PlanError: a rank wants what no rank holds, ranks hold a tensor that none wants, or they differ in
                `bucket_bytes` or `ranks_per_node`.
        """
        self.source, self.sink = source, sink
        self.exchange: Exchange = JsonExchange(group, ranks)
        self._device = torch.device(device)
        self._transport = make_transport(self._device, group, ranks_per_node, ranks)
        planned = plan_sync(source, sink, self.exchange, bucket_bytes, ranks_per_node)
        self.plan, self.lower_bound = planned.current, planned.lower_bound
        self._executor: Executor | None = None

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
        try:
            self.source.begin()
            self.sink.begin()
            self.source.complete(self.exchange)
            report = self._executor.run(verify)
            self.sink.end()
            corrupted = corrupted_on_any(report.corrupted, self.exchange)
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
