"""Replies of an environment to whole batches of conversations, with a time limit each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from hybrid3d.rewards.environments import ENVIRONMENTS, Environment, find_environment, stops_of
from hybrid3d.rewards.pool_client import ProcessPoolClient, try_out
from hybrid3d.rewards.registry import load_function

Conversed = tuple[tuple[str, ...], str, str]
"""Turns, reference, prompt."""


@dataclass(frozen=True)
class Reply:
    """Words, or None: the conversation is over, also where no reply could be had.

    `failure` is then the kind, as in `Scores` (`not_a_text` instead of a number), and `said` what was said of it.
    """

    words: str | None
    failure: str = ""
    said: str = ""


class EnvironmentRunner:
    """Asks one environment in `workers` processes, which start with the first turn; a builtin one needs none.

    Raises:
        ValueError: `spec` is neither an environment's name nor `module:function`.
    """

    def __init__(self, spec: str, workers: int, timeout_seconds: float):
        target = find_environment(spec)
        self._function = cast(Environment, load_function(target)) if spec in ENVIRONMENTS else None
        self._pool = ProcessPoolClient(target, "reply", workers, timeout_seconds)

    def reply(self, items: Sequence[Conversed]) -> list[Reply]:
        """To each conversation, in order."""
        if self._function is not None:
            return [Reply(self._function(*item)) for item in items]
        verdicts = self._pool.call(items)
        return [Reply(None if words is None else str(words), kind, said) for words, kind, said in verdicts]

    def close(self) -> None:
        """End all processes; another turn would start them again."""
        self._pool.close()


def check_environment(spec: str) -> tuple[str, ...]:
    """Try to load an environment: its stops. ValueError: there is none, or it cannot be loaded or called; says why."""
    target = find_environment(spec)
    if spec in ENVIRONMENTS:
        return stops_of(load_function(target))
    return try_out(spec, target, "reply", "environment")
