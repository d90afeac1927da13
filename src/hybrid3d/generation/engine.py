"""What generation asks of an engine, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StaleWeights(RuntimeError):
    """Generating was refused: the engine's weights are older than allowed, or a sync was broken off."""


@dataclass(frozen=True)
class Completion:
    """An answer or a part of it.

    Attributes:
        tokens: the one that ended it included.
        logprobs: with which each token was sampled; empty for a greedy answer.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Engine(Protocol):
    """One rank of a replica of the model that generates. All ranks of a replica call every method together.

    Attributes:
        replica: which replica this rank belongs to.
        replicas: how many there are.
        leads: whether this rank speaks for its replica.
        end_tokens: the checkpoint's tokens that end an answer.
    """

    replica: int
    replicas: int
    leads: bool

    @property
    def end_tokens(self) -> Sequence[int]: ...

    def require(self, weights: int) -> int:
        """The version of the engine's weights, at least this one. StaleWeights: they are older, or not whole."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] | None,
        end_token: int,
        stops: Sequence[int] = (),
        longest: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Sample one answer for each prompt (token ids) with a seed of its own; greedily where `seeds` is None."""
        ...
