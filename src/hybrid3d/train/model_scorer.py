"""Scores answers with a reward model that this process and others have shards of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from hybrid3d.config import Recipe, sequences_multiple
from hybrid3d.distributed import gather_objects
from hybrid3d.rl.batch import Batch
from hybrid3d.scoring.scorer import Query, Scores, scores_of
from hybrid3d.train.dp_split import shares_of
from hybrid3d.train.trained_model import ScoringModel


@dataclass(frozen=True)
class ModelScorer:
    """Implements `Scorer` by a reward model, in the layout of the recipe's `train`.

    Attributes:
        group: the ranks that have shards of the model.
    """

    model: ScoringModel
    recipe: Recipe
    pad_id: int
    group: dist.ProcessGroup

    def score(self, queries: Sequence[Query]) -> Scores:
        """Return the rewards of answers, in order; what a model says that can be no reward has failed."""
        if not queries:
            return Scores([])
        multiple = sequences_multiple(self.recipe) // self.recipe.algorithm.minibatches
        rows = [(np.concatenate([query.prompt_ids, query.tokens]), len(query.prompt_ids)) for query in queries]
        rows += [(rows[-1][0][: rows[-1][1] + 1], rows[-1][1])] * (-len(rows) % multiple)  # whole micro batches
        shares = shares_of(self.recipe, [len(sequence) for sequence, _ in rows])
        local = [rows[row] for row in shares[self.model.data_parallel_rank]]
        sequences, prompts = [sequence for sequence, _ in local], [prompt for _, prompt in local]
        found = self.model.scores(Batch.from_sequences(sequences, prompts, pad_id=self.pad_id), self.recipe)
        own = None
        if found is not None and self.model.is_reporting_rank:
            own = self.model.data_parallel_rank, found.tolist()
        scores: dict[int, float] = {}
        for place, values in filter(None, gather_objects(own, self.group)):
            scores |= zip(shares[place], values, strict=True)
        said = [scores[number] for number in range(len(queries))]
        return scores_of(queries, said, self.recipe.reward.default)
