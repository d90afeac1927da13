"""Conversations of the policy with an environment: all of a replica's at once, turn after turn."""

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
from hybrid3d.rewards.environments import ends_in, stop_tokens
from hybrid3d.rl.data import Example


@dataclass
class Trajectory:
    """An answer as it grows.

    Attributes:
        seed: of the first draw; None where it is greedy.
        tokens: the policy's and the environment's.
        loss_mask: whether the policy generated each token.
        logprobs: with which vLLM drew the policy's; none where it is greedy.
        turns: texts, the policy's and the environment's in turn, without the policy's last.
        begin: where in `tokens` that one begins.
        requests: how many the engine has completed for it.
        weight_version: of the weights that generated it.
        failure: the kind of failure that broke it off, and what was said of it.
    """

    example: Example
    seed: int | None
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    begin: int = 0
    requests: int = 0
    weight_version: int = 0
    over: bool = False
    failure: str = ""
    said: str = ""

    @property
    def context(self) -> list[int]:
        return [*self.example.prompt_ids, *self.tokens]

    @property
    def replies(self) -> int:
        return len(self.turns) // 2

    def request_seed(self) -> int | None:
        """Return a seed of its own for each request; the first is the answer's seed."""
        if self.seed is None or self.requests == 0:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{self.requests}".encode()).digest()[:4], "little")

    def write(self, completion: Completion) -> None:
        """Append the policy's next tokens."""
        self._add(completion.tokens, loss_mask=True)
        self.logprobs += completion.logprobs
        self.weight_version = completion.weight_version
        self.requests += 1

    def hear(self, heard: TurnResult) -> None:
        """Words, which end the policy's turn; none, and it goes on within its turn; or the end."""
        self.over, self.failure, self.said = heard.over, heard.failure, heard.said
        if heard.tokens:
            self.turns += [heard.turn, heard.words]
            self._add(heard.tokens, loss_mask=False)
            self.begin = len(self.tokens)

    def _add(self, tokens: Sequence[int], loss_mask: bool) -> None:
        self.tokens += tokens
        self.loss_mask += [loss_mask] * len(tokens)


@dataclass(frozen=True)
class TurnResult:
    """How a conversation goes on, as the rank that leads its replica tells the others.

    `turn` is what the policy wrote, `words` and their `tokens` what came back.
    """

    over: bool
    turn: str = ""
    words: str = ""
    tokens: tuple[int, ...] = ()
    failure: str = ""
    said: str = ""


class MultiTurnRollout:
    """Holds conversations with the recipe's environment; without one they have one turn.

    Every rank of the group makes one of these and calls `run`, all together.
    """

    def __init__(self, recipe: Recipe, engine: Engine, tokenizer: Any, group: dist.ProcessGroup):
        rollout, reward = recipe.rollout, recipe.reward
        self._group = group
        assert rollout is not None, "checked when the recipe was read"
        self._engine, self._tokenizer, self._end = engine, tokenizer, tokenizer.eos_token_id
        self._ends = {self._end, *engine.end_tokens}
        self._longest, self._max_replies = rollout.max_new_tokens, rollout.max_turns
        self._replier: EnvironmentRunner | None = None
        self._stops: tuple[str, ...] = ()
        if rollout.environment is not None:
            self._replier = EnvironmentRunner(rollout.environment, reward.workers, reward.timeout_seconds)
            # A user's module says its stops; it runs in no rank, and to load it takes a process.
            told = check_environment(rollout.environment) if group.rank() == 0 else None
            self._stops = broadcast_object(told, group) or ()
        self._stop_tokens = stop_tokens(tokenizer, self._stops)

    def run(
        self, examples: Sequence[Example], seeds: Sequence[int] | None, version: int, temperature: float = 1.0
    ) -> list[Trajectory]:
        """Generate an answer to each example, turn by turn: with these seeds at a temperature, or greedily.

        Args:
            version: the engine's weights must have this version or a later one.

        All replicas go on until the last of their conversations is over: engines that share experts step together.
        """
        stop_tokens = [self._end, *self._stop_tokens]
        held = [Trajectory(e, seed) for e, seed in zip(examples, seeds or [None] * len(examples), strict=True)]
        going, anyone = held, True
        while anyone:
            requests = [
                GenerationRequest(
                    one.context, self._longest - len(one.tokens), stop_tokens, one.request_seed(), temperature
                )
                for one in going
            ]
            for one, completion in zip(going, self._engine.generate(requests, version), strict=True):
                one.write(completion)
            anyone = self._replier is not None and self._hear(self._replier, going)
            going = [one for one in going if not one.over]
        return held

    def close(self) -> None:
        """End the processes that environments run in."""
        if self._replier is not None:
            self._replier.close()

    def _hear(self, replier: EnvironmentRunner, going: Sequence[Trajectory]) -> bool:
        """Let the environment reply; whether any conversation of any replica goes on."""
        told = (self._engine.replica, self._heard(replier, going)) if self._engine.leads else None
        of_replicas = dict(filter(None, gather_objects(told, self._group)))
        for one, heard in zip(going, of_replicas[self._engine.replica], strict=True):
            one.hear(heard)
        return any(not heard.over for replica in of_replicas.values() for heard in replica)

    def _heard(self, replier: EnvironmentRunner, going: Sequence[Trajectory]) -> list[TurnResult]:
        """What each conversation goes on with."""
        turns = [self._text(one.tokens[one.begin :]) for one in going]
        asked = [number for number, one in enumerate(going) if self._asks(one, turns[number])]
        items = [((*going[i].turns, turns[i]), going[i].example.answer, going[i].example.prompt) for i in asked]
        replies = dict(zip(asked, replier.reply(items), strict=True))
        return [
            self._next(one, turn, replies.get(number, Reply("")))
            for number, (one, turn) in enumerate(zip(going, turns, strict=True))
        ]

    def _asks(self, one: Trajectory, turn: str) -> bool:
        """Whether the policy has ended its turn: it may have run out of tokens, or paused where no stop is."""
        if one.replies >= self._max_replies or len(one.tokens) >= self._longest:
            return False
        last = one.tokens[-1]
        return last in self._ends or ends_in(turn, self._text([last]), self._stops)

    def _next(self, one: Trajectory, turn: str, reply: Reply) -> TurnResult:
        """What follows; words after which the policy could not write one token are left out, and it is over."""
        room, last = self._longest - len(one.tokens), one.tokens[-1]
        if reply.words is None:
            return TurnResult(over=True, failure=reply.failure, said=reply.said)
        tokens = tuple(self._tokenizer.encode(reply.words, add_special_tokens=False)) if reply.words else ()
        silent = not tokens and (last in self._ends or last not in self._stop_tokens)
        if silent or len(tokens) >= room:
            return TurnResult(over=True)
        return TurnResult(over=False, turn=turn, words=reply.words, tokens=tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
