"""Shares of equal counts and micro batches within a budget, against their bounds and the best there is."""

from __future__ import annotations

import math
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.rl.balance import balanced_shares, split_within_budget

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=24)


def tokens(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


def assert_dealt_out(lengths: list[int], parts: list[list[int]]) -> None:
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)


def test_shares_written_down() -> None:
    """Dealt out: 8 + 5 + 4 + 2 and 7 + 6 + 3 + 1, of 36 tokens; 2 and 1 change places."""
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    assert sorted(tokens(lengths, balanced_shares(lengths, 2))) == [18, 18]
    assert balanced_shares([9, 1, 1, 1], 4) == [[1], [2], [3], [0]]


@settings(deadline=None)
@given(each=st.integers(1, 6), shares=st.integers(1, 6), data=st.data())
def test_shares_have_equal_counts_and_nearly_equal_tokens(each: int, shares: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=each * shares, max_size=each * shares))
    parts = balanced_shares(lengths, shares)
    assert_dealt_out(lengths, parts)
    assert {len(part) for part in parts} == {each}
    sums = tokens(lengths, parts)
    assert max(sums) - min(sums) <= max(lengths) - min(lengths)


@pytest.mark.parametrize("shares", [2, 8, 64])
def test_shares_of_a_step_are_within_a_hundredth(shares: int) -> None:
    """512 answers of log-normal lengths (median 150 tokens, sigma 0.5): in turn they differ by a tenth and more."""
    random = Random(1)
    lengths = [max(1, int(150 * math.exp(random.gauss(0, 0.5)))) for _ in range(512)]
    mean = sum(lengths) / shares
    in_turn = [list(range(share, 512, shares)) for share in range(shares)]
    assert max(tokens(lengths, balanced_shares(lengths, shares))) <= 1.01 * mean
    assert shares == 2 or max(tokens(lengths, in_turn)) > 1.1 * mean


@pytest.mark.parametrize(("count", "shares"), [(5, 2), (3, 4), (4, 0)])
def test_unequal_counts_are_refused(count: int, shares: int) -> None:
    with pytest.raises(ValueError, match=f"{count} sequences do not divide into {shares} shares of equal count"):
        balanced_shares([1] * count, shares)


def cost(lengths: list[int], part: list[int], packed: bool) -> int:
    each = [lengths[i] for i in part]
    return sum(each) if packed else len(each) * max(each)


@settings(deadline=None)
@given(lengths=LENGTHS, spare=st.integers(0, 100), packed=st.booleans(), more=st.integers(0, 24))
def test_micro_batches_are_never_over_budget(lengths: list[int], spare: int, packed: bool, more: int) -> None:
    budget = max(lengths) + spare
    parts = split_within_budget(lengths, budget, packed=packed)
    assert_dealt_out(lengths, parts)
    least = min(len(parts) + more, len(lengths))
    exactly = split_within_budget(lengths, budget, packed=packed, min_parts=least)
    assert_dealt_out(lengths, exactly)
    assert len(exactly) == least
    for part in (*parts, *exactly):
        assert part
        assert cost(lengths, part, packed) <= budget
    for some in (parts, exactly):
        costs = [cost(lengths, part, packed) for part in some]
        assert costs == sorted(costs, reverse=True)
    if packed:  # longest first fills all but one micro batch to more than half
        assert len(parts) <= 2 * sum(lengths) / budget + 1


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), spare=st.integers(0, 20))
def test_padded_micro_batches_are_the_fewest(lengths: list[int], spare: int) -> None:
    budget = max(lengths) + spare

    def fewest(order: tuple[int, ...]) -> int:
        """Cut a sequence of rows as late as it can be."""
        count, part = 1, []
        for i in order:
            if cost(lengths, [*part, i], packed=False) <= budget:
                part.append(i)
            else:
                count, part = count + 1, [i]
        return count

    best = min(fewest(order) for order in permutations(range(len(lengths))))
    assert len(split_within_budget(lengths, budget, packed=False)) == best


def test_sequence_over_budget_is_refused_with_both_numbers() -> None:
    message = "a sequence of 31 tokens does not fit into train.max_tokens_per_micro_batch=30: set it to 31 or more"
    with pytest.raises(ValueError, match=message):
        split_within_budget([5, 31], 30, packed=True)


def test_micro_batches_beyond_the_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences cannot be split into 3 micro batches"):
        split_within_budget([5, 6], 30, packed=False, min_parts=3)
