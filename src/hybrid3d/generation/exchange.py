"""Hands the answers of replicas to the ranks that go on with them, and choices of experts to those that train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from hybrid3d.distributed import gather_numbers
from hybrid3d.generation.delivery import Message, deliver
from hybrid3d.generation.samples import Sample
from hybrid3d.patches import pickled, unpickled

T = TypeVar("T")


class AnswerExchange:
    """Exchanges what replicas have answered: each replica's leading rank has it, and each receiver gets it once.

    Attributes:
        received_bytes: of all answers that this rank has received.
    """

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int, receivers: Sequence[int] | None = None):
        """
        Args:
            group: all ranks of all replicas.
            ranks_per_node: the number of consecutive ranks that share a node, which an answer enters once.
            receivers: ranks of the group that get the answers of all replicas; by default all.
        """
        self._group, self._ranks_per_node = group, ranks_per_node
        self._receivers = range(group.size()) if receivers is None else receivers
        self.received_bytes = 0

    def gather(self, replica: int, value: T | None) -> dict[int, T]:
        """Return the values of all replicas by number, on the receivers; on other ranks none or their own.

        Args:
            value: of this rank's replica, on the rank that leads it; None on others.
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
