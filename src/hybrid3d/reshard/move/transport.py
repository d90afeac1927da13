"""Point-to-point transports over torch.distributed that count the bytes that they receive."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from hybrid3d.reshard.move.lent_memory import CountingTransport, SharedMemory


class Pending(Protocol):
    """Operations in flight; their tensors must not be touched until `wait` returns."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Collects sends and receives of byte tensors (from `as_bytes`) and starts them all with `run`.

    Both ends of a message use the same `tag` and submit the messages between them in the same order. A message that
    both ends have started makes progress while both wait for messages, and mostly also if neither does.

    Attributes:
        received_bytes: of all messages that were received, or borrowed, over the life of the transport.
        network_bytes: of those from ranks of other nodes.
        blocks_host: whether `wait` blocks the host thread, rather than a CUDA stream.
        shared_memory: lends messages to other ranks of the machine; None if all messages are sent.
    """

    received_bytes: int
    network_bytes: int
    blocks_host: bool

    @property
    def shared_memory(self) -> SharedMemory | None: ...

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None: ...

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None: ...

    def run(self) -> Pending: ...


class _Works:
    def __init__(
        self,
        works: Sequence[dist.Work | None],
        messages: Sequence[Sequence[Any]] = (),  # of each of these, its direction and the other rank
        timeout: timedelta | None = None,
    ):
        self._works, self._messages, self._timeout = works, messages, timeout
        self._waited = 0  # the number of the one that `wait` waits for

    def wait(self) -> None:
        for number, work in enumerate(self._works):
            self._waited = number
            assert work is not None, "every rank of the plan is in the group"
            if self._timeout is None:
                work.wait()
            else:
                work.wait(self._timeout)

    def awaited(self) -> tuple[str, Sequence[int]] | None:
        """Return the message that `wait` is waiting for, and the rank at its other end; any thread may call it."""
        if self._waited >= len(self._messages):
            return None
        direction, rank = self._messages[self._waited]
        return f"a message {direction} rank {rank}", (rank,)


class GlooTransport(CountingTransport):
    """Point-to-point over gloo for CPU tensors; arguments: as for `make_transport`."""

    blocks_host = True

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        work = dist.isend(tensor, group=self._group, group_dst=self._members[dst], tag=tag)
        self._submitted.append((work, "to", dst))

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._count(tensor.nbytes, src)
        work = dist.irecv(tensor, group=self._group, group_src=self._members[src], tag=tag)
        self._submitted.append((work, "from", src))

    def run(self) -> Pending:
        submitted, self._submitted = self._submitted, []
        return _Works([work for work, *_ in submitted], [message for _, *message in submitted], self._timeout)


class NcclTransport(CountingTransport):
    """Point-to-point over NCCL: each `run` launches one batch as one NCCL group. One GPU has sent to itself."""

    blocks_host = False

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._submitted.append(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=self._members[dst]))

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._count(tensor.nbytes, src)
        self._submitted.append(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=self._members[src]))

    def run(self) -> Pending:
        submitted, self._submitted = self._submitted, []
        return _Works(dist.batch_isend_irecv(submitted) if submitted else [])


def make_transport(
    device: torch.device,
    group: dist.ProcessGroup,
    ranks_per_node: int,
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    shares_memory: bool = False,
    kind: Literal["collective", "nixl"] = "collective",
) -> Transport:
    """Return the transport for tensors on `device`; every rank of `group` calls it.

    Args:
        ranks_per_node: the number of consecutive ranks that share a node.
        ranks: the plan's rank of each member of the group, by default their ranks in the group.
        timeout: of a message over gloo or by NIXL, by default the group's.
        shares_memory: on CPU, lend messages to the other ranks of the node that can read this process's memory.
        kind: `collective` sends over NCCL on GPUs and over gloo on CPUs; with `nixl` senders write into the memory of
            their receivers.

    Raises:
        NoNixl: NIXL is chosen, and cannot be imported.
    """
    if kind == "nixl":
        from hybrid3d.reshard.move.nixl import NixlTransport

        return NixlTransport(group, ranks_per_node, ranks, timeout, shares_memory and device.type != "cuda")
    if device.type != "cuda":
        return GlooTransport(group, ranks_per_node, ranks, timeout, shares_memory)
    # NCCL requires all ranks in the first operation of a group, and a bucket may involve only some of them
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return NcclTransport(group, ranks_per_node, ranks)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes: no backend sends FP8, and gloo does not send BF16."""
    # `view` raises for a tensor with gaps. A single element keeps its stride, which a view as bytes does not allow.
    flat = tensor.view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)
