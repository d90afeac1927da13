"""The algorithms by name: a row says how advantages are made of rewards, and what its settings are by default.

To add one, write its function of advantages, if none of those there does, and a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hybrid3d.rl.advantages import centred_advantages, grpo_advantages, leave_one_out_advantages, plain_advantages
from hybrid3d.rl.losses import Aggregation, Ratio


@dataclass(frozen=True, kw_only=True)
class Method:
    """One algorithm.

    Attributes:
        advantages: of answers [B], from their rewards [B], the number of answers to a prompt, and penalties [B].
        by_token: a KL in the reward costs at the tokens where it arises, and a token's advantage is made of what comes
            from it on, by GAE where there is a critic; else the KL is taken off the answer's reward or advantage, and
            all tokens of an answer have its advantage.
        normalised: over all tokens of a step, at last.
        ratio, loss_agg_mode, clip, clip_high, dynamic_sampling: defaults of the recipe's settings.
    """

    advantages: Callable[[Tensor, int, Tensor | None], Tensor]
    by_token: bool = False
    normalised: bool = False
    ratio: Ratio = "token"
    loss_agg_mode: Aggregation = "token"
    clip: float = 0.2
    clip_high: float | None = None
    dynamic_sampling: int = 0


METHODS = {
    # DeepSeekMath, arXiv 2402.03300, but with DAPO's mean over tokens (`loss_agg_mode: sequence` is the paper's)
    "grpo": Method(advantages=grpo_advantages),
    # arXiv 2503.20783
    "dr_grpo": Method(advantages=centred_advantages, loss_agg_mode="constant"),
    # arXiv 2503.14476: clip-higher, dynamic sampling, token mean; its overlong penalty is `reward.overlong_buffer`
    "dapo": Method(advantages=grpo_advantages, clip_high=0.28, dynamic_sampling=3),
    # arXiv 2507.18071, clips of section 5.1
    "gspo": Method(advantages=grpo_advantages, ratio="sequence", loss_agg_mode="sequence", clip=3e-4, clip_high=4e-4),
    # arXiv 2402.14740
    "rloo": Method(advantages=leave_one_out_advantages),
    # arXiv 2501.03262: REINFORCE++, and its variant with the mean of a prompt's answers as baseline
    "reinforce_pp": Method(advantages=plain_advantages, by_token=True, normalised=True),
    "reinforce_pp_baseline": Method(advantages=centred_advantages, normalised=True),
    # arXiv 1707.06347, and arXiv 2203.02155 for its use here
    "ppo": Method(advantages=plain_advantages, by_token=True, normalised=True),
}
