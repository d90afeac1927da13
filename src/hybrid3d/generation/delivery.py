"""Delivers bytes from ranks that have them to those that are to get them, once to each, and once to a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d.distributed import launcher_ranks


@dataclass(frozen=True)
class Message:
    """Bytes that a rank of a group has, and that others of the group are to get.

    Attributes:
        src: the rank that has them.
        receivers: those that get them; `src` may be one of them.
    """

    src: int
    receivers: Sequence[int]
    nbytes: int

    def neighbours(self, rank: int, nodes: Sequence[int], number: int) -> tuple[int | None, list[int]]:
        """Return which rank this one gets the message from, if from any, and to which ones it hands it on.

        A message enters a node once, where one of its receivers, another one for each number, hands it on to others.

        Args:
            nodes: of each rank of the group.
        """
        by_node: dict[int, list[int]] = {}
        for receiver in self.receivers:
            if receiver != self.src:
                by_node.setdefault(nodes[receiver], []).append(receiver)
        near = by_node.get(nodes[rank], [])
        if rank == self.src:
            far = [ranks[number % len(ranks)] for node, ranks in by_node.items() if node != nodes[rank]]
            return None, [*near, *far]
        if rank not in near:
            return None, []
        first = self.src if nodes[self.src] == nodes[rank] else near[number % len(near)]
        return (self.src, [other for other in near if other != rank]) if first == rank else (first, [])


def deliver(
    messages: Sequence[Message], contents: Mapping[int, torch.Tensor], group: dist.ProcessGroup, ranks_per_node: int
) -> dict[int, torch.Tensor]:
    """Deliver messages, and return those that this rank has or gets, as bytes, by their numbers.

    Every rank of the group calls it with the same messages. Each receives what is for it once, and nothing else.

    Args:
        contents: by number, the messages of which this rank is the source, as bytes.
        ranks_per_node: the number of consecutive ranks that share a node.
    """
    found, arriving = dict(contents), list[tuple[int, Any, list[int]]]()
    nodes, sent = [rank // ranks_per_node for rank in launcher_ranks(group)], list[Any]()

    def hand_on(number: int, ranks: list[int]) -> None:
        sent.extend(dist.isend(found[number], group=group, group_dst=rank, tag=number) for rank in ranks)

    for number, message in enumerate(messages):
        src, ranks = message.neighbours(group.rank(), nodes, number) if message.nbytes else (None, [])
        if src is None:
            hand_on(number, ranks)
        else:
            found[number] = torch.empty(message.nbytes, dtype=torch.uint8)
            arriving.append((number, dist.irecv(found[number], group=group, group_src=src, tag=number), ranks))
    for number, work, ranks in arriving:
        work.wait()
        hand_on(number, ranks)
    for work in sent:
        work.wait()
    return found
