"""One rank of a proof: vLLM has the sums of weights and adapters, quantized or not, whole or where they changed.

    torchrun --nproc-per-node 4 merged_sync.py OUT.json CHECKPOINT ROLLOUT_TP QUANTIZATION TRAIN

The sums are made a second time, copied, and synced by a source that knows of no adapters: that is the truth.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from delta_sync import Case, recipe_for
from hybrid3d import distributed, launch_environment
from hybrid3d.config import Lora, Train
from hybrid3d.reshard.ends import PlainSource
from hybrid3d.sync import policy_sync, weight_sync
from hybrid3d.train.megatron import runtime
from sync import Engine, Landed, differing

SYNCS = 3


class Merged(Case):
    """A policy with adapters, whose sums are synced."""

    def __init__(self, folder, recipe, rank, engine, landed):
        super().__init__(folder, recipe, rank, engine, landed)
        self.sync = policy_sync(recipe, dist.group.WORLD, self.policy, engine)

    def sync_truth(self) -> None:
        """Give vLLM the sums as weights of a model without adapters."""
        weights = self.policy.weights
        with self.policy.merged(), torch.no_grad():
            sums = {name: tensor.detach().clone() for name, tensor in weights.tensors.items()}
        whole = dataclasses.replace(self.recipe, lora=None, sync=dataclasses.replace(self.recipe.sync, delta="never"))
        self.landed.tensors.clear()
        self.truth = weight_sync(whole, dist.group.WORLD, PlainSource(sums, weights.holdings), self.engine.sink()).run(
            self.number
        )

    def prove(self) -> dict:
        """Sync, and return the report with what differs from the truth afterwards."""
        self.landed.tensors.clear()
        before = self.snapshot()
        report = self.sync.run(self.number, verify=True)
        restored = differing(before, self.snapshot())
        got = self.state()
        self.sync_truth()
        found = {key: differing(got[key], state) for key, state in self.state().items()}
        of_report = ("dense_reason", "corrupted", "received_bytes", "lower_bound_bytes", "changed")
        return (
            found
            | {key: getattr(report, key) for key in of_report}
            | {"restored": restored, "dense_bytes": self.truth.received_bytes}
        )


def main(out: str, folder: str, rollout_tp: str, quantization: str, layout: str) -> None:
    group = distributed.start()
    rank, train = group.rank(), Train(**json.loads(layout))
    runtime.initialize(train, seed=1)
    recipe = recipe_for(folder, train, int(rollout_tp), quantization)
    recipe = dataclasses.replace(recipe, lora=Lora(rank=4, alpha=64.0, sync="merged"))
    engine = Engine(recipe, rank, launch_environment.run_id(), range(group.size()))
    case = Merged(folder, recipe, rank, engine, Landed())
    results = []
    for _ in range(SYNCS):
        case.update()  # B is 0 at first
        results.append(case.prove())
    everyone = distributed.gather_objects(results, group)
    if rank == 0:
        Path(out).write_text(json.dumps(everyone))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
