"""Groups sequences into shares of ranks and into micro batches with nearly equal numbers of tokens."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence


def balanced_shares(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Split sequences into shares with equally many sequences and nearly equally many tokens; returns their indices.

    Sequences are assigned in rounds, the longest first: in each round every share gets one, and the share with the
    fewest tokens gets the longest. Then the largest and the smallest share repeatedly swap the pair of sequences that
    brings their sizes closest, as long as this narrows the gap. The token counts of two shares never differ by more
    than the lengths of the longest and the shortest sequence. The indices of a share are ascending.

    Raises:
        ValueError: the number of sequences is not a multiple of `shares`.
    """
    if shares < 1 or len(lengths) % shares:
        raise ValueError(f"{len(lengths)} sequences do not divide into {shares} shares of equal count")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    assigned: list[tuple[int, list[int]]] = [(0, []) for _ in range(shares)]
    for first in range(0, len(order), shares):
        assigned.sort()
        in_round = order[first : first + shares]
        assigned = [(n + lengths[i], [*members, i]) for (n, members), i in zip(assigned, in_round, strict=True)]
    while len(assigned) > 1:
        assigned.sort()
        (low, few), (high, many) = assigned[0], assigned[-1]
        gap, give, take = _best_swap(lengths, many, few, high - low)
        if gap >= high - low:
            break
        moved = lengths[give] - lengths[take]
        assigned[0] = low + moved, [give if i == take else i for i in few]
        assigned[-1] = high - moved, [take if i == give else i for i in many]
    return [sorted(members) for _, members in assigned]


def _best_swap(lengths: Sequence[int], many: Sequence[int], few: Sequence[int], gap: int) -> tuple[int, int, int]:
    """Return the gap that remains after the best swap between two shares, and the pair to swap."""
    candidates = sorted(few, key=lambda i: (lengths[i], i))
    found = []
    for give in many:  # the best partner is shorter by half the gap
        at = bisect_left(candidates, lengths[give] - gap / 2, key=lambda i: lengths[i])
        found += [(abs(gap - 2 * (lengths[give] - lengths[i])), give, i) for i in candidates[max(0, at - 1) : at + 1]]
    return min(found, default=(gap, -1, -1))


def split_within_budget(lengths: Sequence[int], budget: int, *, packed: bool, min_parts: int = 1) -> list[list[int]]:
    """Split sequences into micro batches of at most `budget` tokens each, the largest first; returns their indices.

    The indices of a micro batch are ascending. If it is `packed`, it counts the sum of its lengths, else its rows times
    its longest length. There are exactly `min_parts` of them, unless more are made for `min_parts=1`.

    Raises:
        ValueError: a sequence is longer than the budget, or there are fewer sequences than `min_parts`.
    """
    if max(lengths, default=0) > budget:
        raise ValueError(
            f"a sequence of {max(lengths)} tokens does not fit into train.max_tokens_per_micro_batch={budget}: "
            f"set it to {max(lengths)} or more"
        )
    if min_parts > len(lengths):
        raise ValueError(f"{len(lengths)} sequences cannot be split into {min_parts} micro batches")
    parts = _packed(lengths, budget, min_parts) if packed else _padded(lengths, budget)

    def size(part: Sequence[int]) -> int:
        each = [lengths[i] for i in part]
        return sum(each) if packed else max(each) * len(each)

    while len(parts) < min_parts:
        largest = max((part for part in parts if len(part) > 1), key=size)
        parts.remove(largest)
        middle = len(largest) // 2
        parts += _longest_first(lengths, largest, 2) if packed else [largest[:middle], largest[middle:]]
    return [sorted(part) for part in sorted(parts, key=lambda part: (-size(part), min(part)))]


def _packed(lengths: Sequence[int], budget: int, min_parts: int) -> list[list[int]]:
    """Make as many parts as the budget needs, or `min_parts` if that is more and fits too."""
    everything = range(len(lengths))

    def fits(parts: list[list[int]]) -> bool:
        return all(sum(lengths[i] for i in part) <= budget for part in parts)

    count = -(-sum(lengths) // budget)
    while not fits(parts := _longest_first(lengths, everything, count)):
        count += 1
    more = _longest_first(lengths, everything, max(count, min_parts))
    return more if fits(more) else parts


def _longest_first(lengths: Sequence[int], indices: Sequence[int], count: int) -> list[list[int]]:
    """Assign each sequence, the longest first, to the part with fewest tokens (Graham 1969); no part stays empty."""
    parts: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(count)]
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        tokens, number, part = parts[0]
        heapq.heapreplace(parts, (tokens + lengths[i], number, [*part, i]))
    return [part for _, _, part in parts]


def _padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequences of similar lengths greedily; no grouping needs fewer micro batches."""
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= budget:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts
