"""One rank that trains layers for multi-token prediction; it does what tests/train/test_mtp.py asks.

    torchrun --nproc-per-node N mtp.py INPUTS.pt OUT

For each layout OUT gets `<layout>-rank<n>.pt` and, in `<layout>/`, folders of gradients and weights.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import Train
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.ends import PlainSource
from hybrid3d.rl.objective import sft_loss
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.stepping import place_of
from hybrid3d.trainer.export import write_export
from train_layouts import built, forget, my_batch, recipe_for, report_of


def export(policy: Any, source: str, out: Path) -> list[str]:
    return write_export(policy, source, out, dist.group.WORLD)[1]


def export_gradients(policy: Policy, source: str, out: Path) -> None:
    """Export gradients in the place of the weights; they are whole where no other rank has the same weights."""
    of = {place_of(p): p.main_grad for stage in policy.stages for p in stage.parameters()}
    gradients = {n: of.get(place_of(t), torch.zeros_like(t)) for n, t in policy.weights.tensors.items()}
    of_gradients = PlainSource(gradients, policy.weights.holdings)
    export(SimpleNamespace(own_source=lambda: of_gradients, config=policy.config), source, out)


def step(policy: Policy, spec: dict[str, Any], dp: int, gradients: Path | None = None) -> dict[str, Any]:
    batch, _ = my_batch(policy, spec, dp)
    source = policy.recipe.model.path

    def accepts(norm: float) -> bool:
        if gradients is not None:
            export_gradients(policy, source, gradients)
        return True

    report = report_of(policy, policy.train_step(batch, sft_loss, policy.recipe, accepts_grad_norm=accepts))
    policy.end_step()
    logprobs = policy.logprobs(batch, policy.recipe)
    return {**report, "logprobs": logprobs}


def broken_step(policy: Policy, spec: dict[str, Any], dp: int) -> dict[str, Any]:
    """A step after one weight of the layer has become infinite."""
    batch, _ = my_batch(policy, spec, dp)
    for stage in policy.stages:
        if hasattr(stage, "mtp"):
            stage.mtp.layers[0].eh_proj.weight.data[0, 0] = torch.inf
    before = {name: tensor.detach().clone() for name, tensor in policy.weights.tensors.items()}
    report = policy.train_step(batch, sft_loss, policy.recipe)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in policy.weights.tensors.items())
    return {"updated": report.updated, "grad_norm": report.grad_norm, "unchanged": unchanged}


def one_layout(source: str, train: Train, spec: dict[str, Any], out: Path, first: Path) -> dict[str, Any]:
    """Two steps with and without the layers' loss; with it, the second one also from a checkpoint.

    Args:
        first: `out` of the first layout.
    """
    config, found = read_config(source), {}
    for name, coef in (("plain", 0.0), ("mtp", spec["coef"])):
        recipe = recipe_for(source, replace(train, mtp_loss_coef=coef), spec, clip_grad=spec["clip_grad"])
        recipe = replace(recipe, model=replace(recipe.model, dtype=spec["dtype"]))
        policy = built(Policy, config, recipe)
        found[f"{name}-carried"] = export(policy, source, out / f"{name}-loaded")
        found[name] = [step(policy, spec, train.dp, out / f"{name}-gradients")]
        if coef:
            checkpoint.begin({"policy": policy}, out / "checkpoint", {}, dist.group.WORLD).finish()
        found[name].append(step(policy, spec, train.dp))
        export(policy, source, out / f"{name}-trained")
        forget(policy)
    policy = built(Policy, config, recipe)
    checkpoint.load({"policy": policy}, out / "checkpoint", dist.group.WORLD)
    found["resumed"] = [step(policy, spec, train.dp)]
    export(policy, source, out / "resumed")
    found["broken"] = broken_step(policy, spec, train.dp)
    forget(policy)
    policy = built(Policy, config, recipe, trainable=False, with_mtp=True)  # as an export does
    checkpoint.load_weights({"policy": policy}, out / "checkpoint", dist.group.WORLD)
    export(policy, source, out / "saved")
    checkpoint.load_weights({"policy": policy}, first / "checkpoint", dist.group.WORLD)
    export(policy, source, out / "saved-by-first")
    policy = built(Policy, config, recipe, trainable=False)  # as an evaluation does
    checkpoint.load_weights({"policy": policy}, out / "checkpoint", dist.group.WORLD)
    return found


@record
def main(inputs: str, out: Path) -> None:
    spec = torch.load(inputs)
    distributed.start()
    for name, layout in spec["layouts"].items():
        train = Train(**{"micro_batch_size": 4, **layout}, expert_bias_update_rate=spec["expert_bias_update_rate"])
        runtime.initialize(train, seed=1)
        found = one_layout(spec["source"], train, spec, out / name, out / next(iter(spec["layouts"])))
        torch.save(found, out / f"{name}-rank{dist.get_rank()}.pt")
        runtime.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
