"""Sleep and wake-up of the rollout engine through vLLM's own methods, down to the functions that a GPU's driver has.

Everything that keeps account of sleep is vLLM's: `LLM`, its client, core, scheduler, executor and GPU worker, and the
allocator. Only mapping and copying of memory, which a CPU cannot do, is noted down instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.device_allocator import AllocationData, cumem, sleep_mode_backend
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.worker import gpu_worker

from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.rollout.patches import keep_weights_while_asleep

pytestmark = pytest.mark.engines

SIZES = {"weights": 400, "kv_cache": 300, "runtime": 20, "workspace": 1}  # bytes of the blocks that vLLM has by tag


class Driver:
    """Keeps account of mapped memory in place of a GPU's driver, and fails on what a driver fails on."""

    def __init__(self) -> None:
        self.mapped, self.copies = dict[int, int](), list[int]()

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        assert handle[2] not in self.mapped, "a driver refuses to map an address twice"
        self.mapped[handle[2]] = handle[1]

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        del self.mapped[handle[2]]  # KeyError: a driver refuses to unmap what is not mapped

    def cudaMemcpy(self, dst: int, src: int, count: int) -> None:
        assert dst in self.mapped or src in self.mapped, "neither address is mapped"
        self.copies.append(count)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """vLLM's allocator over such a driver."""
    found = Driver()
    monkeypatch.setattr(cumem, "cumem_available", True)
    monkeypatch.setattr(cumem, "libcudart", found)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
    for name in ("create_and_map", "unmap_and_release"):
        monkeypatch.setattr(cumem, name, getattr(found, name))
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)  # selects the allocator
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *unused: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (10**6 - sum(found.mapped.values()), 10**6))
    yield found
    cumem.CuMemAllocator.instance = None


class PlainScheduler(Scheduler):
    """vLLM's scheduler without requests."""

    def __init__(self) -> None:
        self._pause_state = PauseState.UNPAUSED
        self.requests, self.waiting, self.running, self.skipped_waiting = {}, [], [], []


class Core(EngineCore):
    """vLLM's core without caches that could be reset."""

    def _reset_caches(self, *unused: Any, **more: Any) -> None:
        pass


def worker_with(tags: tuple[str, ...], driver: Driver) -> gpu_worker.Worker:
    """Return vLLM's worker of a GPU, which has allocated a block of each of these tags."""
    worker = gpu_worker.Worker.__new__(gpu_worker.Worker)
    worker._sleep_mode_backend = sleep_mode_backend.CuMemBackend()
    worker._sleep_saved_buffers, worker._sleep_saved_draft_buffers = {}, {}
    worker._sleep_saved_parameters = {}
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=())
    model = torch.nn.Module()
    model.register_buffer("frequencies", torch.arange(4.0))
    worker.model_runner = SimpleNamespace(model=model, get_model=lambda: model)
    worker.get_draft_model = lambda: None
    worker.synchronize_device = lambda: None
    worker.shutdown = lambda: None
    allocator = cumem.CuMemAllocator.get_instance()
    for address, tag in enumerate(tags):
        handle = (0, SIZES[tag], address, 0)
        driver.create_and_map(handle)
        allocator.pointer_to_data[address] = AllocationData(handle, tag)
    return worker


def engine_of(driver: Driver, keeps_weights: bool) -> RolloutEngine:
    """Return a `RolloutEngine` over vLLM's own objects, with what `keep_weights_while_asleep` leaves to be freed."""
    executor = ExecutorWithExternalLauncher.__new__(ExecutorWithExternalLauncher)
    tags = tuple(tag for tag in SIZES if not (keeps_weights and tag == "weights"))
    executor.driver_worker, executor.sleeping_tags = worker_with(tags, driver), set()
    core = Core.__new__(Core)
    core.model_executor, core.scheduler = executor, PlainScheduler()
    client = InprocClient.__new__(InprocClient)
    client.engine_core = core
    client.shutdown = lambda: None
    llm = LLM.__new__(LLM)
    llm.llm_engine = LLMEngine.__new__(LLMEngine)
    llm.llm_engine.engine_core, llm.llm_engine.logger_manager = client, None
    llm.llm_engine.renderer = SimpleNamespace(clear_mm_cache=lambda: None)
    engine = RolloutEngine.__new__(RolloutEngine)
    engine._llm, engine._sleeps, engine._asleep, engine.weight_version = llm, True, set(), 3
    engine.discards_weights = not keeps_weights
    return engine


def is_paused(engine: RolloutEngine) -> bool:
    """Whether vLLM's scheduler would leave a request in its queue."""
    core = engine.llm.llm_engine.engine_core.engine_core
    assert core.is_scheduler_paused() == core.is_sleeping()
    return bool(core.is_scheduler_paused())


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_engine_generates_again_after_each_sleep(driver: Driver, keeps_weights: bool) -> None:
    engine = engine_of(driver, keeps_weights)
    all_bytes = sum(driver.mapped.values())
    for _ in range(3):
        engine.sleep()
        assert (engine.asleep_bytes(), driver.mapped) == (all_bytes, {})
        assert is_paused(engine)
        assert engine.weight_version is None
        engine.wake("weights")
        assert engine.asleep_bytes() == SIZES["kv_cache"]
        assert is_paused(engine)
        engine.wake("kv_cache")
        assert (engine.asleep_bytes(), sum(driver.mapped.values())) == (0, all_bytes)
        assert not is_paused(engine)
    copied = set(driver.copies)
    assert copied == {SIZES["runtime"]}  # and no weights, which would fill the host's memory


def test_engine_sleeps_again_where_only_weights_have_been_woken(driver: Driver) -> None:
    engine = engine_of(driver, keeps_weights=False)
    for _ in range(2):
        engine.sleep()
        engine.sleep()  # twice is once
        engine.wake("weights")
        assert sum(driver.mapped.values()) == sum(SIZES.values()) - SIZES["kv_cache"]
    engine.sleep()
    assert driver.mapped == {}
    engine.wake("kv_cache")  # in the other order
    assert is_paused(engine)
    engine.wake("weights")
    assert not is_paused(engine)


def test_buffers_survive_where_weights_are_discarded(driver: Driver) -> None:
    engine = engine_of(driver, keeps_weights=False)
    buffers = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.model
    expected = buffers.frequencies.clone()
    engine.sleep()
    buffers.frequencies.zero_()  # as memory that is mapped anew may be
    engine.wake("weights")
    assert buffers.frequencies.equal(expected)


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_engine_is_awake_when_it_is_shut_down(driver: Driver, keeps_weights: bool) -> None:
    engine = engine_of(driver, keeps_weights)
    all_bytes, at_end = sum(driver.mapped.values()), list[int]()
    engine.llm.llm_engine.engine_core.shutdown = lambda: at_end.append(sum(driver.mapped.values()))
    engine.sleep()
    engine.wake("weights")
    engine.close()
    engine.close()  # of one that is awake
    assert at_end == [all_bytes, all_bytes]


def test_memory_that_could_not_be_woken_is_woken_later(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(driver, keeps_weights=False)
    engine.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(cumem, "create_and_map", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.wake("weights")
    engine.wake("weights")
    engine.wake("kv_cache")
    assert sum(driver.mapped.values()) == sum(SIZES.values())
    assert not is_paused(engine)


def out_of_memory(handle: tuple[int, int, int, int]) -> None:
    raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62")


def test_engine_that_stays_asleep_is_an_error(driver: Driver) -> None:
    engine = engine_of(driver, keeps_weights=True)
    engine.sleep()
    engine._asleep = {"kv_cache"}  # as if weights that are kept needed no waking
    with pytest.raises(RuntimeError, match="still sleeps, although its weights and kv_cache were woken"):
        engine.wake("kv_cache")


def test_kept_weights_are_not_in_the_memory_that_sleeps(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_with((), driver)
    worker.vllm_config.model_config.enable_cumem_allocator = True
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    pool = gpu_worker.Worker._maybe_get_memory_pool_context
    monkeypatch.setattr(gpu_worker.Worker, "_maybe_get_memory_pool_context", pool)  # restores it
    assert not isinstance(worker._maybe_get_memory_pool_context("weights"), contextlib.nullcontext)
    keep_weights_while_asleep()
    assert isinstance(worker._maybe_get_memory_pool_context("weights"), contextlib.nullcontext)
    for tag in ("kv_cache", "runtime", "workspace"):
        assert not isinstance(worker._maybe_get_memory_pool_context(tag), contextlib.nullcontext)
