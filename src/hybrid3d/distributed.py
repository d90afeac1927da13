"""The processes of a run: this rank's number, the process group of all ranks, and collectives on Python objects.

Every collective takes its process group as an argument, and every rank of that group calls it.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d import patches
from hybrid3d.launch_environment import (
    adopt_slurm,
    local_rank,
    local_world_size,
    rank,
    run_id,
    under_launcher,
    world_size,
)

__all__ = [
    "adopt_slurm",
    "all_reduce_max",
    "all_reduce_min",
    "broadcast_object",
    "gather_objects",
    "gather_unique",
    "local_rank",
    "local_world_size",
    "rank",
    "run_id",
    "start",
    "under_launcher",
    "world_size",
]


def start(store: dist.Store | None = None) -> dist.ProcessGroup:
    """Bind this rank to its GPU, where there is one, and create the default process group.

    Args:
        store: the rendezvous store of the ranks; without it they rendezvous at MASTER_ADDR:MASTER_PORT.

    Returns:
        The group of all ranks.
    """
    patches.apply(patches.TORCH)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    met: dict[str, Any] = {}
    if store is not None:
        met = {"store": dist.PrefixStore("default", store), "rank": rank(), "world_size": world_size()}
    dist.init_process_group(backend, timeout=timedelta(minutes=10), **met)
    group = dist.group.WORLD
    assert group is not None
    return group


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, by rank in the group, on every rank. For records, not for tensors."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_unique(value: Any, group: dist.ProcessGroup) -> list[tuple[list[int], Any]]:
    """Return each distinct value once, with the ranks in the group that have it, on every rank.

    For large values that are mostly equal: each distinct one is sent once.
    """
    pickled = pickle.dumps(value)
    ranks_of: dict[tuple[bytes, int], list[int]] = {}
    for other, digest in enumerate(gather_objects((hashlib.sha256(pickled).digest(), len(pickled)), group)):
        ranks_of.setdefault(digest, []).append(other)
    found = []
    for (_, nbytes), ranks in ranks_of.items():
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if ranks[0] == group.rank():
            buffer = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        dist.broadcast(buffer, group=group, group_src=ranks[0])
        found.append((ranks, pickle.loads(buffer.numpy().tobytes())))
    return found


def broadcast_object(value: Any, group: dist.ProcessGroup) -> Any:
    """Return the value of the group's first rank on every rank; the values of the others are ignored.

    None costs one number, so this is cheap where there is rarely anything to send.
    """
    data = pickle.dumps(value) if group.rank() == 0 and value is not None else b""
    size = torch.tensor(len(data))
    dist.broadcast(size, group=group, group_src=0)
    if not size:
        return None
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, group=group, group_src=0)
    return pickle.loads(buffer.numpy().tobytes())


def all_reduce_min(number: int, group: dist.ProcessGroup) -> int:
    """Return the smallest of the ranks' numbers on every rank."""
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MIN, group=group)
    return int(tensor)


def all_reduce_max(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Return the element-wise maximum of the ranks' numbers on every rank; every rank gives as many."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor.tolist()
