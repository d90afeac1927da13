"""One rank of the proof of context parallelism: it does what tests/train/test_context_parallel.py asks.

    torchrun --nproc-per-node N context_parallel.py INPUTS.pt OUT

For each family and layout OUT gets `<family>-<layout>-rank<n>.pt` and a folder of exported weights.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from critic import critic_of, value_step, values
from hybrid3d import distributed
from hybrid3d.config import Train
from hybrid3d.inputs.models import read_config
from hybrid3d.rl.objective import KlSettings, LossSettings, PolicyObjective
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.train.megatron.policy import Policy
from train_layouts import built, export, forget, my_batch, recipe_for, report_of

UPDATES = 3


def update(policy: Policy, spec: dict[str, Any], dp: int) -> dict[str, Any]:
    """One update with an entropy bonus, ratios of whole sequences, and a KL to where the policy was before."""
    batch, mine = my_batch(policy, spec, dp)
    found = policy.logprobs_and_entropies(batch, policy.recipe)
    old, entropies = found if found is not None else (None, None)
    if policy.router_replay is not None:  # as the trainer replays the choices of this pass
        batch = replace(batch, experts=policy.router_replay.recorded)
    noise = None if old is None else spec["noise"][mine, : old.shape[1]]
    loss = PolicyObjective(
        advantages=spec["advantages"][mine][:, None] * batch.response_mask,
        mask=batch.response_mask,
        old_logprobs=None if old is None else old + noise,
        answer_weights=torch.ones(len(batch)),
        loss=LossSettings(clip=spec["clip"], ratio="sequence"),
        ref_logprobs=None if old is None else old - noise,
        kl=KlSettings(spec["kl_coef"]),
        entropy_coef=0.1,
    )
    report = report_of(policy, policy.train_step(batch, loss, policy.recipe))
    scores = None if old is None else torch.stack([old, entropies]) * batch.response_mask
    return {**report, "rows": mine, "scores": scores, "experts": batch.experts}


def one_case(folders: dict[str, str], train: Train, spec: dict[str, Any], out: Path) -> dict[str, Any]:
    policy = built(Policy, read_config(folders["start"]), recipe_for(folders["start"], train, spec))
    found: dict[str, Any] = {"updates": [update(policy, spec, train.dp) for _ in range(UPDATES)]}
    found["weights"] = policy.weights.tensors
    export(policy, folders["start"], out)
    forget(policy)
    if "classifier" in folders:
        critic = critic_of(folders["classifier"], replace(train, router_replay="none"), spec)
        found["values"] = values(critic, spec, train.dp)
        found["critic"] = [value_step(critic, spec, train.dp) for _ in range(2)]
        forget(critic)
    return found


def resume(folders: dict[str, str], layouts: dict[str, Train], spec: dict[str, Any], out: Path) -> dict[str, Any]:
    """Save a policy after an update and go on; go on from the checkpoint in every layout."""
    found = {}
    for number, (name, train) in enumerate(layouts.items()):
        runtime.initialize(train, seed=1)
        policy = built(Policy, read_config(folders["start"]), recipe_for(folders["start"], train, spec))
        if number == 0:
            update(policy, spec, train.dp)
            checkpoint.begin({"policy": policy}, out, {}, dist.group.WORLD).finish()
        else:
            checkpoint.load({"policy": policy}, out, dist.group.WORLD)
        found[name] = update(policy, spec, train.dp)
        forget(policy)
        runtime.shutdown()
    return found


@record
def main(inputs: str, out: Path) -> None:
    spec = torch.load(inputs)
    distributed.start()
    for family, name in spec["cases"]:
        train = Train(**{**spec["settings"], **spec["layouts"][name]})
        runtime.initialize(train, seed=1)
        found = one_case(spec["checkpoints"][family], train, spec, out / f"{family}-{name}")
        torch.save(found, out / f"{family}-{name}-rank{dist.get_rank()}.pt")
        runtime.shutdown()
    for family, names in spec["resumed"].items():
        layouts = {name: Train(**{**spec["settings"], **spec["layouts"][name]}) for name in names}
        found = resume(spec["checkpoints"][family], layouts, spec, out / f"{family}-checkpoint")
        torch.save(found, out / f"{family}-resumed-rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
