"""Predicts a sync that sends only changed elements, from the plan of a full one: see `reshard/delta.py`.

The changed elements are taken to be spread evenly over all tensors; with `rollout.quantization` all are taken for FP8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.planning.hardware import Hardware
from hybrid3d.planning.seconds import SyncTime, estimate_sync_time
from hybrid3d.planning.traffic import SyncTraffic
from hybrid3d.reshard.encoding import entropy_bytes, form_of
from hybrid3d.reshard.layout import ITEMSIZE
from hybrid3d.reshard.quantization import FP8

RUN = 1 << 24  # elements of the run whose encoding stands for all: large, so that rounding does not show


@dataclass(frozen=True)
class ChangedSync:
    """A sync of the elements that changed. Sums over ranks, in bytes.

    Attributes:
        fraction: of the elements that changed.
        delta_bytes: that ranks receive.
        delta_bound_bytes: the entropy of it.
        delta_network_bytes: the part of `delta_bytes` that comes from other nodes.
        bitmap_bytes: the memory of the bitmaps on the fullest rank.
        time: the predicted time.
    """

    fraction: float
    delta_bytes: int
    delta_bound_bytes: int
    delta_network_bytes: int
    bitmap_bytes: int
    time: SyncTime


def predict_changed_sync(
    recipe: Recipe, traffic: SyncTraffic, network_bytes: int, hardware: Hardware, fraction: float
) -> ChangedSync:
    """Predict a sync of the elements that changed.

    Args:
        network_bytes: that a full sync receives from other nodes.
        fraction: of the elements that changed, above 0 and up to 1.
    """
    itemsize = ITEMSIZE[FP8 if recipe.quantizes else recipe.model.dtype]
    changed = max(1, round(fraction * RUN))
    share = form_of(RUN, changed, itemsize).nbytes / (RUN * itemsize)
    bound = entropy_bytes(RUN, changed, itemsize) / (RUN * itemsize)
    received = int(traffic.traffic.sum())
    bitmaps = traffic.held / itemsize / 8
    # A sender reads its bitmaps twice: it counts the changed elements of each message, and then encodes them.
    read = 0 if fraction == 1 else bitmaps
    time = estimate_sync_time(
        traffic.traffic * share, traffic.local * share + read, hardware, recipe.machine.gpus_per_node
    )
    return ChangedSync(
        fraction=fraction,
        delta_bytes=round(received * share),
        delta_bound_bytes=round(received * bound),
        delta_network_bytes=round(network_bytes * share),
        bitmap_bytes=int(np.max(bitmaps)),
        time=time,
    )
