"""One rank of the critic's proof: it does what tests/train/test_critic.py asks, in every layout, and judges nothing.

    torchrun --nproc-per-node 4 critic.py INPUTS.pt OUT

For each family and layout OUT gets `<family>-<layout>-rank<n>.pt` and a folder of exported weights.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import RoleRanks, Train
from hybrid3d.config.sections.engines import RewardRole
from hybrid3d.inputs.models import read_config
from hybrid3d.rl.batch import Rows
from hybrid3d.scoring.scorer import Query
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.value_model import ValueModel
from hybrid3d.workers.reward import load_model_scorer
from train_layouts import built, export, forget, my_batch, recipe_for, report_of, sft_step


def squared(returns: torch.Tensor) -> Any:
    def loss(values: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (values - returns[rows, : values.shape[1]]).square() / 2, {}

    return loss


def critic_of(folder: str, train: Train, spec: dict[str, Any], trainable: bool = True) -> ValueModel:
    recipe = recipe_for(folder, train, spec, **spec["sft"])
    critic = ValueModel(read_config(folder), recipe, dist.get_rank(), recipe.optimizer if trainable else None)
    critic.recipe = recipe  # which its methods take
    return critic


def value_step(critic: ValueModel, spec: dict[str, Any], dp: int) -> dict[str, Any]:
    batch, mine = my_batch(critic, spec, dp)
    return report_of(critic, critic.train_step(batch, squared(spec["returns"][mine]), critic.recipe))


def values(critic: ValueModel, spec: dict[str, Any], dp: int) -> dict[str, Any]:
    """This data-parallel rank's rows, without what padding holds."""
    batch, mine = my_batch(critic, spec, dp)
    found = critic.values(batch, critic.recipe)
    if found is not None:
        found = found * (torch.arange(found.shape[1]) < batch.lengths[:, None])
    scores = critic.scores(batch, critic.recipe)
    return {"rows": mine, "values": found, "scores": scores, "has_output": critic.has_output}


def one_layout(folders: dict[str, str], train: Train, spec: dict[str, Any], out: Path) -> dict[str, Any]:
    found = {}
    frozen = critic_of(folders["classifier"], train, spec, trainable=False)
    found["frozen"] = values(frozen, spec, train.dp)
    critic = critic_of(folders["classifier"], train, spec)
    found["step"] = value_step(critic, spec, train.dp)
    export(critic, folders["classifier"], out)
    forget(critic)
    fresh = critic_of(folders["start"], train, spec)
    found["fresh"] = [values(fresh, spec, train.dp)]
    found["fresh steps"] = [value_step(fresh, spec, train.dp) for _ in range(2)]
    found["fresh"].append(values(fresh, spec, train.dp))
    forget(fresh)
    return found


def both(folders: dict[str, str], train: Train, spec: dict[str, Any]) -> tuple[Policy, ValueModel]:
    recipe = recipe_for(folders["start"], train, spec)
    return built(Policy, read_config(folders["start"]), recipe), critic_of(folders["start"], train, spec)


def resume(folders: dict[str, str], spec: dict[str, Any], out: Path) -> dict[str, Any]:
    """Save a policy and its critic after a step and go on; do the same from the checkpoint, in another layout."""
    here, there = Train(tp=2, pp=2, micro_batch_size=4), Train(pp=2, dp=2, micro_batch_size=4)
    runtime.initialize(here, seed=1)
    policy, critic = both(folders, here, spec)
    sft_step(policy, spec, 1), value_step(critic, spec, 1)
    checkpoint.begin({"policy": policy, "critic": critic}, out, {}, dist.group.WORLD).finish()
    found = {"went on": [sft_step(policy, spec, 1), value_step(critic, spec, 1)]}
    forget(policy), forget(critic)
    runtime.shutdown()
    runtime.initialize(there, seed=1)
    policy, critic = both(folders, there, spec)
    checkpoint.load({"policy": policy, "critic": critic}, out, dist.group.WORLD)
    found["resumed"] = [sft_step(policy, spec, 2), value_step(critic, spec, 2)]
    forget(policy), forget(critic)
    frozen = critic_of(folders["start"], there, spec, trainable=False)
    checkpoint.load_weights({"critic": frozen}, out, dist.group.WORLD)
    found["frozen"] = values(frozen, spec, 2)
    runtime.shutdown()
    return found


def score_apart(classifier: str, spec: dict[str, Any]) -> list[float]:
    """The scores of the reward model on ranks of its own, of 13 samples, which are not whole micro batches."""
    recipe = recipe_for(classifier, Train(micro_batch_size=4), spec)
    reward, role = replace(recipe.reward, model=classifier), RewardRole(ranks=4, tp=2, pp=2)
    recipe = replace(recipe, reward=reward, roles=RoleRanks(reward=role))
    scorer = load_model_scorer(recipe, classifier, 0, dist.group.WORLD)
    rows = list(zip(spec["sequences"], spec["prompts"], strict=True))[:13]
    found = scorer.score(
        [Query("", "", "", prompt_ids=row[:prompt], tokens=row[prompt:]) for row, prompt in rows]
    ).rewards
    runtime.shutdown()
    return found


@record
def main(inputs: str, out: Path) -> None:
    spec = torch.load(inputs)
    distributed.start()
    for family, name in spec["cases"]:
        folders, train = spec["checkpoints"][family], Train(**spec["layouts"][name], **spec["settings"])
        runtime.initialize(train, seed=1)
        found = one_layout(folders, train, spec, out / f"{family}-{name}")
        torch.save(found, out / f"{family}-{name}-rank{dist.get_rank()}.pt")
        runtime.shutdown()
    family = spec["cases"][0][0]
    found = resume(spec["checkpoints"][family], spec, out / "checkpoint")
    torch.save(found, out / f"resume-rank{dist.get_rank()}.pt")
    scores = score_apart(spec["checkpoints"][family]["classifier"], spec)
    torch.save({"scores": scores}, out / f"apart-rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
