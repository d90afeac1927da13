"""The experts that vLLM's routers chose for the tokens of a sequence, for router replay (`train.router_replay`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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

    def __getitem__(self, token: int) -> list[list[int]]:
        """Return the experts of a token, by layer."""
        found: list[list[int]] = self.array[token].tolist()
        return found

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
