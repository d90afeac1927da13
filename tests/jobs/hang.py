"""Ranks of which one does not move: in work of its own, and then in a collective that the others do not take part in.

The groups have no limit: the watchdog ends the ranks in which all wait for each other.

torchrun --nproc-per-node 3 hang.py OUT
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

os.environ["HYBRID3D_HEARTBEAT_SECONDS"] = "6"

import torch
import torch.distributed as dist

from hybrid3d.watch import watchdog
from hybrid3d.watch.heartbeat import enter_phase

DEADLOCK_SECONDS = 9.0


def write_slowly() -> None:
    time.sleep(14)


def crossed(group: dist.ProcessGroup, rank: int) -> None:
    """Rank 0 broadcasts while the others are at a barrier, until it is ended."""
    with suppress(RuntimeError):
        if rank == 0:
            dist.broadcast(torch.zeros(1), group=group, group_src=1)
        else:
            dist.barrier(group)


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    os.dup2(os.open(out / f"rank-{rank}.stacks", os.O_CREAT | os.O_WRONLY), 2)
    watchdog.POLL_SECONDS = 1.0
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1, 2])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)

    def report(event: str, message: str, fields: dict[str, object]) -> None:
        with (out / "reports.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "message": message, **fields}) + "\n")

    def end(message: str) -> None:
        report("deadlock", message, {})
        os._exit(0)

    watchdog.START_SECONDS = DEADLOCK_SECONDS
    watching = watchdog.Watchdog(store, rank, 3, report, on_deadlock=end)
    enter_phase("slow-disk" if rank == 1 else "wait")
    if rank == 1:
        write_slowly()
        enter_phase("wait")
    dist.barrier()
    crossed(group, rank)
    watching.stop()
    os._exit(0)


main(Path(sys.argv[1]))
