"""A run that ran out of GPU memory goes on from its last checkpoint, with settings that take less.

A rank that fails within a step cannot try again: its peers wait for it. So it leaves the settings in the run's folder
and ends, and whoever started the ranks starts them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid3d.config import OFFLOADS, Recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.run.run_folder import RunFolder

ADVICE = "raise train.tp or train.pp, set train.recompute=full, or lower rollout.gpu_memory_utilization"


class OutOfMemoryRestart(RuntimeError):
    """A rank ran out of memory, and the run takes less when it is started again."""


@dataclass(frozen=True)
class OomRecovery:
    """What a run has given up for memory: how often, and the settings that it holds to since."""

    count: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: RunFolder) -> OomRecovery:
        """What the folder says."""
        count, settings = 0, dict[str, Any]()
        while (path := folder.relief_of(count + 1)).exists():
            count += 1
            settings |= json.loads(path.read_text())["new"]
        return cls(count, settings)

    def after(self, error: BaseException, recipe: Recipe, folder: RunFolder, rank: int) -> RuntimeError:
        """What to raise on the rank that ran out, once the next start knows of it.

        Of ranks that run out together, all with the same settings, one leaves them and records the event.

        Args:
            recipe: the settings in force.
        """
        new, cause = smaller(recipe), (str(error) or type(error).__name__).splitlines()[0]
        if not new:
            return RuntimeError(f"{cause}: micro batches are as small as they can be: {ADVICE}")
        if self.count >= recipe.guard.max_interventions:
            limit = recipe.guard.max_interventions
            return RuntimeError(
                f"{cause}: memory has run out {self.count + 1} times, guard.max_interventions={limit} allows {limit}: "
                f"{ADVICE}"
            )
        old = {key: getattr(recipe.train, key.removeprefix("train.")) for key in new}
        told = {"rank": rank, "count": self.count + 1, "old": old, "new": new, "error": cause}
        draft = folder.path / f"out-of-memory.{rank}.tmp"
        draft.write_text(json.dumps(told))
        try:
            os.link(draft, folder.relief_of(self.count + 1))
            folder.add_event("out_of_memory", **told)
        except FileExistsError:  # of a rank that ran out too, with the same settings
            pass
        finally:
            draft.unlink()
        changes = ", ".join(f"{key}={new[key]} in place of {old[key]}" for key in new)
        return OutOfMemoryRestart(f"{cause}: started again, the run goes on from its last checkpoint with {changes}")


def smaller(recipe: Recipe) -> dict[str, Any]:
    """Settings in place of the recipe's that take less memory: half the micro batch, and what can be put away is.

    Empty where nothing is left to give up. A smaller micro batch divides the old one, so that it fits the step.
    """
    train, found = recipe.train, dict[str, Any]()
    if train.max_tokens_per_micro_batch is not None:
        longest = recipe.rollout.max_model_len if recipe.rollout else _longest(recipe)
        tokens = max(train.max_tokens_per_micro_batch // 2, longest)
        if tokens < train.max_tokens_per_micro_batch:
            found["train.max_tokens_per_micro_batch"] = tokens
    elif train.micro_batch_size > 1:
        size = train.micro_batch_size
        found["train.micro_batch_size"] = max(n for n in range(1, size // 2 + 1) if size % n == 0)
    if recipe.algorithm.generates:
        kept = ("parameters",) if recipe.sync.share_storage else ()  # in which vLLM's weights lie
        found |= {f"train.offload_{kind}": True for kind in OFFLOADS if kind not in (*train.offloads, *kept)}
    return found


def _longest(recipe: Recipe) -> int:
    """Tokens of the longest sequence that supervised data may have."""
    return int(read_config(recipe.model.path)["max_position_embeddings"])
