"""Which sequences go together: shares of ranks and micro batches that are alike in tokens."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence


def balanced_shares(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Deal sequences into shares of equal count and nearly equal tokens.

    Round by round, the longest first, each share gets one, that with the fewest tokens the longest of the round. Then
    the fullest and the emptiest share exchange the pair that brings them closest together, for as long as one does.
    The largest and the smallest share never differ by more than the longest and the shortest sequence do.

    Returns:
        The numbers of each share's sequences, ascending.

    Raises:
        ValueError: the sequences do not divide into equal counts.
    """
    if shares < 1 or len(lengths) % shares:
        raise ValueError(f"{len(lengths)} sequences do not divide into {shares} shares of equal count")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    dealt: list[tuple[int, list[int]]] = [(0, []) for _ in range(shares)]
    for first in range(0, len(order), shares):
        dealt.sort()
        dealt = [(n + lengths[i], [*of, i]) for (n, of), i in zip(dealt, order[first : first + shares], strict=True)]
    while len(dealt) > 1:
        dealt.sort()
        (low, few), (high, many) = dealt[0], dealt[-1]
        gap, give, take = _closest(lengths, many, few, high - low)
        if gap >= high - low:
            break
        moved = lengths[give] - lengths[take]
        dealt[0] = low + moved, [give if i == take else i for i in few]
        dealt[-1] = high - moved, [take if i == give else i for i in many]
    return [sorted(of) for _, of in dealt]


def _closest(lengths: Sequence[int], many: Sequence[int], few: Sequence[int], gap: int) -> tuple[int, int, int]:
    """The gap that is left if two shares exchange the best pair, and that pair."""
    there = sorted(few, key=lambda i: (lengths[i], i))
    found = []
    for give in many:  # best is a sequence that is shorter by half the gap
        at = bisect_left(there, lengths[give] - gap / 2, key=lambda i: lengths[i])
        found += [(abs(gap - 2 * (lengths[give] - lengths[i])), give, i) for i in there[max(0, at - 1) : at + 1]]
    return min(found, default=(gap, -1, -1))


def within_budget(lengths: Sequence[int], budget: int, *, packed: bool, least: int = 1) -> list[list[int]]:
    """Deal sequences into micro batches of at most `budget` tokens each, the fullest first.

    Args:
        packed: a micro batch has the sum of its lengths; without it, as many tokens as rows of its longest.
        least: make so many micro batches or more. For any that is not more than there are sequences, and not less than
            would be made without it, it makes exactly so many.

    Returns:
        The numbers of each micro batch's sequences, ascending.

    Raises:
        ValueError: a sequence is longer than the budget, or there are fewer sequences than `least`.
    """
    if max(lengths, default=0) > budget:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens does not fit into train.max_tokens_per_micro_batch={budget}: "
            f"set it to {max(lengths)} or more"
        )
    if least > len(lengths):
        raise ValueError(f"{len(lengths)} sequences cannot be {least} micro batches")
    parts = _packed(lengths, budget, least) if packed else _padded(lengths, budget)

    def size(part: Sequence[int]) -> int:
        each = [lengths[i] for i in part]
        return sum(each) if packed else max(each) * len(each)

    while len(parts) < least:
        largest = max((part for part in parts if len(part) > 1), key=size)
        parts.remove(largest)
        middle = len(largest) // 2
        parts += _longest_first(lengths, largest, 2) if packed else [largest[:middle], largest[middle:]]
    return [sorted(part) for part in sorted(parts, key=lambda part: (-size(part), min(part)))]


def _packed(lengths: Sequence[int], budget: int, least: int) -> list[list[int]]:
    """As many parts as the tokens need, or `least` where those fit too."""
    everything = range(len(lengths))

    def fits(parts: list[list[int]]) -> bool:
        return all(sum(lengths[i] for i in part) <= budget for part in parts)

    count = -(-sum(lengths) // budget)
    while not fits(parts := _longest_first(lengths, everything, count)):
        count += 1
    more = _longest_first(lengths, everything, max(count, least))
    return more if fits(more) else parts


def _longest_first(lengths: Sequence[int], among: Sequence[int], count: int) -> list[list[int]]:
    """Each sequence, the longest first, to the part that has the fewest tokens (Graham 1969): none is left empty."""
    parts: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(count)]
    for i in sorted(among, key=lambda i: (-lengths[i], i)):
        tokens, number, part = parts[0]
        heapq.heapreplace(parts, (tokens + lengths[i], number, [*part, i]))
    return [part for _, _, part in parts]


def _padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Sequences of like lengths together, each time as many as fit: no grouping has fewer micro batches."""
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= budget:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts
