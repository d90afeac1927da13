"""Train one rank with GRPO at a learning rate, and write which fraction of the bfloat16 weights each update changes.

    torchrun --nproc-per-node 1 benchmarks/measure_changed_fractions.py LR OUT.json

`benchmarks/changed_fractions.py` runs this at several learning rates and prints the results.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

RECIPE = "recipes/demo-llm.yaml"
RUNS = Path("runs/changed-fractions")
UPDATES = 16
SETTINGS = ["model.dtype=bfloat16", "rollout.pack_weights=false", "guard.initial_mismatch=warn"]
ONE_RANK = ["train.pp=1", "train.first_stage_layers=null", "train.last_stage_layers=null"]
# Kinds of tensors, by a part of Megatron's names for them
KINDS = {
    "embedding": "word_embeddings",
    "attention QKV": "linear_qkv",
    "attention output": "linear_proj",
    "MLP gate and up": "linear_fc1",
    "MLP down": "linear_fc2",
    "norms": "norm",
}
ALL = "all"
STRIDE = 7  # predictions are means over every 7th element of the tensors with more than
ALL_PREDICTED = 100_000  # elements

ByKind = dict[str, float]


def measure(lr: str, out: Path) -> None:
    """Run GRPO at a learning rate on this process's rank, and write a row for each update."""
    from hybrid3d import distributed
    from hybrid3d.config import load_recipe
    from hybrid3d.train.megatron import runtime

    overrides = [f"name={lr}", f"run.dir={RUNS}", f"run.steps={UPDATES}", f"optimizer.lr={lr}", *SETTINGS, *ONE_RANK]
    recipe = load_recipe(RECIPE, overrides)
    group = distributed.start()
    runtime.initialize(recipe.train, recipe.run.seed)
    from hybrid3d.run.folder import RunFolder
    from hybrid3d.run.health import Guard
    from hybrid3d.run.logger import Display, RunLogger
    from hybrid3d.trainer.local_generator import LocalGenerator
    from hybrid3d.trainer.trainer import Trainer

    folder = RunFolder.for_recipe(recipe)
    folder.create(recipe)
    guard = Guard(RunLogger(folder, 0, Display(recipe.name, recipe.run.steps, None)))
    make = partial(LocalGenerator, recipe=recipe, group=group, slots=[0])
    trainer = Trainer(recipe, group, make, guard)
    policy, rows, batch = trainer.models.policy, [], 0
    for step in range(recipe.run.steps):
        trainer.sync(step, recipe)
        generated = trainer.generate_batch(step, batch, recipe)
        batch += generated.batches
        experience = trainer.make_experience(generated, step, recipe)
        predicted = predict(policy, recipe, step)
        before = {name: tensor.detach().clone() for name, tensor in policy.weights.tensors.items()}
        metrics = trainer.update(experience, step, recipe)
        rows.append(
            {
                "update": step + 1,
                "changed": changed_elements(policy, before),
                **predicted,
                "reward": statistics.mean(sample.reward for sample in generated.samples),
                "grad_norm": metrics.replicated["train/grad_norm"],
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    elements = by_kind((name, tensor.numel()) for name, tensor in policy.weights.tensors.items())
    trainer.close(recipe)
    out.write_text(json.dumps({"elements": elements, "rows": rows}), encoding="utf-8")


def changed_elements(policy: Any, before: dict[str, Any]) -> ByKind:
    """Return how many elements the update has changed, from the tracker's bits.

    RuntimeError: they differ from a comparison with the weights before.
    """
    import torch

    from hybrid3d.reshard.delta.encoding import unpack_bits

    counts, changes = [], policy.changes.bitmaps()
    for name, tensor in policy.weights.tensors.items():
        bits = unpack_bits(changes[name])[: tensor.numel()]
        compared = (tensor.detach().view(torch.int16) != before[name].view(torch.int16)).flatten()
        if not torch.equal(bits, compared):
            raise RuntimeError(f"{name}: the tracker's bits are not those of the elements that changed")
        counts.append((name, int(bits.sum())))
    return by_kind(counts)


def predict(policy: Any, recipe: Any, updates: int) -> dict[str, ByKind]:
    """Return the predictions for the next update: from Adam's state and, for the first one, the learning rate only."""
    import torch
    from predicted_changes import adam_step_size, change_probability

    settings, found = recipe.optimizer, {"predicted": [], "long_run": [], "step_over_lr": []}
    for name, weights, state in tensors_with_state(policy):
        stride = STRIDE if weights.numel() > ALL_PREDICTED else 1
        sampled = weights.detach().view(-1)[::stride]
        size: torch.Tensor = torch.full((len(sampled),), settings.lr)
        if updates:
            size = adam_step_size(
                *(state[key].view(-1)[::stride] for key in ("exp_avg", "exp_avg_sq")),
                updates,
                lr=settings.lr,
                beta1=settings.beta1,
                beta2=settings.beta2,
                eps=settings.eps,
            )
        for key, tensor in (
            ("predicted", change_probability(sampled, size, updates, settings.beta1)),
            ("long_run", change_probability(sampled, size, math.inf)),
            ("step_over_lr", size / settings.lr),
        ):
            found[key].append((name, float(tensor.double().mean()) * weights.numel()))
    return {key: by_kind(values) for key, values in found.items()}


def tensors_with_state(policy: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the policy's weights, by name, and the state that Adam has of each, on one rank."""
    from hybrid3d.train.megatron.stepping import place_of

    names = {place_of(tensor): name for name, tensor in policy.weights.tensors.items()}
    for optimizer in policy.optimizer.chained_optimizers:
        groups = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
        for models, mains in groups:
            for model, main in zip(models, mains, strict=True):
                yield names[place_of(model)], model, optimizer.optimizer.state.get(main, {})


def by_kind(values: Iterable[tuple[str, float]]) -> ByKind:
    """Return the sums of values of tensors over the tensors of each kind, and over all."""
    sums = dict.fromkeys((*KINDS, ALL), 0.0)
    for name, value in values:
        (kind,) = (kind for kind, part in KINDS.items() if part in name)
        sums[kind] += value
        sums[ALL] += value
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lr")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    measure(options.lr, options.out)


if __name__ == "__main__":
    main()
