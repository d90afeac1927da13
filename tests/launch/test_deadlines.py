"""A wait that contains another one is longer, and no room has a table of its own."""

import re
from pathlib import Path

import pytest

from hybrid3d import launch_environment
from hybrid3d.launch_environment import (
    ANSWER_SECONDS,
    BEAT_SECONDS,
    CLOSE_SECONDS,
    DECIDED_SECONDS,
    DECISION_SECONDS,
    END_SECONDS,
    EXIT_SECONDS,
    KILL_SECONDS,
)

PACKAGE = Path(launch_environment.__file__).parent
ROOMS = ("launch", "watch", "workers")
CONSTANT = re.compile(r"^\w*(?:SECONDS|TIMEOUT)\w* *=.*", re.MULTILINE)
PACES = {"POLL_SECONDS", "SAMPLE_SECONDS", "ADDRESS_POLL_SECONDS", "ACCEPT_PAUSE_SECONDS"}  # nobody is lost by them


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        # `rank.run_process`: who tells of a lost rank asks the others what they wait for, and kills its own processes
        (EXIT_SECONDS, ANSWER_SECONDS + KILL_SECONDS),
        (END_SECONDS, EXIT_SECONDS + BEAT_SECONDS),  # `local_ranks._end` and `WorkerLoop._has_failed`: a rank's exit
        (CLOSE_SECONDS, EXIT_SECONDS + KILL_SECONDS),  # `TrainingAttempts.await_ends`: parents that wait for a child
        (DECISION_SECONDS, EXIT_SECONDS + KILL_SECONDS + CLOSE_SECONDS),  # `is_there_another`: rank 0's parent
        (DECIDED_SECONDS, DECISION_SECONDS),  # `run_training_rank`: all that it asks the store
    ],
)
def test_wait_that_contains_another_is_longer(outer: float, inner: float) -> None:
    assert outer > inner


def test_rooms_have_paces_of_their_own_alone() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), line.split()[0])
        for room in ROOMS
        for path in (PACKAGE / room).glob("*.py")
        for line in CONSTANT.findall(path.read_text(encoding="utf-8"))
    }
    sizes = {
        ("watch/watchdog.py", "NATIVE_STACKS_SECONDS"),
        ("watch/work_meter.py", "MIN_SECONDS"),
        ("workers/reward.py", "CALL_SECONDS"),  # of work in a call, which nothing enforces
    }
    assert {one for one in found if one[1] not in PACES} == sizes
