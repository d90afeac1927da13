"""One rank of a run whose syncs go wrong: what its engine says when it is to generate.

    torchrun --nproc-per-node 4 broken_sync.py FOLDER CHECKPOINT SHARED_MEMORY

Messages to rank 0, or those that it lends, arrive with a flipped bit, once and then always. At last rank 3 is killed in
the middle of a sync; the others write FOLDER/<rank>.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

from faulty_transport import Fault, FlippedBit, Killed, use_faulty_transports
from hybrid3d import distributed, launch_environment
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Sync, Train
from hybrid3d.generation.engine import GenerationRequest, StaleWeights, complete
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.sync import CorruptSync, WeightSync, policy_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy

REQUESTS = [GenerationRequest([5, 6, 7], max_new_tokens=8, stop_tokens=[0], seed=1)]


def sync_with(sync: WeightSync, fault: Fault, number: int, overlapped: bool = False) -> str:
    """How many tensors a sync had to mend, or what it failed of."""
    try:
        with sync.transport.failing(fault, sync.plan):
            sync.begin(number, verify=True)
            if overlapped:
                sync.bucket_ready(0, last=True)
            return str(len(sync.finish().corrupted))
    except (CorruptSync, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def generate(engine: RolloutEngine) -> str:
    """How many tokens came, or why none did."""
    try:
        return str(len(complete(engine, REQUESTS, version=0)[0].tokens))
    except StaleWeights as refused:
        return str(refused)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when it sees that a rank is gone: it must wait
    folder, checkpoint, shared_memory = Path(sys.argv[1]), *sys.argv[2:]
    group = distributed.start()
    rank, train = launch_environment.rank(), Train(tp=2, pp=2, micro_batch_size=1)
    recipe = Recipe(
        name="broken",
        model=Model(path=checkpoint),
        train=train,
        rollout=Rollout(tp=2, max_model_len=128, max_new_tokens=8, kv_cache_gib=1 / 16),
        sync=Sync(verify="always", shared_memory=shared_memory),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=4, samples_per_prompt=2),
        optimizer=Optimizer(lr=1e-3),
        run=Run(steps=1),
    )
    runtime.initialize(train, seed=1)
    policy = Policy(json.loads((Path(checkpoint) / "config.json").read_text()), recipe, rank, trainable=False)
    engine = RolloutEngine(recipe, rank, launch_environment.run_id(), range(4))
    said = {"before": generate(engine)}
    use_faulty_transports()
    sync = policy_sync(recipe, group, policy, engine)
    sync.run(0, verify=True)
    said["peers"] = "" if sync.transport.shared_memory is None else str(sorted(sync.transport.shared_memory.peers))
    said["synced"] = generate(engine)
    for what, times in (("once", 1), ("always", 1 << 30)):
        said[what] = sync_with(sync, FlippedBit(times if rank == 0 else 0), 1)
        said[f"after {what}"] = generate(engine)
    said["overlapped"] = sync_with(sync, FlippedBit(1 if rank == 0 else 0), 2, overlapped=True)
    said["after overlapped"] = generate(engine)
    said["whole again"] = sync_with(sync, Fault(), 2)
    said["killed"] = sync_with(sync, Killed(at=3) if rank == 3 else Fault(), 3)
    said["after killed"] = generate(engine)
    (folder / f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # nothing can be closed any more: a peer is gone


if __name__ == "__main__":
    main()
