"""The interface of the engine that generates, which vLLM implements.

Its completions may have the experts that vLLM's routers chose, for router replay (`train.router_replay`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from hybrid3d.config import Recipe

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True)
class ExpertChoices:
    """The experts of the first tokens of a sequence: k for each token and each layer that has experts.

    Attributes:
        layers, per_token: number of layers with experts, and k; both are 0 if there are no choices.
        dtype: of the numbers of experts: `uint8`, or `uint16` where there are more than 256 experts.
        data: the numbers, [tokens, layers, k], as contiguous bytes.
        held_by: the rank of the ranks that train that has the numbers, where it is not every rank that has the object:
            they are large, and only the ranks that train the sequence need them. Another rank gets the object without.
        tokens: where the numbers are not here, for how many tokens there are any.
    """

    layers: int = 0
    per_token: int = 0
    dtype: str = "uint8"
    data: bytes = b""
    held_by: int | None = field(default=None, compare=False)
    tokens: int = field(default=0, compare=False)

    @classmethod
    def of(cls, array: Array) -> ExpertChoices:
        """Return the choices in an array [tokens, layers, k] of unsigned integers."""
        return cls(array.shape[1], array.shape[2], array.dtype.name, np.ascontiguousarray(array).tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process gets: of what a rank holds, no numbers."""
        data, tokens = (self.data, self.tokens) if self.held_by is None else (b"", len(self))
        return ExpertChoices, (self.layers, self.per_token, self.dtype, data, self.held_by, tokens)

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers, wherever they are."""
        return len(self) * self.layers * self.per_token * np.dtype(self.dtype).itemsize

    @functools.cached_property
    def array(self) -> Array:
        """The choices as [tokens, layers, k]."""
        if not self.layers:
            return np.zeros((0, 0, 0), self.dtype)
        return np.frombuffer(self.data, self.dtype).reshape(-1, self.layers, self.per_token)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.tokens or len(self.array)

    def first(self, tokens: int) -> ExpertChoices:
        """Return the choices of the first tokens."""
        if tokens >= len(self):
            return self
        return replace(self, tokens=tokens) if self.tokens else replace(self, data=self.array[:tokens].tobytes())

    def extended(self, longer: ExpertChoices) -> ExpertChoices:
        """Return these choices, and after them those of another computation of the same sequence for later tokens."""
        if len(longer) <= len(self):
            return self
        return replace(longer, data=self.data + longer.array[len(self) :].tobytes())


NO_CHOICES = ExpertChoices()


def joined(choices: Sequence[ExpertChoices]) -> Array:
    """Return the choices of several sequences in a row, [tokens, layers, k]; empty if there are none."""
    found = [one.array for one in choices if len(one)]
    return np.concatenate(found) if found else NO_CHOICES.array


T = TypeVar("T")


class StaleWeights(RuntimeError):
    """The engine's weights are older than the version that was required, or a sync of them was interrupted."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, in vLLM's terms, and the texts that end them.

    Without a request's seed all but `stop` is unused.
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
    """A prompt, and how to sample an answer to it; a seed of its own lets a run repeat, and None samples greedily."""

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
        replica: the number of the replica that this rank belongs to; there are `replicas`.
        leads: whether this rank reports for its replica.
        steps_together: whether replicas share experts, so that a step of one is a step of all.
        end_tokens: the checkpoint's tokens that end an answer.
    """

    replica: int
    replicas: int
    leads: bool
    steps_together: bool

    @property
    def end_tokens(self) -> Sequence[int]: ...

    def submit(self, requests: Mapping[int, GenerationRequest], version: int) -> None:
        """Begin to generate completions of requests, by their numbers, with weights of this version or a later one.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
        """
        ...

    def step(self) -> dict[int, Completion]:
        """Generate the next token of the submitted requests; return the completions that have ended, by number."""
        ...

    def drain(self) -> dict[int, Completion]:
        """Generate until all requests have ended, those of replicas that step together too; return the completions."""
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


def complete(engine: Engine, requests: Sequence[GenerationRequest], version: int) -> list[Completion]:
    """Return one completion for each request; arguments and errors are those of `Engine.submit`."""
    engine.submit(dict(enumerate(requests)), version)
    ended = engine.drain()
    return [ended[number] for number in range(len(requests))]
