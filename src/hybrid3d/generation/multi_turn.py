"""Multi-turn rollouts: the policy and an environment take turns within an answer, all of a replica's at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import broadcast_object, gather_objects
from hybrid3d.generation.engine import Completion, Engine, GenerationRequest
from hybrid3d.rewards.environment_runner import EnvironmentRunner, Reply, check_environment
from hybrid3d.rewards.environments import ends_with_stop, stop_tokens
from hybrid3d.rl.data import Example


@dataclass
class Trajectory:
    """An answer that is being generated.

    Attributes:
        seed: of the first request; None samples greedily.
        tokens: of the policy and of the environment.
        loss_mask: whether the policy generated each token.
        logprobs: of the policy's tokens, with which vLLM sampled them; empty where it is greedy.
        turns: texts of the policy and of the environment, alternating, without the policy's current turn.
        turn_start: index in `tokens` of the policy's current turn.
        requests: how many the engine has completed for this answer.
        weight_version: of the weights that generated it.
        done: whether it is complete.
        failure: the kind of the environment's failure that ended it; empty if there was none.
        message: what the failure said.
    """

    example: Example
    seed: int | None
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    turn_start: int = 0
    requests: int = 0
    weight_version: int = 0
    done: bool = False
    failure: str = ""
    message: str = ""

    @property
    def context(self) -> list[int]:
        """Token ids of the prompt and of the answer so far."""
        return [*self.example.prompt_ids, *self.tokens]

    @property
    def replies(self) -> int:
        """How many times the environment has replied."""
        return len(self.turns) // 2

    def request_seed(self) -> int | None:
        """Return a seed of its own for each request; the first is the answer's seed."""
        if self.seed is None or self.requests == 0:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{self.requests}".encode()).digest()[:4], "little")

    def append_completion(self, completion: Completion) -> None:
        """Append tokens that the policy generated."""
        self._append(completion.tokens, loss_mask=True)
        self.logprobs += completion.logprobs
        self.weight_version = completion.weight_version
        self.requests += 1

    def apply(self, result: TurnResult) -> None:
        """Append the environment's reply, if it replied, and begin the policy's next turn; or finish the answer."""
        self.done, self.failure, self.message = result.done, result.failure, result.message
        if result.tokens:
            self.turns += [result.turn, result.reply]
            self._append(result.tokens, loss_mask=False)
            self.turn_start = len(self.tokens)

    def _append(self, tokens: Sequence[int], loss_mask: bool) -> None:
        self.tokens += tokens
        self.loss_mask += [loss_mask] * len(tokens)


@dataclass(frozen=True)
class TurnResult:
    """What follows a turn of the policy; the leading rank of a replica sends it to the others.

    Attributes:
        done: the answer is complete.
        turn: the policy's turn, as text.
        reply: the environment's reply to it; empty if the policy goes on within its turn.
        tokens: of the reply.
        failure, message: as of a `Trajectory`.
    """

    done: bool
    turn: str = ""
    reply: str = ""
    tokens: tuple[int, ...] = ()
    failure: str = ""
    message: str = ""


class MultiTurnRollout:
    """Generates answers with the replies of the recipe's environment; without an environment they have one turn.

    Every rank of the group makes one of these and calls `run`, all together.
    """

    def __init__(self, recipe: Recipe, engine: Engine, tokenizer: Any, group: dist.ProcessGroup):
        rollout, reward = recipe.rollout, recipe.reward
        assert rollout is not None, "checked when the recipe was read"
        self._group = group
        self._engine, self._tokenizer = engine, tokenizer
        self._end_token = tokenizer.eos_token_id
        self._end_tokens = {self._end_token, *engine.end_tokens}
        self._max_new_tokens, self._max_replies = rollout.max_new_tokens, rollout.max_turns
        self._runner: EnvironmentRunner | None = None
        self._stops: tuple[str, ...] = ()
        if rollout.environment is not None:
            self._runner = EnvironmentRunner(rollout.environment, reward.workers, reward.timeout_seconds)
            # The stop strings are in a user's module, which no rank imports: a process of its own loads it once.
            stops = check_environment(rollout.environment) if group.rank() == 0 else None
            self._stops = broadcast_object(stops, group) or ()
        self._stop_tokens = stop_tokens(tokenizer, self._stops)

    def run(
        self, examples: Sequence[Example], seeds: Sequence[int] | None, version: int, temperature: float = 1.0
    ) -> list[Trajectory]:
        """Generate an answer to each example, turn by turn: with these seeds at a temperature, or greedily.

        All replicas generate until the last answer of any is complete: engines that share experts step together.

        Args:
            version: the engine's weights must have this version or a later one.
        """
        stop_tokens = [self._end_token, *self._stop_tokens]
        answers = [Trajectory(e, seed) for e, seed in zip(examples, seeds or [None] * len(examples), strict=True)]
        active, any_active = answers, True
        while any_active:
            requests = [
                GenerationRequest(
                    prompt_ids=answer.context,
                    max_new_tokens=self._max_new_tokens - len(answer.tokens),
                    stop_tokens=stop_tokens,
                    seed=answer.request_seed(),
                    temperature=temperature,
                )
                for answer in active
            ]
            for answer, completion in zip(active, self._engine.generate(requests, version), strict=True):
                answer.append_completion(completion)
            any_active = self._runner is not None and self._take_turns(self._runner, active)
            active = [answer for answer in active if not answer.done]
        return answers

    def close(self) -> None:
        """End the processes that environments run in."""
        if self._runner is not None:
            self._runner.close()

    def _take_turns(self, runner: EnvironmentRunner, active: Sequence[Trajectory]) -> bool:
        """Let the environment reply to each answer; return whether any answer of any replica goes on."""
        local = (self._engine.replica, self._turn_results(runner, active)) if self._engine.leads else None
        by_replica = dict(filter(None, gather_objects(local, self._group)))
        for answer, result in zip(active, by_replica[self._engine.replica], strict=True):
            answer.apply(result)
        return any(not result.done for results in by_replica.values() for result in results)

    def _turn_results(self, runner: EnvironmentRunner, active: Sequence[Trajectory]) -> list[TurnResult]:
        """Return what follows each answer's current turn."""
        turns = [self._text(answer.tokens[answer.turn_start :]) for answer in active]
        ended = [i for i, answer in enumerate(active) if self._has_ended_turn(answer, turns[i])]
        items = [((*active[i].turns, turns[i]), active[i].example.answer, active[i].example.prompt) for i in ended]
        replies = dict(zip(ended, runner.reply(items), strict=True))
        return [
            self._turn_result(answer, turn, replies.get(i, Reply("")))
            for i, (answer, turn) in enumerate(zip(active, turns, strict=True))
        ]

    def _has_ended_turn(self, answer: Trajectory, turn: str) -> bool:
        """Return whether the environment is to reply: not where tokens or turns ran out, or vLLM paused elsewhere."""
        if answer.replies >= self._max_replies or len(answer.tokens) >= self._max_new_tokens:
            return False
        last = answer.tokens[-1]
        return last in self._end_tokens or ends_with_stop(turn, self._text([last]), self._stops)

    def _turn_result(self, answer: Trajectory, turn: str, reply: Reply) -> TurnResult:
        """Return what follows a turn; a reply that leaves no room for one token of the policy is not appended."""
        room, last = self._max_new_tokens - len(answer.tokens), answer.tokens[-1]
        if reply.text is None:
            return TurnResult(done=True, failure=reply.failure, message=reply.message)
        tokens = tuple(self._tokenizer.encode(reply.text, add_special_tokens=False)) if reply.text else ()
        ended = not tokens and (last in self._end_tokens or last not in self._stop_tokens)
        if ended or len(tokens) >= room:
            return TurnResult(done=True)
        return TurnResult(done=False, turn=turn, reply=reply.text, tokens=tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
