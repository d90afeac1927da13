"""The end of a transfer in a trainer's rank: every rank sends what it holds, and rank 0 calls vLLM."""

from __future__ import annotations

import functools
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from vllm.distributed.weight_transfer import base

from hybrid3d import ledger
from hybrid3d.distributed import host_store, is_lost_peer
from hybrid3d.reshard import NoSink, PlainSource
from hybrid3d.weight_transfer import BACKEND, register
from hybrid3d.weight_transfer.sources import read_source
from hybrid3d.weight_transfer.worker import (
    LOST,
    MEETING_POLL_SECONDS,
    Membership,
    TransferFailed,
    UpdateInfo,
    WorkerInitInfo,
    find_store,
    meet,
)

CAUSE_SECONDS = 10.0  # in which vLLM says why a worker has gone
MIB = 2**20

register()  # vLLM loads its plugins in its own processes only, and a trainer may ask its factory


@dataclass(kw_only=True)
class TrainerInitInfo(base.TrainerInitInfo):
    """How a trainer's rank begins a transfer.

    Attributes:
        master_address: an address of rank 0's host, at which it listens alone, and which the workers reach.
        master_port: where rank 0 listens; 0, for any free port, if the trainer has one rank.
        world_size: the trainer's ranks and vLLM's workers together.
        num_trainer_ranks: the trainer's ranks.
        timeout: seconds for which a member waits for others.
        bucket_mib: the size of each of two staging buffers, in MiB; the same on each rank.
        rank: of this process among the trainer's.
    """

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int = 0
    world_size: int
    num_trainer_ranks: int = 1
    timeout: float = 300.0
    bucket_mib: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.num_trainer_ranks < self.world_size:
            raise ValueError(
                f"world_size {self.world_size} has {self.num_trainer_ranks} ranks of the trainer: at least one is the "
                "trainer's, and one a worker of vLLM"
            )
        if not 0 <= self.rank < self.num_trainer_ranks:
            raise ValueError(f"rank {self.rank} is none of the trainer's {self.num_trainer_ranks} ranks")
        if self.num_trainer_ranks > 1 and not self.master_port:
            raise ValueError(f"{self.num_trainer_ranks} ranks of a trainer need a master_port, the same on each")


@dataclass(frozen=True)
class WorkerReport:
    """What one of vLLM's workers received in an update, and the fewest bytes that it must, counted without the plan."""

    received_bytes: int
    lower_bound: int


class TrainerEngine(base.TrainerWeightTransferEngine):
    """Sends the weights of one rank of a trainer to vLLM. All ranks make and call it together.

    What each worker received in the last update is in `reports`.
    """

    init_info_cls = TrainerInitInfo

    def __init__(self, info: TrainerInitInfo, client: Any, source: Any):
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self.rank = info.rank  # vLLM 0.33 has it, too
        self.reports: tuple[WorkerReport, ...] = ()
        self._info, self._updates, self._answers = info, 0, 0
        self._read, self._holdings = read_source(source, info.rank)
        self._device = _device_of(self._read())
        self._tensors: dict[str, torch.Tensor] = {}  # only during an update: a source may make new ones for each
        self._answer: Future[None] = Future()  # of vLLM to the call in progress
        self._store: TCPStore | None = None  # which rank 0 hosts
        self._membership: Membership | None = None

    @classmethod
    def trainer_init(cls, init_info: TrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Connect this rank of a trainer and vLLM's workers, and plan the transfer.

        Args:
            client: one of vLLM's clients; only rank 0 uses it.
            source: the weights, under the names of the Hugging Face checkpoint: tensors by name, or a `WeightSource`;
                see `read_source`.

        Raises:
            PlanError: vLLM wants a tensor that the trainer does not have, or the other way round, or ranks differ in
                `bucket_mib`.
            TransferFailed: vLLM's workers cannot take part.
        """
        if source is None:
            raise ValueError("the hybrid3d backend needs a source: tensors by name, or a WeightSource")
        engine = cls(init_info, client, source)
        engine._attempt(engine._connect)
        return engine

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send the weights as they are now, and return once vLLM generates with them.

        Args:
            weight_version: which vLLM reports from then on.

        Raises:
            TransferFailed: vLLM has not got them; if it had begun to take them, it generates nothing until an update
                has succeeded.
        """
        self._attempt(lambda: self._send(weight_version))

    def shutdown(self) -> None:
        """Leave vLLM's workers."""
        membership, self._membership, self._store = self._membership, None, None
        self._tensors.clear()
        if membership:
            membership.leave()

    def _connect(self) -> None:
        info, device = self._info, self._device
        find = host_store if info.is_sender else find_store
        self._store = raw = find(info.master_address, info.master_port, info.timeout)
        session = ledger.open_session(raw) if info.is_sender else ledger.read_session(raw)
        for_all = WorkerInitInfo(
            master_address=info.master_address,
            master_port=raw.port,
            session=session,
            rank_offset=info.num_trainer_ranks,
            world_size=info.world_size,
            device=device.type,
            timeout=info.timeout,
            bucket_bytes=info.bucket_mib * MIB,
        )
        store = PrefixStore(session, raw)
        ledger.join(store)
        # vLLM is asked once all ranks are there: each learns why it refuses, and none waits for a store that is gone
        meet(store, ledger.count_joined, info.num_trainer_ranks, info.timeout)
        if info.is_sender:
            self._call(self.client.init_weight_transfer_engine, asdict(for_all))
        meet(store, ledger.count_joined, info.world_size, info.timeout, lambda: self._pass_on_refusal(store))
        if info.is_sender:
            ledger.forget_session(raw)  # a rank that connects anew too early would join it
        source = PlainSource(self._tensors, self._holdings)
        self._membership = Membership(store, info.rank, for_all, source, NoSink(), device)
        self._wait_for_answer(store)

    def _send(self, weight_version: str | None) -> None:
        info, membership = self._info, self._membership
        if not membership:
            raise TransferFailed("this trainer is not connected any more: begin anew with trainer_init")
        store, resharder = membership.store, membership.resharder
        self._updates += 1
        self._call(self._start, asdict(UpdateInfo(self._updates)))
        self._tensors.update(self._read())
        workers = info.world_size - info.num_trainer_ranks
        arrived = functools.partial(ledger.count_arrived, epoch=self._updates)
        meet(store, arrived, workers, info.timeout, lambda: self._pass_on_refusal(store))
        resharder.run(self._updates)
        resharder.bind()  # to those of the next update
        self._tensors.clear()
        received = resharder.exchange.unique((resharder.exchange.rank, 0, 0))
        by_rank = {rank: WorkerReport(*counted) for _, (rank, *counted) in received}
        self.reports = tuple(by_rank[rank] for rank in membership.ranks[info.num_trainer_ranks :])
        self._wait_for_answer(store)
        self._call(self.client.finish_weight_update, weight_version)
        self._wait_for_answer(store)

    def _start(self, update: Mapping[str, Any]) -> None:
        self.client.start_weight_update()
        self.client.update_weights(update)

    def _call(self, call: Callable[..., Any], argument: Any) -> None:
        """Let rank 0 call vLLM, which may answer only once all ranks take part; `_wait_for_answer` waits for it."""
        if not self.is_sender:
            return
        self._answer = answer = Future[None]()

        def work() -> None:
            try:
                call(argument)
                answer.set_result(None)
            except Exception as error:
                answer.set_exception(TransferFailed(f"vLLM refuses: {_cause(error)}"))

        threading.Thread(target=work, name="vLLM", daemon=True).start()  # nobody waits for it when the trainer ends

    def _wait_for_answer(self, store: Store) -> None:
        """Wait until vLLM has answered rank 0's call, and all ranks of the trainer know."""
        info, before = self._info, self._answers * self._info.num_trainer_ranks
        self._answers += 1
        if self.is_sender:
            try:
                self._answer.exception(info.timeout)
            except TimeoutError:
                self._answer = Future[None]()
                self._answer.set_exception(TransferFailed(f"vLLM has not answered within {info.timeout:g} s"))
            self._pass_on_refusal(store)
            self._answer.result()
            ledger.hear_answer(store)
            self._keep_store_until(lambda: ledger.count_heard(store) >= before + info.num_trainer_ranks)
            return
        end = time.monotonic() + info.timeout + CAUSE_SECONDS  # rank 0 says before what has failed
        while ledger.count_heard(store) <= before:
            self._pass_on_refusal(store)
            if time.monotonic() > end:
                raise TransferFailed(f"rank 0 has not told within {info.timeout:g} s that vLLM has answered")
            time.sleep(MEETING_POLL_SECONDS)
        ledger.hear_answer(store)

    def _pass_on_refusal(self, store: Store) -> None:
        """Tell the other members that vLLM has refused rank 0's call; the store is kept until the ranks know."""
        if not self.is_sender:
            if refusal := ledger.read_refusal(store):
                ledger.hear_refusal(store)
                raise TransferFailed(refusal)
        elif self._answer.done() and (error := self._answer.exception()):
            ledger.refuse(store, str(error))
            self._keep_store_until(lambda: ledger.count_told(store) >= self._info.num_trainer_ranks - 1)

    def _keep_store_until(self, told: Callable[[], bool]) -> None:
        """Wait until the other ranks are told, but not for long if one is lost: the store may end with this process."""
        end = time.monotonic() + CAUSE_SECONDS
        while not told() and time.monotonic() < end:
            time.sleep(MEETING_POLL_SECONDS)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do the work, or leave the workers and say why it failed."""
        try:
            work()
            return
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they refer to the group, which `shutdown` is to free
            self.shutdown()
            if not is_lost_peer(error):
                raise
            cause = self._cause_of_loss(error)
        raise TransferFailed(cause)

    def _cause_of_loss(self, error: Exception) -> str:
        """Return why a member is lost: rank 0 learns it from vLLM, if that still answers."""
        if self.is_sender:
            with suppress(TimeoutError):
                if answered := self._answer.exception(CAUSE_SECONDS):
                    return str(answered)
        return f"{LOST}: {_cause(error)}"


def _device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"the weights are on {', '.join(sorted(map(str, devices)))}: they must be on one device")
    return devices.pop() if devices else torch.device("cpu")


def _cause(error: BaseException) -> str:
    """Return what an error says; one of HTTP says only its status, and the answer why."""
    answer = getattr(getattr(error, "response", None), "text", "")
    return answer or (str(error).splitlines() or [type(error).__name__])[0]
