"""One rank of the proof of adapters: trains them in a layout, and judges nothing.

    torchrun --nproc-per-node 4 adapters.py INPUTS.pt FAMILY LAYOUT OUT.pt

OUT.pt gets the steps' reports, and the adapters afterwards.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import Lora, Recipe, Train
from hybrid3d.distributed import gather_objects
from hybrid3d.inputs.models import read_config
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.train.megatron.policy import Policy
from train_layouts import built, forget, recipe_for, sft_step


def recipe_of(family: str, train: Train, spec: dict[str, Any]) -> Recipe:
    recipe = recipe_for(spec["checkpoints"][family], train, spec, **spec["sft"])
    lora = Lora(rank=spec["rank"], alpha=spec["alpha"], path=spec["adapters"][family])
    return dataclasses.replace(recipe, lora=lora)


def adapters_of(policy: Policy) -> list[Any]:
    """Return the boxes that each rank has."""
    assert policy.adapters is not None
    mine = [(p.name, p.box, policy.adapters.tensors[p.name].detach().clone()) for p in policy.adapters.pieces]
    return gather_objects(mine, dist.group.WORLD)


def after_nothing_in_bfloat16(config: Any, recipe: Recipe, spec: dict[str, Any]) -> list[Any]:
    """Return the adapters after an update with a learning rate of 0, which copies the optimizer's weights."""
    model = dataclasses.replace(recipe.model, dtype="bfloat16")
    still = dataclasses.replace(recipe, model=model, optimizer=dataclasses.replace(recipe.optimizer, lr=0.0))
    policy = built(Policy, config, still)
    sft_step(policy, spec, recipe.train.dp)
    found = adapters_of(policy)
    forget(policy)
    return found


def experts_only(config: Any, recipe: Recipe, spec: dict[str, Any], folder: Path) -> bool:
    """Return whether adapters of experts alone, beside which the other optimizer has nothing, come back."""
    assert recipe.lora is not None
    lora = dataclasses.replace(recipe.lora, path=None, target_modules=("gate_proj", "up_proj", "down_proj"))
    alone = dataclasses.replace(recipe, lora=lora)
    policy = built(Policy, config, alone)
    sft_step(policy, spec, recipe.train.dp)
    checkpoint.begin({"policy": policy}, folder, {}, dist.group.WORLD).finish()
    again = built(Policy, config, alone)
    checkpoint.load({"policy": again}, folder, dist.group.WORLD)
    assert policy.adapters is not None
    assert again.adapters is not None
    same = all(map(torch.equal, policy.adapters.tensors.values(), again.adapters.tensors.values()))
    forget(policy)
    forget(again)
    return all(gather_objects(same, dist.group.WORLD))


def one_layout(family: str, layout: dict[str, Any], spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    train = Train(**{"micro_batch_size": 4, **layout})
    config, recipe = read_config(spec["checkpoints"][family]), recipe_of(family, train, spec)
    policy = built(Policy, config, recipe)
    before = [weight.detach().clone() for weight in policy.weights.tensors.values()]
    found: dict[str, Any] = {"reports": [], "after": []}
    for _ in range(spec["count"]):
        report = sft_step(policy, spec, train.dp)
        found["reports"].append(gather_objects(report, dist.group.WORLD))
        found["after"].append(adapters_of(policy))
    same = all(map(torch.equal, before, policy.weights.tensors.values()))
    found["base_is_unchanged"] = all(gather_objects(same, dist.group.WORLD))
    checkpoint.begin({"policy": policy}, folder, {}, dist.group.WORLD).finish()
    found["saved"] = sorted(FileSystemReader(folder).read_metadata().state_dict_metadata)
    forget(policy)
    policy = built(Policy, config, recipe)
    checkpoint.load({"policy": policy}, folder, dist.group.WORLD)
    found["loaded"] = adapters_of(policy)
    forget(policy)
    found["bfloat16"] = after_nothing_in_bfloat16(config, recipe, spec)
    if family == "qwen3_moe":
        found["experts_only"] = experts_only(config, recipe, spec, folder / "experts")
    return found


@record
def main(inputs: str, family: str, name: str, out: Path) -> None:
    spec = torch.load(inputs)
    distributed.start()
    layout = spec["layouts"][name]
    runtime.initialize(Train(**layout), seed=1)
    found = one_layout(family, layout, spec, out.with_suffix(""))
    if dist.get_rank() == 0:
        torch.save(found, out)
    runtime.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
