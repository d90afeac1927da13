"""Which of several ends of ranks caused the others, by what they leave and by their exit codes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hybrid3d.run.ends import Ended, find_root_cause
from hybrid3d.run.folder import RunFolder

LOST = Ended(0, "rank 2 is lost", time=1.0, peer=True)
BOOM, LATER = Ended(1, "ValueError: boom", time=2.0), Ended(2, "KeyError: later", time=3.0)
FINAL = Ended(3, "no more restarts", time=4.0, final=True)
KILLED, TERM = -signal.SIGKILL, -signal.SIGTERM


@pytest.mark.parametrize(
    ("ends", "codes", "reason"),
    [
        ([LOST, BOOM, LATER], {0: 1, 1: 1, 2: 1}, BOOM.reason),  # the first that is not about another rank
        ([LOST, BOOM, LATER, FINAL], {0: 1, 1: 1, 3: 1}, FINAL.reason),
        ([LOST, BOOM], {0: 1, 2: KILLED}, BOOM.reason),  # an error before a signal
        ([LOST], {0: 1, 2: KILLED}, "killed by SIGKILL"),  # a signal before a lost peer
        ([LOST], {0: 1, 2: TERM}, LOST.reason),  # but for one by which others end it
        ([], {0: TERM, 1: 3, 2: KILLED}, "killed by SIGKILL"),
        ([], {1: 3, 0: TERM}, "ended with exit code 3"),  # the first
    ],
)
def test_cause_of_several_ends(ends: list[Ended], codes: dict[int, int], reason: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    for end in ends:
        assert end.write(folder)
    assert find_root_cause(folder, codes).reason == reason


def test_signals_without_a_name_have_their_number() -> None:
    assert Ended.by_code(1, -(signal.SIGRTMIN + 1)).reason == f"killed by signal {signal.SIGRTMIN + 1}"


def test_cause_among_some_ranks_is_none_of_the_others(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    for end in (BOOM, LATER):
        end.write(folder)
    assert find_root_cause(folder, {2: 1}, ranks=range(2, 3)) == LATER
