"""Replies of an environment to whole batches of conversations, with a time limit each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid3d.rl.environments import ENVIRONMENTS, find_environment, stops_of
from hybrid3d.rl.pooled import Pooled, try_out
from hybrid3d.rl.rewards import load_function
from hybrid3d.rl.scoring_worker import Item


@dataclass(frozen=True)
class Reply:
    """Words, or None: the conversation is over, also where no reply could be had.

    `failure` is then the kind, as in `Scores` (`not_a_text` instead of a number), and `said` what was said of it.
    """

    words: str | None
    failure: str = ""
    said: str = ""


class Replier:
    """Asks one environment in `workers` processes, which start with the first turn; a builtin one needs none.

    Raises:
        ValueError: `spec` is neither an environment's name nor `module:function`.
    """

    def __init__(self, spec: str, workers: int, timeout_seconds: float):
        target = find_environment(spec)
        self._function = load_function(target) if spec in ENVIRONMENTS else None
        self._pool = Pooled(target, "reply", workers, timeout_seconds)

    def reply(self, items: Sequence[Item]) -> list[Reply]:
        """To (turns, reference, prompt) of each conversation, in order."""
        if self._function is not None:
            return [Reply(self._function(*item)) for item in items]
        verdicts = self._pool.call(list(items))
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
