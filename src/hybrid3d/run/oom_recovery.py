"""Recovery from running out of GPU memory: the run restarts from its last checkpoint with settings that need less.

A rank that fails within a step cannot retry, because its peers wait for it. It writes the new settings to the run's
folder and exits, and the launcher starts the ranks again.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybrid3d.config import OFFLOADS, Recipe
from hybrid3d.run.folder import RunFolder
from hybrid3d.storage.disk import CheckpointWriteError, describe_write_error

logger = logging.getLogger(__name__)

ADVICE = "raise train.tp or train.pp, set train.recompute=full, or lower rollout.gpu_memory_utilization"

# What libraries that allocate GPU memory without torch's allocator say when there is none, each in a RuntimeError
OUT_OF_MEMORY = re.compile(
    r"CUDA Error: out of memory"  # vLLM's csrc/cumem_allocator.cpp, when it wakes up
    r"|Cuda failure (\d+ )?'out of memory'"  # NCCL's src/include/checks.h
    r"|Failed to CUDA (m|c)alloc (async )?\d+ bytes"  # NCCL's src/include/alloc.h, which replaces the line above
    r"|CUDA error: out of memory"  # torch, of the CUDA runtime's own allocations
    r"|CUDA out of memory"  # torch's allocator, where a library has raised another error of it
    r"|CUBLAS_STATUS_ALLOC_FAILED"  # torch, of the workspace of cuBLAS
)


class OutOfMemoryRestart(RuntimeError):
    """Raised on a rank that ran out of memory, after it has saved settings that need less for the next start."""


def find_out_of_memory(error: BaseException) -> str | None:
    """Return what an error says if this rank ran out of GPU memory, else None: the first line that says so."""
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, torch.OutOfMemoryError):
        return lines[0]
    if not isinstance(error, RuntimeError) or isinstance(error, OutOfMemoryRestart):
        return None
    return next((line for line in lines if OUT_OF_MEMORY.search(line)), None)


@dataclass(frozen=True)
class OomRecovery:
    """The number of a run's out-of-memory restarts so far, and the settings that they pinned, by dotted key."""

    count: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: RunFolder) -> OomRecovery:
        """Read the out-of-memory records of a run's folder."""
        count, settings = 0, dict[str, Any]()
        while (path := folder.oom_record_path(count + 1)).exists():
            count += 1
            settings |= json.loads(path.read_text(encoding="utf-8"))["new"]
        return cls(count, settings)

    def prepare_restart(self, cause: str, recipe: Recipe, folder: RunFolder, rank: int) -> RuntimeError:
        """Save settings that need less memory for the next start, and return the error to raise on this rank.

        If several ranks run out together, all with the same settings, one of them saves the record and the event. The
        recipe is the one with the current settings; `cause` is what `find_out_of_memory` returns.

        Returns:
            `OutOfMemoryRestart`, or another error if memory cannot be reduced further or has run out too often.
        """
        new = reduced_settings(recipe)
        if not new:
            return RuntimeError(f"{cause}: micro batches cannot be made smaller: {ADVICE}")
        if self.count >= recipe.guard.max_interventions:
            limit = recipe.guard.max_interventions
            return RuntimeError(
                f"{cause}: memory has run out {self.count + 1} times, guard.max_interventions={limit} allows {limit}: "
                f"{ADVICE}"
            )
        old = {key: getattr(recipe.train, key.removeprefix("train.")) for key in new}
        fields = {"rank": rank, "count": self.count + 1, "old": old, "new": new, "error": cause}
        path, draft = folder.oom_record_path(self.count + 1), folder.path / f"out-of-memory.{rank}.tmp"
        try:
            draft.write_text(json.dumps(fields), encoding="utf-8")
            _publish(draft, path)
        except FileExistsError:  # another rank ran out of memory too, and saved the same settings
            pass
        except OSError as error:
            problem = describe_write_error(path, error)
            return RuntimeError(f"{cause}: there is no restart with other settings, as {problem}: {ADVICE}")
        else:
            try:
                folder.add_event("out_of_memory", **fields)
            except CheckpointWriteError as error:  # the record, which is written, says the same
                logger.warning("%s", error)
        finally:
            draft.unlink(missing_ok=True)
        changes = ", ".join(f"{key}={new[key]} instead of {old[key]}" for key in new)
        return OutOfMemoryRestart(f"{cause}: after a restart the run resumes from its last checkpoint with {changes}")


def _publish(draft: Path, path: Path) -> None:
    """Give a file its name; raise `FileExistsError` if another one has it."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links: of two ranks at once the latter's file stays
        if path.exists():
            raise FileExistsError(path) from None
        draft.replace(path)


def reduced_settings(recipe: Recipe) -> dict[str, Any]:
    """Return settings that need less memory: at most half the micro batch, and everything offloaded.

    Empty if nothing can be reduced. The new micro batch size divides the old one, so that it still divides the step.
    """
    train, settings = recipe.train, dict[str, Any]()
    if train.max_tokens_per_micro_batch is not None:
        if recipe.algorithm.generates:
            assert recipe.rollout is not None, "checked when the recipe was read"
            longest = recipe.rollout.max_model_len
        else:  # of a supervised sequence
            from hybrid3d.inputs.models import read_config  # not above: it imports what reads data

            longest = int(read_config(recipe.model.path)["max_position_embeddings"])
        tokens = max(train.max_tokens_per_micro_batch // 2, longest)
        if tokens < train.max_tokens_per_micro_batch:
            settings["train.max_tokens_per_micro_batch"] = tokens
    elif train.micro_batch_size > 1:
        size = train.micro_batch_size
        settings["train.micro_batch_size"] = max(n for n in range(1, size // 2 + 1) if size % n == 0)
    if recipe.algorithm.generates and not recipe.is_split:
        settings |= {f"train.offload_{kind}": True for kind in OFFLOADS if kind not in train.offloads}
    return settings
