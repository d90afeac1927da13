"""The usual way to sync changed elements, as a baseline: one rank gathers all of them and broadcasts them to all.

Each element is sent by one of the ranks that hold it, found and encoded as hybrid3d does it. Rank 0 receives the
changed elements of all ranks and sends each of them to every other rank; these decode everything and write what their
engine wants. This runs layer by layer: while one layer is broadcast, the next one is gathered, and the one before it is
written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch

from hybrid3d.bench.baselines import Peers
from hybrid3d.reshard.delta.encoding import Changes, Form, decode, encode, form_of
from hybrid3d.reshard.delta.runs import Elements, RunChanges, order_in_run, scatter_elements
from hybrid3d.reshard.ends import Sink, Source
from hybrid3d.reshard.move.memory import DeviceBuffer, align_up
from hybrid3d.reshard.move.transport import Pending, Transport
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import layer_of
from hybrid3d.reshard.plan.layout import ITEMSIZE, Demand, Holdings, Piece, contiguous_stride, pieces_by_name

ROOT = 0
BUFFERS = 3  # layers that are gathered, broadcast and written at the same time


@dataclass(eq=False)
class _Run:
    """The elements of one layer and dtype that one rank contributes.

    Attributes:
        sparse: only the changed elements are sent.
        boxes: (canonical tensor, box) of each part.
        starts: the first position of each part, and the end.
        held: where this rank holds each part, if it is the owner.
        elements, changes: the same, and which of it changed.
        wanted: (part, box in common, view of it) for what this rank wants of it.
    """

    layer: int | None
    owner: int
    dtype: str
    sparse: bool
    boxes: list[tuple[str, Box]]
    starts: list[int] = field(init=False)
    held: list[Piece] = field(default_factory=list)
    elements: Elements | None = None
    changes: RunChanges | None = None
    wanted: list[tuple[int, Box, torch.Tensor]] = field(default_factory=list)
    count: int = 0
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.starts = [0, *accumulate(box.numel for _, box in self.boxes)]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.starts[-1] * ITEMSIZE[self.dtype]

    @property
    def form(self) -> Form:
        return form_of(self.starts[-1], self.count, ITEMSIZE[self.dtype]) if self.sparse else Form("dense", self.nbytes)

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class GatheredDelta:
    """Sends the changed elements of all ranks to all ranks. Every rank calls `run` together.

    Args:
        sparse: the canonical tensors of which only changed elements are sent.
        changes: of this rank's local tensors.

    Attributes:
        nbytes: the bytes of its buffers.
        operations: the sends and receives of the last run.
    """

    def __init__(
        self,
        peers: Peers,
        sparse: Container[str],
        changes: Changes,
        held: tuple[Holdings, Source],
        wanted: tuple[Demand, Sink],
        transport: Transport,
        device: torch.device,
    ):
        self._rank, self._world = peers.rank, len(peers.signatures)
        self._source, self._sink = held[1], wanted[1]
        self._transport, self._device = transport, device
        self._runs = list(_runs(peers, sparse))
        holds, wants = pieces_by_name(held[0].pieces), pieces_by_name(wanted[0].pieces)
        for run in self._runs:
            for i, (name, box) in enumerate(run.boxes):
                if run.owner == self._rank:
                    lies = next(piece for piece in holds[name] if piece.box.contains(box))
                    run.held.append(lies.restrict(box))
                for target in wants.get(name, ()):
                    common = box.intersect(target.box)
                    if common is not None:
                        run.wanted.append((i, common, self._sink.write(target.restrict(common))))
        own = [run for run in self._runs if run.owner == self._rank]
        bits = torch.empty(max((run.starts[-1] // 8 for run in own), default=0), dtype=torch.uint8, device=device)
        for run in own:
            run.elements = Elements([self._source.read(piece) for piece in run.held])
            run.changes = RunChanges(run.held, changes, bits) if run.sparse else None
        layers = groupby(self._runs, key=lambda run: run.layer)
        self._layers = [(layer, list(runs)) for layer, runs in layers]
        sizes = [sum(align_up(run.nbytes) for run in runs) for _, runs in self._layers]
        self._memory = [DeviceBuffer(max(sizes[i::BUFFERS], default=0), device) for i in range(BUFFERS)]
        self.nbytes = sum(memory.nbytes for memory in self._memory)
        self.operations = 0

    @torch.no_grad()
    def run(self) -> int:
        """Run once, and return the received bytes."""
        before, self.operations = self._transport.received_bytes, 0
        self._exchange_counts()
        gathering = self._start(0, None)
        for number in range(len(self._layers)):
            gathering.wait()
            moving = self._start(number + 1, number)
            if number:
                self._write(number - 1)
            gathering = moving
        gathering.wait()
        self._write(len(self._layers) - 1)
        return self._transport.received_bytes - before

    def _exchange_counts(self) -> None:
        """Tell all ranks how many elements of each run changed, through the root."""
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        counts = torch.stack([none if run.changes is None else run.changes.count() for run in self._runs])
        if self._rank == ROOT:
            of_rank = {r: torch.empty_like(counts) for r in range(self._world) if r != ROOT}
            for rank, received in of_rank.items():
                self._receive(received, rank, 0)
            self._transport.run().wait()
            counts = torch.stack([counts, *of_rank.values()]).sum(0)  # each has only those of its own runs
            for rank in of_rank:
                self._send(counts, rank, 1)
        else:
            self._send(counts, ROOT, 0)
            total = torch.empty_like(counts)
            self._receive(total, ROOT, 1)
            counts = total
        self._transport.run().wait()
        for run, count in zip(self._runs, counts.tolist(), strict=True):
            run.count = count

    def _start(self, gathered: int, broadcast: int | None) -> Pending:
        """Start to gather one layer on the root, and to broadcast another one from it."""
        if gathered < len(self._layers):
            self._place(gathered)
            for run in self._runs_of(gathered):
                if run.owner == self._rank:
                    self._encode(run)
                    if self._rank != ROOT:
                        self._send(run.data, ROOT, 2 * gathered + 2)
                elif self._rank == ROOT:
                    self._receive(run.data, run.owner, 2 * gathered + 2)
        for run in self._runs_of(broadcast) if broadcast is not None else ():
            if self._rank == ROOT:
                for rank in range(self._world):
                    if rank not in (ROOT, run.owner):
                        self._send(run.data, rank, 2 * broadcast + 3)  # type: ignore[operator]
            elif run.owner != self._rank:
                self._receive(run.data, ROOT, 2 * broadcast + 3)  # type: ignore[operator]
        return self._transport.run()

    def _runs_of(self, layer: int) -> Iterator[_Run]:
        """Yield the runs of a layer of which something is sent."""
        return (run for run in self._layers[layer][1] if run.form.nbytes)

    def _place(self, layer: int) -> None:
        at = 0
        for run in self._runs_of(layer):
            run.data = self._memory[layer % BUFFERS].flat_view(at, run.form.nbytes, torch.uint8)
            at += align_up(run.nbytes)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        self.operations += 1
        self._transport.submit_send(tensor.view(torch.uint8), rank, tag)

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        self.operations += 1
        self._transport.submit_recv(tensor.view(torch.uint8), rank, tag)

    def _encode(self, run: _Run) -> None:
        if run.form.kind == "dense":
            flat = run.data.view(run.torch_dtype)
            for piece, start in zip(run.held, run.starts, strict=False):
                flat[start : start + piece.box.numel].view(piece.box.size).copy_(self._source.read(piece))
        elif run.changes is not None and run.elements is not None:
            positions = run.changes.positions()
            encode(positions, run.elements.gather(positions), run.starts[-1], run.data)

    def _write(self, number: int) -> None:
        """Write what this rank wants of a layer."""
        layer = self._layers[number][0]
        if any(run.wanted for run in self._layers[number][1]):
            self._sink.open(layer)
        for run in self._runs_of(number):
            if run.form.kind == "dense":
                self._write_all(run)
            else:
                self._write_changed(run)
        if any(run.wanted for run in self._layers[number][1]):
            self._sink.close(layer)

    def _write_all(self, run: _Run) -> None:
        flat = run.data.view(run.torch_dtype)
        for i, common, target in run.wanted:
            box = run.boxes[i][1]
            part = flat[run.starts[i] : run.starts[i + 1]].view(box.size)
            inside = tuple(
                slice(a - b, a - b + n) for a, b, n in zip(common.start, box.start, common.size, strict=True)
            )
            target.copy_(part[inside])

    def _write_changed(self, run: _Run) -> None:
        positions, values = decode(run.data, run.starts[-1], run.count, run.torch_dtype)
        ends = torch.searchsorted(positions, torch.tensor(run.starts, device=positions.device)).tolist()
        for i, common, target in run.wanted:
            at, of_box = positions[ends[i] : ends[i + 1]] - run.starts[i], values[ends[i] : ends[i + 1]]
            inside, at = positions_inside(at, run.boxes[i][1], common)
            scatter_elements(target, at, of_box[inside].to(target.dtype))


def positions_inside(positions: torch.Tensor, box: Box, part: Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which row-major positions of a box lie inside a part of it, and their positions in the part."""
    inside, rest, found = torch.ones_like(positions, dtype=torch.bool), positions, torch.zeros_like(positions)
    steps = zip(
        contiguous_stride(box.size), contiguous_stride(part.size), box.start, part.start, part.size, strict=True
    )
    for step, part_step, box_start, part_start, size in steps:
        index = rest.div(step, rounding_mode="floor")
        rest = rest - index * step
        index += box_start - part_start
        inside &= (index >= 0) & (index < size)
        found += index * part_step
    return inside, found[inside]


def _runs(peers: Peers, sparse: Container[str]) -> Iterator[_Run]:
    """Yield all runs, layer by layer; a box is left out if another rank, or one before, sends a box around it."""
    found: dict[tuple[int | None, int, str, bool], list[tuple[str, Box]]] = {}
    for name, boxes in _held(peers).items():
        sent: list[Box] = []
        for box, rank, dtype in sorted(boxes, key=lambda held: (-held[0].numel, held[1])):
            if not any(other.contains(box) for other in sent):
                found.setdefault((layer_of(name), rank, dtype, name in sparse), []).append((name, box))
                sent.append(box)
    for (layer, rank, dtype, is_sparse), parts in sorted(found.items(), key=lambda item: _run_order(item[0])):
        yield _Run(layer, rank, dtype, is_sparse, sorted(parts, key=lambda part: order_in_run(*part)))


def _held(peers: Peers) -> dict[str, list[tuple[Box, int, str]]]:
    """Return (box, rank, dtype) for all that any rank holds, by tensor."""
    found: dict[str, list[tuple[Box, int, str]]] = defaultdict(list)
    for rank, signature in enumerate(peers.signatures):
        for boxes, names in signature.items():
            for name in names:
                found[name] += [(box, rank, dtype) for box, dtype in boxes]
    return found


def _run_order(key: tuple[int | None, int, str, bool]) -> tuple[bool, int, int, str, bool]:
    layer, rank, dtype, sparse = key
    return layer is None, layer or 0, rank, dtype, sparse
