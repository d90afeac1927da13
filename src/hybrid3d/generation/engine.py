"""The interface of the engine that generates, which vLLM implements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hybrid3d.config import Recipe
from hybrid3d.generation.router_replay import NO_CHOICES, ExpertChoices

T = TypeVar("T")


class StaleWeights(RuntimeError):
    """The engine's weights are older than the version that was required, or a sync of them was interrupted."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, in vLLM's terms. Without a request's seed all but `stop` is unused.

    Attributes:
        temperature: of the distribution that is sampled.
        top_p, top_k, min_p: which tokens it is restricted to.
        stop: texts that end an answer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @classmethod
    def for_training(cls, recipe: Recipe) -> Sampling:
        """Return how the answers are sampled that a step trains on."""
        rollout = recipe.rollout
        assert rollout is not None, "checked when the recipe was read"
        return cls(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.stop)

    @classmethod
    def for_evaluation(cls, recipe: Recipe) -> Sampling:
        """Return how held-out problems are answered; where that is greedy, as for training, without an effect."""
        assert recipe.rollout is not None, "checked when the recipe was read"
        evaluation = recipe.evaluation
        if evaluation.temperature == 0:
            return cls.for_training(recipe)
        return cls(evaluation.temperature, evaluation.top_p, stop=recipe.rollout.stop)

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never sampled, so that the others have more than their probability."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, and how to sample an answer to it.

    Attributes:
        prompt_ids: token ids.
        max_new_tokens: the answer has at most so many tokens.
        stop_tokens: tokens that end the answer.
        seed: of this request alone, so that a run repeats; None samples greedily.
        sampling: the distribution that is sampled, and what ends the answer besides tokens.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_tokens: Sequence[int]
    seed: int | None = None
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class Completion:
    """An answer to a request, or the next part of one.

    Attributes:
        tokens: the one that ended it included.
        logprobs: of each token in the distribution at the temperature over all tokens; empty for a greedy answer.
        weight_version: of the weights that generated it.
        stopped: whether a text of `Sampling.stop` ended it.
        truncated: whether it ended because it may have no more tokens (vLLM's finish reason `length`).
        kept: where sampling truncates the distribution, the probability of the tokens that it kept, for each token.
        experts: of the tokens of the request's prompt and of the answer that vLLM has computed so far: all but the
            last. Only with `train.router_replay: rollout`, for sampled answers, on the rank that leads its replica.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    stopped: bool = False
    truncated: bool = False
    kept: tuple[float, ...] = ()
    experts: ExpertChoices = NO_CHOICES


def join_completions(parts: Sequence[Completion], version: int, experts: ExpertChoices) -> Completion:
    """Return the completion that consists of these parts, by weights of one version."""
    tokens, logprobs, kept = (
        tuple(itertools.chain.from_iterable(getattr(part, key) for part in parts))
        for key in ("tokens", "logprobs", "kept")
    )
    stopped, truncated = any(part.stopped for part in parts), any(part.truncated for part in parts)
    return Completion(tokens, logprobs, version, stopped, truncated, kept, experts)


class Engine(Protocol):
    """One rank of a replica of the model that generates. All ranks of a replica call every method together.

    Attributes:
        replica: the number of the replica that this rank belongs to.
        replicas: how many there are.
        leads: whether this rank reports for its replica.
        end_tokens: the checkpoint's tokens that end an answer.
    """

    replica: int
    replicas: int
    leads: bool

    @property
    def end_tokens(self) -> Sequence[int]: ...

    def generate(self, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
        """Return one completion for each request, by weights of this version or a later one.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
        """
        ...

    def submit(self, requests: Mapping[int, GenerationRequest], version: int) -> None:
        """Begin to generate completions of requests, by their numbers, with weights of this version or a later one.

        Raises:
            StaleWeights: as for `generate`.
        """
        ...

    def step(self) -> dict[int, Completion]:
        """Generate the next token of the submitted requests; return the completions that have ended, by number."""
        ...

    def interrupt(self) -> dict[int, Completion]:
        """End all requests that were submitted, between two tokens, and return their tokens so far, by number."""
        ...

    def pause(self) -> tuple[dict[int, Completion], dict[int, Completion]]:
        """Stop between two tokens; the next `step` goes on with the same requests, and their KV cache.

        Returns:
            The completions that have ended, and what the other requests have generated since they were submitted or
            paused, by number.
        """
        ...

    def cancel(self, numbers: Sequence[int]) -> None:
        """End requests that were submitted."""
        ...

    def broadcast(self, value: T | None) -> T:
        """Return the value of the replica's leading rank."""
        ...
