"""Where the messages of a rank lie: in its two staging buffers, or in the memory that it lends to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybrid3d.reshard.plan.layout import ITEMSIZE
from hybrid3d.reshard.plan.planner import Message, RankPlan

CanShare = Callable[[Message], bool]
"""Returns whether the two ranks of a message share memory."""


@dataclass(frozen=True)
class Place:
    """Where a message lies in the memory of a rank.

    Attributes:
        buffer: the index of the buffer, 0 or 1.
        offset: in bytes.
        lent: it is a buffer of lent memory, in which the receiver reads the message; otherwise it is a staging buffer.
    """

    buffer: int
    offset: int
    nbytes: int
    lent: bool


PlacedMessage = tuple[Message, Place | None]
"""A message, and its place; without one, the tensor's own memory is sent or filled directly, or it is borrowed."""


def place_messages(plan: RankPlan, can_share: CanShare) -> list[list[PlacedMessage]]:
    """Return the messages of each bucket of a rank with their places.

    All messages that can be are lent, also those that could be sent directly. Their receivers copy them from there into
    their tensors.
    """
    placed = []
    for i, bucket in enumerate(plan.buckets):
        of_bucket: list[PlacedMessage] = []
        ends = {False: 0, True: 0}  # of staging memory, and of lent memory
        # widest dtype first, so that every message is aligned without padding
        for m in sorted(bucket.messages, key=lambda m: -ITEMSIZE[m.dtype]):
            lent = can_share(m)
            nbytes = m.staging_bytes_on(plan.rank) if not lent else m.nbytes if m.src == plan.rank else 0
            of_bucket.append((m, Place(i % 2, ends[lent], nbytes, lent) if nbytes else None))
            ends[lent] += nbytes
        placed.append(of_bucket)
    return placed


def lent_bytes(placed: list[list[PlacedMessage]]) -> tuple[int, int]:
    """Return the size of each buffer of lent memory."""
    places = [place for of_bucket in placed for _, place in of_bucket if place is not None and place.lent]
    first, second = (
        max((place.offset + place.nbytes for place in places if place.buffer == buffer), default=0) for buffer in (0, 1)
    )
    return first, second
