"""Ranks that work more slowly than others that do the same, by steps that are made up."""

from __future__ import annotations

import msgspec
import pytest

from hybrid3d.watch.work_meter import KEPT_STEPS, SlowRank, StepWork, Work, WorkRecord, find_slow_ranks

SAMPLE = 0.1


def trains(*seconds: float, stage: int = 0) -> Work:
    """Return a rank that worked for so many seconds in each step of training."""
    steps = [StepWork(step, {"train": value}) for step, value in enumerate(seconds)]
    return Work("node", {"train": f"pipeline stage {stage}"}, steps)


def generates(seconds: float, passes: int, tokens: int) -> Work:
    steps = [StepWork(step, {"generate": seconds}, passes, tokens) for step in range(3)]
    return Work("node", {"generate": "rank 0 of a replica"}, steps)


def found(*works: Work) -> list[tuple[int, str, float, int]]:
    slow = find_slow_ranks(dict(enumerate(works)), SAMPLE)
    return [(one.rank, one.phase, round(one.seconds / one.typical, 2), one.steps) for one in slow]


def test_rank_below_four_fifths_of_the_median_speed_is_slow() -> None:
    usual = trains(20, 20, 20)
    assert found(usual, usual, usual, trains(26, 26, 26)) == [(3, "train", 1.3, 3)]
    assert found(usual, usual, usual, trains(24, 24, 24)) == []


def test_slower_of_two_ranks_is_found() -> None:
    assert found(trains(30, 30, 30), trains(20, 20, 20)) == [(0, "train", 1.5, 3)]


def test_stages_are_not_compared() -> None:
    assert found(trains(9, 9, 9), trains(20, 20, 20, stage=1)) == []
    assert found(trains(9, 9, 9), trains(20, 20, 20, stage=1), trains(9, 9, 9), trains(20, 20, 20, stage=1)) == []


def test_slow_rank_needs_three_slow_steps_in_a_row() -> None:
    usual = trains(20, 20, 20, 20)
    assert found(usual, usual, trains(40, 40, 40, 20)) == []
    assert found(usual, usual, trains(20, 20, 40, 40)) == []
    assert found(usual, usual, trains(20, 40, 40, 40)) == [(2, "train", 2.0, 3)]
    assert found(trains(20, 20), trains(40, 40)) == []


def test_short_steps_are_looked_at_over_more_steps() -> None:
    """A tenth of a second a sample says little about steps of a second: 30 of them may be 20 by chance."""
    assert found(trains(*[1.0] * 3), trains(*[1.5] * 3)) == []
    assert found(trains(*[1.0] * 12), trains(*[1.5] * 12)) == [(1, "train", 1.5, 10)]
    assert found(trains(*[0.1] * 10), trains(*[0.25] * 10)) == []  # less than MIN_SECONDS a step


def test_steps_that_not_all_have_completed_are_not_compared() -> None:
    assert found(trains(20, 20), trains(20, 20, 40, 40, 40)) == []


def test_rank_that_was_lost_is_not_waited_for() -> None:
    usual, lost = trains(*[20] * 9), trains(*[20] * 4)
    slow = trains(*[20] * 6, *[40] * 3)  # since the other one was lost
    assert found(usual, lost, slow) == [(2, "train", 2.0, 3)]
    assert found(usual, Work("node", {"train": "pipeline stage 0"}), slow) == [(2, "train", 2.0, 3)]


def test_replicas_with_other_requests_are_not_slow() -> None:
    usual = generates(20.0, passes=100, tokens=1000)
    assert found(usual, usual, generates(40.0, passes=200, tokens=1000)) == []  # one long answer
    assert found(usual, usual, generates(40.0, passes=100, tokens=2000)) == []  # more answers
    assert found(usual, usual, generates(40.0, passes=100, tokens=1000)) == [(2, "generate", 2.0, 3)]
    assert found(usual, usual, generates(0.0, passes=0, tokens=0)) == []  # had none
    assert found(usual, generates(0.0, passes=0, tokens=0)) == []


def test_work_record_has_last_steps_and_what_was_generated_there() -> None:
    record, generated = WorkRecord(), [0, 0]
    record.add_seconds("generate", 1.0)  # before the first step
    record.generates(1, lambda: (generated[0], generated[1]))
    for step in range(KEPT_STEPS + 4):
        record.begin_step(step)
        record.add_seconds("eval", 2.0)
        record.add_seconds("advance", 0.5)
        record.add_seconds("train", 3.0)  # it does not train
        generated[0], generated[1] = generated[0] + 5, generated[1] + 70
    work = msgspec.json.decode(record.message(), type=Work)
    assert work.parts == {"generate": "rank 1 of a replica"}
    assert [one.step for one in work.steps] == list(range(3, KEPT_STEPS + 3))
    assert all(one == StepWork(one.step, {"generate": 2.5}, 5, 70) for one in work.steps)


def test_message_says_how_much_slower_than_which() -> None:
    said = str(SlowRank(3, "node-1", "train", "pipeline stage 0", 3.0, 2.0, 4, 8))
    assert said == (
        "rank 3 on node-1 is slow: in phase train (pipeline stage 0) it worked for 3.0 s a step, 1.5 times as long as "
        "the median of 8 ranks that do the same (2.0 s), over 4 steps"
    )


@pytest.mark.parametrize("steps", [0, 2])
def test_steps_too_few_say_nothing(steps: int) -> None:
    assert found(trains(*[1.0] * steps), trains(*[99.0] * steps)) == []
