"""One rank of a proof: the optimizer's step in buckets is its step as a whole, and a bucket that is ready is final.

torchrun --nproc-per-node 4 stepping.py '{CHECKPOINT: [LAYOUT, ...], ...}'
"""

import dataclasses
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import OFFLOADS, Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Train
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.move.transport import as_bytes
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import sft_loss
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy


class AsAWhole:
    """Megatron's own step."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def step(self, hook, accepts_grad_norm):
        updated, norm, _ = self._optimizer.step()
        return updated, norm


def snapshot(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.weights.tensors.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))


def offload(policy: Policy, recipe: Recipe, step: int) -> None:
    """What it holds takes no memory until it is used again, and is then what it was."""
    held = {kind: [tensor.untyped_storage() for tensor in policy._tensors_of(kind)] for kind in OFFLOADS}
    assert [kind for kind in OFFLOADS if not held[kind]] in ([], ["optimizer"] if step == 0 else [])
    memories = [memory for of_kind in held.values() for memory in of_kind]
    before = [memory.nbytes() for memory in memories]
    policy.offload(recipe.train)
    assert not any(memory.nbytes() for memory in memories)
    policy.logprobs(batch_of(policy, step), recipe)
    assert all(memory.nbytes() for memory in held["parameters"])
    assert not any(memory.nbytes() for memory in held["gradients"] + held["optimizer"])
    policy.offload(recipe.train)
    policy.onload()
    assert [memory.nbytes() for memory in memories] == before
    policy.offload(recipe.train)


def batch_of(policy: Policy, step: int) -> Batch:
    random = torch.Generator().manual_seed(100 * step + policy.data_parallel_rank)
    sequences = [torch.randint(1, 300, (6 + i,), generator=random).tolist() for i in range(4)]
    return Batch.from_sequences(sequences, [2] * 4, pad_id=0)


def prove(folder: str, layout: Train, dtype: str) -> None:
    recipe = Recipe(
        name="stepping",
        model=Model(path=folder, dtype=dtype),
        train=layout,
        rollout=Rollout(max_model_len=64, max_new_tokens=8),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=8, samples_per_prompt=2),
        optimizer=Optimizer(lr=1e-2, weight_decay=0.1, clip_grad=0.5),
        run=Run(steps=10),
    )
    runtime.initialize(layout, seed=1)
    config, rank = read_config(folder), dist.get_rank()
    offloaded = {f"offload_{kind}": True for kind in OFFLOADS}
    offloading = dataclasses.replace(recipe, train=dataclasses.replace(layout, **offloaded))
    whole = Policy(config, offloading, rank)
    parted = Policy(config, recipe, rank)
    whole._stepping = AsAWhole(whole.optimizer)
    bucket_of, buckets = parted.optimizer_buckets, len(parted._stepping)
    assert buckets >= 4, f"only {buckets} buckets"
    assert sorted(set(bucket_of.values())) == list(range(buckets))
    for step in range(3):
        before, at = snapshot(parted), []
        refused = parted.train_step(batch_of(parted, step), sft_loss, recipe, accepts_grad_norm=lambda norm: norm < 0)
        assert not refused.updated
        assert all(same(tensor, before[name]) for name, tensor in snapshot(parted).items())
        offload(whole, offloading, step)
        reports = [whole.train_step(batch_of(whole, step), sft_loss, offloading)]
        hook = lambda bucket, last, at=at: at.append(snapshot(parted))  # noqa: E731
        reports.append(parted.train_step(batch_of(parted, step), sft_loss, recipe, hook))
        assert reports[0] == reports[1]
        after, truth = snapshot(parted), snapshot(whole)
        assert [name for name in truth if not same(after[name], truth[name])] == []
        assert any(not same(after[name], before[name]) for name in after)
        assert len(at) == buckets
        still = [name for name in after if name not in bucket_of]
        assert all("expert_bias" in name for name in still), still
        for bucket, seen in enumerate(at):
            for name, of in bucket_of.items():
                assert same(seen[name], (after if of <= bucket else before)[name]), f"{name} of bucket {of} at {bucket}"
    layers = {name: of for name, of in bucket_of.items() if ".layers." in name and ".experts." not in name}
    order = sorted(layers, key=lambda name: (int(name[5:].split(".")[0]), int(name.split(".layers.")[1].split(".")[0])))
    assert [layers[name] for name in order] == sorted(layers.values()), "first layers are not first"
    runtime.shutdown()


@record
def main() -> None:
    torch.set_num_threads(1)
    distributed.start()
    for folder, layouts in json.loads(sys.argv[1]).items():
        for layout in layouts:
            for dtype in ("float32", "bfloat16"):
                prove(folder, Train(**layout, micro_batch_size=2), dtype)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
