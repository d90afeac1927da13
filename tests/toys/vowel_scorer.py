"""A scorer that counts vowels: all that a new way to compute rewards takes."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid3d.scoring.scorer import Query, Scores


class Vowels:
    """The number of vowels of an answer; one without letters has no reward and counts as failed."""

    def score(self, queries: Sequence[Query]) -> Scores:
        rewards = [float(sum(letter in "aeiou" for letter in query.answer)) for query in queries]
        empty = sum(not query.answer.strip() for query in queries)
        return Scores(rewards, {"empty": empty} if empty else {}, {"empty": "no letters"} if empty else {})
