"""One rank of a trainer, sharded by FSDP: it sends the weights of one checkpoint, and dies while it sends another's.

Arguments: a folder, the checkpoints, the address of vLLM's server, the port of the transfer, and the number of workers.
The last rank dies once the file `go` is in the folder; the others write why they have failed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

from checkpoints import model_of
from hybrid3d.reshard import GlooTransport
from hybrid3d.reshard.move.transport import Pending
from hybrid3d.weight_transfer import TrainerInitInfo, trainer

BUCKETS = 4  # that the rank that dies has started


def die_while_sending() -> None:
    run, started = GlooTransport.run, 0

    def run_or_die(self: GlooTransport) -> Pending:
        nonlocal started
        started += 1
        if started > BUCKETS:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self)

    GlooTransport.run = run_or_die  # type: ignore[method-assign]


def main(folder: Path, first: str, second: str, url: str, port: int, workers: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainer.MIB = 32 * 1024  # so that there are several buckets
    model = fully_shard(model_of(first), mesh=init_device_mesh("cpu", (ranks,)))
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(
            rank=rank,
            num_trainer_ranks=ranks,
            world_size=ranks + workers,
            master_address="127.0.0.1",
            master_port=port,
            bucket_mib=8,
            timeout=120,
        ),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    engine.send_weights("first")
    (folder / f"sent-{rank}.json").write_text(json.dumps([[r.received_bytes, r.lower_bound] for r in engine.reports]))
    while not (folder / "go").exists():
        time.sleep(0.05)
    with torch.no_grad():
        for here, there in zip(model.parameters(), model_of(second).parameters(), strict=True):
            assert isinstance(here, DTensor)
            new = distribute_tensor(there.data, here.device_mesh, here.placements, src_data_rank=None)
            here.to_local().copy_(new.to_local())
    if rank == ranks - 1:
        die_while_sending()
    try:
        engine.send_weights("second")
    except trainer.TransferFailed as error:
        (folder / f"failed-{rank}").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
