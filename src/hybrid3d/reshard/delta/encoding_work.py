"""Counts what finding, encoding, decoding and writing changed elements takes of one rank, beside the wire.

The numbers of operations are those of `runs.py` and `encoding.py`, which a test counts as they run. On a
GPU an operation is at least a launch; `nonzero` is three, and waits for the GPU, as reading a number on the host does.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hybrid3d.reshard.delta.executor import DeltaMessage, delta_plan, local_runs
from hybrid3d.reshard.delta.runs import order_in_run
from hybrid3d.reshard.plan.planner import RankPlan, Transfer

# Launches of a run, without those of its views
COUNT_LAUNCHES = 14
FIND_LAUNCHES = 14
ENCODE_LAUNCHES = 16
DECODE_LAUNCHES = 11
VIEW_LAUNCHES, GAPPED_DIM_LAUNCHES = 1, 5  # of reading or writing changed elements; for each dim of a view with gaps

# Bytes that are read and written, for each element of a run and for each changed one
COUNT_BYTES = 4.125
FIND_BYTES, FOUND_BYTES = 0.625, 166.0
ENCODED_BYTES, ENCODED_BIT_BYTES = 88.0, 45.5  # the second for each low bit of a position
DECODED_BYTES, DECODED_BIT_BYTES = 98.0, 22.3
VIEW_BYTES, GAPPED_DIM_BYTES = 13.0, 100.0


@dataclass
class EncodingWork:
    """What a rank does in a sync of changed elements, in numbers that do not depend on how many changed.

    Attributes:
        launches: operations that start something on a GPU.
        host_waits: how often the host waits for a result.
        counted, found: elements of the runs whose changes are counted, and searched.
        encoded, decoded: elements of the runs that are sent, and received.
        accessed: elements of views that are read or written.
        accessed_dims: those of views with gaps, times their dims.
        full_bytes: of the tensors that are sent in full: sent, received, or copied within the rank.
    """

    launches: float = 0.0
    host_waits: float = 0.0
    counted: float = 0.0
    found: float = 0.0
    encoded: float = 0.0
    decoded: float = 0.0
    accessed: float = 0.0
    accessed_dims: float = 0.0
    full_bytes: float = 0.0

    def moved_bytes(self, fraction: float) -> float:
        """Return the bytes that are read and written if this fraction of the elements changed."""
        low = max(0, int(1 / fraction).bit_length() - 1) if fraction else 0
        of_changed = (
            self.found * FOUND_BYTES
            + self.encoded * (ENCODED_BYTES + ENCODED_BIT_BYTES * low)
            + self.decoded * (DECODED_BYTES + DECODED_BIT_BYTES * low)
            + self.accessed * VIEW_BYTES
            + self.accessed_dims * GAPPED_DIM_BYTES
        )
        return self.counted * COUNT_BYTES + self.found * FIND_BYTES + fraction * of_changed


def count_encoding(
    plan: RankPlan, sparse: Container[str], multiplicity: Mapping[str, int] = MappingProxyType({})
) -> EncodingWork:
    """Count the work of a rank's plan; of the canonical tensors in `sparse` only changed elements are sent.

    Args:
        multiplicity: the number of tensors that each name stands for; 1 by default.
    """
    work, peers = EncodingWork(), set()
    for bucket in delta_plan(plan, sparse).buckets:
        for m in bucket.messages:
            times = _times(m.transfers, multiplicity)
            if isinstance(m, DeltaMessage):
                (_add_sent if m.src == plan.rank else _add_received)(work, m.transfers, times)
                peers.add((m.src, m.dst))
            else:
                work.full_bytes += times * m.nbytes
        for run in local_runs(t for t in bucket.transfers if t.is_local and t.name in sparse):
            _add_local(work, run, _times(run, multiplicity))
        work.full_bytes += sum(
            _times([t], multiplicity) * t.nbytes for t in bucket.transfers if t.is_local and t.name not in sparse
        )
    work.launches += len(peers) + 1  # the numbers of changed elements are exchanged
    work.host_waits += len(peers) + 1
    return work


def _times(transfers: Sequence[Transfer], multiplicity: Mapping[str, int]) -> int:
    return max(multiplicity.get(t.name, 1) for t in transfers)


def _add_access(work: EncodingWork, transfers: Sequence[Transfer], times: int, written: bool) -> int:
    """Add that changed elements are read or written; return the number of views, which are merged as in `Elements`."""
    kinds: dict[object, list[Transfer]] = {}
    for t in transfers:
        kinds.setdefault(order_in_run(t.name, t.box)[:2], []).append(t)
    for same in kinds.values():
        elements = sum(t.box.numel for t in same)
        pieces = [t.target if written else t.source for t in same]
        has_gaps = len(same) > 1 or any(piece is not None and not piece.contiguous for piece in pieces)
        dims = len(same[0].box.size) + (len(same) > 1) if has_gaps else 0
        work.launches += times * (VIEW_LAUNCHES + has_gaps + GAPPED_DIM_LAUNCHES * dims)
        work.accessed += times * elements
        work.accessed_dims += times * elements * dims
    if len(kinds) > 1:  # the positions are divided among the views
        work.launches += times * (len(kinds) + 1)
        work.host_waits += times
    return len(kinds)


def _add_sent(work: EncodingWork, transfers: Sequence[Transfer], times: int) -> None:
    elements = sum(t.box.numel for t in transfers)
    views = _add_access(work, transfers, times, written=False)
    if transfers[0].relayed:  # the positions have arrived with the elements
        work.launches += times * (len(transfers) + 1)
    else:
        _add_finding(work, elements, views, times)
    work.launches += times * (ENCODE_LAUNCHES + (views > 1))
    work.encoded += times * elements


def _add_received(work: EncodingWork, transfers: Sequence[Transfer], times: int) -> None:
    work.launches += times * DECODE_LAUNCHES
    work.host_waits += times
    work.decoded += times * sum(t.box.numel for t in transfers)
    _add_access(work, transfers, times, written=True)
    if any(t.handed_on for t in transfers):
        work.launches += times * (len(transfers) + 1)
        work.host_waits += times


def _add_local(work: EncodingWork, transfers: Sequence[Transfer], times: int) -> None:
    views = _add_access(work, transfers, times, written=False)
    _add_finding(work, sum(t.box.numel for t in transfers), views, times)
    work.launches += times * (views > 1)
    _add_access(work, transfers, times, written=True)


def _add_finding(work: EncodingWork, elements: int, views: int, times: int) -> None:
    """Add that changed elements are counted, and later found: both copy the bits of all views together."""
    work.launches += times * (COUNT_LAUNCHES + FIND_LAUNCHES + 2 * views)
    work.host_waits += times * 2
    work.counted += times * elements
    work.found += times * elements
