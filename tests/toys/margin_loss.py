"""A policy loss that pushes by the advantage until a margin: all that a new loss takes, with its line in the table."""

from __future__ import annotations

from hybrid3d.rl.objective import LossSettings, Objective, TokenTerms

MARGIN = 0.25


def margin(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return `A log r` where `|log r|` is below the margin, and a constant beyond it."""
    clamped = terms.log_ratio.clamp(-MARGIN, MARGIN)
    return terms.advantage * clamped, {"clip_fraction": clamped != terms.log_ratio}
