"""Write trl_dpo.json: what TRL computes for preference pairs, against which `tests/rl/test_rl_preferences.py` checks.

    pip install trl accelerate datasets
    python tests/numbers/make_trl_dpo.py

It runs TRL's own methods: `DPOTrainer._compute_loss`, and `CPOTrainer.cpo_loss` for what DPO's trainer does not have.
They are given the settings that they read of a trainer, and a model that returns the batch's log-probabilities, in
float64. README.md beside this file says what each case holds.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer

from batches import BATCHES, lists, write

NAMES = ("ragged", "holes")

CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": ["sigmoid"], "beta": 0.1},
    "sigmoid_steep": {"loss_type": ["sigmoid"], "beta": 2.0},
    "sigmoid_norm": {"loss_type": ["sigmoid_norm"], "beta": 5.0},
    "robust": {"loss_type": ["robust"], "beta": 0.5, "label_smoothing": 0.1},
    "hinge": {"loss_type": ["hinge"], "beta": 1.0},
    "ipo": {"loss_type": ["ipo"], "beta": 0.3},
    "apo_zero": {"loss_type": ["apo_zero"], "beta": 0.5},
    "apo_down": {"loss_type": ["apo_down"], "beta": 0.5},
    "sigmoid_sft": {"loss_type": ["sigmoid", "sft"], "beta": 0.1, "loss_weights": [1.0, 0.25]},
}
# CPO's trainer reads no reference: its `sigmoid` is given log-ratios to one, its `simpo` means over tokens
CPO_CASES: dict[str, dict[str, Any]] = {
    "sigmoid_smoothed": {"loss_type": "sigmoid", "beta": 0.5, "label_smoothing": 0.2},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0},
    "simpo_smoothed": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.2, "label_smoothing": 0.1},
}
ACCELERATOR = SimpleNamespace(device="cpu", gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor)


def dpo_case(name: str, settings: dict[str, Any], batch_name: str) -> dict[str, Any]:
    """Run DPO's loss on a batch, whose first half are chosen answers, and whose second half rejected ones."""
    batch = BATCHES[batch_name]
    logprobs, mask = batch["logprobs"].clone().requires_grad_(), batch["mask"]
    given = {"label_smoothing": 0.0, "loss_weights": [1.0] * len(settings["loss_type"]), **settings}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        loss_types=given["loss_type"],
        loss_weights=given["loss_weights"],
        beta=given["beta"],
        label_smoothing=given["label_smoothing"],
        **{"aux_loss_enabled": False, "ld_alpha": None, "use_weighting": False, "precompute_ref_logps": True},
        **{"f_divergence_type": "reverse_kl", "_total_train_tokens": 0, "_tp_size": 1},
        _metrics={"train": defaultdict(list)},
    )
    zeros = torch.zeros_like(logprobs)
    outputs = SimpleNamespace(
        log_probs=logprobs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), logits=None
    )
    reference = (batch["ref_logprobs"] * mask).sum(1)
    tokens = torch.nn.functional.pad(mask, (1, 0)).long()  # a prompt of one token
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "completion_mask": tokens,
        "ref_chosen_logps": reference.chunk(2)[0],
        "ref_rejected_logps": reference.chunk(2)[1],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    kept = ("scoring/", "logps/")
    metrics = {key: value[-1] for key, value in trainer._metrics["train"].items() if key.startswith(kept)}
    return case(f"{name}_{batch_name}", "DPOTrainer._compute_loss", batch_name, given, loss, gradient, metrics)


def cpo_case(name: str, settings: dict[str, Any], batch_name: str) -> dict[str, Any]:
    batch = BATCHES[batch_name]
    logprobs, mask = batch["logprobs"].clone().requires_grad_(), batch["mask"]
    sums = (logprobs * mask).sum(1)
    if settings["loss_type"] == "simpo":
        scores = sums / mask.sum(1)
    else:
        scores = sums - (batch["ref_logprobs"] * mask).sum(1)
    trainer = SimpleNamespace(alpha=0.0, accelerator=ACCELERATOR, **settings)
    losses, chosen, rejected = CPOTrainer.cpo_loss(trainer, *scores.chunk(2))
    loss = losses.mean()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    means = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).double(),
        "logps/chosen": sums.chunk(2)[0],
        "logps/rejected": sums.chunk(2)[1],
    }
    metrics = {key: values.mean().item() for key, values in means.items()}
    return case(f"{name}_{batch_name}", "CPOTrainer.cpo_loss", batch_name, settings, loss, gradient, metrics)


def case(
    name: str,
    made_by: str,
    batch: str,
    settings: dict[str, Any],
    loss: Tensor,
    gradient: Tensor,
    metrics: dict[str, float],
) -> dict[str, Any]:
    outputs = {"loss": loss.item(), "gradient": lists(gradient), "metrics": metrics}
    return {"name": name, "made_by": made_by, "batch": batch, "settings": settings, "outputs": outputs}


def main() -> None:
    cases = [dpo_case(name, settings, batch) for name, settings in CASES.items() for batch in NAMES]
    cases += [cpo_case(name, settings, batch) for name, settings in CPO_CASES.items() for batch in NAMES]
    write("trl_dpo.json", {"trl": trl.__version__, "losses": cases})


if __name__ == "__main__":
    main()
