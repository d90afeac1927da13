"""Computes the rewards of batches with time limits, so that no answer and no reward function can stop a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from hybrid3d.scoring.functions import find_reward, load_function, unusable
from hybrid3d.scoring.pool_client import ProcessPoolClient, load_in_subprocess
from hybrid3d.scoring.pool_worker import Item


@dataclass(frozen=True)
class Scores:
    """Holds the rewards of a batch, and the failures.

    Attributes:
        rewards: one per sample; a sample whose reward failed has the default reward.
        failures: number of failed samples by kind: `raised`, `hung` (no reward within the limit), `died` (the process
            ended, with any exit code), `not_a_number` (also no finite one), `too_large`, and for a batched function
            `wrong_count` and `wrong_type` (no list, tuple or 1-D array).
        examples: the first message of each kind.
        places: the numbers of the samples that these are of.
    """

    rewards: list[float]
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def naming(self, rows: Sequence[int | None]) -> Scores:
        """Return the same with the rows in messages: those of the samples' prompts in their file, where known."""
        told = {kind: rows[self.places[kind]] if kind in self.places else None for kind in self.examples}
        named = {kind: f"row {told[kind]}: " if told[kind] is not None else "" for kind in self.examples}
        return replace(self, examples={kind: f"{named[kind]}{text}" for kind, text in self.examples.items()}, places={})


class Scorer:
    """Computes one reward in `workers` processes, which start with the first batch; a cheap builtin one needs none.

    A user's reward is `module:function`: a function of (answer, reference, prompt) that returns a float. With the
    attribute `batched = True` it takes three lists and returns a list, a tuple or a 1-D array, and `timeout_seconds`
    applies to the whole batch.

    Raises:
        ValueError: `spec` is neither the name of a reward nor `module:function`.
    """

    def __init__(self, spec: str, workers: int, timeout_seconds: float, default: float):
        reward = find_reward(spec)
        self._function = None if reward.pooled else load_function(reward.target)
        self._pool = ProcessPoolClient(reward.target, "reward", workers, timeout_seconds)
        self._default = default

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, items: Sequence[Item]) -> Scores:
        """Return the rewards of items (answer, reference, prompt), in order."""
        if self._function is not None:
            return Scores([float(self._function(*item)) for item in items])
        return _scores(cast("list[_Result]", self._pool.call(items)), self._default)

    def close(self) -> None:
        """End all processes; the next batch starts them again."""
        self._pool.close()


def scores_of(rewards: Sequence[float], default: float) -> Scores:
    """Return numbers as scores, those of a reward model; those that can be no reward have failed."""
    return _scores([(reward, unusable(reward), f"{reward:g}") for reward in rewards], default)


_Result = tuple[float | None, str, str]


def _scores(results: Sequence[_Result], default: float) -> Scores:
    """Return the scores of rewards, each with the kind of its failure, or "", and a message of it."""
    failed = [(kind, message, place) for place, (_, kind, message) in enumerate(results) if kind]
    return Scores(
        rewards=[default if kind else cast(float, reward) for reward, kind, _ in results],
        failures=dict(Counter(kind for kind, *_ in failed)),
        examples={kind: message for kind, message, _ in reversed(failed)},  # the first of each kind
        places={kind: place for kind, _, place in reversed(failed)},
    )


def check_reward(spec: str) -> None:
    """Check that a reward can be loaded and called. ValueError: it cannot, or does not exist; says why."""
    reward = find_reward(spec)
    if reward.pooled:
        load_in_subprocess(spec, reward.target, "reward", "reward")
