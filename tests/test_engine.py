"""The rollout engine's calls of vLLM, which sleeps only on a GPU: a recorder stands for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybrid3d.rollout.engine import RolloutEngine

pytestmark = pytest.mark.engines


class Recorder:
    """Stands for `vllm.LLM`, and keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")))

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")


@pytest.fixture
def engine() -> RolloutEngine:
    found = RolloutEngine.__new__(RolloutEngine)
    found._llm, found._sleeps, found._asleep, found.weight_version = Recorder(), True, set(), 3
    found.discards_weights = True
    return found


def test_weights_that_are_kept_are_not_woken(engine: RolloutEngine) -> None:
    engine.discards_weights = False  # `rollout.keep_weights`
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv_cache")
    assert engine._llm.calls == ["sleep 1", "wake kv_cache"]


def test_it_is_woken_before_it_is_shut_down(engine: RolloutEngine) -> None:
    engine.sleep()
    engine.close()
    assert engine._llm.calls == ["sleep 2", "wake weights", "wake kv_cache", "shutdown"]


def test_what_is_awake_is_not_woken(engine: RolloutEngine) -> None:
    engine.sleep()
    engine.wake("weights")
    engine.close()
    assert engine._llm.calls == ["sleep 2", "wake weights", "wake kv_cache", "shutdown"]
    engine._llm.calls.clear()
    engine.close()
    assert engine._llm.calls == ["shutdown"]
