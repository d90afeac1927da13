"""Executes a plan with only the elements that changed: see `encoding.py` for how they travel.

The plan is the one of a dense sync. What travels between two ranks in a bucket is one run of elements (`runs.py`), the
transfers one behind the other, those of one kind together; it is encoded in the staging memory of the bucket, which is
as large as in a dense sync. How many elements of each run changed is exchanged once, before anything else: from then on
both ends know the size of every message. Ranks that hand on boxes learn it for each of these boxes, and then tell their
readers. They hand on the elements that arrived as changed, whose positions they keep until the layer is complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from hybrid3d.reshard.delta.encoding import Changes, Form, decode, encode, entropy_bytes, form_of, num_bytes
from hybrid3d.reshard.delta.runs import Elements, RunChanges, RunOrder, order_in_run, split_positions
from hybrid3d.reshard.ends import Sink, Source
from hybrid3d.reshard.move.executor import ExecutionReport, Executor, Step
from hybrid3d.reshard.move.lent_memory import Place, PlacedMessage
from hybrid3d.reshard.move.memory import BatchedCopies, DeviceBuffer
from hybrid3d.reshard.move.transport import Pending, Transport, as_bytes
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import ITEMSIZE, Piece
from hybrid3d.reshard.plan.planner import Bucket, Message, RankPlan, Transfer, group_messages

# Beyond the tags of messages and of checksums.
COUNTS_TAG = 1 << 21
RELAYED_COUNTS_TAG = COUNTS_TAG + 1

LOCAL_RUN = 1 << 24  # elements of a run that stays on its rank, unless a single box has more


@dataclass(frozen=True, slots=True)
class DeltaMessage(Message):
    """The changed elements of transfers of one dtype between one pair of ranks in one bucket."""

    def staging_bytes_on(self, rank: int) -> int:
        """Return the bytes of staging that this message takes at most: those of all its elements."""
        return self.nbytes if rank in (self.src, self.dst) else 0


def delta_plan(plan: RankPlan, sparse: Container[str]) -> RankPlan:
    """Return the plan with a `DeltaMessage` for each pair of ranks, dtype and bucket, beside what is sent in full.

    Of the canonical tensors in `sparse`, the same on every rank, only changed elements are sent.
    """
    tags: dict[tuple[int, int], int] = defaultdict(int)
    buckets = []
    for bucket in plan.buckets:
        messages = group_messages([t for t in bucket.transfers if t.name not in sparse], tags)
        for m in group_messages([t for t in bucket.transfers if t.name in sparse], tags, direct=False):
            in_order = tuple(sorted(m.transfers, key=_order))
            messages = (*messages, DeltaMessage(m.tag, m.src, m.dst, m.dtype, in_order))
        buckets.append(replace(bucket, messages=messages))
    return replace(plan, buckets=tuple(buckets))


def _order(transfer: Transfer) -> RunOrder:
    return order_in_run(transfer.name, transfer.box)


@dataclass(eq=False)
class _Run:
    """The elements of a message at this end of it.

    Attributes:
        staging: [nbytes] the memory in which it is encoded, large enough for all elements.
        elements: the memory that is read or written.
        starts: the first position of each transfer, and the end.
        copies: pack all elements, or unpack them.
        changes: which elements changed, if this rank sends what it holds itself.
        counts: how many elements of each transfer changed, if the receiver hands any of them on; else their sum.
    """

    message: DeltaMessage
    staging: torch.Tensor
    elements: Elements
    starts: list[int]
    copies: BatchedCopies
    changes: RunChanges | None = None
    counts: list[int] = field(default_factory=list)

    @property
    def relayed(self) -> bool:
        """Whether the sender hands on what it has received; a bucket has only such transfers, or none."""
        return self.message.transfers[0].relayed

    @property
    def num_counts(self) -> int:
        """The length of `counts`."""
        return len(self.message.transfers) if self.hands_on else 1

    @property
    def hands_on(self) -> bool:
        """Whether the receiver hands on some of the transfers."""
        return any(t.handed_on for t in self.message.transfers)

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


@dataclass(eq=False)
class _LocalRun:
    """Elements that stay on this rank."""

    pieces: list[Piece]
    source: Elements
    target: Elements
    changes: RunChanges | None = None
    count: int = 0


@dataclass
class _DeltaStep(Step):
    """The operations of one bucket: those of transfers in full, and those of changed elements."""

    outgoing: list[_Run] = field(default_factory=list)
    incoming: list[_Run] = field(default_factory=list)
    local_runs: list[_LocalRun] = field(default_factory=list)


@dataclass(frozen=True)
class DeltaReport(ExecutionReport):
    """The measurements of a run of changed elements on this rank.

    Attributes:
        bound_bytes: entropy of what this rank sent; see `entropy_bytes`.
        scratch_bytes: memory in which the bits of a run are brought together, one bit an element.
    """

    bound_bytes: float = 0.0
    scratch_bytes: int = 0


class DeltaExecutor(Executor):
    """Executes one rank's part of a plan with the elements that changed, any number of times.

    Every rank of the plan makes it and calls `run_delta` together. The sink must still have what the last run wrote.
    Of the tensors in `sparse` every holder knows the changed elements.
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
        """The number of sends, receives, loans and copies of one run, if something changed in every message."""
        changed = sum(len(step.outgoing) + len(step.incoming) + len(step.local_runs) for step in self._steps)
        return super().operations + changed

    def run_delta(self, changes: Changes, verify: bool = False) -> DeltaReport:
        """Move the elements that changed, and all of the tensors that are sent in full.

        Args:
            changes: by local tensor of the source, which of its elements may have changed since the last run. Bitmaps
                that stay where they are from run to run are set up once.
            verify: compare checksums of all elements at both ends of every transfer.
        """
        self._bind_changes(changes)
        self._arrived.clear()  # a failed run may have left some
        self.begin(verify)
        bound = self._exchange_counts()
        done = self.finish()
        return DeltaReport(**vars(done), bound_bytes=bound, scratch_bytes=self._staging[2].nbytes)

    def _bind(self, step: Step, bucket: Bucket, places: Iterable[PlacedMessage]) -> None:
        super()._bind(step, bucket, places)
        assert isinstance(step, _DeltaStep)
        for transfers in local_runs(t for t in bucket.transfers if t.is_local and t.name in self._sparse):
            pieces = [_source_of(t) for t in transfers]
            source, target = Elements([*map(self._read, transfers)]), Elements([*map(self._write, transfers)])
            step.local_runs.append(_LocalRun(pieces, source, target))

    def _bind_message(self, step: Step, m: Message, place: Place | None) -> None:
        assert isinstance(step, _DeltaStep)
        if not isinstance(m, DeltaMessage):
            super()._bind_message(step, m, place)
            return
        assert place is not None, "these are always staged"
        sends, copies = m.src == self._rank, BatchedCopies()
        flat = self._staged(m, place, copies)
        copies.merge()
        elements = Elements([self._read(t) if sends else self._write(t) for t in m.transfers])
        starts = [0, *accumulate(t.box.numel for t in m.transfers)]
        (step.outgoing if sends else step.incoming).append(_Run(m, as_bytes(flat), elements, starts, copies))

    def _can_share(self, message: Message) -> bool:
        return not isinstance(message, DeltaMessage) and super()._can_share(message)

    def _bind_local(self, step: Step, transfer: Transfer) -> None:
        if transfer.name not in self._sparse:
            super()._bind_local(step, transfer)

    def _bind_changes(self, changes: Changes) -> None:
        """Set up how the changed elements of each run are found, unless these are the bitmaps of the last run."""
        places = {name: bits.data_ptr() for name, bits in changes.items()}
        if self._changes and places == {name: bits.data_ptr() for name, bits in self._changes.items()}:
            return
        self._changes = dict(changes)
        sent = [run for step in self._steps for run in step.outgoing if not run.relayed]
        local_runs = [run for step in self._steps for run in step.local_runs]
        sizes = [run.starts[-1] for run in sent]
        sizes += [sum(piece.box.numel for piece in run.pieces) for run in local_runs]
        self._staging[2:] = [DeviceBuffer(num_bytes(max(sizes, default=0)), self._device)]
        scratch = self._staging[2].flat_view(0, self._staging[2].nbytes, torch.uint8)
        for run in sent:
            run.changes = RunChanges([_source_of(t) for t in run.message.transfers], changes, scratch)
        for local in local_runs:
            local.changes = RunChanges(local.pieces, changes, scratch)

    def _exchange_counts(self) -> float:
        """Tell every receiver how many elements of its messages changed; return the entropy of all that is sent."""
        outgoing = [run for step in self._steps for run in step.outgoing]
        incoming = [run for step in self._steps for run in step.incoming]
        handed_on: dict[tuple[str, Box], int] = {}
        bound = 0.0
        for relayed, tag in ((False, COUNTS_TAG), (True, RELAYED_COUNTS_TAG)):
            sent, received = ([run for run in runs if run.relayed == relayed] for runs in (outgoing, incoming))
            if relayed:
                for run in sent:
                    run.counts = [sum(handed_on[t.name, t.box] for t in run.message.transfers)]
            else:
                _count_changes(sent, [local for step in self._steps for local in step.local_runs])
            bound += sum(entropy_bytes(run.starts[-1], run.count, ITEMSIZE[run.message.dtype]) for run in sent)
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
        for local in step.local_runs:
            if local.count and local.changes is not None:
                positions = local.changes.positions()
                local.target.scatter(positions, local.source.gather(positions))
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
        positions = self._changed_positions(run)
        values = run.elements.gather(positions).to(getattr(torch, run.message.dtype))
        encode(positions, values, run.starts[-1], run.encoded)

    def _changed_positions(self, run: _Run) -> torch.Tensor:
        """Return the positions of the changed elements of a run that this rank sends."""
        if run.changes is not None:
            return run.changes.positions()
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        arrived = [self._arrived.get((t.name, t.box), nothing) for t in run.message.transfers]
        return torch.cat([found + start for found, start in zip(arrived, run.starts, strict=False)])

    def _decode(self, run: _Run) -> None:
        if run.form.kind == "dense":
            run.copies.run()
            for t in run.message.transfers:
                self._keep(t, torch.arange(t.box.numel if t.handed_on else 0, device=self._device))
            return
        positions, values = decode(run.encoded, run.starts[-1], run.count, getattr(torch, run.message.dtype))
        run.elements.scatter(positions, values)
        if run.hands_on:
            ends = split_positions(positions, torch.tensor(run.starts, device=positions.device))
            for t, start, low, high in zip(run.message.transfers, run.starts, ends, ends[1:], strict=False):
                self._keep(t, positions[low:high] - start)

    def _keep(self, transfer: Transfer, positions: torch.Tensor) -> None:
        if transfer.handed_on:
            self._arrived[transfer.name, transfer.box] = positions


def _source_of(transfer: Transfer) -> Piece:
    assert transfer.source is not None, "the sender knows where its pieces lie"
    return transfer.source


def local_runs(transfers: Iterable[Transfer]) -> Iterator[Sequence[Transfer]]:
    """Yield the transfers within a rank in runs of one target dtype."""
    run: list[Transfer] = []
    elements = 0
    for t in sorted(transfers, key=lambda t: (t.dtype, _order(t))):
        if run and (elements + t.box.numel > LOCAL_RUN or t.dtype != run[0].dtype):
            yield run
            run, elements = [], 0
        run.append(t)
        elements += t.box.numel
    if run:
        yield run


def _count_changes(sent: Sequence[_Run], local_runs: Sequence[_LocalRun]) -> None:
    """Set how many elements changed of the runs that this rank sends, and of those that stay on it."""
    summed = [run for run in sent if not run.hands_on]
    changes = [run.changes for run in summed] + [local.changes for local in local_runs]
    waiting = [found.count() for found in changes if found is not None]
    counts = torch.stack(waiting).tolist() if waiting else []
    for run, count in zip(summed, counts, strict=False):
        run.counts = [count]
    for local, count in zip(local_runs, counts[len(summed) :], strict=True):
        local.count = count
    for run in sent:
        if run.hands_on and run.changes is not None:
            run.counts = run.changes.count_by_piece()


def _by_rank(runs: Iterable[_Run], peer: Callable[[Message], int]) -> dict[int, list[_Run]]:
    found: dict[int, list[_Run]] = defaultdict(list)
    for run in runs:
        found[peer(run.message)].append(run)
    return found
