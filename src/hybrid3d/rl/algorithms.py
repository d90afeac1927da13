"""Defines the table of algorithms: how each computes advantages, and the defaults of its settings.

To add an algorithm, add a row, and an advantage function in `advantages.py` if no existing one fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hybrid3d.rl.advantages import centred_advantages, grpo_advantages, leave_one_out_advantages, plain_advantages
from hybrid3d.rl.losses import Aggregation, Ratio


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """Describes one algorithm.

    Attributes:
        advantages: computes the advantages of answers [B] from their rewards [B], the group size and penalties [B].
        token_level: if true, a KL in the reward is subtracted at the tokens where it arises, and a token's advantage
            comes from its return, or from GAE if there is a critic. If false, the KL is subtracted from the answer's
            reward or advantage, and all tokens of an answer share its advantage.
        normalize: whether the advantages are then normalized over all tokens of the step.
        ratio, loss_agg_mode, clip, clip_high, dynamic_sampling: defaults of the recipe's settings.
    """

    advantages: Callable[[Tensor, int, Tensor | None], Tensor]
    token_level: bool = False
    normalize: bool = False
    ratio: Ratio = "token"
    loss_agg_mode: Aggregation = "token"
    clip: float = 0.2
    clip_high: float | None = None
    dynamic_sampling: int = 0


ALGORITHMS = {
    # DeepSeekMath, arXiv 2402.03300, but with DAPO's mean over tokens (`loss_agg_mode: sequence` is the paper's)
    "grpo": AlgorithmSpec(advantages=grpo_advantages),
    # arXiv 2503.20783
    "dr_grpo": AlgorithmSpec(advantages=centred_advantages, loss_agg_mode="constant"),
    # arXiv 2503.14476: clip-higher, dynamic sampling, token mean; its overlong penalty is `reward.overlong_buffer`
    "dapo": AlgorithmSpec(advantages=grpo_advantages, clip_high=0.28, dynamic_sampling=3),
    # arXiv 2507.18071, clips of section 5.1
    "gspo": AlgorithmSpec(
        advantages=grpo_advantages, ratio="sequence", loss_agg_mode="sequence", clip=3e-4, clip_high=4e-4
    ),
    # arXiv 2402.14740
    "rloo": AlgorithmSpec(advantages=leave_one_out_advantages),
    # arXiv 2501.03262: REINFORCE++, and its variant with the mean of a prompt's answers as baseline
    "reinforce_pp": AlgorithmSpec(advantages=plain_advantages, token_level=True, normalize=True),
    "reinforce_pp_baseline": AlgorithmSpec(advantages=centred_advantages, normalize=True),
    # arXiv 1707.06347, and arXiv 2203.02155 for its use here
    "ppo": AlgorithmSpec(advantages=plain_advantages, token_level=True, normalize=True),
}
