"""Defines what each algorithm's name stands for: defaults of the settings in the section `algorithm`.

To add an algorithm that combines what there is, add a row. A new advantage is a function in `rl/advantages.py`, a new
loss one in `rl/objective.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# fmt: off
Name = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo", "grpo_passk", "opo",
    "remax", "gpg", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "dppo", "sft", "dpo",
]
# fmt: on
Advantage = Literal[
    "group_mean", "leave_one_out", "length_weighted_mean", "best_of_group", "greedy_answer", "returns", "gae"
]
AdvantageScale = Literal["none", "group_std", "batch_std", "varying_groups", "whiten"]
Ratio = Literal["token", "sequence", "sequence_straight_through"]
LossKind = Literal["ppo", "cispo", "sapo", "gmpo", "reinforce", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"]
Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]
PreferenceLossType = Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "apo_zero", "apo_down", "simpo"]
REFERENCE_FREE_LOSSES = ("simpo",)
SMOOTHED_LOSSES = ("sigmoid", "sigmoid_norm", "robust", "simpo")  # which read `label_smoothing`
FROM_DATA = ("sft", "dpo")  # which train on answers of the data, and sample none

GROUP_ADVANTAGES = ("group_mean", "leave_one_out", "length_weighted_mean", "best_of_group")
GROUP_SCALES = ("group_std", "varying_groups")
TOKEN_ADVANTAGES = ("returns", "gae")  # a token's own; the others are an answer's


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Holds what an algorithm combines; the attributes are the settings of `algorithm` of the same names."""

    advantage: Advantage = "group_mean"
    advantage_scale: AdvantageScale = "none"
    ratio: Ratio = "token"
    policy_loss: LossKind = "ppo"
    loss_agg_mode: Aggregation = "token"
    clip: float = 0.2
    clip_high: float | None = None
    dynamic_sampling: int = 0


ALGORITHMS = {
    # DeepSeekMath, arXiv 2402.03300, but with DAPO's mean over tokens (`loss_agg_mode: sequence` is the paper's)
    "grpo": Combination(advantage_scale="group_std"),
    # arXiv 2503.20783
    "dr_grpo": Combination(loss_agg_mode="constant"),
    # arXiv 2503.14476: clip-higher, dynamic sampling, token mean; its overlong penalty is `reward.overlong_buffer`
    "dapo": Combination(advantage_scale="group_std", clip_high=0.28, dynamic_sampling=3),
    # arXiv 2507.18071, clips of section 5.1
    "gspo": Combination(
        advantage_scale="group_std", ratio="sequence", loss_agg_mode="sequence", clip=3e-4, clip_high=4e-4
    ),
    # arXiv 2402.14740
    "rloo": Combination(advantage="leave_one_out"),
    # arXiv 2501.03262: REINFORCE++, and its variant with the mean of a prompt's answers as baseline
    "reinforce_pp": Combination(advantage="returns", advantage_scale="whiten"),
    "reinforce_pp_baseline": Combination(advantage_scale="whiten"),
    # arXiv 1707.06347, and arXiv 2203.02155 for its use here
    "ppo": Combination(advantage="gae", advantage_scale="whiten"),
    # Pass@k policy optimization, arXiv 2503.19595
    "grpo_passk": Combination(advantage="best_of_group", advantage_scale="group_std"),
    # arXiv 2505.23585
    "opo": Combination(advantage="length_weighted_mean"),
    # arXiv 2310.10505
    "remax": Combination(advantage="greedy_answer", policy_loss="reinforce", loss_agg_mode="sequence_sum"),
    # arXiv 2504.02546
    "gpg": Combination(advantage_scale="varying_groups", policy_loss="reinforce"),
    # MiniMax-M1, arXiv 2506.13585: only the upper bound acts; 5 is that of arXiv 2510.13786
    "cispo": Combination(advantage_scale="group_std", policy_loss="cispo", clip=1.0, clip_high=4.0),
    # arXiv 2511.20347
    "sapo": Combination(advantage_scale="group_std", policy_loss="sapo", loss_agg_mode="sequence"),
    # arXiv 2507.20673: bounds of log-ratios
    "gmpo": Combination(advantage_scale="group_std", policy_loss="gmpo", loss_agg_mode="sequence", clip=0.4),
    # arXiv 2505.22617
    "clip_cov": Combination(advantage_scale="group_std", policy_loss="clip_cov"),
    "kl_cov": Combination(advantage_scale="group_std", policy_loss="kl_cov"),
    # arXiv 2602.04879: bounds of the difference of probabilities
    "dppo": Combination(policy_loss="dppo_tv", loss_agg_mode="constant", clip=0.15),
}
