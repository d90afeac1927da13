"""Losses of preference pairs: values, gradients and metrics against those of TRL, to 1e-6."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import TokenScores
from hybrid3d.rl.preferences import (
    PREFERENCE_LOSSES,
    REFERENCE_FREE,
    PairObjective,
    PairScores,
    PreferenceSettings,
    score_pairs,
    token_weights,
)

NUMBERS = Path(__file__).resolve().parents[1] / "numbers"
BATCHES = json.loads((NUMBERS / "trl.json").read_text())["batches"]
CASES = json.loads((NUMBERS / "trl_dpo.json").read_text())["losses"]
METRICS = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "logps/chosen": "chosen_logprob",
    "logps/rejected": "rejected_logprob",
}


def interleaved(rows: Tensor) -> Tensor:
    """Put each pair's rejected answer behind its chosen one, where TRL has all chosen answers first."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def batch_of(name: str) -> tuple[Batch, Tensor, Tensor]:
    """A batch of TRL's numbers, with the log-probabilities of policy and reference."""
    found = {
        key: interleaved(torch.tensor(BATCHES[name][key], dtype=torch.float64))
        for key in ("logprobs", "ref_logprobs", "mask")
    }
    mask = found["mask"]
    lengths = torch.full((len(mask),), mask.shape[1])
    batch = Batch(torch.zeros_like(mask).long(), torch.ones_like(lengths), lengths, mask)
    return batch, found["logprobs"], found["ref_logprobs"]


def settings_of(case: dict[str, Any]) -> PreferenceSettings:
    given = case["settings"]
    kinds = given["loss_type"] if isinstance(given["loss_type"], list) else [given["loss_type"]]
    weights = dict(zip(kinds, given.get("loss_weights", [1.0] * len(kinds)), strict=True))
    kept = {key: given[key] for key in ("beta", "label_smoothing", "simpo_gamma") if key in given}
    return PreferenceSettings(kinds[0], sft_coef=weights.get("sft", 0.0), **kept)


def scored(name: str, settings: PreferenceSettings) -> tuple[PairScores, Batch, Tensor]:
    batch, logprobs, reference = batch_of(name)
    free = settings.loss_type in REFERENCE_FREE
    return score_pairs(batch, logprobs, None if free else reference, settings), batch, logprobs


def gradient(batch: Batch, logprobs: Tensor, weights: Tensor) -> Tensor:
    """The gradient of an update, whose micro batches are of one sequence, and so do not have a whole pair."""
    values, mask = logprobs.clone().requires_grad_(), batch.response_mask
    objective = PairObjective(weights)
    for row in range(len(batch)):
        rows = slice(row, row + 1)
        losses, sums = objective(TokenScores(values[rows], lambda: torch.zeros(())), rows)
        assert sums == {}
        ((losses * mask[rows]).sum() / mask.sum()).backward()
    assert values.grad is not None
    return values.grad


def test_preference_losses_all_have_numbers() -> None:
    assert {settings_of(case).loss_type for case in CASES} == {*PREFERENCE_LOSSES}


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_losses_are_those_of_trl(case: dict[str, Any]) -> None:
    settings, wanted = settings_of(case), case["outputs"]
    scores, batch, logprobs = scored(case["batch"], settings)
    pairs, mask = len(batch) // 2, batch.response_mask
    chosen_tokens = int(mask[0::2].sum())
    sums = scores.sums()
    loss = sums["loss"] / pairs - settings.sft_coef * sums["chosen_logprob"] / chosen_tokens
    assert loss == pytest.approx(wanted["loss"], abs=1e-6)
    for theirs, ours in METRICS.items():
        assert sums[ours] / pairs == pytest.approx(wanted["metrics"][theirs], abs=1e-6), theirs
    weights = token_weights(scores.slopes, settings, pairs, chosen_tokens, int(mask.sum()))
    expected = interleaved(torch.tensor(wanted["gradient"], dtype=torch.float64))
    torch.testing.assert_close(gradient(batch, logprobs, weights), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_padding_may_hold_anything(kind: str) -> None:
    settings = PreferenceSettings(kind)
    batch, logprobs, reference = batch_of("ragged")
    outside = batch.response_mask == 0
    noisy = score_pairs(
        batch,
        logprobs.masked_fill(outside, float("nan")),
        None if kind in REFERENCE_FREE else reference.masked_fill(outside, float("inf")),
        settings,
    )
    scores, _, _ = scored("ragged", settings)
    assert torch.equal(noisy.slopes, scores.slopes)
    assert noisy.sums() == scores.sums()


def test_sft_term_is_of_chosen_answers_alone() -> None:
    settings = PreferenceSettings("hinge", beta=1e-9, sft_coef=0.5)  # a hinge without slope to speak of
    scores, batch, _ = scored("ragged", settings)
    weights = token_weights(scores.slopes, settings, 4, int(batch.response_mask[0::2].sum()), 33)
    chosen_tokens = int(batch.response_mask[0::2].sum())
    assert weights[0::2].tolist() == pytest.approx([-0.5 * 33 / chosen_tokens] * 4, abs=1e-6)
    assert weights[1::2].tolist() == pytest.approx([0.0] * 4, abs=1e-6)
