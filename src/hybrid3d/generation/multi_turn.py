"""Multi-turn rollouts: the policy and an environment take turns within an answer, all of a replica's at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from hybrid3d.distributed import all_reduce_max
from hybrid3d.generation.engine import Engine, Sampling
from hybrid3d.generation.turns import Trajectory, Turns
from hybrid3d.rl.data import Example


class MultiTurnRollout:
    """Generates answers with the replies of the recipe's environment; without an environment they have one turn.

    Every rank of the group makes one of these and calls `run`, all together.
    """

    def __init__(self, turns: Turns, engine: Engine, group: dist.ProcessGroup):
        self._turns, self._engine, self._group = turns, engine, group

    def run(
        self, examples: Sequence[Example], seeds: Sequence[int | None], version: int, sampling: Sampling
    ) -> list[Trajectory]:
        """Generate an answer to each example, turn by turn: sampled with its seed, or greedily without one.

        All replicas generate until the last answer of any is complete: engines that share experts step together.

        Args:
            version: the engine's weights must have this version or a later one.
        """
        answers = [Trajectory(example, seed) for example, seed in zip(examples, seeds, strict=True)]
        active, any_active = answers, True
        while any_active:
            requests = [self._turns.request(answer, sampling) for answer in active]
            for answer, completion in zip(active, self._engine.generate(requests, version), strict=True):
                self._turns.append(answer, completion)
            any_active = self._turns.have_environment and self._take_turns(active)
            active = [answer for answer in active if not answer.done]
        return answers

    def _take_turns(self, active: Sequence[Trajectory]) -> bool:
        """Let the environment reply to each answer; return whether any answer of any replica goes on."""
        results = self._engine.broadcast(self._turns.results(active) if self._engine.leads else None)
        for answer, result in zip(active, results, strict=True):
            answer.apply(result)
        return bool(all_reduce_max([int(any(not result.done for result in results))], self._group)[0])
