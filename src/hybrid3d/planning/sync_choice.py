"""Chooses by expected seconds whether a sync sends all elements, or only those that changed.

The seconds are counted: bytes at the machine's bandwidths, and launches and waits at seconds for each. They are not
measured, so that two runs of one seed, and all ranks of a run, choose alike. `plan --changed` prints the same seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hybrid3d.planning.hardware import Hardware
from hybrid3d.reshard.delta.encoding import form_of
from hybrid3d.reshard.delta.encoding_work import EncodingWork
from hybrid3d.reshard.plan.planner import Transfer

ASSUMED_FRACTION = 0.02  # of the elements that change, until a run knows how many did
RUN = 1 << 24  # elements of the run whose encoding stands for all: large, so that rounding does not show
ENCODING_RATE = 0.5  # bandwidth of encoding and decoding, as a part of that of copies: measured on a CPU
OPTIMIZER_BYTES = 30  # read and written for each parameter: float32 gradient, weight and moments, bfloat16 weight


@dataclass(frozen=True)
class SyncLoad:
    """The bytes that a rank moves in a sync of all elements.

    Attributes:
        near_sent, near_received: to and from other ranks of its node.
        far_sent, far_received: to and from other nodes.
        local: that stay on it.
    """

    near_sent: float = 0.0
    near_received: float = 0.0
    far_sent: float = 0.0
    far_received: float = 0.0
    local: float = 0.0

    @classmethod
    def of(cls, rank: int, transfers: Iterable[Transfer], ranks_per_node: int) -> SyncLoad:
        """Return what a rank's transfers move."""
        counts = dict.fromkeys(("near_sent", "near_received", "far_sent", "far_received", "local"), 0)
        for t in transfers:
            distance = "near" if t.src // ranks_per_node == t.dst // ranks_per_node else "far"
            counts["local" if t.is_local else f"{distance}_{'sent' if t.src == rank else 'received'}"] += t.nbytes
        return cls(**counts)

    @property
    def nbytes(self) -> float:
        return self.near_sent + self.near_received + self.far_sent + self.far_received + self.local

    def scaled(self, factor: float) -> SyncLoad:
        return SyncLoad(**{key: n * factor for key, n in vars(self).items()})


def dense_seconds(load: SyncLoad, hardware: Hardware, borrows: bool = False) -> float:
    """Return the expected seconds of a sync of all elements on a rank.

    Args:
        borrows: ranks of a node read messages in each other's memory.
    """
    copies = 2 * load.nbytes / hardware.memory_bandwidth  # each byte is read and written
    return _together(hardware, copies, *_wire(load, hardware, borrows))


def hidden_seconds(dense: float, early: float, parameters: float, hardware: Hardware) -> float:
    """Return how much of a sync of all elements the optimizer's step hides.

    Args:
        dense: its seconds.
        early: the part of it that can start before the last weights are updated.
        parameters: that the rank's optimizer updates.
    """
    return min(dense * early, OPTIMIZER_BYTES * parameters / hardware.memory_bandwidth)


def encoding_seconds(work: EncodingWork, fraction: float, hardware: Hardware) -> float:
    """Return the expected seconds in which a rank finds, encodes, decodes and writes changed elements."""
    return (
        work.launches * hardware.launch_seconds
        + work.host_waits * hardware.wait_seconds
        + work.moved_bytes(fraction) / (ENCODING_RATE * hardware.memory_bandwidth)
    )


def delta_seconds(
    load: SyncLoad, work: EncodingWork, fraction: float, itemsize: int, hardware: Hardware, borrows: bool = False
) -> float:
    """Return the expected seconds of a sync of changed elements on a rank, with what it sends in full.

    Args:
        itemsize: bytes of an element.
        borrows: as for `dense_seconds`; changed elements are always sent.
    """
    if not load.nbytes:
        return 0.0
    full = min(1.0, work.full_bytes / load.nbytes)
    wire = _wire(load.scaled((1 - full) * encoded_part(fraction, itemsize)), hardware, borrows=False)
    changed = _together(hardware, encoding_seconds(work, fraction, hardware), *wire)
    return changed + dense_seconds(load.scaled(full), hardware, borrows)


def encoded_part(fraction: float, itemsize: int) -> float:
    """Return the bytes of an encoded run, as a part of those of all of its elements."""
    return form_of(RUN, max(1, round(fraction * RUN)), itemsize).nbytes / (RUN * itemsize)


def _wire(load: SyncLoad, hardware: Hardware, borrows: bool) -> tuple[float, float]:
    near = 0.0 if borrows else max(load.near_sent, load.near_received) / hardware.nvlink_bandwidth
    return near, max(load.far_sent, load.far_received) / hardware.network_bandwidth


def _together(hardware: Hardware, *seconds: float) -> float:
    """Return the seconds of resources that work at the same time; a CPU core does all of it in turns."""
    combine: Callable[[tuple[float, ...]], float] = sum if hardware.serial else max
    return combine(seconds)
