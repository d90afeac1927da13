"""A move of weights between the ranks of a process group, planned once and run any number of times; and its ends.

The ends are plain tensors and the local shards of DTensors. Which rows a shard has is asked from torch: it shards the
numbers of the rows as it has sharded the tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from hybrid3d.reshard.ends import Exchange, PlainSink, PlainSource, WeightSink, WeightSource
from hybrid3d.reshard.exchange import JsonExchange
from hybrid3d.reshard.move.device import synchronize
from hybrid3d.reshard.move.executor import ExecutionReport, Executor
from hybrid3d.reshard.move.transport import make_transport
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import ITEMSIZE, Demand, Holdings, Piece, View
from hybrid3d.reshard.sync_plan import corrupted_on_any, listed, plan_sync

BUCKET_BYTES = 64 * 2**20
ONE_NODE = 1 << 30


class CorruptTensors(RuntimeError):
    """Raised if tensors arrived otherwise than they were sent."""

    def __init__(self, names: Sequence[str]):
        super().__init__(f"{len(names)} tensors arrived corrupted: {listed(names)}")


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
            source, sink: what this rank sends, and receives; `NoSource()` or `NoSink()` if that is nothing.
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


Run = tuple[int, int, int]
"""Consecutive rows: the first one in the local tensor, the first one in the canonical tensor, and how many."""


def local_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what this rank has of each tensor, by name: a plain tensor itself, and of a DTensor the local shard."""
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in tensors.items()
        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None
    }


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Piece, ...]:
    """Return the pieces of canonical tensors that lie in the tensors of `local_shards`.

    Args:
        tensors: by canonical name, plain tensors, which this rank has whole, and DTensors, of which it has a shard.

    Raises:
        ValueError: a DTensor has sums that are not added up yet, or a tensor has a dtype that cannot be sent.
    """
    pieces = []
    for name, memory in local_shards(tensors).items():
        dtype = str(memory.dtype).removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise ValueError(f"{name} has dtype {dtype}: only {', '.join(ITEMSIZE)} can be resharded")
        for runs in itertools.product(*_runs_of(name, tensors[name])):
            box = Box(tuple(start for _, start, _ in runs), tuple(length for _, _, length in runs))
            offset = sum(first * stride for (first, _, _), stride in zip(runs, memory.stride(), strict=True))
            if box.numel:
                pieces.append(Piece(name, box, View(name, offset, memory.stride()), dtype))
    return tuple(pieces)


def _runs_of(name: str, tensor: torch.Tensor) -> list[list[Run]]:
    """Return the rows of a tensor that this rank has, along each dim."""
    if not isinstance(tensor, DTensor):
        return [[(0, 0, length)] for length in tensor.shape]
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name} is placed as {placements}: redistribute it, as its shards are not added up yet")
    place = tuple(mesh.get_coordinate() or ())
    return [
        _runs(dim, length, mesh, place, tuple(p if getattr(p, "dim", None) == dim else Replicate() for p in placements))
        for dim, length in enumerate(tensor.shape)
    ]


@functools.lru_cache(1 << 12)
def _runs(
    dim: int, length: int, mesh: DeviceMesh, place: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[Run]:
    """Return which of so many rows along a dim this rank has, at its place of the mesh; no other dim is sharded."""
    numbers = torch.arange(length).view([length if d == dim else 1 for d in range(dim + 1)])
    rows = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local().flatten().tolist()
    runs: list[Run] = []
    for position, row in enumerate(rows):
        if runs and row == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((position, row, 1))
    return runs


def tensor_source(tensors: Mapping[str, torch.Tensor]) -> PlainSource:
    """Return the source of tensors that this rank holds; arguments and errors: as for `pieces_of`."""
    return PlainSource(local_shards(tensors), Holdings(pieces_of(tensors)))


def tensor_sink(tensors: Mapping[str, torch.Tensor]) -> PlainSink:
    """Return the sink of tensors that this rank wants; arguments and errors: as for `pieces_of`."""
    return PlainSink(local_shards(tensors), Demand(pieces_of(tensors)))
