"""Where the messages of a rank lie in its two staging buffers, and which of them the receivers read there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybrid3d.reshard.layout import ITEMSIZE
from hybrid3d.reshard.planner import Message, RankPlan

CanShare = Callable[[Message], bool]
"""Returns whether the two ranks of a message can read each other's staging memory."""


@dataclass(frozen=True)
class Place:
    """Where a message lies in the staging memory of a rank.

    Attributes:
        buffer: the index of the staging buffer.
        offset: in bytes.
        lent: the receiver reads the message there; otherwise it is sent from there, or received there.
    """

    buffer: int
    offset: int
    nbytes: int
    lent: bool = False


PlacedMessage = tuple[Message, Place | None]
"""A message, and its place; without one, the tensor's own memory is sent or filled directly, or it is borrowed."""


def place_messages(plan: RankPlan, can_share: CanShare) -> tuple[list[int], list[list[PlacedMessage]]]:
    """Return the size of each staging buffer, and the messages of each bucket of a rank with their places.

    All messages are lent that can be, also those that could be sent directly; their receivers stage nothing. So a
    buffer may be larger than planned, but never than a bucket.
    """
    sizes, placed = list(plan.staging_bytes), []
    for i, bucket in enumerate(plan.buckets):
        of_bucket: list[PlacedMessage] = []
        end = 0
        # widest dtype first, so that every message is aligned without padding
        for m in sorted(bucket.messages, key=lambda m: -ITEMSIZE[m.dtype]):
            sends, lent = m.src == plan.rank, can_share(m)
            nbytes = m.staging_bytes_on(plan.rank) if not lent else m.nbytes if sends else 0
            of_bucket.append((m, Place(i % 2, end, nbytes, lent) if nbytes else None))
            end += nbytes
        placed.append(of_bucket)
        sizes[i % 2] = max(sizes[i % 2], end)
    return sizes, placed
