"""One of two ranks between which toys are synced: each holds half of each tensor, and the second wants all of it.

    torchrun --nproc-per-node 2 toy_sync.py FOLDER

Each rank writes FOLDER/<rank>.json: whether its sink has the right values after each version, and bytes.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hybrid3d import distributed
from hybrid3d.distributed import GroupExchange
from hybrid3d.reshard.ends import NoSink, PlainSource
from hybrid3d.reshard.move.transport import make_transport
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Demand, Holdings, Piece, View
from hybrid3d.sync import SyncSettings, WeightSync
from toys.doubling_sink import Doubling
from toys.negated_source import Negated

NAMES = ["model.layers.0.weight", "model.layers.1.weight", "model.norm.weight"]
ROWS, COLUMNS = 6, 4  # that a rank holds


def pieces(first: int, rows: int) -> tuple[Piece, ...]:
    return tuple(Piece(n, Box((first, 0), (rows, COLUMNS)), View(n, 0, (COLUMNS, 1)), "float32") for n in NAMES)


def values(name: str, version: int) -> torch.Tensor:
    """The whole tensor of a version."""
    return torch.arange(2.0 * ROWS * COLUMNS).reshape(-1, COLUMNS) + 100 * NAMES.index(name) + 1000 * version + 1


def main(folder: Path) -> None:
    group = distributed.start()
    rank = group.rank()
    held = {name: torch.empty(ROWS, COLUMNS) for name in NAMES}
    source = Negated(PlainSource(held, Holdings(pieces(ROWS * rank, ROWS)), dict.fromkeys(NAMES, 0)))
    landed = {name: torch.full((2 * ROWS, COLUMNS), torch.nan) for name in NAMES}
    sink = Doubling(landed, Demand(pieces(0, 2 * ROWS))) if rank else NoSink()
    transport = make_transport(torch.device("cpu"), dist.new_group(), 8)
    sync = WeightSync(source, sink, SyncSettings(bucket_bytes=64, ranks_per_node=8), GroupExchange(group), transport)
    said = []
    for version in range(3):
        for name, tensor in held.items():
            tensor.copy_(values(name, version)[ROWS * rank : ROWS * (rank + 1)])
        sync.begin(version, verify=True)
        sync.bucket_ready(0, last=True)
        report = sync.finish()
        right = [n for n in NAMES if not rank or landed[n].equal(-2 * values(n, version))]
        said.append({"right": right, "version": sink.version, "received": report.received_bytes})
        said[-1] |= {"bound": report.lower_bound_bytes, "corrupted": report.corrupted}
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
