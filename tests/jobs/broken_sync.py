"""One rank of a run whose syncs go wrong: what its engine says when it is to generate.

    torchrun --nproc-per-node 4 broken_sync.py FOLDER CHECKPOINT SHARED_MEMORY

Messages to rank 0, or those that it lends, arrive with a flipped bit, once and then always. At last rank 3 is killed in
the middle of a sync; the others write FOLDER/<rank>.json.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hybrid3d import distributed
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Sync, Train
from hybrid3d.generation.engine import GenerationRequest, StaleWeights
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.sync import CorruptSync, WeightSync, policy_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy

REQUESTS = [GenerationRequest([5, 6, 7], max_new_tokens=8, stop_tokens=[0], seed=1)]


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


class Flipping:
    """A transport of which a bit flips in the first message that arrives, in so many of its runs."""

    def __init__(self, transport, times):
        self._transport, self._left, self._first = transport, times, None

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def submit_recv(self, tensor, src, tag):
        self._first = tensor if self._first is None else self._first
        self._transport.submit_recv(tensor, src, tag)

    def run(self):
        pending, arriving = self._transport.run(), self._first
        self._first = None

        class Flipped:
            def wait(_):
                pending.wait()
                if arriving is not None and self._left:
                    self._left -= 1
                    arriving[0] ^= 1

        return Flipped()


class FlippingLender:
    """A bit flips in this rank's memory before the first loan of a bucket, so many times."""

    def __init__(self, executor, times):
        self._shared, self._left, self._executor, self._bucket = executor._shared, times, executor, None

    def __getattr__(self, name):
        return getattr(self._shared, name)

    def lend(self, receiver, bucket):
        if self._left and bucket != self._bucket:
            self._left, self._bucket = self._left - 1, bucket
            step = next(step for step in self._executor._steps if step.number == bucket)
            self._executor._lent[step.index % 2].flat_view(0, 1, torch.uint8)[0] ^= 1
        self._shared.lend(receiver, bucket)


@contextmanager
def flipping(sync: WeightSync, times: int) -> Iterator[object]:
    """Yield the transport of a sync of which bits flip on rank 0."""
    executor = sync._executor
    if sync.transport.shared_memory is None:
        yield Flipping(sync.transport, times)
    else:
        executor._shared = FlippingLender(executor, times)
        yield sync.transport
        executor._shared = sync.transport.shared_memory


def sync_with(sync: WeightSync, transport: object, number: int, overlapped: bool = False) -> str:
    """How many tensors a sync had to mend, or what it failed of."""
    sync._executor._transport, before = transport, sync._executor._transport
    try:
        sync.begin(number, verify=True)
        if overlapped:
            sync.bucket_ready(0, last=True)
        return str(len(sync.finish().corrupted))
    except (CorruptSync, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sync._executor._transport = before


def generate(engine: RolloutEngine) -> str:
    """How many tokens came, or why none did."""
    try:
        return str(len(engine.generate(REQUESTS, version=0)[0].tokens))
    except StaleWeights as refused:
        return str(refused)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when it sees that a rank is gone: it must wait
    folder, checkpoint, shared_memory = Path(sys.argv[1]), *sys.argv[2:]
    group = distributed.start()
    rank, train = distributed.rank(), Train(tp=2, pp=2, micro_batch_size=1)
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
    engine = RolloutEngine(recipe, rank, distributed.run_id(), range(4))
    said = {"before": generate(engine)}
    sync = policy_sync(recipe, group, policy, engine)
    sync.run(0, verify=True)
    said["peers"] = "" if sync.transport.shared_memory is None else str(sorted(sync.transport.shared_memory.peers))
    said["synced"] = generate(engine)
    for what, times in (("once", 1), ("always", 1 << 30)):
        with flipping(sync, times if rank == 0 else 0) as transport:
            said[what] = sync_with(sync, transport, 1)
        said[f"after {what}"] = generate(engine)
    with flipping(sync, 1 if rank == 0 else 0) as transport:
        said["overlapped"] = sync_with(sync, transport, 2, overlapped=True)
    said["after overlapped"] = generate(engine)
    said["whole again"] = sync_with(sync, sync.transport, 2)
    said["killed"] = sync_with(sync, Dying(sync.transport) if rank == 3 else sync.transport, 3)
    said["after killed"] = generate(engine)
    (folder / f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # nothing can be closed any more: a peer is gone


if __name__ == "__main__":
    main()
