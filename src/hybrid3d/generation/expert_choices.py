"""The experts that vLLM's routers chose for the tokens of a sequence, for router replay (`train.router_replay`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True)
class ExpertChoices:
    """The experts of the first tokens of a sequence: k for each token and each layer that has experts.

    Attributes:
        layers, per_token: number of layers with experts, and k; both are 0 if there are no choices.
        dtype: of the numbers of experts: `uint8`, or `uint16` where there are more than 256 experts.
        data: the numbers, [tokens, layers, k], as contiguous bytes.
    """

    layers: int = 0
    per_token: int = 0
    dtype: str = "uint8"
    data: bytes = b""

    @classmethod
    def of(cls, array: Array) -> ExpertChoices:
        """Return the choices in an array [tokens, layers, k] of unsigned integers."""
        return cls(array.shape[1], array.shape[2], array.dtype.name, np.ascontiguousarray(array).tobytes())

    @functools.cached_property
    def array(self) -> Array:
        """The choices as [tokens, layers, k]."""
        if not self.layers:
            return np.zeros((0, 0, 0), self.dtype)
        return np.frombuffer(self.data, self.dtype).reshape(-1, self.layers, self.per_token)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.array)

    def __getitem__(self, token: int) -> list[list[int]]:
        """Return the experts of a token, by layer."""
        found: list[list[int]] = self.array[token].tolist()
        return found

    def first(self, tokens: int) -> ExpertChoices:
        """Return the choices of the first tokens."""
        return self if tokens >= len(self) else replace(self, data=self.array[:tokens].tobytes())

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
