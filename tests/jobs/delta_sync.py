"""One rank of a proof: after a sync of changed elements, vLLM is as after a dense sync of the same weights.

    torchrun --nproc-per-node 4 delta_sync.py OUT.json ROLLOUT_TP SYNCS MODE FAMILY=FOLDER ...

Real updates change the weights, two before each sync; every other sync overlaps the last of them. With MODE=faults, the
last layout goes on with what can go wrong, and at last rank 3 is killed in the middle of a sync: then each of the other
ranks writes OUT.json.<rank>. With MODE=fp8, vLLM's weights are in FP8 with block scales. With MODE=auto, the sync
chooses what it sends.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from broken_sync import generate
from faulty_transport import Fault, FlippedBit, Killed, use_faulty_transports
from hybrid3d import distributed, launch_environment
from hybrid3d.config import Algorithm, Data, Machine, Model, Optimizer, Recipe, Rollout, Run, Sync, Train
from hybrid3d.families import family_of
from hybrid3d.reshard.delta.encoding import unpack_bits
from hybrid3d.reshard.files import load_files
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import sft_loss
from hybrid3d.sync import weight_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy
from sync import Engine, Landed, differing, tensors_of

DENSE_LAYOUTS = [Train(pp=2, dp=2, vpp=2), Train(tp=2, pp=2)]
SPARSE_LAYOUTS = [Train(dp=4, ep=4), Train(tp=2, pp=2, ep=2, etp=1)]


def recipe_for(folder: str, train: Train, rollout_tp: int, mode: str) -> Recipe:
    return Recipe(
        name="delta",
        model=Model(path=folder, dtype="bfloat16"),
        train=dataclasses.replace(train, micro_batch_size=1),
        rollout=Rollout(
            tp=rollout_tp,
            max_model_len=128,
            max_new_tokens=8,
            kv_cache_gib=1 / 16,
            pack_weights=False,
            quantization="fp8" if mode == "fp8" else None,
        ),
        sync=Sync(
            bucket_mib=0.25,
            delta="auto" if mode == "auto" else "always",
        ),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=4, samples_per_prompt=2),
        optimizer=Optimizer(lr=2e-5),
        run=Run(steps=1000),
        machine=Machine(gpus_per_node=2),
    )


class Case:
    """A policy, an engine, and syncs between them.

    Attributes:
        results: one record for each sync.
    """

    def __init__(self, folder: str, recipe: Recipe, rank: int, engine: Engine, landed: Landed):
        self.folder, self.recipe, self.rank, self.engine, self.landed = folder, recipe, rank, engine, landed
        self.policy = Policy(json.loads((Path(folder) / "config.json").read_text()), recipe, rank, trainable=True)
        self.sync = weight_sync(recipe, dist.group.WORLD, self.policy.source(), engine.sink(), overlaps=True)
        self.results: list[dict] = []
        self.number = 0

    def update(self, hook=None, **settings) -> None:
        random = torch.Generator().manual_seed(1000 * self.number + self.policy.data_parallel_rank)
        sequences = [torch.randint(3, 320, (24,), generator=random).tolist() for _ in range(2)]
        batch = Batch.from_sequences(sequences, [4, 8], pad_id=0)
        self.policy.train_step(batch, sft_loss, self.recipe, hook, **settings)
        self.number += 1

    def hook(self, bucket: int, last: bool) -> None:
        if bucket == 0:
            self.sync.begin(self.number, verify=True)
        self.sync.bucket_ready(bucket, last)

    def finish(self, what: str, compares: bool = True) -> None:
        """Sync, or finish the sync that has begun; record it, and whether all is as after a dense sync."""
        self.landed.tensors.clear()
        begun = self.sync.in_progress is not None
        report = self.sync.finish() if begun else self.sync.run(self.number, verify=True)
        result = vars(report) | {"choice": dict(report.choice), "expected": None, "of_engines": None}
        result |= {"what": what, "rank": self.rank, "train": vars(self.recipe.train)}
        if compares:
            got = self.state()
            self.sync.require_dense()
            self.landed.tensors.clear()
            dense = self.sync.run(self.number)
            assert dense.dense_reason
            result |= {"dense_bytes": dense.received_bytes, "dense_network_bytes": dense.network_bytes}
            result |= {key: differing(got[key], state) for key, state in self.state().items()}
        self.results.append(result)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        engine = self.engine
        live, outputs = tensors_of(engine.model), engine.outputs()
        return {
            "landed": dict(self.landed.tensors),
            "live": live,
            "outputs": outputs,
            "logprobs": {"all": engine.logprobs()},
        }

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.policy.weights.tensors.items()}

    def tracked(self, before: dict[str, torch.Tensor]) -> dict[str, int]:
        """Elements that changed, those of them whose bit is not set, and bits that are set of others."""
        counts = {"changed": 0, "missed": 0, "extra": 0, "untracked": 0}
        changes = self.policy.changes.bitmaps()
        for name, old in before.items():
            if name not in changes:
                counts["untracked"] += 1
                continue
            changed = (old.view(torch.int16) != self.policy.weights.tensors[name].detach().view(torch.int16)).flatten()
            bits = unpack_bits(changes[name])[: len(changed)]
            counts["changed"] += int(changed.sum())
            counts["missed"] += int((changed & ~bits).sum())
            counts["extra"] += int((bits & ~changed).sum())
        return counts


def prove_faults(case: Case, out: str) -> None:
    """What goes wrong with a sync of changed elements, or before it; the next one is right, or dense."""
    case.update(accepts_grad_norm=lambda norm: False)
    case.finish("skipped update")
    weights = case.policy.weights
    case.finish("nothing", compares=False)  # a sync of changed elements is possible again
    case.update()
    with torch.no_grad():
        next(iter(weights.tensors.values())).data.mul_(1.5)
    case.finish("changed by hand")
    case.finish("nothing", compares=False)
    load_files(case.folder, weights.demand, weights.tensors, case.rank)
    case.finish("loaded")
    case.finish("nothing", compares=False)
    case.update()
    with case.sync.transport.failing(FlippedBit(case.rank == 0, after=2), case.sync.plan):  # two exchange counts
        case.finish("a flipped bit")
    case.finish("nothing", compares=False)
    case.update()
    case.sync.transport.fault = Killed(at=4) if case.rank == 3 else Fault()  # the first two exchange counts
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when it sees that a rank is gone: it must wait
    Path(f"{out}.{case.rank}").write_text(json.dumps([*case.results, {"killed": killed(case)}]))
    os._exit(0)  # nothing can be closed any more: a peer is gone


def killed(case: Case) -> list[str]:
    try:
        case.sync.run(case.number)
    except RuntimeError as error:
        return [type(error).__name__, generate(case.engine)]
    return []


def prove(rank: int, rollout_tp: int, syncs: int, mode: str, folder: str, kept: list, out: str) -> list[dict]:
    config = json.loads((Path(folder) / "config.json").read_text())
    layouts = SPARSE_LAYOUTS if family_of(config).experts(config) else DENSE_LAYOUTS
    first = recipe_for(folder, layouts[0], rollout_tp, mode)
    use_faulty_transports()
    engine, landed, results = (
        Engine(first, rank, f"{launch_environment.run_id()}-{Path(folder).name}", range(4)),
        Landed(),
        [],
    )
    kept.append(engine)  # an engine that is dropped takes the default process group with it
    for layout in layouts:
        runtime.initialize(layout, seed=1)
        case = Case(folder, recipe_for(folder, layout, rollout_tp, mode), rank, engine, landed)
        case.finish("first", compares=False)
        for turn in range(1, syncs + 1):
            before = case.snapshot()
            case.update()
            tracked = case.tracked(before)
            case.update(hook=case.hook if turn % 2 == 0 else None)
            again = case.tracked(before)
            case.finish("overlapped" if turn % 2 == 0 else "changes", compares=turn in (1, 2, syncs))
            case.results[-1] |= {"tracked": tracked, "tracked_again": again}
        results += case.results
        if mode == "faults" and layout is layouts[-1]:
            prove_faults(case, out)
        for module in case.policy._modules:
            module.__dict__.clear()
        runtime.shutdown()
    return results


def main() -> None:
    out, rollout_tp, syncs, mode, *cases = sys.argv[1:]
    distributed.start()
    results, kept = {}, []
    for one in cases:
        family, _, folder = one.partition("=")
        results[family] = prove(launch_environment.rank(), int(rollout_tp), int(syncs), mode, folder, kept, out)
    everyone = distributed.gather_objects(results, dist.group.WORLD)
    if launch_environment.rank() == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()


if __name__ == "__main__":
    main()
