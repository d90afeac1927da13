"""Hands the answers of replicas to the ranks that go on with them, and choices of experts to those that train.

Bytes go to each rank that is to get them once, and enter each node once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybrid3d.distributed import gather_numbers, launcher_ranks
from hybrid3d.generation.samples import Sample
from hybrid3d.patches import pickled, unpickled

T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """Bytes that rank `src` of a group has, and that the receivers are to get; `src` may be one of them."""

    src: int
    receivers: Sequence[int]
    nbytes: int

    def neighbours(self, rank: int, nodes: Sequence[int], number: int) -> tuple[int | None, list[int]]:
        """Return which rank this one gets the message from, if from any, and to which ones it hands it on.

        A message enters a node once, where one of its receivers, another one for each number, hands it on to others.
        `nodes` has the node of each rank of the group.
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

    Every rank of the group calls it with the same messages, and with the contents, by number, of those of which it is
    the source. Each receives once what is for it. `ranks_per_node` consecutive ranks share a node.
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


class AnswerExchange:
    """Exchanges what replicas have answered: each replica's leading rank has it, and each receiver gets it once.

    An answer enters a node, which is `ranks_per_node` consecutive ranks, once. `received_bytes` counts the bytes of all
    answers that this rank has received.
    """

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int, receivers: Sequence[int] | None = None):
        """Exchange among all ranks of all replicas, of which `receivers`, by default all, get all answers."""
        self._group, self._ranks_per_node = group, ranks_per_node
        self._receivers = range(group.size()) if receivers is None else receivers
        self.received_bytes = 0

    def gather(self, replica: int, value: T | None) -> dict[int, T]:
        """Return the values of all replicas by number, on the receivers; on other ranks none or their own.

        The value of a replica is given by the rank that leads it, and is None on others.
        """
        rank = self._group.rank()
        data = pickled((replica, value)) if value is not None else None
        sizes = gather_numbers(0 if data is None else len(data), self._group)
        leading = [leader for leader, size in enumerate(sizes) if size]
        messages = [Message(leader, self._receivers, sizes[leader]) for leader in leading]
        own = {} if data is None else {leading.index(rank): data}
        found = deliver(messages, own, self._group, self._ranks_per_node)
        self.received_bytes += sum(len(part) for number, part in found.items() if number not in own)
        values = dict(unpickled(part) for number, part in found.items() if number not in own)
        if value is not None:
            values[replica] = value
        return dict(sorted(values.items()))


def deliver_choices(
    samples: Sequence[Sample],
    wanted: Sequence[tuple[Sequence[int], Sequence[int]]],
    group: dist.ProcessGroup,
    per_node: int,
) -> list[Sample]:
    """Return samples, those that are wanted here with their choices of experts. All ranks of the group call it.

    Args:
        samples: the same on each rank, apart from which choices it has.
        wanted: which samples, by number, which ranks of the group want; the same on each rank.
        per_node: the number of consecutive ranks that share a node.
    """
    parcels = []  # the samples of each message
    messages, contents = list[Message](), dict[int, torch.Tensor]()
    for numbers, ranks in wanted:
        by_holder: dict[int, list[int]] = {}
        for number in numbers:
            holder = samples[number].experts.held_by
            if holder is not None and samples[number].experts.nbytes:
                by_holder.setdefault(holder, []).append(number)
        for holder, held in by_holder.items():
            if holder == group.rank():
                choices = bytearray(b"".join(samples[number].experts.data for number in held))
                contents[len(messages)] = torch.frombuffer(choices, dtype=torch.uint8)
            messages.append(Message(holder, ranks, sum(samples[number].experts.nbytes for number in held)))
            parcels.append(held)
    found = list(samples)
    for place, data in deliver(messages, contents, group, per_node).items():
        if place in contents:
            continue
        start, received = 0, data.numpy().tobytes()
        for number in parcels[place]:
            experts = found[number].experts
            whole = replace(experts, data=received[start : start + experts.nbytes], tokens=0)
            found[number], start = replace(found[number], experts=whole), start + experts.nbytes
    return found
