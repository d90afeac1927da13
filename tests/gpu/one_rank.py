"""A rank without peers: its process group, policies on tiny checkpoints, and batches."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hybrid3d import distributed
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Sync, Train
from hybrid3d.families import Config
from hybrid3d.rl.batch import Batch
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy

MICRO_BATCH = 4


def start() -> dist.ProcessGroup:
    """Create the default group of this process alone, and Megatron's groups in it."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    group = distributed.start(HashStore())
    runtime.initialize(Train(), seed=1)
    return group


def recipe_for(
    folder: Path | str, dtype: Any, rollout: Rollout | None = None, sync: Sync | None = None, **train: Any
) -> Recipe:
    """Return the recipe of a run on one rank; `train` has keys of its section."""
    return Recipe(
        name="gpu",
        model=Model(path=str(folder), dtype=dtype),
        train=Train(**{"micro_batch_size": MICRO_BATCH} | train),
        rollout=rollout,
        sync=sync or Sync(),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="sft", prompts_per_step=8),
        optimizer=Optimizer(lr=1e-3, weight_decay=0.1, clip_grad=1.0),
        run=Run(steps=100),
    )


def make_policy(config: Config, recipe: Recipe, trainable: bool = True) -> Policy:
    return Policy(config, recipe, 0, trainable=trainable)


def make_batch(config: Config, step: int, sequences: int = 8, longest: int = 64) -> Batch:
    """Return sequences of 8 to `longest` tokens, half of each a prompt; the same for the same arguments."""
    source = random.Random(step)
    lengths = [longest, *(source.randint(8, longest) for _ in range(sequences - 1))]
    rows = [[source.randrange(3, config["vocab_size"]) for _ in range(length)] for length in lengths]
    return Batch.from_sequences(rows, [length // 2 for length in lengths], pad_id=0)


def bits_differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether any bit of two tensors of one shape and dtype differs."""
    return not torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
