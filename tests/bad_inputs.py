"""What every refusal of a bad input must be: exit code 2, one message that names what is wrong, and nothing started.

A table of `Bad` cases can be run through `Harness.refuse`: in this process, which takes milliseconds, or as a process
of its own. `sample` chooses the same cases every time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybrid3d import cli
from run_ranks import environment

SECONDS = 20.0  # that a refusal may take

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_VARIABLES += ("HYBRID3D_CHECKED", "HYBRID3D_RUN", "HYBRID3D_RENDEZVOUS_SECONDS")


@dataclass(frozen=True)
class Bad:
    """A bad input.

    Attributes:
        label: a name that no other case of its table has.
        arguments: of the command line.
        said: what the message must name, each of these: a key, a file or a variable.
        prepare: makes the files of the case in the folder that the command is run in.
        variables: of the environment.
    """

    label: str
    arguments: tuple[str, ...]
    said: tuple[str, ...]
    prepare: Callable[[Path], object] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def sample(cases: Sequence[Bad], number: int, seed: int = 1) -> list[Bad]:
    """As many of the cases, the same every time, in their order."""
    if number >= len(cases):
        return list(cases)
    chosen = {*random.Random(seed).sample(range(len(cases)), number)}
    return [case for index, case in enumerate(cases) if index in chosen]


def check_labels(cases: Sequence[Bad]) -> None:
    labels = [case.label for case in cases]
    assert len({*labels}) == len(labels), "two cases have the same label"


class Harness:
    """Runs cases in a folder in which nothing else is wrong.

    Args:
        work: the folder; it is the current one while a case runs.
        started: what was launched, which must stay empty.
    """

    def __init__(
        self,
        work: Path,
        started: list[object],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ):
        self._work, self._started, self._capsys, self._monkeypatch = work, started, capsys, monkeypatch

    def refuse(self, case: Bad) -> str:
        """The message that `hybrid3d` refuses a case with, after every check of it."""
        if case.prepare is not None:
            case.prepare(self._work)
        before = snapshot(self._work)
        self._capsys.readouterr()
        begun = time.monotonic()
        with self._monkeypatch.context() as patched:
            patched.chdir(self._work)
            for name in LAUNCHER_VARIABLES:
                patched.delenv(name, raising=False)
            for name, value in case.variables.items():
                patched.setenv(name, value)
            try:
                code = cli.main(list(case.arguments))
            except SystemExit as ended:  # argparse
                code = int(ended.code or 0)
            seconds = time.monotonic() - begun
            for name in LAUNCHER_VARIABLES:  # what the command set itself goes, too
                patched.delenv(name, raising=False)
        out, message = self._capsys.readouterr()
        launched = [*self._started]
        self._started.clear()
        assert not launched, f"{case.label}: something was launched"
        assert snapshot(self._work) == before, f"{case.label}: something was written"
        check_refusal(case, code, out, message, seconds)
        return message

    def refuse_as_process(self, case: Bad) -> str:
        """As `refuse`, in a process of its own, with all that libraries might print."""
        if case.prepare is not None:
            case.prepare(self._work)
        before, begun = snapshot(self._work), time.monotonic()
        alone = {name: value for name, value in environment("bad").items() if name not in LAUNCHER_VARIABLES}
        done = subprocess.run(
            [sys.executable, "-m", "hybrid3d", *case.arguments],
            cwd=self._work,
            env={**alone, **case.variables},
            capture_output=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        seconds = time.monotonic() - begun
        out, message = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        assert snapshot(self._work) == before, f"{case.label}: something was written"
        check_refusal(case, done.returncode, out, message, seconds)
        return message


def check_refusal(case: Bad, code: int, out: str, message: str, seconds: float) -> None:
    """Exit code 2, nothing on stdout, and one message, in time, that says what is wrong."""
    told = f"{case.label}: exit code {code} after {seconds:.1f} s\n{out}\n{message}"
    assert "Traceback" not in message, told
    assert code == 2, told
    assert out == "", told
    assert seconds < SECONDS, told
    first, *more = message.splitlines() or [""]
    assert first.strip(), told
    if not message.startswith("usage:"):  # argparse has lines of its own
        assert all(line.startswith("  ") for line in more), told
    assert message.isprintable() or all(char in "\n\t" or char.isprintable() for char in message), told
    assert len(message) < 20_000, told
    for words in case.said:
        assert words in message, f"{words!r} is not said\n{told}"


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its size and time of change."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            found[os.path.relpath(os.path.join(parent, name), folder)] = status.st_size, status.st_mtime_ns
    return found
