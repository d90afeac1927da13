"""The end of a transfer in one of vLLM's workers: the boxes of its shard arrive in its live parameters."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
from vllm.logger import init_logger

from hybrid3d import ledger
from hybrid3d.distributed import is_lost_peer
from hybrid3d.reshard import CorruptTensors, NoSource, PlanError
from hybrid3d.rollout.loader_trace import UnsupportedLoader
from hybrid3d.rollout.sink import VllmSink
from hybrid3d.weight_transfer.group import Membership, TransferFailed, WorkerInitInfo, find_store, meet

logger = init_logger(__name__)

LOST = "the connection to another member of the transfer was lost"
EXPECTED = (CorruptTensors, PlanError, TransferFailed, UnsupportedLoader)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What a trainer tells the workers with each update.

    Attributes:
        update: its number, from 1.
    """

    update: int


class WorkerEngine(WeightTransferEngine):
    """Receives the weights of one worker.

    vLLM would mistake what a worker raises: see `hold.py`. So methods keep their errors, and `take_failure` returns
    what has failed. Only `start_weight_update` raises, in all workers alike, where vLLM has not loaded `hold.py`.

    Attributes:
        held: whether vLLM's engine has said that it holds generation.
    """

    init_info_cls, update_info_cls = WorkerInitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any):
        super().__init__(config, vllm_config, device, model)
        self.held = False
        self._failure = ""
        self._membership: Membership | None = None

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
        if info.device != self.device.type:
            return f"the trainer's weights are on {info.device}, and vLLM's on {self.device.type}"
        return ""

    def start_weight_update(self) -> None:
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
        logger.info("update %d: received %d bytes", update_info.update, report.received_bytes)

    def finish_weight_update(self) -> None:
        if not (self._membership and self._membership.resharder.sink.version):
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
