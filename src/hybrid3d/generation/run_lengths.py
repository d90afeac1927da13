"""A sequence of numbers that seldom change, as runs: the versions of the weights that generated each token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True)
class RunLengths(Sequence[int]):
    """Holds numbers as runs (number, length), so that it takes as much memory as there are runs."""

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> RunLengths:
        """Return the same numbers as runs."""
        if isinstance(numbers, RunLengths):
            return numbers
        return cls(tuple((number, sum(1 for _ in run)) for number, run in itertools.groupby(map(int, numbers))))

    def __len__(self) -> int:
        return sum(length for _, length in self.runs)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(*run) for run in self.runs)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> RunLengths: ...

    def __getitem__(self, place: int | slice) -> int | RunLengths:
        numbers = [*self]
        return RunLengths.of(numbers[place]) if isinstance(place, slice) else numbers[place]
