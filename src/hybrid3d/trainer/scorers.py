"""Which scorers a run has: of the answers that are trained on, and of those to held-out problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import broadcast_object
from hybrid3d.generation.replicas import Replicas, ReplicaScorer
from hybrid3d.scoring.scorer import Given, Query, Scorer, Scorers, Scores
from hybrid3d.workers.reward import RewardWorkers, WorkerScorer


@dataclass(frozen=True)
class OfFirstRank:
    """Implements `Scorer` on all ranks of a group by a scorer that its first rank has."""

    scorer: Scorer | None
    group: dist.ProcessGroup

    def score(self, queries: Sequence[Query]) -> Scores:
        """Return the rewards of answers, in order."""
        scores: Scores = broadcast_object(None if self.scorer is None else self.scorer.score(queries), self.group)
        return scores


def make_scorers(
    recipe: Recipe, replicas: Replicas, workers: RewardWorkers | None, group: dist.ProcessGroup | None
) -> Scorers:
    """Return the scorers that a recipe asks for.

    Args:
        workers: the ranks that only compute rewards, on the first rank, if there are any.
        group: the ranks that ask, which all do; None where the first one asks alone.
    """
    if recipe.roles.reward.ranks is None:
        by_function: Scorer = ReplicaScorer(replicas)
        return Scorers(None if recipe.reward.model is not None else Given(by_function), Given(by_function))

    def by(name: str) -> Scorer:
        own = None if workers is None else WorkerScorer(workers, name)
        if group is not None:
            return Given(OfFirstRank(own, group))
        assert own is not None, "the first rank knows the ranks that compute rewards"
        return Given(own)

    return Scorers(by("function" if recipe.reward.model is None else "model"), by("function"))
