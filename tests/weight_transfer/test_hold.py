"""vLLM's engine generates nothing while its weights are incomplete, whatever its workers and callers do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from hybrid3d.weight_transfer import hold

pytestmark = pytest.mark.engines

PAUSED, NEW_PAUSED, RUNS = PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED
INIT, START, DRAFT, UPDATE, FINISH, SHUTDOWN = hold._STEPS


class Core:
    """What an update touches of vLLM's `EngineCore`, with vLLM's own scheduler state, and two workers."""

    def __init__(self, backend: str = "hybrid3d", dp: int = 1):
        self.scheduler: Any = Scheduler.__new__(Scheduler)
        self.scheduler._pause_state = RUNS
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend=backend),
            parallel_config=SimpleNamespace(data_parallel_size=dp),
        )
        self.failures = ["", ""]
        self.called, self.resets, self.version = list[Any](), 0, "v0"
        self.resets_caches = True

    def get_weight_version(self) -> str:
        return self.version

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def _reset_caches(self) -> None:
        assert self.scheduler.pause_state == PAUSED
        if not self.resets_caches:
            raise RuntimeError("Failed to reset the KV connector cache.")
        self.resets += 1

    def resume(self) -> None:
        self.scheduler.set_pause_state(RUNS)

    @property
    def runs(self) -> bool:
        return bool(self.scheduler.pause_state == RUNS)


def workers(self: Core, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> list[Any]:
    """Stands for `EngineCore.collective_rpc`."""
    self.called.append(method if isinstance(method, str) else method.__name__)
    if method is hold.take_failure:
        found, self.failures = self.failures, ["", ""]
        return found
    return [None, None]


CALL: Callable[..., list[Any]] = hold.holding_generation(workers)


def call(core: Core, *methods: str) -> None:
    for method in methods:
        assert CALL(core, method) == [None, None]


def test_generation_is_held_from_start_to_finish() -> None:
    core = Core()
    call(core, INIT)
    assert (core.runs, core.version) == (True, "v0")
    for method in (START, UPDATE, UPDATE):
        call(core, method)
        assert (core.runs, core.version, core.resets) == (False, "incomplete", 0)
    call(core, FINISH)
    assert (core.runs, core.version, core.resets) == (True, "v0", 1)
    call(core, START, UPDATE, FINISH)
    assert (core.runs, core.resets) == (True, 2)


def failed_core() -> Core:
    core = Core()
    call(core, INIT, START)
    core.failures = ["", "the trainer was lost"]
    with pytest.raises(hold.UpdateFailed, match="the trainer was lost"):
        call(core, UPDATE)
    return core


def test_generation_is_not_resumed_after_a_failed_update() -> None:
    core = failed_core()
    for attempt in (core.resume, lambda: core.scheduler.set_pause_state(RUNS)):
        with pytest.raises(hold.UpdateFailed, match=r"weights are incomplete.*\(the trainer was lost\)"):
            attempt()
    assert (core.runs, core.version) == (False, "incomplete")
    for method in (UPDATE, FINISH):
        with pytest.raises(hold.UpdateFailed, match="before start_weight_update"):
            call(core, method)
    assert not core.runs


def test_next_update_that_succeeds_resumes_generation() -> None:
    core = failed_core()
    call(core, INIT, START)
    assert not core.runs
    core.failures = ["again", "again"]
    with pytest.raises(hold.UpdateFailed, match=r"^again$"):
        call(core, UPDATE)
    call(core, INIT, START, UPDATE, FINISH)
    assert (core.runs, core.version, core.resets) == (True, "v0", 1)


@pytest.mark.parametrize("done", [(START,), (START, UPDATE)])
def test_generation_is_not_resumed_during_an_update(done: tuple[str, ...]) -> None:
    core = Core()
    call(core, INIT, *done)
    with pytest.raises(hold.UpdateFailed, match="an update is in progress, or its trainer has gone"):
        core.resume()
    assert (core.runs, core.version) == (False, "incomplete")


def test_error_of_vllm_in_an_update_is_the_reason() -> None:
    core = Core()
    call(core, INIT, START)
    seen = list[str]()

    def failing(self: Core, method: Any, *args: Any) -> list[Any]:
        if method == UPDATE:
            raise RuntimeError("no update is active")
        if method is hold.end_update:
            seen.append(hold._holds[self].failure)
        return workers(self, method, *args)

    with pytest.raises(RuntimeError, match="no update is active"):
        hold.holding_generation(failing)(core, UPDATE)
    assert seen == ["no update is active"]
    with pytest.raises(hold.UpdateFailed, match=r"weights are incomplete \(no update is active\)"):
        core.resume()
    call(core, START, UPDATE, FINISH)
    assert core.runs


def test_generation_is_held_where_caches_cannot_be_dropped() -> None:
    core = Core()
    call(core, INIT, START, UPDATE)
    core.resets_caches = False
    with pytest.raises(RuntimeError, match="Failed to reset"):
        call(core, FINISH)
    with pytest.raises(hold.UpdateFailed, match="weights are incomplete"):
        core.resume()
    assert (core.runs, core.version) == (False, "incomplete")
    core.resets_caches = True
    call(core, INIT, START, UPDATE, FINISH)
    assert (core.runs, core.version) == (True, "v0")


def test_update_of_a_draft_model_is_refused_before_workers() -> None:
    core = Core()
    with pytest.raises(hold.UpdateFailed, match="does not update draft models"):
        call(core, DRAFT)
    assert (core.called, core.runs) == ([], True)


@pytest.mark.parametrize("done", [(START,), (START, UPDATE)])
def test_trainer_that_comes_after_one_that_has_gone_may_begin(done: tuple[str, ...]) -> None:
    core = Core()
    call(core, INIT, *done)
    with pytest.raises(hold.UpdateFailed, match="has been started already"):
        call(core, START)
    call(core, INIT)
    assert "end_update" in core.called
    with pytest.raises(hold.UpdateFailed, match="has not finished it"):
        core.resume()
    call(core, START, UPDATE, FINISH)
    assert core.runs


@pytest.mark.parametrize("state", [PAUSED, NEW_PAUSED])
def test_pause_of_the_user_outlasts_an_update(state: PauseState) -> None:
    core = Core()
    core.scheduler.set_pause_state(state)
    call(core, INIT, START, UPDATE, FINISH)
    assert (core.scheduler.pause_state, core.resets) == (state, 0)
    core.resume()
    assert core.runs


def test_pause_during_an_update_is_kept_for_later() -> None:
    core = Core()
    call(core, INIT, START)
    core.scheduler.set_pause_state(NEW_PAUSED)  # in which running requests go on
    assert core.scheduler.pause_state == PAUSED
    call(core, UPDATE, FINISH)
    assert core.scheduler.pause_state == NEW_PAUSED


def test_update_that_cannot_start_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()

    def refusing(self: Core, method: Any, *args: Any) -> list[Any]:
        if method == START:
            raise RuntimeError("not configured")
        return workers(self, method, *args)

    with pytest.raises(RuntimeError, match="not configured"):
        hold.holding_generation(refusing)(core, START)
    assert (core.runs, core.version) == (True, "v0")


def test_engines_that_generate_together_must_be_paused_first() -> None:
    core = Core(dp=2)
    with pytest.raises(hold.UpdateFailed, match="2 engines generate together: pause generation"):
        call(core, START)
    assert core.runs
    core.scheduler.set_pause_state(NEW_PAUSED)
    call(core, START, UPDATE, FINISH)


def test_trainer_is_not_released_during_an_update() -> None:
    core = Core()
    call(core, START)
    with pytest.raises(hold.UpdateFailed, match="has been started"):
        call(core, SHUTDOWN)
    call(core, UPDATE, FINISH, SHUTDOWN)


def test_calls_of_other_backends_are_left_alone() -> None:
    for core in (Core("nccl"), Core()):
        methods = (INIT, START, UPDATE, FINISH) if core.vllm_config.weight_transfer_config.backend == "nccl" else ("x",)
        call(core, *methods)
        assert core.called == list(methods)
        assert core.runs


def test_install_replaces_once() -> None:
    original = hold.ENGINE_CALLS.original()
    try:
        hold.install()
        first = hold.ENGINE_CALLS.original()
        hold.install()
        assert hold.ENGINE_CALLS.original() is first
        assert getattr(first, "__wrapped__", None) is not None
    finally:
        hold.ENGINE_CALLS.replace(original)


def test_worker_ends_an_update_below_what_vllm_wraps_it_in() -> None:
    inner = SimpleNamespace(_weight_update_active=True, weight_transfer_engine=SimpleNamespace(held=False))
    hold.end_update(SimpleNamespace(worker=inner))
    hold.guard(inner)
    assert not inner._weight_update_active
    assert inner.weight_transfer_engine.held
