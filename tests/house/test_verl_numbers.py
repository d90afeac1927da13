"""The numbers of verl in `tests/numbers/verl.json` are whole, and those that TRL has as well are the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

NUMBERS = Path(__file__).resolve().parents[1] / "numbers"
TRL = json.loads((NUMBERS / "trl.json").read_text())
VERL = json.loads((NUMBERS / "verl.json").read_text())

SECTIONS = {
    "losses": {"loss", "gradient", "metrics"},
    "loss_agg_modes": {"loss", "gradient"},
    "kl_penalty": {"mean", "gradient"},
    "advantages": {"advantages"},
    "rollout_weights": {"weights"},
    "rollout_weight_metrics": {"metrics"},
    "rejection_masks": {"mask", "masked_fraction", "seq_masked_fraction"},
    "off_policy_metrics": {"metrics"},
}
LOSS_MODES = """
vanilla gspo sapo gpg clip_cov kl_cov geo_mean cispo bypass_mode dppo_tv dppo_kl
""".split()
ESTIMATORS = """
grpo grpo_passk rloo gpg opo remax reinforce_plus_plus reinforce_plus_plus_baseline
""".split()


@pytest.mark.parametrize("section", SECTIONS)
def test_cases(section: str) -> None:
    cases: list[dict[str, Any]] = VERL[section]
    assert len({case["name"] for case in cases}) == len(cases)
    for case in cases:
        assert set(case["verl"]) <= set(VERL["verl"]), case["name"]
        assert case["outputs"].keys() - {"returns"} == SECTIONS[section], case["name"]
        assert "null" not in json.dumps(case["outputs"]), case["name"]
        assert "batch" not in case or case["batch"] in TRL["batches"], case["name"]


def test_verl_numbers_have_every_loss_and_estimator() -> None:
    assert {case["settings"]["loss_mode"] for case in VERL["losses"]} == set(LOSS_MODES)
    assert {case["settings"]["adv_estimator"] for case in VERL["advantages"]} == set(ESTIMATORS)


@pytest.mark.parametrize(
    ("theirs", "verls"),
    [*((f"dapo_{batch}", f"vanilla_{batch}") for batch in TRL["batches"]), ("sapo", "sapo_ragged")],
)
def test_losses_are_those_of_trl(theirs: str, verls: str) -> None:
    one = next(case for case in TRL["losses"] if case["name"] == theirs)["outputs"]
    other = next(case for case in VERL["losses"] if case["name"] == verls)["outputs"]
    for output in ("loss", "gradient"):
        torch.testing.assert_close(torch.tensor(other[output]), torch.tensor(one[output]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("theirs", "verls"), [("grpo_none", "grpo_no_std_twelve"), ("rloo", "rloo_twelve")])
def test_advantages_are_those_of_trl(theirs: str, verls: str) -> None:
    one = next(case for case in TRL["advantages"] if case["name"] == theirs)["outputs"]
    other = next(case for case in VERL["advantages"] if case["name"] == verls)["outputs"]
    assert other["advantages"] == pytest.approx(one["advantages"], abs=1e-6)
