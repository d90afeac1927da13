"""One rank of a run in which another is killed in the middle of a sync: what its engine says when it is to generate.

    torchrun --nproc-per-node 4 broken_sync.py FOLDER CHECKPOINT

Each rank that lives writes FOLDER/<rank>.json; the last one is killed in its second sync.
"""

import json
import os
import signal
import sys
from pathlib import Path

from hybrid3d import ranks
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Sync, Train
from hybrid3d.rollout.engine import RolloutEngine, StaleWeights
from hybrid3d.sync import WeightSync
from hybrid3d.train import runtime
from hybrid3d.train.policy import Policy

PROMPT = [[5, 6, 7]]


class Dying:
    """A transport that ends its process instead of starting the third bucket."""

    def __init__(self, transport):
        self._transport, self._runs = transport, 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def run(self):
        self._runs += 1
        if self._runs == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._transport.run()


def generate(engine: RolloutEngine) -> str:
    """How many tokens came, or why none did."""
    try:
        return str(len(engine.generate(PROMPT, [1], end_token=0)[0].tokens))
    except StaleWeights as refused:
        return str(refused)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when it sees that a rank is gone: it must wait
    folder, checkpoint = Path(sys.argv[1]), sys.argv[2]
    ranks.start()
    rank, train = ranks.rank(), Train(tp=2, pp=2, micro_batch_size=1)
    recipe = Recipe(
        name="broken",
        model=Model(path=checkpoint),
        train=train,
        rollout=Rollout(tp=2, max_model_len=128, max_new_tokens=8, kv_cache_gib=1 / 16),
        sync=Sync(),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=4, samples_per_prompt=2),
        optimizer=Optimizer(lr=1e-3),
        run=Run(steps=1),
    )
    runtime.initialize(train, seed=1)
    policy = Policy(json.loads((Path(checkpoint) / "config.json").read_text()), recipe, rank, trainable=False)
    engine = RolloutEngine(recipe, rank, ranks.ident(), range(4))
    said = {"before": generate(engine)}
    sync = WeightSync(recipe, policy.weights, engine, rank)
    sync.run(0)
    said["synced"] = generate(engine)
    if rank == 3:
        sync._executor._transport = Dying(sync.transport)
    try:
        sync.run(1)
        said["error"] = ""
    except RuntimeError as error:
        said["error"] = str(error)
    said["after"] = generate(engine)
    (folder / f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # nothing can be closed any more: a peer is gone


if __name__ == "__main__":
    main()
