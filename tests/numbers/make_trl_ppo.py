"""Write trl_ppo.json: PPO with a value head, as the last TRL whose PPO is in methods computes it, and GAE by TorchRL.

    pip install trl==0.11.4 transformers==4.46.3 torchrl
    python tests/numbers/make_trl_ppo.py

TRL's methods are called on a PPOTrainer that has a config and a KL controller, all that they read; in float64.
README.md beside this file says what each case holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torchrl
import trl
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate
from trl import PPOConfig
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.utils import AdaptiveKLController

from batches import BATCHES, LENGTHS, WIDTH, lists, rounded, write

VOCABULARY = 4
TOKEN_MEAN = "sum over the tokens in the mask / number of tokens in the mask of this batch"


def make_batch() -> dict[str, Tensor]:
    """The batch "ragged" of trl.json with what a value head adds; advantages here are one a token."""
    generator = torch.Generator().manual_seed(21)

    def noise(*shape: int) -> Tensor:
        return rounded(torch.randn(*shape, generator=generator, dtype=torch.float64))

    values = noise(len(LENGTHS), WIDTH)
    return {
        **{name: BATCHES["ragged"][name] for name in ("logprobs", "old_logprobs", "ref_logprobs", "mask")},
        "scores": torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0, 0.25, -0.5, 1.5], dtype=torch.float64),
        "token_rewards": noise(len(LENGTHS), WIDTH),
        "old_values": values,
        "values": rounded(values + 0.4 * noise(len(LENGTHS), WIDTH)),
        "returns": noise(len(LENGTHS), WIDTH),
        "advantages": noise(len(LENGTHS), WIDTH),
        "logits": noise(len(LENGTHS) * WIDTH, VOCABULARY).reshape(len(LENGTHS), WIDTH, VOCABULARY),
    }


def make_trainer(kl_coef: float = 0.2, **settings: Any) -> PPOTrainer:
    """A trainer without a model: none of the methods that are called here has use for one."""
    trainer = PPOTrainer.__new__(PPOTrainer)
    trainer.config = PPOConfig(exp_name="numbers", **settings)
    trainer.kl_ctl = AdaptiveKLController(kl_coef, trainer.config.target, trainer.config.horizon)
    return trainer


def token_reward_cases(batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """A score a sequence and a KL penalty a token, as one reward a token."""
    cases = []
    for penalty in ("kl", "abs", "mse"):
        trainer = make_trainer(kl_coef=0.2, kl_penalty=penalty)
        rewards, _, kl = trainer.compute_rewards(
            batch["scores"], batch["logprobs"], batch["ref_logprobs"], batch["mask"].long()
        )
        cases.append(
            {
                "name": penalty,
                "made_by": "PPOTrainer.compute_rewards",
                "settings": {"kl_penalty": penalty, "kl_coef": 0.2},
                "outputs": lists({"rewards": rewards, "kl": kl}),
            }
        )
    return cases


def torchrl_gae(batch: dict[str, Tensor], gamma: float, lam: float) -> tuple[list[list[float]], list[list[float]]]:
    """TorchRL's advantages and returns of each sequence, which its last token ends; rows as long as the sequences."""
    advantages, returns = [], []
    for row, length in enumerate(LENGTHS):
        values = batch["old_values"][row, :length, None]
        done = torch.zeros(length, 1, dtype=torch.bool)
        done[-1] = True
        following = torch.cat([values[1:], torch.zeros(1, 1, dtype=torch.float64)])
        rewards = batch["token_rewards"][row, :length, None]
        advantage, target = generalized_advantage_estimate(gamma, lam, values, following, rewards, done, done)
        advantages.append(advantage[:, 0].tolist())
        returns.append(target[:, 0].tolist())
    return advantages, returns


def gae_cases(batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Rewards a token and values to advantages and returns."""
    cases = []
    for gamma, lam in [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.9, 0.0)]:
        trainer = make_trainer(gamma=gamma, lam=lam)
        _, advantages, returns = trainer.compute_advantages(batch["old_values"], batch["token_rewards"], batch["mask"])
        outputs: dict[str, Any] = {"whitened_advantages": advantages, "returns": returns}
        outputs["torchrl_advantages"], outputs["torchrl_returns"] = torchrl_gae(batch, gamma, lam)
        cases.append(
            {
                "name": f"gamma_{gamma}_lambda_{lam}",
                "made_by": "PPOTrainer.compute_advantages; torchrl.objectives.value.functional."
                "generalized_advantage_estimate",
                "settings": {
                    "gamma": gamma,
                    "lambda": lam,
                    "whitening": "(x - mean) / sqrt(var + 1e-8) over the tokens in the mask, var divided by n - 1",
                },
                "outputs": lists(outputs),
            }
        )
    return cases


def loss_cases(batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The policy's loss and the value head's, and their gradients in logprobs and in values."""
    cases = []
    for clip, value_clip, coefficient in [(0.2, 0.2, 0.1), (0.3, 0.1, 0.5), (0.2, 1e9, 1.0)]:
        trainer = make_trainer(cliprange=clip, cliprange_value=value_clip, vf_coef=coefficient)
        logprobs = batch["logprobs"].clone().requires_grad_()
        values = batch["values"].clone().requires_grad_()
        policy, value, stats = trainer.loss(
            batch["old_logprobs"],
            batch["old_values"],
            batch["logits"],
            values,
            logprobs,
            batch["mask"],
            batch["advantages"],
            batch["returns"],
        )
        gradient, value_gradient = torch.autograd.grad(policy + value, (logprobs, values))
        scalars = {name: item for name, item in stats.items() if item.ndim == 0}
        cases.append(
            {
                "name": f"clip_{clip}_value_clip_{value_clip:g}",
                "made_by": "PPOTrainer.loss",
                "settings": {
                    "cliprange": clip,
                    "cliprange_value": value_clip,
                    "vf_coef": coefficient,
                    "normaliser": TOKEN_MEAN,
                    "value_loss": "half the mean of the larger of the two squared errors, then times vf_coef",
                },
                "outputs": lists(
                    {
                        "policy_loss": policy.detach(),
                        "value_loss_times_vf_coef": value.detach(),
                        "gradient": gradient,
                        "value_gradient": value_gradient,
                        "metrics": scalars,
                    }
                ),
            }
        )
    return cases


def controller_cases() -> list[dict[str, Any]]:
    """The coefficient after each update with (the KL of a sequence, the sequences it was measured on)."""
    cases = []
    for name, start, target, horizon, updates in [
        ("small_errors", 0.2, 6.0, 10000, [(6.0, 256), (6.6, 256), (5.4, 256), (6.0, 256)]),
        ("clipped_errors", 0.2, 6.0, 10000, [(60.0, 256), (0.0, 256), (-3.0, 512), (7.2, 512)]),
        ("short_horizon", 0.05, 0.1, 100, [(0.11, 64), (0.3, 64), (0.02, 64), (0.1, 64)]),
    ]:
        controller = AdaptiveKLController(start, target, horizon)
        values = []
        for current, steps in updates:
            controller.update(current, steps)
            values.append(float(controller.value))
        cases.append(
            {
                "name": name,
                "made_by": "trl.trainer.utils.AdaptiveKLController.update",
                "settings": {"init_kl_coef": start, "target": target, "horizon": horizon, "error_clip": 0.2},
                "inputs": {"updates": [list(update) for update in updates]},
                "outputs": {"values": values},
            }
        )
    return cases


def main() -> None:
    torch.set_default_dtype(torch.float64)  # TorchRL takes gamma in the default
    batch = make_batch()
    numbers = {
        "trl": trl.__version__,
        "torchrl": torchrl.__version__,
        "torch": torch.__version__,
        "dtype": "float64",
        "batch": lists(batch),
        "token_rewards": token_reward_cases(batch),
        "gae": gae_cases(batch),
        "losses": loss_cases(batch),
        "kl_controller": controller_cases(),
    }
    write("trl_ppo.json", numbers)


if __name__ == "__main__":
    main()
