"""What follows from each end of a process that runs a rank, in tables; whole runs that are killed are elsewhere."""

from __future__ import annotations

import signal

import pytest

from hybrid3d.launch.policies import Again, Decision, Exit, Over, ServingPolicy, decide_training
from hybrid3d.launch_environment import DISCONNECTED, END_SECONDS, FORGIVEN_SECONDS, RUN_LOST, State
from hybrid3d.run.ends import Ended

C, R, L, E = (state.value for state in (State.CONNECTED, State.READY, State.LEAVING, State.ENDING))
BOOM, LOST = Ended(3, "ValueError: boom"), Ended(3, "rank 0 is lost", peer=True)
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM)
KILLED = {number: f"killed by {number.name}" for number in SIGNALS}


def after(code: int, states: bytes, record: Ended | None = None, ended: bool = False) -> Over | Again:
    """Return what follows from the first end of rank 3."""
    return ServingPolicy(3, "generation", 2).after(Exit(code, states), record, ended)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
@pytest.mark.parametrize("states", [b"", C, C + R])
def test_signal_that_ends_a_rank_is_named(number: int, states: bytes) -> None:
    assert after(-number, states) == Again(KILLED[number], 0.0 if R in states else 1.0)
    assert after(-number, states, ended=True) == Over(0)


@pytest.mark.parametrize(
    ("code", "states", "record", "expected"),
    [
        (0, C + R + E, None, Over(0)),
        (1, C + R + E, BOOM, Over(0)),  # at the end of the run nobody needs it
        (0, C + L, None, Again()),  # it was asked to wait without a model
        (RUN_LOST, C, None, Over(1)),  # rank 0 hangs, and it has reported that
        (RUN_LOST, C + R, None, Over(1)),
        (1, C, None, Over(1, Ended(3, "ended with exit code 1"))),
        (1, C + R, None, Again("ended with exit code 1")),  # as code 3
        (0, C + R, None, Again("ended with exit code 0")),  # nobody has told it to end
        (1, b"", None, Over(1)),  # the ranks have not met, and rank 0 says why
        (2, b"", None, Over(2)),
        (1, C, BOOM, Over(1, Ended(3, BOOM.reason))),  # by itself before it was ready
        (3, C, None, Over(1, Ended(3, "ended with exit code 3"))),
        (1, C + R, BOOM, Again(BOOM.reason)),
        (3, C + R, None, Again("ended with exit code 3")),
        (1, C, LOST, Again(LOST.reason, 1.0)),  # by others' doing
        (DISCONNECTED, C, None, Again("its connection to rank 0 ended", 1.0)),
        (DISCONNECTED, C + R, None, Again("its connection to rank 0 ended")),
    ],
)
def test_end_of_a_rank_that_serves(code: int, states: bytes, record: Ended | None, expected: Over | Again) -> None:
    found = after(code, states, record)
    if isinstance(found, Over) and found.end is not None:
        assert isinstance(expected, Over)
        assert expected.end is not None
        assert (found.code, found.end.reason, found.end.peer) == (expected.code, expected.end.reason, False)
    else:
        assert found == expected


def test_store_that_is_gone_later_ends_the_rank() -> None:
    policy = ServingPolicy(3, "generation", 2)
    assert isinstance(policy.after(Exit(-9, C + R), None, False), Again)
    assert policy.after(Exit(1, E), None, False) == Over(0)


def test_start_that_fails_is_a_failure_of_the_rank() -> None:
    """Nothing says that the run has ended when a rank that is started again does not get as far as its store."""
    policy = ServingPolicy(3, "generation", 2)
    assert isinstance(policy.after(Exit(-9, C + R), None, False), Again)
    assert policy.after(Exit(2), None, False) == Again("ended with exit code 2", 1.0)
    over = policy.after(Exit(1), None, False)
    assert isinstance(over, Over)
    assert over.end is not None
    assert (over.code, over.end.reason) == (
        1,
        "ended with exit code 1; it was started again 2 times: raise roles.generation.max_restarts",
    )


def test_restarts_are_counted_and_forgiven() -> None:
    policy = ServingPolicy(3, "generation", 2)
    assert [policy.after(Exit(-9, C), None, False) for _ in range(2)] == [
        Again("killed by SIGKILL", 1.0),
        Again("killed by SIGKILL", 3.0),
    ]
    for _ in range(2):  # the one that was ready for so long begins to count anew
        long = Exit(-9, C + R, ready_seconds=FORGIVEN_SECONDS + 1)
        assert policy.after(long, None, False) == Again("killed by SIGKILL")
    assert isinstance(policy.after(Exit(-9, C + R), None, False), Again)
    over = policy.after(Exit(-9, C + R), None, False)
    assert isinstance(over, Over)
    assert over.end is not None
    assert (over.code, over.end.reason) == (
        1,
        "killed by SIGKILL; it was started again 2 times: raise roles.generation.max_restarts",
    )
    endless = ServingPolicy(3, "reward", 99)
    assert [endless.after(Exit(-9, C), None, False) for _ in range(9)][-1] == Again("killed by SIGKILL", END_SECONDS)


NO_MORE = Decision(again=False, counts=False, final=True)
OUT_OF_MEMORY = Ended(1, "out of memory", kind="out_of_memory")


@pytest.mark.parametrize(
    ("cause", "codes", "restarts", "ended", "expected"),
    [
        (Ended.by_code(1, -9), {0: 1, 1: -9}, 0, False, Decision(again=True, counts=True, final=False)),
        (Ended.by_code(1, -9), {0: 1, 1: -9}, 2, False, NO_MORE),
        (Ended(1, "no reward today", on_all_ranks=True), {0: 1, 1: 1}, 0, False, NO_MORE),
        (OUT_OF_MEMORY, {0: 1, 1: 1}, 2, False, Decision(again=True, counts=False, final=False)),
        (Ended.by_code(1, -9), {0: 1, 1: -9}, 0, True, Decision(again=False, counts=False, final=False)),
        (Ended.by_code(0, -9), {0: -9}, 0, False, Decision(again=False, counts=False, final=False)),  # a node is lost
        (Ended.by_code(0, -9), {0: -9, 1: 0}, 0, False, Decision(again=False, counts=False, final=False)),
    ],
)
def test_failure_of_ranks_that_train(
    cause: Ended, codes: dict[int, int], restarts: int, ended: bool, expected: Decision
) -> None:
    assert decide_training(cause, codes, range(2), restarts, 2, ended) == expected
