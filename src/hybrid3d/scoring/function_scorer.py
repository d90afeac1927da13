"""Computes rewards by a function with time limits, so that no answer and no reward function can stop a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hybrid3d.scoring.functions import find_reward, load_function
from hybrid3d.scoring.pool_client import ProcessPoolClient, load_in_subprocess
from hybrid3d.scoring.scorer import Query, Result, Scores, scores_of_results


class FunctionScorer:
    """Implements `Scorer` in `workers` processes, which start with the first batch; a cheap builtin one needs none.

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

    def __enter__(self) -> FunctionScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, queries: Sequence[Query]) -> Scores:
        """Return the rewards of answers, in order."""
        items = [(query.answer, query.reference, query.prompt) for query in queries]
        if self._function is not None:
            return Scores([float(self._function(*item)) for item in items])
        return scores_of_results(queries, cast("list[Result]", self._pool.call(items)), self._default)

    def close(self) -> None:
        """End all processes; the next batch starts them again."""
        self._pool.close()


def check_reward(spec: str) -> None:
    """Check that a reward can be loaded and called. ValueError: it cannot, or does not exist; says why."""
    reward = find_reward(spec)
    if reward.pooled:
        load_in_subprocess(spec, reward.target, "reward", "reward")
