"""Lets agents make the answers of a replica: their calls are answered by its engine, all at once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybrid3d import launch_environment
from hybrid3d.config import Recipe
from hybrid3d.generation.agents.program import AgentProgram
from hybrid3d.generation.agents.server import EndpointServer
from hybrid3d.generation.agents.sessions import Session, SessionPool
from hybrid3d.generation.engine import Completion, Engine, Sampling
from hybrid3d.generation.samples import AnswerTokens, Sample
from hybrid3d.generation.scheduler import News, Prompt
from hybrid3d.rl.token_texts import decode_part

logger = logging.getLogger(__name__)

OF_AGENT = "agent_"  # prefix of the kinds of failures of agents, not of rewards


class AgentAnswers:
    """Implements `Continuation`: each answer is a session of an agent, which connects to a server.

    The agents' program runs if the recipe names one.
    """

    failed = OF_AGENT

    def __init__(self, recipe: Recipe, engine: Engine, tokenizer: Any):
        assert recipe.rollout is not None, "checked when the recipe was read"
        assert recipe.rollout.agents is not None, "the recipe has agents"
        self._tokenizer, self._default_reward = tokenizer, recipe.reward.default
        of_server = copy.deepcopy(tokenizer)  # which the server's thread uses
        end_tokens, settings = [tokenizer.eos_token_id, *engine.end_tokens], recipe.rollout.agents
        self._pool = SessionPool(of_server, recipe.rollout, end_tokens)
        self._server = EndpointServer(self._pool, recipe.name, of_server, settings, launch_environment.rank())
        logger.info("agents find sessions at %s/sessions", self._server.url)
        self._program = None
        if settings.command is not None:
            self._program = AgentProgram(settings.command, self._server.url, self._server.key)

    def close(self) -> None:
        """Stop listening, and end the agents' program."""
        self._server.close()
        if self._program is not None:
            self._program.close()

    def open(self, prompt: Prompt) -> list[Session]:
        return [self._pool.open(prompt.example, seed, prompt.version) for seed in prompt.seeds]

    def restarted(self, talk: Session) -> Session:
        return self._pool.open(talk.example, talk.seed, talk.version)

    def begin(self, talks: Sequence[Session], sampling: Sampling) -> News:
        return self._pool.serve(talks, sampling)

    def follow(self, ended: Mapping[int, Completion], is_idle: bool) -> News:
        if self._program is not None:
            self._program.check()
        return self._pool.follow(ended, is_idle)

    def interrupt(self, ended: Mapping[int, Completion], parts: Mapping[int, Completion], kept: bool) -> list[int]:
        return self._pool.halt(ended, parts, kept)

    def release(self) -> None:
        self._pool.release()

    def drop(self, talks: Iterable[Session]) -> list[int]:
        return [number for talk in talks for number in self._pool.drop(talk)]

    def samples(self, talk: Session) -> list[Sample]:
        return samples_of(talk, self._tokenizer, self._default_reward)


def samples_of(session: Session, tokenizer: Any, default: float) -> list[Sample]:
    """Return a sample for each branch of a session that has ended, with the reward if its agent has given one.

    A session that has failed has the reward `default`; one without a call has a sample that training learns nothing
    from.
    """
    example, history = session.example, session.history
    reward = default if session.failure else session.reward
    if not history.branches:
        nothing = AnswerTokens(tokens=[tokenizer.eos_token_id], loss_mask=[False], versions=[session.version])
        return [nothing.sample(example, example.prompt_ids, "", reward)]
    return [
        branch.sample(
            example,
            branch.prompt_ids,
            decode_part(tokenizer, branch.tokens, branch.prompt_ids),
            reward,
            branch=number,
            last=branch is history.last,
        )
        for number, branch in enumerate(history.branches)
    ]
