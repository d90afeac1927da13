"""The end of a transfer in one of vLLM's workers, and the process group of these and a trainer's ranks.

The boxes of a worker's shard arrive in its live parameters. The group is outside of those that its members have
otherwise.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from hybrid3d import ledger
from hybrid3d.distributed import clone_store, group_outside, interface_of, is_lost_peer
from hybrid3d.launch_environment import source_address
from hybrid3d.reshard import CorruptTensors, JsonExchange, NoSource, PlanError, Resharder, WeightSink, WeightSource
from hybrid3d.rollout.loader_trace import UnsupportedLoader
from hybrid3d.rollout.sink import VllmSink

logger = init_logger(__name__)

LOST = "the connection to another member of the transfer was lost"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the machine, for all of its containers
WATCH_SECONDS, MEETING_POLL_SECONDS = 0.5, 0.02


class TransferFailed(RuntimeError):
    """Raised if vLLM has not got the weights; the trainer must connect anew."""


@dataclass
class WorkerInitInfo(WeightTransferInitInfo):
    """What a trainer tells the workers when it begins, and how all members of the group find each other.

    Attributes:
        master_address, master_port: where the first rank of the trainer listens.
        session: a name that no other group has.
        rank_offset: the rank of the first worker, which is the number of the trainer's ranks.
        world_size: how many members there are, the trainer's ranks and the workers.
        device: the type of all members' devices, `cpu` or `cuda`.
        timeout: seconds for which a member waits for others.
    """

    master_address: str
    master_port: int
    session: str
    rank_offset: int
    world_size: int
    device: str
    timeout: float
    bucket_bytes: int


def find_store(address: str, port: int, timeout: float) -> TCPStore:
    """Return a connection to the trainer's store.

    Raises:
        ConnectionError: there is no answer in time.
    """
    try:
        return TCPStore(address, port, None, False, timedelta(seconds=timeout))
    except dist.DistError as error:
        raise ConnectionError(f"the trainer does not answer at {address}:{port} within {timeout:g} s") from error


def meet(
    store: Store, arrived: Callable[[Store], int], count: int, timeout: float, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until `count` members have arrived, as `arrived` counts them; `check` is called now and then meanwhile.

    Raises:
        TransferFailed: a member cannot take part, or some have not arrived in time.
    """
    end = time.monotonic() + timeout
    while (here := arrived(store)) < count:
        check()
        if refusal := ledger.read_refusal(store):
            raise TransferFailed(refusal)
        if time.monotonic() > end:
            raise TransferFailed(f"{count - here} of {count} members have not arrived within {timeout:g} s")
        time.sleep(MEETING_POLL_SECONDS)


class Membership:
    """This process as a member of a transfer; `leave` undoes it.

    Attributes:
        ranks: the rank of each member in plans; those that share a node are numbered consecutively.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        info: WorkerInitInfo,
        source: WeightSource,
        sink: WeightSink,
        device: torch.device | str,
    ):
        """Join, by a store of this transfer alone, and plan the transfer; all members do it together.

        Raises:
            ValueError: gloo cannot listen at this machine's address on the way to the trainer.
            PlanError, UnsupportedLoader: as `Resharder`.
        """
        self.store, self._cuda, self._watching = store, info.device == "cuda", True
        self._group = _make_group(store, rank, info)
        try:
            nodes = JsonExchange(self._group).unique(BOOT_ID.read_text(encoding="ascii"))
            self.ranks, per_node = number_by_node(nodes, info.world_size)
            if self._cuda:
                threading.Thread(target=self._watch, name="trainer", daemon=True).start()
            self.resharder = Resharder(
                source,
                sink,
                self._group,
                device=device,
                bucket_bytes=info.bucket_bytes,
                ranks=self.ranks,
                ranks_per_node=per_node,
            )
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the group, so that no member waits for this one. It is called once."""
        self._watching, group = False, self._group
        if self._cuda:
            group.abort()
        for name in ("_group", "resharder"):  # which refers to it
            vars(self).pop(name, None)
        dist.destroy_process_group(group)
        del group
        gc.collect()  # gloo closes its sockets when the last reference to a group and its operations is gone

    def _watch(self) -> None:
        """Abort the group once the trainer's store is gone: over NCCL nobody notices that a member is."""
        group, store = self._group, clone_store(self.store)
        while self._watching:
            try:
                ledger.check_answers(store)
            except dist.DistError:
                group.abort()
                return
            time.sleep(WATCH_SECONDS)


def number_by_node(nodes: Sequence[tuple[Sequence[int], str]], size: int) -> tuple[list[int], int]:
    """Return the rank of each of `size` members, given those on each node, and how many numbers each node has."""
    per_node = max(len(members) for members, _ in nodes)
    ranks = [0] * size
    for node, (members, _) in enumerate(nodes):
        for place, member in enumerate(members):
            ranks[member] = node * per_node + place
    return ranks, per_node


def _make_group(store: Store, rank: int, info: WorkerInitInfo) -> dist.ProcessGroup:
    own = source_address(info.master_address)
    interface = interface_of(own)
    if interface is None:
        raise ValueError(
            f"{own}, this machine's address on the way to {info.master_address}, is no interface's first address"
        )
    with _gloo_listens_at(interface):
        backend, timeout = "cpu:gloo,cuda:nccl" if info.device == "cuda" else "gloo", timedelta(seconds=info.timeout)
        return group_outside(rank, info.world_size, backend, store, info.session, timeout, "weight transfer")


@contextmanager
def _gloo_listens_at(interface: str) -> Iterator[None]:
    """Set gloo's variable alone: other threads may change other ones meanwhile."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before


EXPECTED = (CorruptTensors, PlanError, TransferFailed, UnsupportedLoader)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What a trainer tells the workers with each update: its number, from 1."""

    update: int


class WorkerEngine(WeightTransferEngine):
    """Receives the weights of one worker.

    vLLM would mistake what a worker raises: see `hold.py`. So methods keep their errors, and `take_failure` returns
    what has failed. Only `start_weight_update` raises, in all workers alike, where vLLM has not loaded `hold.py`:
    generation is `held` once vLLM's engine has said so.
    """

    init_info_cls, update_info_cls = WorkerInitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any):
        super().__init__(config, vllm_config, device, model)
        self.held = False
        self._failure = ""
        self._membership: Membership | None = None
        self._updated = False  # since the update has begun

    def take_failure(self) -> str:
        failure, self._failure = self._failure, ""
        return failure

    def parse_init_info(self, init_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        return init_dict  # `init_transfer_engine` parses it, where an error is kept

    def init_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._attempt(lambda: self._join(init_info))

    def _join(self, init_info: Mapping[str, Any]) -> None:
        self.shutdown()
        info: WorkerInitInfo = super().parse_init_info(dict(init_info))
        parallel = self.parallel_config
        rank = info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = PrefixStore(info.session, find_store(info.master_address, info.master_port, info.timeout))
        refusal = self._refusal(info, rank)
        if refusal:
            ledger.refuse(store, refusal)  # the other members wait for this one
            raise TransferFailed(refusal)
        ledger.join(store)
        meet(store, ledger.count_joined, info.world_size, info.timeout)
        sink = VllmSink(self.model, self.vllm_config)
        self._membership = Membership(store, rank, info, NoSource(), sink, self.device)

    def _refusal(self, info: WorkerInitInfo, rank: int) -> str:
        """Return why this worker cannot take part; empty if it can."""
        if rank >= info.world_size:
            workers, expected = rank + 1 - info.rank_offset, info.world_size - info.rank_offset
            return (
                f"vLLM has {workers} workers or more, and world_size={info.world_size} with {info.rank_offset} of the "
                f"trainer's ranks leaves {expected} for them: set it to the number of both together"
            )
        if self.vllm_config.quant_config is not None:
            return f"vLLM quantizes its weights ({self.model_config.quantization}), which only its own loader can do"
        if self.parallel_config.enable_eplb:
            return "vLLM moves experts between ranks (--enable-eplb), after which weights would reach the wrong ones"
        if info.device != self.device.type:
            return f"the trainer's weights are on {info.device}, and vLLM's on {self.device.type}"
        return ""

    def start_weight_update(self) -> None:
        self._updated = False
        if not self.held:
            raise RuntimeError(
                "vLLM's engine process has not loaded hybrid3d's plugin, without which it would generate with weights "
                "of two versions: name hybrid3d in VLLM_PLUGINS, or unset it"
            )

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._attempt(lambda: self.receive_weights(self.parse_update_info(dict(update_info))))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if not self._membership:
            raise RuntimeError("no trainer is connected: call init_weight_transfer_engine first")
        ledger.arrive(self._membership.store, update_info.update)
        resharder = self._membership.resharder
        report = resharder.run(update_info.update)
        resharder.exchange.unique((resharder.exchange.rank, report.received_bytes, resharder.lower_bound))
        self._updated = True
        logger.info("update %d: received %d bytes", update_info.update, report.received_bytes)

    def finish_weight_update(self) -> None:
        if not (self._membership and self._updated):
            self._failure = "finish_weight_update is called before an update has succeeded"

    def shutdown(self) -> None:
        membership, self._membership = self._membership, None
        if membership:
            membership.leave()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do the work, or leave the group and keep the reason why it failed."""
        self._failure = ""
        try:
            work()
            return
        except Exception as error:
            if is_lost_peer(error):
                self._failure = LOST
                logger.warning("%s: %s", LOST, error)
            elif isinstance(error, EXPECTED):
                self._failure = str(error)
            else:
                self._failure = f"{type(error).__name__}: {error}"
                logger.exception("weights were not received")
            traceback.clear_frames(error.__traceback__)  # they refer to the group, which `shutdown` is to free
        try:
            self.shutdown()
        except Exception:
            logger.exception("the group was not left in order")
