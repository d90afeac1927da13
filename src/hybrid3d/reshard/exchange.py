"""The collectives of the ranks of a process group, for planning a move together: values travel as JSON.

Nothing that comes from a socket is unpickled: whoever sends to a rank can make it fail, and not make it run anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d.reshard.plan.box import Box

_DIGEST_BYTES = 32


class JsonExchange:
    """The collectives of a process group (`reshard.ends.Exchange`); every member calls each of them together.

    Its values are made of strings, numbers, None, boxes, tuples, sets and mappings; a list arrives as a tuple.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None):
        """
        Args:
            group: with a backend for tensors on CPUs, such as gloo.
            ranks: the rank of each member in plans, by default that in the group.
        """
        self.group, self.ranks = group, ranks or range(group.size())
        self.rank = self.ranks[group.rank()]

    def unique(self, value: Any) -> list[tuple[list[int], Any]]:
        data = json.dumps(_to_json(value), separators=(",", ":")).encode()
        own = hashlib.sha256(data).digest() + len(data).to_bytes(8, "little")
        found = [torch.empty(_DIGEST_BYTES + 8, dtype=torch.uint8) for _ in self.ranks]
        dist.all_gather(found, torch.frombuffer(bytearray(own), dtype=torch.uint8), group=self.group)
        members_of: dict[bytes, list[int]] = {}
        for member, digest in enumerate(found):
            members_of.setdefault(digest.numpy().tobytes(), []).append(member)
        return [
            ([self.ranks[m] for m in members], self._broadcast(data, digest, members[0]))
            for digest, members in members_of.items()
        ]

    def _broadcast(self, data: bytes, digest: bytes, src: int) -> Any:
        """Return the value with this digest, which member `src` has."""
        nbytes = int.from_bytes(digest[_DIGEST_BYTES:], "little")
        content = bytearray(data) if src == self.group.rank() else bytearray(nbytes)
        buffer = torch.frombuffer(content, dtype=torch.uint8)
        dist.broadcast(buffer, group=self.group, group_src=src)
        if hashlib.sha256(content).digest() != digest[:_DIGEST_BYTES]:
            raise ValueError(f"{nbytes} bytes from rank {self.ranks[src]} are not those that it announced")
        return _from_json(json.loads(content))

    def minimum(self, number: int) -> int:
        return self._reduced([number], dist.ReduceOp.MIN)[0]

    def maximum(self, numbers: Sequence[int]) -> list[int]:
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def _reduced(self, numbers: Sequence[int], operation: dist.ReduceOp.RedOpType) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, operation, group=self.group)
        return [int(number) for number in tensor]

    def maximum_of(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)


def _to_json(value: Any) -> Any:
    """Return a value in terms of JSON: an object with one key says what its content is."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Box):
        return {"box": [value.start, value.size]}
    if isinstance(value, Mapping):
        return {"map": [[_to_json(key), _to_json(each)] for key, each in value.items()]}
    if isinstance(value, Set):
        if all(isinstance(each, str) for each in value):
            return {"set": sorted(value)}
        return {"set": sorted((_to_json(each) for each in value), key=json.dumps)}
    if isinstance(value, tuple | list):
        return [_to_json(each) for each in value]
    raise TypeError(f"a {type(value).__name__} is exchanged between ranks, which exchange strings, numbers and boxes")


def _from_json(value: Any) -> Any:
    """Return the value that `_to_json` has described."""
    match value:
        case {"box": [list(start), list(size)]} if (
            _are_lengths(start) and _are_lengths(size) and len(start) == len(size)
        ):
            return Box(tuple(start), tuple(size))
        case {"map": list(entries)} if all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
            return {_from_json(key): _from_json(each) for key, each in entries}
        case {"set": list(members)}:
            return frozenset(map(_from_json, members))
        case list(members):
            return tuple(map(_from_json, members))
        case str() | int() | float() | None:
            return value
    raise ValueError(f"no rank sends {str(value)[:80]}")


def _are_lengths(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)
