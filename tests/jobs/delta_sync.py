"""One rank of a proof: after a sync of changed elements, vLLM is as after a dense sync of the same weights.

    torchrun --nproc-per-node 4 delta_sync.py OUT.json ROLLOUT_TP SYNCS FAMILY=FOLDER ...

Real updates change the weights, two before each sync; half of the syncs overlap the last of them.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sync import Engine, Landed, differing, tensors_of

from hybrid3d import distributed
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Sync, Train
from hybrid3d.families import family_of
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import sft_loss
from hybrid3d.roles.weight_sync import WeightSync
from hybrid3d.train import runtime
from hybrid3d.train.policy import Policy

DENSE_LAYOUTS = [Train(tp=2, pp=2), Train(pp=2, dp=2, vpp=2)]
SPARSE_LAYOUTS = [Train(dp=4, ep=4), Train(tp=2, pp=2, ep=2, etp=1)]


def recipe_for(folder: str, train: Train, rollout_tp: int) -> Recipe:
    return Recipe(
        name="delta",
        model=Model(path=folder, dtype="bfloat16"),
        train=dataclasses.replace(train, micro_batch_size=1),
        rollout=Rollout(tp=rollout_tp, max_model_len=128, max_new_tokens=8, kv_cache_gib=1 / 16, pack_weights=False),
        sync=Sync(bucket_mib=0.25),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=4, samples_per_prompt=2),
        optimizer=Optimizer(lr=2e-5),
        run=Run(steps=1000),
    )


def batch_of(number: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(100 * number + rank)
    sequences = [torch.randint(3, 320, (24,), generator=random).tolist() for _ in range(2)]
    return Batch.from_sequences(sequences, [4, 8], pad_id=0)


def prove(rank: int, rollout_tp: int, syncs: int, family: str, folder: str, kept: list) -> list[dict]:
    config = json.loads((Path(folder) / "config.json").read_text())
    layouts = SPARSE_LAYOUTS if family_of(config).experts(config) else DENSE_LAYOUTS
    engine, landed = None, Landed()
    results = []
    for layout in layouts:
        runtime.initialize(layout, seed=1)
        recipe = recipe_for(folder, layout, rollout_tp)
        policy = Policy(config, recipe, rank, trainable=True)
        if engine is None:
            engine = Engine(recipe, rank, f"{distributed.run_id()}-{family}", range(4))
            kept.append(engine)  # an engine that is dropped takes the default process group with it
        sync = WeightSync(recipe, dist.group.WORLD, policy.weights, engine, policy.optimizer_buckets, policy.changes)
        reports = [vars(sync.run(0))]
        for number in range(1, syncs + 1):
            overlaps = number % 2 == 0

            def hook(bucket: int, last: bool, sync: WeightSync = sync, number: int = number) -> None:
                if bucket == 0:
                    sync.begin(number, verify=True)
                sync.bucket_ready(bucket, last)

            updates = [
                policy.train_step(batch_of(2 * number + i, rank), sft_loss, recipe, hook if overlaps and i else None)
                for i in (0, 1)
            ]
            assert all(update.updated for update in updates)
            landed.tensors.clear()
            report = sync.finish() if overlaps else sync.run(number, verify=True)
            result = vars(report) | {"family": family, "train": vars(layout), "rank": rank}
            if number in (1, 2, syncs):
                got = dict(landed.tensors), tensors_of(engine.model), engine.outputs(), engine.logprobs()
                sync._delta._finished = False  # as if this sync had been interrupted
                landed.tensors.clear()
                dense = sync.run(number)
                truth = dict(landed.tensors), tensors_of(engine.model), engine.outputs(), engine.logprobs()
                result["dense_bytes"], result["dense_because"] = dense.received_bytes, dense.dense_reason
                for what, one, other in zip(("landed", "live", "outputs"), got, truth, strict=False):
                    result[what] = differing(one, other)
                result["logprobs"] = differing({"all": got[3]}, {"all": truth[3]})
            reports.append(result)
        results += [reports]
        for module in policy._modules:
            module.__dict__.clear()
        runtime.shutdown()
    return results


def main() -> None:
    out, rollout_tp, syncs, *cases = sys.argv[1:]
    distributed.start()
    results, kept = [], []
    for case in cases:
        family, _, folder = case.partition("=")
        results += prove(distributed.rank(), int(rollout_tp), int(syncs), family, folder, kept)
    everyone = distributed.gather_objects(results, dist.group.WORLD)
    if distributed.rank() == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()


if __name__ == "__main__":
    main()
