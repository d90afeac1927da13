"""Rewards of whole batches, with a time limit each, so that no answer and no reward function can stop a run."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from hybrid3d.rl.rewards import find_reward, load_reward
from hybrid3d.rl.scoring_worker import START_SECONDS, Item, Verdict

GRACE_SECONDS = 5  # to kill a worker that hangs and start the next
# What can be imported here can be there, this package first of all.
_SERVER = (
    "import sys; sys.path[:] = eval(sys.argv[1]); from hybrid3d.rl import scoring_server as s; s.main(*sys.argv[2:])"
)


@dataclass(frozen=True)
class Scores:
    """The rewards of a batch, and what went wrong with how many samples: those have the default reward.

    `failures` counts by kind: `raised`, `hung` (no reward within the limit), `died` (the process did), `not_a_number`,
    `wrong_count` (of a batched function); `examples` has one message of each kind.
    """

    rewards: list[float]
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


class Scorer:
    """Computes one reward in `workers` processes, which start with the first batch; a cheap builtin one needs none.

    A user's own reward is `module:function`: a function of (answer, reference, prompt) that returns a float. With the
    attribute `batched = True` it takes three lists and returns a list, and `timeout_seconds` holds for the whole batch.

    Raises:
        ValueError: `spec` is neither a reward's name nor `module:function`.
    """

    def __init__(self, spec: str, workers: int, timeout_seconds: float, default: float):
        reward = find_reward(spec)
        self._function = None if reward.pooled else load_reward(reward.target)
        self._spec, self._workers, self._seconds, self._default = spec, workers, timeout_seconds, default
        self._server: tuple[subprocess.Popen[bytes], Connection] | None = None

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, items: Sequence[Item]) -> Scores:
        """Rewards of (answer, reference, prompt), in order."""
        if self._function is not None:
            return Scores([float(self._function(*item)) for item in items])
        verdicts = self._ask(list(items)) if items else []
        failed = [(kind, said) for reward, kind, said in verdicts if reward is None]
        return Scores(
            rewards=[self._default if reward is None else reward for reward, _, _ in verdicts],
            failures=dict(Counter(kind for kind, _ in failed)),
            examples=dict(reversed(failed)),  # the first of each kind
        )

    def close(self) -> None:
        """End all processes; another batch would start them again."""
        if self._server is None:
            return
        process, connection = self._server
        self._server = None
        connection.close()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its workers and their semaphores go with it
            process.wait()

    def _ask(self, items: list[Item]) -> list[Verdict]:
        """Verdicts of the pool. It keeps to the limit of each sample; the one here is for a pool that itself hangs."""
        rounds = math.ceil(len(items) / self._workers)
        limit = START_SECONDS + rounds * (self._seconds + GRACE_SECONDS)
        process, connection = self._running()
        try:
            connection.send(items)
            if connection.poll(limit):
                verdicts: list[Verdict] = connection.recv()
                return verdicts
            failure: Verdict = (None, "hung", f"no rewards from the pool within {limit:g} s")
            process.kill()
        except (EOFError, ConnectionError):
            failure = (None, "died", f"the pool's process ended with exit code {process.wait()}")
        self.close()
        return [failure] * len(items)

    def _running(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._server is not None and self._server[0].poll() is not None:
            self.close()  # it ended between two batches
        if self._server is None:
            ours, theirs = multiprocessing.Pipe()
            arguments = [str(theirs.fileno()), self._spec, str(self._workers), str(self._seconds)]
            process = subprocess.Popen(
                _command("serve", *arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what rewards print; what they say on stderr is for the log
                start_new_session=True,  # an interrupt from the terminal is the trainer's to answer
            )
            theirs.close()
            self._server = process, ours
        return self._server


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", _SERVER, repr(sys.path), *arguments]


def check_reward(spec: str) -> None:
    """Try to load a reward, in a process of its own: a user's module runs its code when it is imported.

    Raises:
        ValueError: there is no such reward, module or function, or it cannot be loaded or called; says why.
    """
    reward = find_reward(spec)
    if not reward.pooled:
        return
    command = _command("check", reward.target)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"reward {spec!r} does not load within {START_SECONDS} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"its process ended with exit code {done.returncode}"
        raise ValueError(f"reward {spec!r} does not load: {reason}")
