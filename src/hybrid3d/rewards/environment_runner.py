"""Runs an environment on batches of conversations, with a time limit per reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from hybrid3d.rewards.environments import ENVIRONMENTS, Environment, find_environment, stops_of
from hybrid3d.rewards.pool_client import ProcessPoolClient, load_in_subprocess
from hybrid3d.rewards.registry import load_function

ConversationItem = tuple[tuple[str, ...], str, str]
"""The turns, the reference and the prompt of one conversation."""


@dataclass(frozen=True)
class Reply:
    """Holds an environment's reply to one conversation.

    Attributes:
        text: continues the context; None if the conversation is over, also if the call failed.
        failure: the kind of failure, as in `Scores` (`not_a_text` instead of `not_a_number`), or "".
        message: describes the failure, or "".
    """

    text: str | None
    failure: str = ""
    message: str = ""


class EnvironmentRunner:
    """Calls one environment in `workers` processes, which start with the first turn; a builtin one needs none.

    Raises:
        ValueError: `spec` is neither the name of an environment nor `module:function`.
    """

    def __init__(self, spec: str, workers: int, timeout_seconds: float):
        target = find_environment(spec)
        self._function = cast(Environment, load_function(target)) if spec in ENVIRONMENTS else None
        self._pool = ProcessPoolClient(target, "reply", workers, timeout_seconds)

    def reply(self, items: Sequence[ConversationItem]) -> list[Reply]:
        """Return the reply to each conversation, in order."""
        if self._function is not None:
            return [Reply(self._function(*item)) for item in items]
        results = self._pool.call(items)
        return [Reply(None if text is None else str(text), kind, message) for text, kind, message in results]

    def close(self) -> None:
        """End all processes; the next call starts them again."""
        self._pool.close()


def check_environment(spec: str) -> tuple[str, ...]:
    """Load an environment and return its stops.

    Raises:
        ValueError: it does not exist, or cannot be loaded or called; says why.
    """
    target = find_environment(spec)
    if spec in ENVIRONMENTS:
        return stops_of(load_function(target))
    return load_in_subprocess(spec, target, "reply", "environment")
