"""Losses, gradients, advantages, KL and corrections against what verl computes (`tests/numbers/verl.json`), to 1e-6."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid3d.rl.advantages import Answers, Moments, answer_advantages, returns_to_go, token_rewards
from hybrid3d.rl.correction import OffPolicy, correction_weights, covariances, high_covariance
from hybrid3d.rl.kl import token_kl
from hybrid3d.rl.losses import answer_weights
from hybrid3d.rl.objective import LossSettings, PolicyObjective, TokenScores

NUMBERS = Path(__file__).resolve().parents[1] / "numbers"
VERL = json.loads((NUMBERS / "verl.json").read_text())
BATCHES = json.loads((NUMBERS / "trl.json").read_text())["batches"]

KINDS = {"vanilla": "ppo", "gspo": "ppo", "gpg": "reinforce", "geo_mean": "gmpo"}
AGGREGATION = {
    **{"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean": "sequence"},
    **{"seq-mean-token-sum": "sequence_sum", "seq-mean-token-sum-norm": "constant"},
}


def tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in BATCHES[case["batch"]].items()}


def cases(section: str, *, but: tuple[str, ...] = ()) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in VERL[section] if not case["name"].startswith(but or ("@",))]


def close(found: Tensor, wanted: Any, mask: Tensor | None = None) -> None:
    expected = torch.tensor(wanted, dtype=torch.float64)
    chosen = ... if mask is None else mask.bool()
    torch.testing.assert_close(found.double()[chosen], expected[chosen], rtol=0, atol=1e-6)


def bounds(threshold: str) -> tuple[float, float]:
    """The bounds of train / rollout: verl's are those of rollout / train."""
    low, high = map(float, threshold.split("_"))
    return 1 / high, 1 / low


def selected_by(settings: dict[str, Any], batch: dict[str, Tensor], advantages: Tensor) -> Tensor | None:
    """The tokens that verl selects by the log-probabilities of the update, those that PPO clips not among them."""
    if settings["loss_mode"] not in ("clip_cov", "kl_cov"):
        return None
    mask = batch["mask"].bool()
    values = covariances(batch["logprobs"][mask], advantages[mask])
    if settings["loss_mode"] == "kl_cov":
        chosen = high_covariance(values, settings["kl_cov_ratio"])
    else:
        ratio = (batch["logprobs"] - batch["old_logprobs"]).exp()[mask]
        clipped = ratio.clamp(1 - settings["clip_ratio_low"], 1 + settings["clip_ratio_high"])
        unclipped = ratio * advantages[mask] <= clipped * advantages[mask]
        chosen = (values > settings["clip_cov_lb"]) & (values < settings["clip_cov_ub"]) & unclipped
    return torch.zeros_like(mask).masked_scatter(mask, chosen)


def loss_and_gradient(case: dict[str, Any], **aggregation: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    batch, settings = tensors(case), case["settings"]
    mode, mask = settings["loss_mode"], batch["mask"]
    correction = settings.get("rollout_correction", {})
    kind = KINDS.get(mode, mode) if mode != "bypass_mode" else KINDS.get(correction["loss_type"], "ppo")
    if correction.get("loss_type") == "reinforce":
        kind = "reinforce"
    weights = None
    if "rollout_is" in correction:
        threshold = correction["rollout_is_threshold"]
        weights = correction_weights("truncate", batch["logprobs"], batch["rollout_logprobs"], mask, 0.0, threshold)
    if "rollout_rs" in correction:
        low, high = bounds(correction["rollout_rs_threshold"])
        kept = correction_weights("sequence_mean_mask", batch["logprobs"], batch["rollout_logprobs"], mask, low, high)
        mask = mask * kept
    advantages = batch["advantages"][:, None].expand_as(mask)
    lengths = mask.sum(1)
    answers = lengths > 0  # verl's means of answers leave those without tokens out
    agg = aggregation.get("mode") or AGGREGATION[settings["loss_agg_mode"]]
    objective = PolicyObjective(
        advantages=advantages,
        mask=mask,
        old_logprobs=batch[settings["old_log_prob"]],
        answer_weights=answer_weights(agg, lengths, aggregation.get("max_tokens", 1)),
        loss=LossSettings(
            kind=kind,
            ratio="sequence_straight_through" if mode == "gspo" else "token",
            clip=settings.get("clip_ratio_low", 0.2),
            clip_high=settings.get("clip_ratio_high"),
            dual_clip=settings.get("clip_ratio_c") if kind == "ppo" else None,
            tau_positive=settings.get("tau_pos", 1.0),
            tau_negative=settings.get("tau_neg", 1.0),
            cov_kl_coef=settings.get("ppo_kl_coef", 1.0),
            max_ratio=settings.get("clip_ratio_c", 20.0),
        ),
        selected=selected_by(settings, batch, advantages),
        weights=weights,
    )
    logprobs = batch["logprobs"].clone().requires_grad_()
    losses, sums = objective(TokenScores(logprobs, lambda: torch.zeros_like(logprobs)), slice(None))
    total = losses.sum() / mask.sum()
    if agg in ("sequence", "sequence_sum") and mode != "geo_mean":
        total = total * len(answers) / answers.sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.detach(), gradient, {name: value / mask.sum() for name, value in sums.items()}


@pytest.mark.parametrize("case", cases("losses"))
def test_losses(case: dict[str, Any]) -> None:
    loss, gradient, means = loss_and_gradient(case)
    outputs = case["outputs"]
    close(loss, outputs["loss"])
    close(gradient, outputs["gradient"])
    if case["settings"]["loss_mode"] in ("vanilla", "gspo", "dppo_tv", "dppo_kl"):
        close(means["clip_fraction"], outputs["metrics"]["actor/pg_clipfrac"])
    if case["settings"]["loss_mode"] == "vanilla":
        close(means["dual_clip_fraction"], outputs["metrics"]["actor/pg_clipfrac_lower"])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("batch", ["ragged", "holes", "empty_sequence"])
def test_aggregations(mode: str, batch: str) -> None:
    case = next(case for case in VERL["loss_agg_modes"] if case["name"] == f"{mode}_{batch}")
    loss, gradient, _ = loss_and_gradient(case)
    close(loss, case["outputs"]["loss"])
    close(gradient, case["outputs"]["gradient"])


@pytest.mark.parametrize("case", cases("kl_penalty"))
def test_kl(case: dict[str, Any]) -> None:
    batch, name = tensors(case), case["settings"]["kl_penalty"]
    logprobs = batch["logprobs"].clone().requires_grad_()
    kl = token_kl(name, logprobs, batch["ref_logprobs"], batch["mask"])
    mean = kl.sum() / batch["mask"].sum()
    close(mean.detach(), case["outputs"]["mean"])
    close(torch.autograd.grad(mean, logprobs)[0], case["outputs"]["gradient"])


ADVANTAGES = {
    **{"grpo": ("group_mean", "group_std"), "grpo_no_std": ("group_mean", "none"), "rloo": ("leave_one_out", "none")},
    **{"grpo_passk": ("best_of_group", "group_std"), "grpo_passk_no_std": ("best_of_group", "none")},
    **{"opo": ("length_weighted_mean", "none"), "gpg_as_in_the_paper": ("group_mean", "varying_groups")},
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_answers(name: str) -> None:
    case = next(case for case in VERL["advantages"] if case["name"] == f"{name}_twelve")
    advantage, scale = ADVANTAGES[name]
    rewards, lengths = torch.tensor(case["inputs"]["rewards"]), torch.tensor(case["inputs"]["lengths"]).float()
    found = answer_advantages(advantage, scale, Answers(rewards, case["settings"]["group"], lengths=lengths))
    close(found, case["outputs"]["advantages"])


@pytest.mark.parametrize("batch", ["ragged", "holes"])
def test_advantages_over_a_greedy_answer(batch: str) -> None:
    case = next(case for case in VERL["advantages"] if case["name"] == f"remax_{batch}")
    rewards, baselines = (torch.tensor(case["inputs"][name]) for name in ("rewards", "baselines"))
    found = answer_advantages("greedy_answer", "none", Answers(rewards, 1, baselines=baselines))
    mask = tensors(case)["mask"]
    close(found[:, None] * mask, case["outputs"]["advantages"], mask)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_discounted"])
def test_whitened_returns(name: str) -> None:
    case = next(case for case in VERL["advantages"] if case["name"] == f"{name}_ragged")
    mask = tensors(case)["mask"]
    rewards = token_rewards(torch.tensor(case["inputs"]["rewards"]), torch.zeros_like(mask), mask)
    returns = returns_to_go(rewards, mask, case["settings"]["gamma"])
    close(Moments.from_values(returns, mask).normalise(returns, mask), case["outputs"]["advantages"], mask)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("batch", ["ragged", "holes", "empty_sequence"])
def test_weights_of_the_correction(level: str, batch: str) -> None:
    case = next(case for case in VERL["rollout_weights"] if case["name"] == f"{level}_2.0_{batch}")
    held = tensors(case)
    name = "truncate" if level == "token" else "sequence_truncate"
    found = correction_weights(name, held["old_logprobs"], held["rollout_logprobs"], held["mask"], 0.0, 2.0)
    close(found, case["outputs"]["weights"], held["mask"])


@pytest.mark.parametrize("batch", ["ragged", "holes"])
def test_answers_that_are_rejected(batch: str) -> None:
    case = next(case for case in VERL["rejection_masks"] if case["name"] == f"seq_mean_k1_{batch}")
    low, high = bounds(case["settings"]["rollout_rs_threshold"])
    held = tensors(case)
    found = correction_weights(
        "sequence_mean_mask", held["old_logprobs"], held["rollout_logprobs"], held["mask"], low, high
    )
    close(found, case["outputs"]["mask"], held["mask"])
    assert 0 < case["outputs"]["masked_fraction"] < 1


@pytest.mark.parametrize("batch", ["ragged", "holes"])
def test_off_policy_metrics(batch: str) -> None:
    case = next(case for case in VERL["off_policy_metrics"] if case["name"].startswith(batch))
    held, wanted = tensors(case), case["outputs"]["metrics"]
    rows = [slice(0, 3), slice(3, 3), slice(3, 8)]  # as three ranks, the second without samples
    parts = [OffPolicy.of(*(held[n][part] for n in ("old_logprobs", "rollout_logprobs", "mask"))) for part in rows]
    found = sum(parts, OffPolicy()).metrics
    names = {"chi2_token": "chi2_token", "chi2_answer": "chi2_seq", "train_perplexity": "training_ppl"}
    for name, of_verl in (names | {"rollout_perplexity": "rollout_ppl"}).items():
        assert found[name] == pytest.approx(wanted[of_verl], abs=1e-6)
    mask = held["mask"].bool()
    ratio = (held["old_logprobs"] - held["rollout_logprobs"])[mask].exp()
    assert found["ess"] == pytest.approx(float(ratio.sum() ** 2 / ratio.square().sum() / len(ratio)), abs=1e-12)
