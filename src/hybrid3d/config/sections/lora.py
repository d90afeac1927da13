"""The recipe's section about low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybrid3d.config.schema import FilePath, Positive, Text, within

MAX_RANK = 512  # the largest that vLLM 0.32.0 has slots for (`rollout/adapters.py`)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (LoRA, arXiv:2106.09685), which are trained instead of the policy's own weights.

    A linear layer W computes W x + alpha / rank * B A x. Names and initial values are those of PEFT.

    Attributes:
        rank: Rank of each adapter (PEFT's `r`).
        alpha: Its scale, divided by the rank (PEFT's `lora_alpha`).
        target_modules: Last names of the layers with an adapter, such as `q_proj`; `null`: all linear layers of the
            model's blocks, which does not include routers.
        path: Folder of adapters in PEFT's format to begin with; `null`: A is random and B is 0.
        sync: `adapter` sends the adapters alone to vLLM's own slots for them; `merged` adds them to the weights that
            are sent, which is slower, and works for experts and latent attention too.
    """

    rank: Annotated[int, within(1, MAX_RANK)] = 16
    alpha: Positive = 32.0
    target_modules: tuple[Text, ...] | None = None
    path: FilePath | None = None
    sync: Literal["adapter", "merged"] = "adapter"
