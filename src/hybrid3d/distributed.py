"""The processes of a run: who this rank is, the default process group, and small exchanges between ranks."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybrid3d.launch_environment import RUN as IDENT
from hybrid3d.launch_environment import adopt_slurm, local_rank, local_world_size, rank, under_launcher, world_size
from hybrid3d.launch_environment import run as ident

__all__ = [
    "IDENT",
    "adopt_slurm",
    "first",
    "gather",
    "gather_unique",
    "ident",
    "largest",
    "least",
    "local_rank",
    "local_world_size",
    "most",
    "rank",
    "start",
    "under_launcher",
    "world_size",
]


class GlooOfOneLoop(dist.ProcessGroupGloo):
    """A gloo group that shares its threads for network events with all others of the process.

    Each group would have its own, which wakes a hundred times a second though nothing happens; Megatron and vLLM make
    thirty groups and more.
    """

    _devices: ClassVar[list[Any]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        if not self._devices:
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            self._devices += [self.create_device(interface=name) for name in interfaces]
            self._devices += [] if interfaces else [self.create_default_device()]
        options = self._Options()
        options._devices, options._threads, options._timeout = self._devices, 2 * len(self._devices), timeout
        super().__init__(store, rank, size, options)


def start(store: dist.Store | None = None) -> None:
    """Bind this rank to its GPU, where there is one, and build the default process group.

    Args:
        store: through which the ranks have met already; without it they meet at MASTER_ADDR:MASTER_PORT.
    """
    distributed_c10d.ProcessGroupGloo = GlooOfOneLoop  # what `new_group` makes, whoever calls it
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    met: dict[str, Any] = {}
    if store is not None:
        met = {"store": dist.PrefixStore("default", store), "rank": rank(), "world_size": world_size()}
    dist.init_process_group(backend, timeout=timedelta(minutes=10), **met)


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank. For records, not for tensors."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_unique(value: Any) -> list[tuple[list[int], Any]]:
    """Every rank's value, each once, with the ranks that have it; on every rank.

    For what is large and mostly the same: it is sent as often as it differs.
    """
    own = pickle.dumps(value)
    having: dict[tuple[bytes, int], list[int]] = {}
    for other, digest in enumerate(gather((hashlib.sha256(own).digest(), len(own)))):
        having.setdefault(digest, []).append(other)
    found = []
    for (_, nbytes), those in having.items():
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if those[0] == rank():
            buffer = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        dist.broadcast(buffer, those[0])
        found.append((those, pickle.loads(buffer.numpy().tobytes())))
    return found


def first(value: Any) -> Any:
    """Rank 0's value, on every rank; what the others give does not matter. For what is mostly None: then one number."""
    data = pickle.dumps(value) if rank() == 0 and value is not None else b""
    size = torch.tensor(len(data))
    dist.broadcast(size, 0)
    if not size:
        return None
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return pickle.loads(buffer.numpy().tobytes())


def least(number: int) -> int:
    """The smallest of the numbers that ranks give, on every rank."""
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor)


def largest(number: int) -> int:
    """Of the numbers that ranks give, on every rank."""
    return most([number])[0]


def most(numbers: Sequence[int]) -> list[int]:
    """Of as many numbers as every rank gives, place by place the largest; on every rank."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()
