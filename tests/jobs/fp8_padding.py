"""Two ranks of TP2 whose micro batches are padded as FP8 needs; tests/train/test_fp8_training.py judges them.

    torchrun --nproc-per-node 2 fp8_padding.py MODEL OUT.pt

Nothing is computed in FP8: the policy is built without it, and only its batches are divided as a recipe with FP8 says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu.one_rank import make_batch
from hybrid3d import distributed
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Run, Train
from hybrid3d.inputs.models import read_config
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy


def recipe_for(model: str, **train: Any) -> Recipe:
    return Recipe(
        name="fp8-padding",
        model=Model(path=model, dtype="float32"),  # so that rounding is small
        train=Train(tp=2, micro_batch_size=4, **train),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="sft", prompts_per_step=8),
        optimizer=Optimizer(lr=1e-3),
        run=Run(steps=1),
    )


def main(model: str, out: str) -> None:
    group = distributed.start()
    runtime.initialize(recipe_for(model).train, seed=1)
    config = read_config(model)
    policy = Policy(config, recipe_for(model), group.rank(), trainable=False)
    widths: list[int] = []
    policy.stages[0].embedding.register_forward_pre_hook(
        lambda module, args, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    batch = make_batch(config, 0, longest=53)
    found = {}
    for packed in (False, True):
        for fp8 in ("none", "blockwise"):
            widths.clear()
            logprobs = policy.logprobs(batch, recipe_for(model, packed=packed, fp8=fp8))
            found[packed, fp8] = {"logprobs": logprobs, "widths": list(widths)}
    if group.rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
