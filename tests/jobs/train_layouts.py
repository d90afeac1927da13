"""One rank of the Megatron proof: it does what tests/train/test_megatron.py asks, in every layout, and judges nothing.

    torchrun --nproc-per-node 4 train_layouts.py INPUTS.pt OUT

For each family and layout OUT gets `<family>-<layout>-rank<n>.pt` and folders of exported weights.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Train
from hybrid3d.families import Config, family_of
from hybrid3d.inputs.export import copy_config_and_tokenizer
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.file_index import read_index
from hybrid3d.reshard.files import create_files, export_files, shard_entries
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import KlSettings, LossSettings, PolicyObjective, sft_loss
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.train.megatron.model import MegatronModel
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.trained_model import StepReport

FILE_BYTES = 300_000  # so that the tiny checkpoints are exported into several files


class Listening(Policy):
    """A policy that keeps the logits of its micro batches, each of one sequence."""

    def _per_token(self, logits, micro, recipe):
        (row,) = torch.arange(2)[micro.rows].tolist()
        self.logits = {**getattr(self, "logits", {}), row: logits.detach().clone()}
        return super()._per_token(logits, micro, recipe)


def forget(policy: MegatronModel) -> None:
    """Let go of a policy that was trained, and of the threads of its groups.

    Autograd nodes and Megatron's DDP keep each other alive in a way that Python does not see.
    """
    for module in policy._modules:
        module.__dict__.clear()


def recipe_for(folder: str, train: Train, spec: dict[str, Any], **optimizer: float) -> Recipe:
    return Recipe(
        name="megatron",
        model=Model(path=folder),
        train=train,
        rollout=Rollout(max_model_len=256, max_new_tokens=8, temperature=spec["temperature"]),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=8, samples_per_prompt=2),
        optimizer=Optimizer(**spec["optimizer"], **optimizer),
        run=Run(steps=10),
    )


def built(kind: type[Policy], config: Config, recipe: Recipe, **options: Any) -> Policy:
    """Build a policy that remembers the recipe which its methods take."""
    policy = kind(config, recipe, dist.get_rank(), **options)
    policy.recipe = recipe
    return policy


def my_batch(policy: Policy, spec: dict[str, Any], dp: int) -> tuple[Batch, slice]:
    """This data-parallel rank's rows, padded to its own longest, as the trainer does it."""
    each = len(spec["sequences"]) // dp
    mine = slice(policy.data_parallel_rank * each, (policy.data_parallel_rank + 1) * each)
    return Batch.from_sequences(spec["sequences"][mine], spec["prompts"][mine], pad_id=0), mine


def export(policy: MegatronModel, source: str, out: Path) -> None:
    entries = shard_entries({n: (e.shape, e.dtype) for n, e in read_index(source).items()}, FILE_BYTES)
    if dist.get_rank() == 0:
        create_files(out, entries)
        copy_config_and_tokenizer(source, out)
    dist.barrier()
    holdings = dict(enumerate(distributed.gather_objects(policy.weights.holdings, dist.group.WORLD)))
    export_files(out, entries, holdings, policy.own_source(), dist.get_rank())
    dist.barrier()


def forward(policy: Listening, spec: dict[str, Any]) -> dict[str, Any]:
    """Logits of long sequences and their log-probabilities: on ranks with the output layer, as they hold them."""
    batch = Batch.from_sequences(spec["long"], [1] * len(spec["long"]), pad_id=0)
    logprobs = policy.logprobs(batch, policy.recipe)
    logits = [policy.logits[start] for start in sorted(policy.logits)] if policy.has_output else []
    place = {"dp": policy.data_parallel_rank, "tp": runtime.parallel_state.get_tensor_model_parallel_rank()}
    return {**place, "logprobs": logprobs, "logits": torch.cat(logits) if logits else None}


def report_of(policy: Policy, report: StepReport) -> dict[str, Any]:
    return {
        "is_reporting_rank": policy.is_reporting_rank,
        "sums": report.sums,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
    }


def sft_step(policy: Policy, spec: dict[str, Any], dp: int) -> dict[str, Any]:
    batch, _ = my_batch(policy, spec, dp)
    report = report_of(policy, policy.train_step(batch, sft_loss, policy.recipe))
    policy.end_step()
    return report


def grpo_step(policy: Policy, reference: Policy, spec: dict[str, Any], dp: int) -> dict[str, Any]:
    batch, mine = my_batch(policy, spec, dp)
    old, ref = policy.logprobs(batch, policy.recipe), reference.logprobs(batch, reference.recipe)
    if old is not None:  # as if the policy had moved since it sampled, so that the clip is reached
        old = old + spec["noise"][mine, : old.shape[1]]
    loss = PolicyObjective(
        advantages=spec["advantages"][mine][:, None] * batch.response_mask,
        mask=batch.response_mask,
        old_logprobs=old,
        answer_weights=torch.ones(len(batch)),
        loss=LossSettings(clip=spec["clip"]),
        ref_logprobs=ref,
        kl=KlSettings(spec["kl_coef"]),
    )
    return report_of(policy, policy.train_step(batch, loss, policy.recipe))


def one_layout(family: str, name: str, spec: dict[str, Any], out: Path) -> dict[str, Any]:
    """All of one family in one layout. Exports go to `out`/loaded, sft-<micro batch> and grpo-<micro batch>."""
    folders, steps = spec["checkpoints"][family], spec["steps"][name]
    train = Train(**spec["layouts"][name], expert_bias_update_rate=spec["expert_bias_update_rate"])
    config, found = read_config(folders["start"]), {}
    single = dataclasses.replace(train, micro_batch_size=1, max_tokens_per_micro_batch=None)
    policy = built(Listening, config, recipe_for(folders["start"], single, spec), trainable=False)
    found["forward"] = forward(policy, spec)
    export(policy, folders["start"], out / "loaded")
    for kind, size in steps:
        sized = dataclasses.replace(train, micro_batch_size=size)
        policy = built(Policy, config, recipe_for(folders["start"], sized, spec, **spec[kind]))
        if kind == "sft":
            found[f"{kind}-{size}"] = sft_step(policy, spec, train.dp)
        else:
            reference = built(Policy, config, recipe_for(folders["near"], sized, spec), trainable=False)
            found[f"{kind}-{size}"] = grpo_step(policy, reference, spec, train.dp)
        export(policy, folders["start"], out / f"{kind}-{size}")
        forget(policy)
    return found


def resume(folders: dict[str, str], spec: dict[str, Any], out: Path) -> dict[str, Any]:
    """Save after two steps at TP2 x PP2 and go on; do the same from the checkpoint, there and in other layouts."""
    config, found = read_config(folders["start"]), {}
    settings = dict(warmup_steps=2, schedule="linear")  # the schedule must be resumed too

    def started(train: Train, folder: str) -> Policy:
        return built(Policy, config, recipe_for(folder, train, spec, **settings))

    def two_steps(policy: Policy, dp: int) -> list[dict[str, Any]]:
        return [sft_step(policy, spec, dp) for _ in range(2)]

    experts = 2 if family_of(config).experts(config) else 1
    here = Train(tp=2, pp=2, ep=experts, micro_batch_size=4)
    runtime.initialize(here, seed=1)
    policy = started(here, folders["start"])
    two_steps(policy, here.dp)
    checkpoint.begin({"policy": policy}, out / "checkpoint", {}, dist.group.WORLD).finish()
    export(policy, folders["start"], out / "saved")
    found["went on"] = two_steps(policy, here.dp)
    export(policy, folders["start"], out / "went-on")
    forget(policy)
    policy = started(here, folders["other"])
    checkpoint.load({"policy": policy}, out / "checkpoint", dist.group.WORLD)
    found["resumed"] = two_steps(policy, here.dp)
    export(policy, folders["start"], out / "resumed")
    forget(policy)
    runtime.shutdown()
    for name, layout in spec["elsewhere"].items():
        there = Train(**layout, micro_batch_size=4)
        runtime.initialize(there, seed=1)
        policy = built(Policy, config, recipe_for(folders["other"], there, spec), trainable=False)
        policy.offload(Train(offload_parameters=True))  # as in an evaluation, whose recipe may have it
        checkpoint.load_weights({"policy": policy}, out / "checkpoint", dist.group.WORLD)
        export(policy, folders["start"], out / f"loaded-{name}")
        policy = started(there, folders["other"])
        checkpoint.load({"policy": policy}, out / "checkpoint", dist.group.WORLD)
        found[f"resumed {name}"] = two_steps(policy, there.dp)
        export(policy, folders["start"], out / f"resumed-{name}")
        forget(policy)
        runtime.shutdown()
    return found


@record
def main(inputs: str, out: Path) -> None:
    spec = torch.load(inputs)
    distributed.start()
    for family in spec["checkpoints"]:
        for name in spec["cases"][family]:
            runtime.initialize(Train(**spec["layouts"][name]), seed=1)
            found = one_layout(family, name, spec, out / f"{family}-{name}")
            torch.save(found, out / f"{family}-{name}-rank{dist.get_rank()}.pt")
            runtime.shutdown()
    for family in spec["resumed"]:
        found = resume(spec["checkpoints"][family], spec, out / f"{family}-resume")
        torch.save(found, out / f"{family}-resume-rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
