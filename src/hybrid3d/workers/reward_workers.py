"""The ranks that only compute rewards, as the first rank that trains sees them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from hybrid3d.config import Recipe
from hybrid3d.generation.samples import Sample
from hybrid3d.run.logger import Record
from hybrid3d.scoring.code import sandbox
from hybrid3d.scoring.pool_client import GRACE_SECONDS
from hybrid3d.scoring.pool_worker import BATCH_SECONDS
from hybrid3d.scoring.scorer import Scores
from hybrid3d.workers.messages import Call
from hybrid3d.workers.role_client import WorkerGroups
from hybrid3d.workers.worker_group import WorkerGroup


class RewardWorkers(WorkerGroups):
    """All groups of ranks that compute rewards. What a group that is lost had to score, the others score."""

    activity = "reward"

    def __init__(self, recipe: Recipe, store: Store, record: Record):
        super().__init__(recipe, store, record, "reward")
        reward, self._per_prompt = recipe.reward, recipe.algorithm.samples_per_prompt
        self._runs_code = reward.name == "code"
        # How many samples a rank can score within the time limit of a batch, however long each of them takes
        rounds = max(1, int(BATCH_SECONDS // (reward.timeout_seconds + GRACE_SECONDS)))
        self._most = max(1, rounds * reward.workers // self._per_prompt) * self._per_prompt
        self._asked: list[WorkerGroup] = []  # in the last call

    def score(self, samples: Sequence[Sample], by_model: bool) -> Scores:
        """Return the rewards of samples, after waiting for ranks that can compute them.

        Args:
            by_model: use the reward model; otherwise the function.
        """
        rewards: dict[int, float] = {}
        failures: Counter[str] = Counter()
        examples: dict[str, str] = {}
        while remaining := [i for i in range(len(samples)) if i not in rewards]:
            groups = self._wait_for_groups()
            most = len(remaining) if by_model else self._most * len(groups)
            shares = dict(zip(groups, self._divide(remaining[:most], len(groups)), strict=True))
            calls = {
                group: Call("score", {"samples": [samples[i] for i in share], "by_model": by_model})
                for group, share in shares.items()
            }
            for group, (scores, *_) in self._receive(self._send(calls)).items():
                rewards |= zip(shares[group], scores.rewards, strict=True)
                failures.update(scores.failures)
                examples = scores.examples | examples
        return Scores([rewards[i] for i in range(len(samples))], dict(failures), examples)

    def _divide(self, items: Sequence[int], groups: int) -> list[Sequence[int]]:
        """Divide items between groups: the answers to a prompt stay together, as a batched reward may compare them."""
        prompts = -(-len(items) // self._per_prompt)
        bounds = [prompts * i // groups * self._per_prompt for i in range(groups + 1)]
        return [items[begin:end] for begin, end in itertools.pairwise(bounds)]

    def _wait_for_groups(self) -> list[WorkerGroup]:
        """Return the groups that are ready, after waiting for one; the first time, for all of them."""
        count, event = (1, "no_reward_worker") if self._asked else (self._active, "")
        ready = self._wait_for(count, event, "no rank can compute rewards: waiting for one to come back")
        if not self._asked and self._runs_code:
            self._record.event("sandbox", sandbox.warning(self.confined_by or ""), confined_by=self.confined_by or "")
        for group in ready if self._asked else ():
            if group not in self._asked:
                why = "; ".join(group.failures)
                message = f"{group} computes rewards again after it was lost: {why}"
                self._record.event("reward_worker_joined", message, ranks=group.ranks, why=why)
        self._asked = ready
        return ready

    def _record_lost(self, group: WorkerGroup, moment: float, ready: int) -> None:
        message = (
            f"{group} lost: {ready} of {self._active} groups can compute rewards, and its ranks are started again, "
            f"at most roles.reward.max_restarts times{group.lost_while}"
        )
        self._record.event("reward_worker_lost", message, ranks=group.ranks, time=moment, phase=group.lost_in)
