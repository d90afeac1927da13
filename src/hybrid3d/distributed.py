"""The processes of a run: this rank's number, the process group of all ranks, and collectives on Python objects.

Every collective takes its process group as an argument, and every rank of that group calls it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from hybrid3d import patches
from hybrid3d.launch_environment import (
    LOOPBACK,
    MEETING_SECONDS,
    first_address,
    local_rank,
    on_one_machine,
    rank,
    world_size,
)
from hybrid3d.patches import pickled, unpickled

SIOCGIFADDR = 0x8915  # of netdevice(7)
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
RANKS_PER_POLL_SECOND = 5000  # that ask the store in the same time
MEETING_TIMEOUT = timedelta(seconds=MEETING_SECONDS)
WAIT_TIMEOUT, EXCHANGE_TIMEOUT = patches.WAIT_TIMEOUT, patches.EXCHANGE_TIMEOUT

_spanning: dict[str, tuple[int, ...]] = {}  # the launcher's ranks of groups that are in no default group, by name
_default_ranks: tuple[int, ...] = ()  # the launcher's ranks of the default group, where they are not all ranks


def start(store: Store | None = None) -> dist.ProcessGroup:
    """Bind this rank to its GPU, where there is one, and create the default process group, of all ranks.

    They rendezvous by the store, or without one at MASTER_ADDR:MASTER_PORT.
    """
    if store is None:
        return _start_default()
    return _start_default(store=PrefixStore("default", store), rank=rank(), world_size=world_size())


@dataclass(frozen=True)
class RoleGroups:
    """The process groups of a rank, where each rank has one role."""

    own: dist.ProcessGroup  # the ranks with this rank's role: the default group, on which Megatron and vLLM build
    everyone: dist.ProcessGroup  # all ranks; ranks in it are those of the launcher
    weights: dist.ProcessGroup  # all ranks, for the messages of syncs alone
    store: Store  # of all ranks


def start_roles(store: Store, roles: Mapping[str, range]) -> RoleGroups:
    """Bind this rank to its GPU, where there is one, and create its groups; the groups of all ranks are in no default.

    `store` is that of the rendezvous of all ranks, and `roles` has the ranks of each role.
    """
    name, ranks = next((name, ranks) for name, ranks in roles.items() if rank() in ranks)
    own = start_among(ranks, f"role/{name}", store)
    everyone, weights = (
        spanning_group(range(world_size()), name, store, WAIT_TIMEOUT, meeting=WAIT_TIMEOUT)
        for name in ("everyone", "weights")
    )
    return RoleGroups(own, everyone, weights, PrefixStore("roles", store))


def start_among(ranks: Sequence[int], name: str, store: Store) -> dist.ProcessGroup:
    """Bind this rank to its GPU, where there is one, and create a default process group of these ranks alone.

    `name` is different for each such group of the run.
    """
    global _default_ranks
    _default_ranks = tuple(ranks)
    return _start_default(store=PrefixStore(name, store), rank=ranks.index(rank()), world_size=len(ranks))


def listen_at(address: str) -> None:
    """Let gloo listen at this address, unless the user has chosen an interface; otherwise it asks for the host's name.

    With all ranks on one machine NCCL listens there, too; otherwise it searches for an interface by itself.
    """
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if on_one_machine():
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def interface_of(address: str) -> str | None:
    """Return the interface that has an address as its first one; None if there is none."""
    if ":" in address:
        wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
        lines = [line.split() for line in IPV6_ADDRESSES.read_text(encoding="ascii").splitlines()]
        return next((fields[-1] for fields in lines if fields[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _start_default(**rendezvous: Any) -> dist.ProcessGroup:
    patches.apply(patches.TORCH)
    if on_one_machine():
        listen_at(LOOPBACK)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    dist.init_process_group(_backend(), timeout=WAIT_TIMEOUT, **rendezvous)
    group = dist.group.WORLD
    assert group is not None
    _set_timeouts(group, WAIT_TIMEOUT)
    return group


def _set_timeouts(group: dist.ProcessGroup, on_cpus: timedelta) -> None:
    """Set the timeouts of a group's collectives on CPUs, and on GPUs."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(EXCHANGE_TIMEOUT if device.type == "cuda" else on_cpus)


def host_store(host: str, port: int = 0, timeout: float = 300.0, own_address: str = "") -> TCPStore:
    """Return a store in this process that listens at one address alone; torch's own listens at all of the machine.

    Args:
        host: where others find it, and where it listens, unless `own_address` is another address.
        port: 0 for any that is free; `port` of the store says which.
        timeout: of its operations, in seconds.

    Raises:
        OSError: nothing can listen there.
    """
    family, _, _, _, where = first_address(own_address or host, port)
    with socket.create_server(where[:2], family=family, backlog=2048) as listening:
        return TCPStore(
            host,
            listening.getsockname()[1],
            None,
            True,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=os.dup(listening.fileno()),
        )


def clone_store(store: Store) -> Store:
    """Return another connection to a store, for a thread of its own."""
    cloned: Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
    return cloned


def weights_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Create a group of the same ranks, of the default group, for weights alone, with the memory that NCCL takes.

    NCCL requires all ranks in the first operation of a group, and a bucket may involve only some of them.
    """
    made: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(group), group_desc="weights")
    dist.all_reduce(torch.zeros(1, device=device), group=made)
    return made


def spanning_group(
    ranks: Sequence[int], name: str, store: Store, timeout: timedelta, meeting: timedelta = MEETING_TIMEOUT
) -> dist.ProcessGroup:
    """Create a process group of ranks that are in different default groups; each calls this after its own was created.

    Args:
        ranks: those of the launcher, in the order of the group.
        name: different for each such group of the run.
        timeout: of its collectives on CPUs.
        meeting: the timeout of its creation, and with gloo of sends and receives that are not told another one; gloo
            takes up to six times as long to fail.
    """
    place, found = ranks.index(rank()), PrefixStore(f"spanning/{name}", store)
    group = group_outside(place, len(ranks), _backend(), found, f"hybrid3d_{name}", meeting, name)
    _set_timeouts(group, timeout)
    _spanning[group.group_name] = tuple(ranks)
    return group


def group_outside(
    rank: int, size: int, backend: str, store: Store, name: str, timeout: timedelta, about: str
) -> dist.ProcessGroup:
    """Create a process group that is no part of the default group; torch has no public function for one.

    `name` is different for each group of this process. `timeout` is that of its creation, and `about` says in torch's
    messages what it is for.
    """
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],  # not a part of the default group
        dist.Backend(backend),
        store,
        group_name=distributed_c10d.GroupName(name),
        timeout=timeout,
        group_desc=about,
    )
    distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


def launcher_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the launcher's ranks of a group's members, in its order; empty for a group that torch has forgotten."""
    if group.group_name in _spanning:
        return _spanning[group.group_name]
    try:
        members = dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return ()
    return tuple(_default_ranks[member] if _default_ranks else member for member in members)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


# Parts of the errors of gloo, and of NCCL through torch's ProcessGroupNCCL, on a rank that has lost a peer
LOST_PEER_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
    "ncclRemoteError",
    "remote process exited",
    "communicator was aborted",
    "Watchdog caught collective operation timeout",
)


class LostPeer(RuntimeError):
    """Raised where another process of the run does not answer, or has gone."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error only says that another rank is lost, so that it is not the cause of the failure."""
    if isinstance(error, dist.DistError) and not isinstance(error, dist.DistBackendError):
        return True  # an error of the store or the network; other NCCL errors are failures of this rank
    return isinstance(error, LostPeer) or any(text in str(error) for text in LOST_PEER_ERRORS)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's value, by rank in the group, on every rank. For records, not for tensors.

    A rank receives at most three times the bytes of all values, and a KiB for each: those that are much larger than the
    others are sent by themselves, and the others padded to one size.
    """
    data = pickled(value)
    sizes = gather_numbers(len(data), group)
    usual = 2 * sum(sizes) // len(sizes) + 1024
    width = max(size for size in sizes if size <= usual)
    padded = torch.zeros(width, dtype=torch.uint8)
    padded[: min(len(data), width)] = data[:width]
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    for src, size in enumerate(sizes):
        if size > usual:
            found[src] = data if src == group.rank() else torch.empty(size, dtype=torch.uint8)
            dist.broadcast(found[src], group=group, group_src=src)
    return [unpickled(each[:size]) for each, size in zip(found, sizes, strict=True)]


def gather_to_first(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Return every rank's value, by rank in the group, on the group's first rank; None on the others."""
    data = pickled(value)
    sizes = gather_numbers(len(data), group)
    if group.rank() > 0:
        dist.send(data, group=group, group_dst=0)
        return None
    found = [data, *(torch.empty(size, dtype=torch.uint8) for size in sizes[1:])]
    works = [dist.irecv(found[src], group=group, group_src=src) for src in range(1, group.size())]
    for work in filter(None, works):
        work.wait()
    return [unpickled(each) for each in found]


def gather_numbers(number: int, group: dist.ProcessGroup) -> list[int]:
    """Return every rank's number, by rank in the group, on every rank."""
    found = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(found, torch.tensor([number]), group=group)
    return [int(each) for each in found]


def broadcast_object(value: Any, group: dist.ProcessGroup, src: int = 0) -> Any:
    """Return the value of rank `src` of the group on every rank; the values of the others are ignored.

    None costs one number, so this is cheap where there is rarely anything to send.
    """
    data = pickled(value) if group.rank() == src and value is not None else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor(len(data))
    dist.broadcast(size, group=group, group_src=src)
    if not size:
        return None
    buffer = data if group.rank() == src else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, group=group, group_src=src)
    return unpickled(buffer)


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
