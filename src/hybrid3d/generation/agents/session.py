"""A session: an answer that an agent makes, and its calls. It ends as samples that share a reward."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hybrid3d.generation.agents.history import Branch, Call, CallResult, History
from hybrid3d.generation.engine import Sampling
from hybrid3d.generation.samples import AnswerTokens, Sample
from hybrid3d.generation.stops import Stops
from hybrid3d.rl.data import Example
from hybrid3d.rl.token_texts import decode_part


@dataclass(eq=False)
class Pending:
    """A call that is being answered.

    Attributes:
        start: the number of its branch's tokens before it.
        max_new_tokens: how many tokens it may generate.
        stops: that end the reply; at `pause_tokens` the engine pauses, as one may end there.
    """

    call: Call
    branch: Branch
    start: int
    max_new_tokens: int
    stops: Stops
    pause_tokens: frozenset[int]
    result: Future[CallResult] = field(default_factory=Future)

    @property
    def generated(self) -> int:
        return len(self.branch.tokens) - self.start


@dataclass(eq=False)
class Session:
    """An answer that an agent makes.

    Attributes:
        seed: of its first request; None is greedy.
        id: which its agent knows, and nobody else; empty while nobody has it.
        version: of the weights when its prompt was drawn.
        sampling: how its calls are answered.
        calls: those that are being answered, by the number of their request.
        requests: how many the engine has been given for it.
        active: when its agent was heard of last, by the pool's clock.
        reward: which its agent has given; None: the recipe's reward is computed.
        failure: the kind of failure that ended it; empty if there was none. `message` says more.
    """

    example: Example
    seed: int | None
    version: int
    history: History
    id: str = ""
    offers: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    calls: dict[int, Pending] = field(default_factory=dict)
    requests: int = 0
    active: float = 0.0
    done: bool = False
    reward: float | None = None
    failure: str = ""
    message: str = ""

    @property
    def generated(self) -> int:
        """How many tokens the policy has generated."""
        return sum(branch.generated for branch in self.history.branches)

    @property
    def newest_version(self) -> int:
        """The version of the weights that generated last."""
        newest = [version for branch in [*self.history.branches] for version in branch.versions[-1:]]
        return max(newest, default=self.version)  # an agent may have given up its only call meanwhile


def samples_of(session: Session, tokenizer: Any, default: float) -> list[Sample]:
    """Return a sample for each branch of a session that has ended, with the reward if its agent has given one.

    A session without a call has one that training learns nothing from.

    Args:
        default: the reward of a session that has failed.
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
