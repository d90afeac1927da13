"""Assigns the sequences of a step to data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from hybrid3d.config import Recipe
from hybrid3d.rl.balance import balanced_shares

Shares = list[list[int]]
"""For each data-parallel rank, the indices of its sequences."""


def shares_of(recipe: Recipe, lengths: Sequence[int], minibatches: int = 1) -> Shares:
    """Assign sequences to data-parallel ranks, consecutively if rows are padded to one width, else balanced by tokens.

    The sequences are first divided into minibatches, in order, and each minibatch is then distributed to all ranks. An
    update therefore has the same sequences for any number of ranks, packed or not.

    Returns:
        For each rank its part of the first minibatch, then of the second and so on, all of equal size.

    Raises:
        ValueError: the sequences do not divide into minibatches and ranks.
    """
    dp, count = recipe.train.dp, len(lengths)
    if count % (minibatches * dp):
        raise ValueError(f"{count} sequences do not divide into {minibatches} minibatches on {dp} data-parallel ranks")
    balanced = recipe.train.packed or recipe.train.max_tokens_per_micro_batch is not None
    of_all, each = count // minibatches, count // (minibatches * dp)
    shares: Shares = [[] for _ in range(dp)]
    for first in range(0, count, of_all):
        dealt = (
            balanced_shares(lengths[first : first + of_all], dp)
            if balanced
            else [range(rank * each, (rank + 1) * each) for rank in range(dp)]
        )
        for share, numbers in zip(shares, dealt, strict=True):
            share += [first + i for i in numbers]
    return shares


def spread_over(minibatches: int, samples: int, rows: int) -> list[int]:
    """Return the order of rows in which those that only fill the batch are spread evenly over its minibatches.

    The first `samples` of the `rows` are samples; the others fill the batch.
    """
    each, filling, order = rows // minibatches, iter(range(samples, rows)), list[int]()
    for number in range(minibatches):
        own = range(samples * number // minibatches, samples * (number + 1) // minibatches)
        order += [*own, *islice(filling, each - len(own))]
    return order
