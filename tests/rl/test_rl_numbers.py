"""Losses, gradients, advantages and KL against what TRL and TorchRL compute (`tests/numbers/`), to 1e-6."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid3d.rl.advantages import Answers, Moments, answer_advantages, gae, returns_to_go, token_rewards
from hybrid3d.rl.correction import correction_weights, high_entropy
from hybrid3d.rl.kl import KlController, token_kl
from hybrid3d.rl.losses import answer_weights, value_loss
from hybrid3d.rl.objective import KlSettings, LossSettings, PolicyObjective, TokenScores, policy_loss

NUMBERS = Path(__file__).resolve().parents[1] / "numbers"
TRL = json.loads((NUMBERS / "trl.json").read_text())
PPO = json.loads((NUMBERS / "trl_ppo.json").read_text())

AGGREGATION = {
    **{"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"},
    **{"cispo": "token", "sapo": "sequence", "luspo": "sequence_sum"},
}
# `vespo` and `off_policy_mask` are not implemented here; of the entropy bonus see its own test
OTHERS = {"vespo", "off_policy_mask", "entropy_bonus"}


def tensors(batch: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in batch.items()}


def named(cases: list[dict[str, Any]], *names: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in cases if not names or case["name"] in names]


def close(found: Tensor, wanted: Any, mask: Tensor | None = None) -> None:
    expected = torch.tensor(wanted, dtype=torch.float64)
    chosen = ... if mask is None else mask.bool()
    torch.testing.assert_close(found.double()[chosen], expected[chosen], rtol=0, atol=1e-6)


def objective(batch: dict[str, Tensor], settings: dict[str, Any]) -> PolicyObjective:
    mask = batch["mask"]
    return PolicyObjective(
        advantages=batch["advantages"][:, None].expand_as(mask),
        mask=mask,
        old_logprobs=batch["old_logprobs"],
        answer_weights=answer_weights(
            AGGREGATION[settings["loss_type"]], mask.sum(1), settings.get("max_completion_length", 0)
        ),
        loss=loss_settings(settings),
        weights=top_entropy(batch, settings.get("top_entropy_quantile", 1.0)),
        ref_logprobs=batch["ref_logprobs"] if settings["beta"] else None,
        kl=KlSettings(settings["beta"], ratio_weighted=settings.get("use_bias_correction_kl", False)),
        entropy_coef=settings.get("entropy_coef", 0.0),
    )


def loss_settings(settings: dict[str, Any]) -> LossSettings:
    """TRL's GSPO has one ratio for an answer, with the gradient of the mean. CISPO's `epsilon_high` is the bound."""
    kind = settings["loss_type"] if settings["loss_type"] in ("cispo", "sapo") else "ppo"
    low, high = (
        (1.0, settings["epsilon_high"] - 1) if kind == "cispo" else (settings["epsilon"], settings.get("epsilon_high"))
    )
    return LossSettings(
        kind=kind,
        ratio=settings.get("importance_sampling_level", "token"),
        clip=low,
        clip_high=high,
        dual_clip=settings.get("delta"),
        tau_positive=settings.get("sapo_temperature_pos", 1.0),
        tau_negative=settings.get("sapo_temperature_neg", 1.05),
    )


def top_entropy(batch: dict[str, Tensor], fraction: float) -> Tensor | None:
    mask = batch["mask"].bool()
    kept = torch.zeros_like(batch["mask"])
    return (
        None if fraction == 1 else kept.masked_scatter(mask, high_entropy(batch["entropies"][mask], fraction).double())
    )


def loss_and_gradient(
    batch: dict[str, Tensor], objective: PolicyObjective, parts: list[slice]
) -> tuple[Tensor, Tensor, Tensor]:
    """A step's loss as Megatron makes it: sums of micro batches over the tokens of all; and the entropies' gradient."""
    logprobs, entropies = batch["logprobs"].clone().requires_grad_(), batch["entropies"].clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        scored = TokenScores(logprobs[rows], lambda rows=rows: entropies[rows])
        total = total + objective(scored, rows)[0].sum() / batch["mask"].sum()
    gradients = torch.autograd.grad(total, (logprobs, entropies), allow_unused=True)
    return total.detach(), gradients[0], torch.zeros_like(entropies) if gradients[1] is None else gradients[1]


@pytest.mark.parametrize("case", [case for case in named(TRL["losses"]) if case.id not in OTHERS])
def test_losses(case: dict[str, Any]) -> None:
    batch = tensors(TRL["batches"][case["batch"]])
    loss, gradient, _ = loss_and_gradient(batch, objective(batch, case["settings"]), [slice(None)])
    close(loss, case["outputs"]["loss"])
    close(gradient, case["outputs"]["gradient"])


def test_entropy_bonus() -> None:
    """TRL's is a mean over tokens beside any policy loss; here both have one mean, so the policy loss is left out."""
    case = next(case for case in TRL["losses"] if case["name"] == "entropy_bonus")
    batch = tensors(TRL["batches"][case["batch"]]) | {"advantages": torch.zeros(8, dtype=torch.float64)}
    bonus = objective(batch, case["settings"] | {"loss_type": "dapo"})
    loss, _, gradient = loss_and_gradient(batch, bonus, [slice(None)])
    close(loss, case["outputs"]["loss"] - case["outputs"]["metrics"]["policy_loss"])
    close(gradient, case["outputs"]["entropy_gradient"])


@pytest.mark.parametrize("case", named(TRL["micro_batches"], "grpo", "dapo", "dr_grpo"))
def test_micro_batches(case: dict[str, Any]) -> None:
    batch, settings = tensors(TRL["batches"][case["batch"]]), case["settings"]
    parts = [slice(*part) for part in settings["parts"]]
    loss, gradient, _ = loss_and_gradient(batch, objective(batch, settings), parts)
    close(loss, sum(case["outputs"]["losses"]))
    close(gradient, case["outputs"]["gradient"])


@pytest.mark.parametrize("case", [case for case in named(TRL["rollout_correction"]) if "truncate_both" not in case.id])
def test_rollout_correction(case: dict[str, Any]) -> None:
    batch, settings = tensors(TRL["batches"][case["batch"]]), case["settings"]
    mode = settings["vllm_importance_sampling_mode"].removeprefix("token_")
    low, high = settings["vllm_importance_sampling_clip_min"] or 0.0, settings["vllm_importance_sampling_clip_max"]
    weights = correction_weights(mode, batch["old_logprobs"], batch["rollout_logprobs"], batch["mask"], low, high)
    wanted = torch.tensor(case["outputs"]["weights"], dtype=torch.float64).expand_as(weights)
    close(weights, wanted.tolist(), batch["mask"])
    corrected = objective(batch, settings)
    object.__setattr__(corrected, "weights", weights)
    loss, gradient, _ = loss_and_gradient(batch, corrected, [slice(None)])
    close(loss, case["outputs"]["loss"])
    close(gradient, case["outputs"]["gradient"])


@pytest.mark.parametrize(
    ("name", "eps"), [("grpo_group", 1e-4), ("grpo_batch", 1e-4), ("grpo_none", None), ("rloo", None)]
)
def test_advantages(name: str, eps: float | None) -> None:
    case = next(case for case in TRL["advantages"] if case["name"] == name)
    rewards, group = torch.tensor(case["inputs"]["rewards"]).sum(1), case["settings"]["group"]
    scale = {"grpo_group": "group_std", "grpo_batch": "batch_std"}.get(name, "none")
    advantage = "leave_one_out" if name == "rloo" else "group_mean"
    found = answer_advantages(advantage, scale, Answers(rewards, group), eps=eps or 0.0)
    close(found, case["outputs"]["advantages"])


def test_kl_in_the_reward_of_an_answer() -> None:
    case = next(case for case in TRL["advantages"] if case["name"] == "rloo_kl_in_reward")
    batch = tensors(TRL["batches"][case["batch"]])
    kl = token_kl("k1", batch["old_logprobs"], batch["ref_logprobs"], batch["mask"]).sum(1)
    rewards = torch.tensor(case["inputs"]["rewards"]).sum(1)
    answers = Answers(rewards, case["settings"]["group"], penalties=case["settings"]["beta"] * kl)
    close(answer_advantages("leave_one_out", "none", answers), case["outputs"]["advantages"])


@pytest.mark.parametrize("case", named(PPO["token_rewards"], "kl", "mse"))
def test_kl_in_the_reward_of_a_token(case: dict[str, Any]) -> None:
    batch = tensors(PPO["batch"])
    estimator = {"kl": "k1", "mse": "k2"}[case["name"]]
    kl = token_kl(estimator, batch["logprobs"], batch["ref_logprobs"], batch["mask"])
    close(kl, case["outputs"]["kl"], batch["mask"])
    found = token_rewards(batch["scores"], case["settings"]["kl_coef"] * kl, batch["mask"])
    close(found, case["outputs"]["rewards"], batch["mask"])


@pytest.mark.parametrize("case", named(PPO["gae"]))
def test_gae(case: dict[str, Any]) -> None:
    batch, settings, wanted = tensors(PPO["batch"]), case["settings"], case["outputs"]
    mask = batch["mask"]
    gamma, lam = settings["gamma"], settings["lambda"]
    advantages, returns = gae(batch["token_rewards"], batch["old_values"], mask, gamma, lam)
    close(returns, wanted["returns"], mask)
    close(Moments.from_values(advantages, mask).normalise(advantages, mask), wanted["whitened_advantages"], mask)
    for row, (of_advantages, of_returns) in enumerate(
        zip(wanted["torchrl_advantages"], wanted["torchrl_returns"], strict=True)
    ):
        close(advantages[row, : len(of_advantages)], of_advantages)
        close(returns[row, : len(of_returns)], of_returns)


def test_returns_without_values_are_those_of_lambda_1() -> None:
    batch = tensors(PPO["batch"])
    case = next(case for case in PPO["gae"] if case["settings"]["lambda"] == case["settings"]["gamma"] == 1)
    close(returns_to_go(batch["token_rewards"], batch["mask"], gamma=1.0), case["outputs"]["returns"], batch["mask"])


@pytest.mark.parametrize("case", named(PPO["losses"]))
def test_ppo(case: dict[str, Any]) -> None:
    batch, settings = tensors(PPO["batch"]), case["settings"]
    mask, tokens = batch["mask"], batch["mask"].sum()
    logprobs, values = batch["logprobs"].requires_grad_(), batch["values"].requires_grad_()
    loss = LossSettings(clip=settings["cliprange"])
    policy = policy_loss(logprobs, batch["old_logprobs"], batch["advantages"], mask, loss)[0].sum()
    clip = settings["cliprange_value"]
    critic = value_loss(values, batch["old_values"], batch["returns"], mask, clip)[0].sum() * settings["vf_coef"]
    close((policy / tokens).detach(), case["outputs"]["policy_loss"])
    close((critic / tokens).detach(), case["outputs"]["value_loss_times_vf_coef"])
    close(torch.autograd.grad(policy / tokens, logprobs)[0], case["outputs"]["gradient"])
    close(torch.autograd.grad(critic / tokens, values)[0], case["outputs"]["value_gradient"])


@pytest.mark.parametrize("case", named(PPO["kl_controller"]))
def test_kl_controller(case: dict[str, Any]) -> None:
    settings = case["settings"]
    control = KlController(settings["init_kl_coef"], settings["target"], settings["horizon"])
    found = []
    for kl, answers in case["inputs"]["updates"]:
        control.observe(kl, answers)
        found.append(control.coef)
    assert found == pytest.approx(case["outputs"]["values"], abs=1e-12)
