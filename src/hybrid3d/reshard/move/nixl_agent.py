"""An agent of NIXL on each rank of a group, where it listens, and the memory that it has registered."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid3d.errors import UserMistake

BACKEND = "UCX"
NETWORK_DEVICES, LOOPBACK = "UCX_NET_DEVICES", "lo"
LOG_LEVEL = "NIXL_LOG_LEVEL"
HOST, GPU = "DRAM", "VRAM"  # kinds of memory
NAME = 32  # characters of an agent's name

Place = tuple[int, int, int]
"""Memory as NIXL names it: address, size in bytes, and number of the GPU."""


class NoNixl(UserMistake):
    """NIXL is chosen as the transport, and cannot be imported."""


def load_nixl() -> Any:
    """Import NIXL and return its module.

    Raises:
        NoNixl: it is not installed, or a library that it needs is missing.
    """
    raises = logging.raiseExceptions
    try:
        found = importlib.import_module("nixl")
    except ImportError as error:
        raise NoNixl(
            f"sync.transport=nixl: the package nixl cannot be imported ({error}): install it with `pip install "
            "--no-deps -r requirements/nixl.txt`, or set sync.transport=collective"
        ) from None
    finally:
        logging.raiseExceptions = raises  # it sets this for the whole process
    if LOG_LEVEL not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of each agent on standard output
    return found


def make_agent(group: dist.ProcessGroup) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a new agent with a name of its own, and the errors by which it says that another one is lost.

    Every rank of the group calls this together. Raises: as `load_nixl`.
    """
    nixl = load_nixl()
    # Its thread would look for messages all the time, also between syncs, and take a whole core for it
    settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
    with _listening_at_home(group):
        agent = nixl.nixl_agent(secrets.token_hex(NAME // 2), settings)
    return agent, (nixl._bindings.nixlRemoteDisconnectError, nixl._bindings.nixlBackendError)


@contextmanager
def _listening_at_home(group: dist.ProcessGroup) -> Iterator[None]:
    """Let agents that are made now listen at the loopback interface alone, if all ranks of a group are on one machine.

    Otherwise, or where the user has chosen devices, UCX listens at those that it finds.
    """
    hosts = gather_bytes(_host(), group)
    at_home = b"" not in hosts and len({*hosts}) == 1 and NETWORK_DEVICES not in os.environ
    if at_home:
        os.environ[NETWORK_DEVICES] = LOOPBACK
    try:
        yield
    finally:
        if at_home:
            del os.environ[NETWORK_DEVICES]


def _host() -> bytes:
    """Return what only processes of this machine, with the same network interfaces, have; empty if it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes() + os.readlink(b"/proc/self/ns/net")
    except OSError:
        return b""


def gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return every rank's bytes, by rank in the group; all ranks call it together."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    width = max(int(size) for size in sizes)
    found = [torch.empty(width, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(found, torch.tensor([*data.ljust(width)], dtype=torch.uint8), group=group)
    return [bytes(each[: int(size)].tolist()) for each, size in zip(found, sizes, strict=True)]


@dataclass(frozen=True)
class _Region:
    """A registered storage, which may have been freed in the meantime, and what NIXL deregisters it by."""

    place: Place
    kind: str
    storage: StorageWeakRef
    registration: Any


class RegisteredMemory:
    """The storages that an agent has registered. Each is registered once, as long as it exists and is not released."""

    def __init__(self, agent: Any):
        self._agent = agent
        self._regions: dict[int, _Region] = {}

    @property
    def starts(self) -> set[int]:
        """The addresses of the registered storages."""
        return {*self._regions}

    def register(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Register the storages of these tensors that are not; return the addresses of those that no longer are."""
        new = {start_of(tensor): tensor for tensor in tensors if tensor.nbytes and not self._has(tensor)}
        freed = {start for start, region in self._regions.items() if region.storage.expired() or start in new}
        gone = self._deregister(freed if new else set())
        for start, tensor in new.items():
            storage, kind = tensor.untyped_storage(), kind_of(tensor)
            place = start, storage.nbytes(), max(tensor.get_device(), 0)
            made = self._agent.register_memory([(*place, "")], kind)
            self._regions[start] = _Region(place, kind, StorageWeakRef(storage), made)
        return gone

    def release(self, kind: str) -> set[int]:
        """Deregister all memory of a kind, and return its addresses."""
        return self._deregister({start for start, region in self._regions.items() if region.kind == kind})

    def metadata_of(self, starts: Iterable[int]) -> bytes:
        """Return what another agent must know to write in these storages."""
        regions = [self._regions[start] for start in starts]
        if not regions:
            return b""
        described = self._agent.get_reg_descs([(*region.place, "") for region in regions], regions[0].kind)
        metadata: bytes = self._agent.get_partial_agent_metadata(described, False, [BACKEND])
        return metadata

    def _has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage is registered as it is; another one may have been at its address."""
        storage, region = tensor.untyped_storage(), self._regions.get(start_of(tensor))
        return region is not None and (region.storage.cdata, region.place[1]) == (storage._cdata, storage.nbytes())

    def _deregister(self, starts: set[int]) -> set[int]:
        for start in starts:
            self._agent.deregister_memory(self._regions.pop(start).registration)
        return starts


def start_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def kind_of(tensor: torch.Tensor) -> str:
    return GPU if tensor.is_cuda else HOST
