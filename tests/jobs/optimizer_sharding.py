"""One rank of the proof of optimizers that each rank saves its own shard of; it judges nothing.

torchrun --nproc-per-node 4 optimizer_sharding.py INPUTS.pt OUT save     TP2 x DP2 trains, saves, goes on and resumes
torchrun --nproc-per-node 2 optimizer_sharding.py INPUTS.pt OUT load     TP2 loads it, and TP1 x DP2 must not
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import Recipe, Train
from hybrid3d.families import family_of
from hybrid3d.inputs.models import read_config
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.train.megatron.policy import Policy
from train_layouts import built, forget, recipe_for, sft_step

FORMATS = (checkpoint.FULLY_RESHARDABLE, checkpoint.DP_RESHARDABLE)


def recipe_of(folder: str, train: Train, spec: dict[str, Any], dtype: str) -> Recipe:
    recipe = recipe_for(folder, train, spec, warmup_steps=2, schedule="linear")
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dtype=dtype))


def state_of(policy: Policy) -> list[torch.Tensor]:
    """Return this rank's shards of main weights and Adam's state, weights and step counts."""
    found = [weight.detach().clone() for weight in policy.weights.tensors.values()]
    for optimizer in policy.optimizer.chained_optimizers:
        adam = optimizer.optimizer
        for param in [] if adam is None else [p for group in adam.param_groups for p in group["params"]]:
            state = adam.state.get(param, {})  # a policy that has not been trained has none
            found += [param.detach().clone(), *(state[key].clone() for key in sorted(state))]
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def save(spec: dict[str, Any], family: str, dtype: str, out: Path) -> dict[str, Any]:
    folders = spec["checkpoints"][family]
    config = read_config(folders["start"])
    train = Train(tp=2, dp=2, ep=2 if family_of(config).experts(config) else 1, micro_batch_size=4)
    runtime.initialize(train, seed=1)
    policy = built(Policy, config, recipe_of(folders["start"], train, spec, dtype))
    for _ in range(2):
        sft_step(policy, spec, train.dp)
    models, world = {"policy": policy}, dist.group.WORLD
    found: dict[str, Any] = {"possible": checkpoint.can_shard_by_ranks(models, world)}
    found["host"] = {sharding: checkpoint.host_bytes(models, sharding) for sharding in FORMATS}
    for sharding in FORMATS:
        checkpoint.begin(models, out / sharding, {"told": sharding}, world, sharding=sharding).finish()
    saved = state_of(policy)
    found["reports"] = [sft_step(policy, spec, train.dp) for _ in range(2)]
    went_on = state_of(policy)
    forget(policy)
    for sharding in FORMATS:
        policy = built(Policy, config, recipe_of(folders["other"], train, spec, dtype))
        found[f"{sharding} before"] = equal(state_of(policy), saved)
        found[f"{sharding} progress"] = checkpoint.load({"policy": policy}, out / sharding, world)
        found[f"{sharding} loaded"] = equal(state_of(policy), saved)
        again = [sft_step(policy, spec, train.dp) for _ in range(2)]
        found[f"{sharding} went on"] = again == found["reports"] and equal(state_of(policy), went_on)
        forget(policy)
    runtime.shutdown()
    return found


def load(spec: dict[str, Any], family: str, dtype: str, out: Path) -> dict[str, Any]:
    folders, world = spec["checkpoints"][family], dist.group.WORLD
    config, found = read_config(folders["start"]), {}
    train = Train(tp=2, ep=2 if family_of(config).experts(config) else 1, micro_batch_size=4)
    runtime.initialize(train, seed=1)
    states = []
    for sharding in FORMATS:
        policy = built(Policy, config, recipe_of(folders["other"], train, spec, dtype))
        checkpoint.load({"policy": policy}, out / sharding, world)
        states.append(state_of(policy))
        forget(policy)
    found["equal"] = equal(*states)
    runtime.shutdown()
    train = Train(dp=2, ep=train.ep, micro_batch_size=4)
    runtime.initialize(train, seed=1)
    policy = built(Policy, config, recipe_of(folders["other"], train, spec, dtype))
    found["expected"] = checkpoint.bytes_expected({"policy": policy}, world)
    files = [path for path in (out / FORMATS[0]).iterdir() if path.suffix == ".distcp"]
    found["written"] = sum(path.stat().st_size for path in files)
    try:
        checkpoint.load({"policy": policy}, out / checkpoint.DP_RESHARDABLE, world)
        found["said"] = ""
    except checkpoint.CheckpointUnloadable as error:
        found["said"] = str(error)
    forget(policy)
    runtime.shutdown()
    return found


@record
def main(inputs: str, out: Path, what: str) -> None:
    spec = torch.load(inputs)
    distributed.start()
    for family, dtype in spec["cases"]:
        act = save if what == "save" else load
        found = act(spec, family, dtype, out / f"{family}-{dtype}")
        torch.save(found, out / f"{what}-{family}-{dtype}-rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
