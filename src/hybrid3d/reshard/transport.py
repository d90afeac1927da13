"""How bytes travel between ranks: three verbs over torch.distributed, and a count of what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """Operations under way; their tensors must stay untouched until `wait` returns."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Submit sends and receives of bytes (as `as_bytes` has them), then start them all with `run`.

    `received_bytes` is the sum of what receives were posted with, over the life of the transport. The two ends of
    a message name the same `tag`, and both submit the messages between them in the same order. What both have started
    proceeds whether or not either of them waits.
    """

    received_bytes: int
    blocks_host: bool  # whether `wait` stops the process, rather than a stream of its GPU

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None: ...

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None: ...

    def run(self) -> Pending: ...


class _Works:
    def __init__(self, works: Sequence[dist.Work | None]):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            assert work is not None, "every rank of the plan is in the group"
            work.wait()


class GlooTransport:
    """Point to point over gloo, for tensors on the CPU. `group` spans every rank of the plan."""

    blocks_host = True

    def __init__(self, group: dist.ProcessGroup):
        self.received_bytes = 0
        self._group = group
        self._works: list[dist.Work | None] = []

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._works.append(dist.isend(tensor, group=self._group, group_dst=dst, tag=tag))

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self.received_bytes += tensor.nbytes
        self._works.append(dist.irecv(tensor, group=self._group, group_src=src, tag=tag))

    def run(self) -> Pending:
        started, self._works = _Works(self._works), []
        return started


class NcclTransport:
    """Point to point over NCCL: one batch per `run`, which NCCL launches as one group. Not yet run on GPUs."""

    blocks_host = False

    def __init__(self, group: dist.ProcessGroup):
        self.received_bytes = 0
        self._group = group
        self._ops: list[dist.P2POp] = []

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._ops.append(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=dst))

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self.received_bytes += tensor.nbytes
        self._ops.append(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=src))

    def run(self) -> Pending:
        works = dist.batch_isend_irecv(self._ops) if self._ops else []
        self._ops = []
        return _Works(works)


def make_transport(device: torch.device, group: dist.ProcessGroup) -> Transport:
    """The transport for tensors on `device`."""
    if device.type != "cuda":
        return GlooTransport(group)
    # NCCL wants all ranks in a group's first operation, and a bucket may leave some out
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return NcclTransport(group)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that has no gaps. Backends know no FP8 and gloo no BF16: everything travels as bytes."""
    flat = tensor.view(-1)  # refuses gaps, and keeps the stride of a single element, which a view as bytes refuses
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)
