"""Holds generation while vLLM's weights are incomplete: from the start of an update until one has succeeded.

This is the part of the backend in vLLM's engine process, which schedules requests and calls the workers. Requests wait
meanwhile, also if the trainer dies in the middle of an update, and `/is_paused` says so.

No call of a worker may raise here: with several workers vLLM reads the answers up to the first error, and takes the
others for those to its next call. So the workers keep their errors, and the engine asks for them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.interface import PauseState

from hybrid3d.patches import Patch, set_existing
from hybrid3d.weight_transfer import BACKEND

logger = logging.getLogger(__name__)

VLLM = "vllm>=0.31,<0.34"
INCOMPLETE = "incomplete"
"""The weights' version, as vLLM reports it, during an update and until one has succeeded."""

CollectiveRpc = Callable[..., list[Any]]


class UpdateFailed(RuntimeError):
    """Raised if workers have not received what they should."""


class Hold:
    """The engine's state while generation is held.

    An update is `open` from its start until it is finished; `failure` says why the last one failed, if any has.
    """

    def __init__(self, core: Any):
        self.open, self.failure = True, ""
        self._pause, self._version = core.scheduler.pause_state, core.get_weight_version()
        self._unpaused = self._pause == PauseState.UNPAUSED
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        core.scheduler.set_pause_state = self._remember
        core.set_weight_version(INCOMPLETE)

    def _remember(self, state: PauseState) -> None:
        """Take a change of the scheduler's state, which is to have it once the weights are complete.

        Raises `UpdateFailed` where generation is to be resumed with weights of two versions.
        """
        if state == PauseState.UNPAUSED:
            reason = self.failure or "an update is in progress, or its trainer has gone"
            raise UpdateFailed(
                f"vLLM's weights are incomplete ({reason}): generation goes on once an update has succeeded"
            )
        self._pause = state

    def release(self, core: Any) -> None:
        """Let generation go on, unless it was paused before or has been meanwhile; after an error it is held still."""
        if self._unpaused:  # nobody has paused it for the update, and so nobody has dropped what older weights computed
            core._reset_caches()
        del core.scheduler.set_pause_state
        core.set_weight_version(self._version)
        core.scheduler.set_pause_state(self._pause)


_holds: WeakKeyDictionary[Any, Hold] = WeakKeyDictionary()


def install() -> None:
    """Let vLLM's engine in this process hold generation during updates by this backend; twice is harmless."""
    if not hasattr(ENGINE_CALLS.original(), "holds_generation"):
        ENGINE_CALLS.replace(holding_generation(ENGINE_CALLS.original()))


def holding_generation(collective_rpc: CollectiveRpc) -> CollectiveRpc:
    """Return vLLM's `EngineCore.collective_rpc` with a hold around updates."""

    @functools.wraps(collective_rpc)
    def call_workers(
        self: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        config = self.vllm_config.weight_transfer_config
        step = _STEPS.get(method) if isinstance(method, str) else None
        call = functools.partial(collective_rpc, self)
        if not (step and config and config.backend == BACKEND):
            return call(method, timeout, args, kwargs)
        return step(self, call, lambda: call(method, timeout, args, kwargs))

    call_workers.holds_generation = True  # type: ignore[attr-defined]
    return call_workers


def _init(core: Any, call: CollectiveRpc, workers: Callable[[], list[Any]]) -> list[Any]:
    hold = _holds.get(core)
    if hold and hold.open:  # the trainer that started an update has gone
        hold.open, hold.failure = False, hold.failure or "its trainer has not finished it"
        call(end_update)
    return _checked(call, workers)


def _start(core: Any, call: CollectiveRpc, workers: Callable[[], list[Any]]) -> list[Any]:
    hold = _holds.get(core)
    if not hold:
        parallel = core.vllm_config.parallel_config
        if parallel.data_parallel_size > 1 and core.scheduler.pause_state == PauseState.UNPAUSED:
            raise UpdateFailed(
                f"{parallel.data_parallel_size} engines generate together: pause generation (/pause) before an update"
            )
        call(guard)
        hold = _holds[core] = Hold(core)
    elif hold.open:
        raise UpdateFailed("an update has been started already, and not been finished")
    hold.open = True
    try:
        return workers()
    except Exception:
        hold.open = False
        if not hold.failure:  # nothing has been written
            _release(core)
        raise


def _update(core: Any, call: CollectiveRpc, workers: Callable[[], list[Any]]) -> list[Any]:
    hold = _open(core, "update_weights")
    try:
        return _checked(call, workers)
    except Exception as error:  # also one of vLLM's own
        hold.open, hold.failure = False, str(error) or type(error).__name__
        call(end_update)
        logger.warning("generation is held, as vLLM's weights are incomplete: %s", error)
        raise


def _finish(core: Any, call: CollectiveRpc, workers: Callable[[], list[Any]]) -> list[Any]:
    _open(core, "finish_weight_update")
    answers = _checked(call, workers)
    _release(core)
    return answers


def _release(core: Any) -> None:
    _holds[core].release(core)
    del _holds[core]


def _refuse_draft(core: Any, call: CollectiveRpc, workers: Callable[[], list[Any]]) -> list[Any]:
    raise UpdateFailed("this backend does not update draft models")


def _shutdown(core: Any, call: CollectiveRpc, workers: Callable[[], list[Any]]) -> list[Any]:
    if core in _holds and _holds[core].open:
        raise UpdateFailed("an update has been started, and not been finished")
    return workers()


def _open(core: Any, method: str) -> Hold:
    hold = _holds.get(core)
    if not (hold and hold.open):
        raise UpdateFailed(f"{method} is called before start_weight_update")
    return hold


def _checked(call: CollectiveRpc, workers: Callable[[], list[Any]]) -> list[Any]:
    """Return the workers' answers, if none has failed."""
    answers = workers()
    failures = list(dict.fromkeys(failure for failure in call(take_failure) if failure))
    if failures:
        raise UpdateFailed("; ".join(failures))
    return answers


_STEPS = {
    "init_weight_transfer_engine": _init,
    "start_weight_update": _start,
    "start_draft_weight_update": _refuse_draft,
    "update_weights": _update,
    "finish_weight_update": _finish,
    "shutdown_weight_transfer_engine": _shutdown,
}


def guard(worker: Any) -> None:
    """Tell a worker's engine that generation is held."""
    worker.weight_transfer_engine.held = True


def take_failure(worker: Any) -> str:
    """Return why a worker's last call failed, and forget it."""
    return str(worker.weight_transfer_engine.take_failure())


def end_update(worker: Any) -> None:
    """Let a worker take the start of another update, whatever has become of this one."""
    worker = getattr(worker, "worker", worker)  # vLLM wraps it
    set_existing(VLLM, worker, _weight_update_active=False)


ENGINE_CALLS = Patch(
    "vllm.v1.engine.core.EngineCore.collective_rpc",
    VLLM,
    "vLLM would generate with weights of two versions after an update that was interrupted, and during one; and it "
    "takes a second worker's error for the answer to its next call (`weight_transfer/hold.py`).",
    "tests/weight_transfer/test_server.py",
    holding_generation,
)


# What this package touches of vLLM's server that `hybrid3d.engines` cannot read in its code: literals, which it reads
# without importing them. A training run touches none of it.
# By a class or module, the attributes that are used of objects without a type
TOUCHED = {
    "vllm.config.VllmConfig": "parallel_config quant_config weight_transfer_config",
    "vllm.config.model.ModelConfig": "quantization",
    "vllm.config.parallel.ParallelConfig": "data_parallel_index data_parallel_size enable_eplb rank world_size",
    "vllm.config.weight_transfer.WeightTransferConfig": "backend",
    "vllm.v1.core.sched.scheduler.Scheduler": "pause_state set_pause_state",
    "vllm.v1.engine.core.EngineCore": "_reset_caches get_weight_version scheduler set_weight_version vllm_config",
    "vllm.v1.worker.gpu_worker.Worker": "_weight_update_active weight_transfer_engine",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "worker",
}

# The engine's names without which the code works too
OPTIONAL = ("vllm.distributed.weight_transfer.base.Shard",)
