"""Executes a plan with only the elements that changed: see `encoding.py` for how they travel.

The plan is the one of a dense sync. What travels between two ranks in a bucket is one run of elements, the transfers
one behind the other; it is encoded in the staging memory of the bucket, which is as large as in a dense sync. How many
elements of each run changed is exchanged once, before anything else: from then on both ends know the size of every
message. Ranks that hand on boxes learn it for each of these boxes, and then tell their readers. They hand on the
elements that arrived as changed, whose positions they keep until the layer is complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.changes import Changes, changed_positions, gather_elements, scatter_elements
from hybrid3d.reshard.copies import BatchedCopies
from hybrid3d.reshard.encoding import Form, decode, encode, entropy_bytes, form_of
from hybrid3d.reshard.executor import ExecutionReport, Executor, Step
from hybrid3d.reshard.layout import ITEMSIZE, Piece
from hybrid3d.reshard.memory import DeviceBuffer
from hybrid3d.reshard.planner import Message, RankPlan, Transfer, group_messages
from hybrid3d.reshard.protocols import Sink, Source
from hybrid3d.reshard.transport import Pending, Transport, as_bytes

# Beyond the tags of messages and of checksums.
COUNTS_TAG = 1 << 21
RELAYED_COUNTS_TAG = COUNTS_TAG + 1


@dataclass(frozen=True, slots=True)
class DeltaMessage(Message):
    """The changed elements of transfers of one dtype between one pair of ranks in one bucket."""

    def staging_bytes_on(self, rank: int) -> int:
        """Return the bytes of staging that this message takes at most: those of all its elements."""
        return self.nbytes if rank in (self.src, self.dst) else 0


def delta_plan(plan: RankPlan, sparse: Container[str]) -> RankPlan:
    """Return the plan with a `DeltaMessage` for each pair of ranks, dtype and bucket, beside what is sent in full.

    Args:
        sparse: the canonical tensors of which only changed elements are sent; the same on every rank.
    """
    tags: dict[tuple[int, int], int] = defaultdict(int)
    buckets = []
    for bucket in plan.buckets:
        in_full = group_messages([t for t in bucket.transfers if t.name not in sparse], tags)
        changed = group_messages([t for t in bucket.transfers if t.name in sparse], tags, direct=False)
        deltas = (DeltaMessage(m.tag, m.src, m.dst, m.dtype, m.transfers) for m in changed)
        buckets.append(replace(bucket, messages=(*in_full, *deltas)))
    return replace(plan, buckets=tuple(buckets))


@dataclass(eq=False)
class _Run:
    """The elements of a message at this end of it.

    Attributes:
        staging: [nbytes] the memory in which it is encoded, large enough for all elements.
        views: of each transfer, the memory that is read or written.
        starts: the first position of each transfer, and the end.
        copies: pack all elements, or unpack them.
        counts: how many elements of each transfer changed, if the receiver hands any of them on; else their sum.
    """

    message: DeltaMessage
    staging: torch.Tensor
    views: list[torch.Tensor]
    starts: list[int]
    copies: BatchedCopies
    counts: list[int] = field(default_factory=list)

    @property
    def relayed(self) -> bool:
        """Whether the sender hands on what it has received; a bucket has only such transfers, or none."""
        return self.message.transfers[0].relayed

    @property
    def num_counts(self) -> int:
        """The length of `counts`."""
        return len(self.views) if any(t.handed_on for t in self.message.transfers) else 1

    def set_counts(self, counts: list[int]) -> None:
        """Set how many elements of each transfer changed."""
        self.counts = counts if self.num_counts == len(counts) else [sum(counts)]

    @property
    def count(self) -> int:
        """How many elements changed; known once the counts have been exchanged."""
        return sum(self.counts)

    @property
    def form(self) -> Form:
        return form_of(self.starts[-1], self.count, ITEMSIZE[self.message.dtype])

    @property
    def encoded(self) -> torch.Tensor:
        """The part of the staging memory that travels."""
        return self.staging[: self.form.nbytes]


@dataclass
class _DeltaStep(Step):
    """The operations of one bucket: those of transfers in full, and those of changed elements."""

    outgoing: list[_Run] = field(default_factory=list)
    incoming: list[_Run] = field(default_factory=list)
    changed: list[tuple[torch.Tensor, torch.Tensor, Piece]] = field(default_factory=list)
    """(target, source, the piece that is read) of what stays on the rank."""


@dataclass(frozen=True)
class DeltaReport(ExecutionReport):
    """The measurements of a run of changed elements on this rank.

    Attributes:
        bound_bytes: entropy of what this rank sent; see `entropy_bytes`.
    """

    bound_bytes: float = 0.0


class DeltaExecutor(Executor):
    """Executes one rank's part of a plan with the elements that changed, any number of times.

    Every rank of the plan calls `run_delta` together. The sink must still have the elements of the last run.

    Args:
        sparse: as for `delta_plan`; of these tensors every holder knows the changed elements.
    """

    _step_type = _DeltaStep
    _steps: list[_DeltaStep]  # type: ignore[assignment]

    def __init__(
        self,
        plan: RankPlan,
        sparse: Container[str],
        source: Source,
        sink: Sink,
        transport: Transport,
        device: torch.device | str = "cpu",
    ):
        self._sparse = sparse
        self._changes: Changes = {}
        self._arrived: dict[tuple[str, Box], torch.Tensor] = {}  # positions of changed elements that are handed on
        super().__init__(delta_plan(plan, sparse), source, sink, transport, device)

    @property
    def operations(self) -> int:
        """The number of sends, receives and copies of one run, if something changed in every message."""
        changed = sum(len(step.outgoing) + len(step.incoming) + len(step.changed) for step in self._steps)
        return super().operations + changed

    def run_delta(self, changes: Changes, verify: bool = False) -> DeltaReport:
        """Move the elements that changed, and all of the tensors that are sent in full.

        Args:
            changes: by local tensor of the source, which of its elements may have changed since the last run.
            verify: compare checksums of all elements at both ends of every transfer.
        """
        self._changes = changes
        self._arrived.clear()  # a failed run may have left some
        self.begin(verify)
        bound = self._exchange_counts()
        done = self.finish()
        self._changes = {}
        return DeltaReport(**vars(done), bound_bytes=bound)

    def _bind_message(self, step: Step, m: Message, staging: DeviceBuffer, at: int) -> None:
        assert isinstance(step, _DeltaStep)
        if not isinstance(m, DeltaMessage):
            super()._bind_message(step, m, staging, at)
            return
        sends, copies = m.src == self._rank, BatchedCopies()
        flat = self._staged(m, staging, at, copies)
        copies.merge()
        views = [self._read(t) if sends else self._write(t) for t in m.transfers]
        starts = [0, *accumulate(t.box.numel for t in m.transfers)]
        (step.outgoing if sends else step.incoming).append(_Run(m, as_bytes(flat), views, starts, copies))

    def _bind_local(self, step: Step, transfer: Transfer) -> None:
        assert isinstance(step, _DeltaStep)
        if transfer.name in self._sparse:
            step.changed.append((self._write(transfer), self._read(transfer), _source_of(transfer)))
        else:
            super()._bind_local(step, transfer)

    def _exchange_counts(self) -> float:
        """Tell every receiver how many elements of its messages changed; return the entropy of all that is sent."""
        outgoing = [run for step in self._steps for run in step.outgoing]
        incoming = [run for step in self._steps for run in step.incoming]
        handed_on: dict[tuple[str, Box], int] = {}
        bound = 0.0
        for relayed, tag in ((False, COUNTS_TAG), (True, RELAYED_COUNTS_TAG)):
            sent, received = ([run for run in runs if run.relayed == relayed] for runs in (outgoing, incoming))
            for run in sent:
                transfers = run.message.transfers
                if relayed:
                    counts = [handed_on[t.name, t.box] for t in transfers]
                else:
                    counts = [len(self._changed_elements(t)) for t in transfers]
                run.set_counts(counts)
                for t, count in zip(transfers, counts, strict=True):
                    bound += entropy_bytes(t.box.numel, count, ITEMSIZE[t.dtype])
            self._send_counts(sent, received, tag)
            for run in received if not relayed else ():
                for t, count in zip(run.message.transfers, run.counts, strict=False):
                    if t.handed_on:  # of a dense run it is not known which elements changed
                        handed_on[t.name, t.box] = t.box.numel if run.form.kind == "dense" else count
        self._timer("counts")
        return bound

    def _send_counts(self, outgoing: Iterable[_Run], incoming: Iterable[_Run], tag: int) -> None:
        """Send the counts of outgoing runs, and set those of incoming ones."""
        sent, received = _by_rank(outgoing, lambda m: m.dst), _by_rank(incoming, lambda m: m.src)
        numbers = {
            src: torch.empty(sum(run.num_counts for run in runs), dtype=torch.int64, device=self._device)
            for src, runs in received.items()
        }
        for src, counted in numbers.items():
            self._transport.submit_recv(as_bytes(counted), src, tag)
        for dst, runs in sent.items():
            counted = torch.tensor([count for run in runs for count in run.counts], device=self._device)
            self._transport.submit_send(as_bytes(counted), dst, tag)
        self._transport.run().wait()
        for src, counted in numbers.items():
            counts = iter(counted.tolist())
            for run in received[src]:
                run.counts = [next(counts) for _ in range(run.num_counts)]

    def _start(self, step: Step) -> Pending:
        assert isinstance(step, _DeltaStep)
        for run in step.incoming:
            if run.count:
                self._transport.submit_recv(run.encoded, run.message.src, run.message.tag)
        for run in step.outgoing:
            if run.count:
                self._encode(run)
                self._transport.submit_send(run.encoded, run.message.dst, run.message.tag)
        self._timer("encode")
        pending = super()._start(step)
        for target, source, piece in step.changed:
            positions = changed_positions(self._changes, piece)
            scatter_elements(target, positions, gather_elements(source, positions).to(target.dtype))
        self._timer("copy")
        return pending

    def _complete(self, step: Step) -> None:
        assert isinstance(step, _DeltaStep)
        for run in step.incoming:
            if run.count:
                self._decode(run)
        self._timer("decode")
        super()._complete(step)
        if step.closes:  # all of the layer has been handed on, and nothing of the next one has been decoded
            self._arrived.clear()

    def _encode(self, run: _Run) -> None:
        if run.form.kind == "dense":
            run.copies.run()
            return
        positions, values = [], []
        for t, view, start in zip(run.message.transfers, run.views, run.starts, strict=False):
            found = self._changed_elements(t)
            positions.append(found + start)
            values.append(gather_elements(view, found))
        dtype = getattr(torch, run.message.dtype)
        encode(torch.cat(positions), torch.cat(values).to(dtype), run.starts[-1], run.encoded)

    def _changed_elements(self, transfer: Transfer) -> torch.Tensor:
        """Return the positions of the changed elements of a box that this rank sends."""
        if not transfer.relayed:
            return changed_positions(self._changes, _source_of(transfer))
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        return self._arrived.get((transfer.name, transfer.box), nothing)

    def _decode(self, run: _Run) -> None:
        transfers, starts = run.message.transfers, run.starts
        if run.form.kind == "dense":
            run.copies.run()
            for t in transfers:
                self._keep(t, torch.arange(t.box.numel if t.handed_on else 0, device=self._device))
            return
        dtype = getattr(torch, run.message.dtype)
        positions, values = decode(run.encoded, starts[-1], run.count, dtype)
        ends = torch.searchsorted(positions, torch.tensor(starts, device=positions.device)).tolist()
        for t, view, start, low, high in zip(transfers, run.views, starts, ends, ends[1:], strict=False):
            if low < high:
                changed = positions[low:high] - start
                scatter_elements(view, changed, values[low:high])
                self._keep(t, changed)

    def _keep(self, transfer: Transfer, positions: torch.Tensor) -> None:
        """Keep the positions of a box's changed elements, if it is handed on."""
        if transfer.handed_on:
            self._arrived[transfer.name, transfer.box] = positions


def _source_of(transfer: Transfer) -> Piece:
    assert transfer.source is not None, "the sender knows where its pieces lie"
    return transfer.source


def _by_rank(runs: Iterable[_Run], peer: Callable[[Message], int]) -> dict[int, list[_Run]]:
    found: dict[int, list[_Run]] = defaultdict(list)
    for run in runs:
        found[peer(run.message)].append(run)
    return found
