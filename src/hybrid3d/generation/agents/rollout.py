"""Lets agents make the answers of a replica: their calls are answered by its engine, all at once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.generation.agents.program import AgentProgram
from hybrid3d.generation.agents.server import EndpointServer
from hybrid3d.generation.agents.sessions import Session, SessionPool
from hybrid3d.generation.engine import Engine, Sampling
from hybrid3d.rl.data import Example

logger = logging.getLogger(__name__)


class AgentRollout:
    """Offers sessions to agents, and generates what they ask for until all sessions have ended.

    All ranks of a replica make one of these and call `run` together. The leading one listens to the agents.
    """

    def __init__(self, recipe: Recipe, engine: Engine, tokenizer: Any):
        self._engine = engine
        self._leader: _Leader | None = _Leader(recipe, engine, tokenizer) if engine.leads else None

    def run(
        self, examples: Sequence[Example], seeds: Sequence[int | None], version: int, sampling: Sampling
    ) -> list[Session]:
        """Return the ended sessions on the leading rank, one for each example and seed; nothing on the others.

        Args:
            version: the engine's weights must have this version or a later one.

        Raises:
            AgentFailed: the agent's program has ended.
        """
        leader, sessions = self._leader, list[Session]()
        if leader is not None:
            sessions = leader.pool.open([*zip(examples, seeds, strict=True)], version, sampling)
        running, done = 0, False
        while not done:
            ended = self._engine.step()
            running -= len(ended)
            found = None
            if leader is not None:
                leader.check_program()
                found = leader.pool.exchange(ended, is_idle=running == 0)
            exchange = self._engine.broadcast(found)
            self._engine.cancel(exchange.cancelled)
            self._engine.submit(exchange.requests, version)
            running += len(exchange.requests) - len(exchange.cancelled)
            done = exchange.done
        self._engine.interrupt()  # a batch that was scheduled ahead must not run while weights are synced
        return sessions

    def close(self) -> None:
        """Stop listening, and end the agent's program."""
        if self._leader is not None:
            self._leader.close()


class _Leader:
    """What the leading rank has besides."""

    def __init__(self, recipe: Recipe, engine: Engine, tokenizer: Any):
        assert recipe.rollout is not None, "checked when the recipe was read"
        assert recipe.rollout.agents is not None, "the recipe has agents"
        tokenizer = copy.deepcopy(tokenizer)  # which the server's thread uses
        end_tokens = [tokenizer.eos_token_id, *engine.end_tokens]
        settings = recipe.rollout.agents
        self.pool = SessionPool(tokenizer, recipe.rollout, end_tokens)
        self._server = EndpointServer(self.pool, recipe.name, tokenizer, settings, distributed.rank())
        logger.info("agents find sessions at %s/sessions", self._server.url)
        self._program = None
        if settings.command is not None:
            self._program = AgentProgram(settings.command, self._server.url, self._server.key)

    def check_program(self) -> None:
        if self._program is not None:
            self._program.check()

    def close(self) -> None:
        self._server.close()
        if self._program is not None:
            self._program.close()
