"""Divides what several ranks of a node want from other nodes among them, so that it crosses the network only once.

Each of the ranks that want a box is to receive an equal share of it from another node, so that all network adapters of
the node are used, and takes the other shares from the ranks that received them: these are *relays*. A rank receives
only what it wants itself, and each element once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid3d.reshard.plan.box import Box


@dataclass(frozen=True, slots=True)
class Relay:
    """The rank at one position of the reader's node, which hands on what it has received from another node.

    It wants `box` itself, and hands on parts of it.
    """

    box: Box
    position: int
    ranks_per_node: int

    def may_send(self, rank: int) -> bool:
        """Return whether a rank is at this position of its node."""
        return rank % self.ranks_per_node == self.position

    def sender(self, reader: int, tensor: int) -> int:
        """Return the rank that hands on to this reader; it is the same for all tensors of a class."""
        return reader // self.ranks_per_node * self.ranks_per_node + self.position


@dataclass(frozen=True, slots=True)
class Share:
    """A box that a rank receives, from a relay or another node, and that it may hand on to others."""

    box: Box
    relay: Relay | None = None
    handed_on: bool = False


def share_out(
    lacking: Iterable[tuple[int, Box, str, Sequence[Box]]], ranks_per_node: int, turn: int
) -> dict[int, dict[Box, list[Share]]]:
    """Divide what the ranks of a node lack among those that lack the same.

    Args:
        lacking: (position on the node, wanted box, wanted dtype, the disjoint boxes of it that no rank of the node
            holds). Boxes of different dtypes are different data.
        turn: decides which of the ranks begins: it receives what cannot be split.

    Returns:
        By position and wanted box, all that the rank receives of the box from other nodes or from relays. Positions and
        boxes of which no other rank wants a part are left out.
    """
    by_dtype: dict[str, list[tuple[Box, int, Box]]] = defaultdict(list)
    for position, wanted, dtype, far in lacking:
        by_dtype[dtype] += [(box, position, wanted) for box in far]
    found: dict[int, dict[Box, list[Share]]] = defaultdict(lambda: defaultdict(list))
    for entries in by_dtype.values():
        for box, readers in _disjoint(entries):
            parts = [box] if len(readers) == 1 else box.split_evenly(len(readers))
            for i, part in enumerate(parts):
                receiver, wanted = readers[(turn + i) % len(readers)]
                relay = Relay(wanted, receiver, ranks_per_node)
                for position, own in readers:
                    received = Share(part, handed_on=len(readers) > 1)
                    found[position][own].append(received if position == receiver else Share(part, relay))
            turn += 1
    shared = {
        position: {box: shares for box, shares in by_box.items() if any(s.handed_on or s.relay for s in shares)}
        for position, by_box in found.items()
    }
    return {position: by_box for position, by_box in shared.items() if by_box}


def _disjoint(entries: Iterable[tuple[Box, int, Box]]) -> list[tuple[Box, list[tuple[int, Box]]]]:
    """Cut overlapping boxes into disjoint ones, each with all (position, wanted box) that have it.

    Boxes that are equal, or do not overlap, stay whole.
    """
    by_box: dict[Box, list[tuple[int, Box]]] = defaultdict(list)
    for box, position, wanted in entries:
        by_box[box].append((position, wanted))
    cells: list[tuple[Box, list[tuple[int, Box]]]] = []
    for new, readers in sorted(by_box.items(), key=lambda entry: (entry[0].start, entry[0].size)):
        rest, kept = [new], []
        for cell, others in cells:
            common = cell.intersect(new)
            if common is None:
                kept.append((cell, others))
                continue
            kept += [(box, others) for box in cell.subtract(common)]
            kept.append((common, [*others, *readers]))
            rest = [part for box in rest for part in box.without(common)]
        cells = [*kept, *((box, readers) for box in rest)]
    return [(box, sorted(readers, key=lambda reader: reader[0])) for box, readers in cells]
