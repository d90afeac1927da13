"""Asks a scorer for the rewards of texts."""

from collections.abc import Sequence

from hybrid3d.scoring.scorer import Query, Scorer, Scores


def score(scorer: Scorer, items: Sequence[tuple[str, str, str]]) -> Scores:
    """Return the scores of items (answer, reference, prompt)."""
    return scorer.score([Query(*item) for item in items])
