"""The interface of what scores answers, the scorer of rewards that agents give, and that of rewards by a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from hybrid3d.scoring.functions import find_reward, load_function, unusable
from hybrid3d.scoring.pool_client import ProcessPoolClient, load_in_subprocess
from hybrid3d.scoring.pool_worker import CallResult

Owner = TypeVar("Owner", bound=Hashable)
T = TypeVar("T")

Tokens: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Query:
    """One answer to score: texts, which functions read, and tokens (int32; others are converted), which models read.

    Answers to one prompt have an equal `prompt_number`, are in a row and are scored together, as a batched function may
    compare them.
    """

    answer: str  # of an agent, that of its last branch
    reference: str
    prompt: str
    row: int | None = None  # of the prompt in its file; None where it is not known
    prompt_ids: Tokens = field(default_factory=lambda: NO_TOKENS)
    tokens: Tokens = field(default_factory=lambda: NO_TOKENS)
    prompt_number: int = 0
    given: float | None = None  # the reward that an agent has given; None: it is to be computed

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "tokens"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int32))

    @property
    def text(self) -> Query:
        """The query without tokens: what is sent to a function."""
        return replace(self, prompt_ids=NO_TOKENS, tokens=NO_TOKENS)


@dataclass(frozen=True)
class Scores:
    """The rewards of a batch, and the failures.

    Attributes:
        rewards: one per answer; an answer whose reward failed has the default reward.
        failures: number of failed answers by kind: `raised`, `hung` (no reward within the limit), `died` (the process
            ended, with any exit code), `not_a_number` (also no finite one), `too_large`, and for a batched function
            `wrong_count` and `wrong_type` (no list, tuple or 1-D array).
        examples: the first message of each kind.
    """

    rewards: list[float]
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


class Scorer(Protocol):
    """Scores answers. The result is the same on all ranks that hold the scorer; they call it together."""

    def score(self, queries: Sequence[Query]) -> Scores:
        """Return the rewards of answers, in order."""
        ...


@dataclass(frozen=True)
class Scorers:
    """The scorers of answers that are trained on, and of those to held-out problems.

    That of training is asked beside generation. It is None where a reward model scores these answers that shares the
    memory of the models that are trained: it is asked when experience is made.
    """

    training: Scorer | None
    held_out: Scorer  # the function also where training has a reward model


@dataclass(frozen=True)
class Given:
    """Implements `Scorer`: rewards that agents have given, and those of another scorer for other answers."""

    others: Scorer

    def score(self, queries: Sequence[Query]) -> Scores:
        missing = [query for query in queries if query.given is None]
        scores = self.others.score(missing)
        computed = iter(scores.rewards)
        rewards = [next(computed) if query.given is None else query.given for query in queries]
        return replace(scores, rewards=rewards)


def scores_of(queries: Sequence[Query], rewards: Sequence[float], default: float) -> Scores:
    """Return numbers as scores, those of a reward model; those that can be no reward have failed."""
    return scores_of_results(queries, [(reward, unusable(reward), f"{reward:g}") for reward in rewards], default)


def scores_of_results(queries: Sequence[Query], results: Sequence[CallResult], default: float) -> Scores:
    """Return the scores of rewards, some of which may have failed; messages name rows where they are known."""
    failed = [
        (kind, message if query.row is None else f"row {query.row}: {message}")
        for query, (_, kind, message) in zip(queries, results, strict=True)
        if kind
    ]
    return Scores(
        rewards=[default if kind else cast(float, reward) for reward, kind, _ in results],
        failures=dict(Counter(kind for kind, _ in failed)),
        examples=dict(reversed(failed)),  # the first of each kind
    )


class FunctionScorer:
    """Implements `Scorer` by a function with time limits, so that no answer and no function can stop a run.

    It is called in `workers` processes, which start with the first batch; a cheap builtin one needs none.

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

    def score(self, queries: Sequence[Query]) -> Scores:
        items = [(query.answer, query.reference, query.prompt) for query in queries]
        if self._function is not None:
            return Scores([float(self._function(*item)) for item in items])
        return scores_of_results(queries, self._pool.call(items), self._default)

    def close(self) -> None:
        """End all processes; the next batch starts them again."""
        self._pool.close()


def check_reward(spec: str) -> None:
    """Check that a reward can be loaded and called. ValueError: it cannot, or does not exist; says why."""
    reward = find_reward(spec)
    if reward.pooled:
        load_in_subprocess(spec, reward.target, "reward", "reward")


def together(parts: Iterable[tuple[Sequence[int], Scores]]) -> Scores:
    """Return the scores of a batch from those of its parts, each with the numbers of its answers."""
    rewards: dict[int, float] = {}
    failures: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for numbers, scores in parts:
        rewards |= zip(numbers, scores.rewards, strict=True)
        failures.update(scores.failures)
        examples = scores.examples | examples
    return Scores([rewards[number] for number in sorted(rewards)], dict(failures), examples)


def by_prompt(queries: Sequence[Query]) -> list[list[int]]:
    """Return the numbers of the answers to each prompt."""
    groups = groupby(range(len(queries)), key=lambda number: queries[number].prompt_number)
    return [list(numbers) for _, numbers in groups]


def shares_of(owners: Sequence[Owner], items: Sequence[T]) -> dict[Owner, Sequence[T]]:
    """Return each owner's consecutive share of the items, of about equal numbers."""
    bounds = [len(items) * i // len(owners) for i in range(len(owners) + 1)]
    return {owner: items[bounds[i] : bounds[i + 1]] for i, owner in enumerate(owners)}


def ask_all(
    owners: Callable[[], Sequence[Owner]],
    prompts: Sequence[Sequence[int]],
    ask: Callable[[Mapping[Owner, list[int]]], Mapping[Owner, T]],
    most: int = 2**31,
) -> Iterator[tuple[list[int], T]]:
    """Divide prompts among owners, and yield numbers of answers and what was returned; a lost one's are asked again.

    Args:
        owners: returns those that are there now, at least one; it is called before each round.
        prompts: of each the numbers of its answers, which one owner gets together.
        ask: called with the numbers that each owner gets; what it returns lacks those that are lost.
        most: how many prompts an owner gets in a round.
    """
    while prompts:
        present = owners()
        shares = shares_of(present, prompts[: most * len(present)])
        numbers = {owner: [i for prompt in share for i in prompt] for owner, share in shares.items()}
        found = ask(numbers)
        yield from ((numbers[owner], result) for owner, result in found.items())
        lost = [prompt for owner, share in shares.items() if owner not in found for prompt in share]
        prompts = [*lost, *prompts[most * len(present) :]]
