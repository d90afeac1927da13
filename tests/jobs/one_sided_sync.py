"""One rank of a sync between ranks of which one only trains, one only generates, and one does both.

    torchrun --nproc-per-node 3 one_sided_sync.py FOLDER

Each rank writes FOLDER/<rank>.json: what landed after two syncs, the report, and the sink's versions.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Run, Sync, Train
from hybrid3d.reshard.ends import PlainSink, PlainSource
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Demand, Holdings, Piece, View
from hybrid3d.sync import weight_sync

SHAPE = 12, 4  # of each of the tensors, of which one is in no layer
NAMES = ["model.layers.0.weight", "model.layers.1.weight", "model.norm.weight"]
HELD = {0: (0, 8), 1: (8, 4)}  # by rank that trains: first row, rows
WANTED = {1: (4, 8), 2: (0, 12)}  # by rank that generates


def pieces(first: int, rows: int) -> tuple[Piece, ...]:
    view = (SHAPE[1], 1)
    return tuple(Piece(name, Box((first, 0), (rows, SHAPE[1])), View(name, 0, view), "float32") for name in NAMES)


class Landing(PlainSink):
    """A sink of plain tensors, and how often they were committed."""

    def __init__(self, first: int, rows: int):
        self.tensors = {name: torch.full((rows, SHAPE[1]), torch.nan) for name in NAMES}
        self.commits = 0
        super().__init__(self.tensors, Demand(pieces(first, rows)))

    def demand_for(self, shapes: dict) -> Demand:
        assert shapes == dict.fromkeys(NAMES, SHAPE)
        return super().demand_for(shapes)

    def commit(self, version: int) -> None:
        self.commits += 1
        super().commit(version)


def values(name: str, version: int) -> torch.Tensor:
    """The whole canonical tensor of a version."""
    count = SHAPE[0] * SHAPE[1]
    return (torch.arange(count) + 1000.0 * NAMES.index(name) + 100_000 * version).reshape(SHAPE)


def main(folder: Path) -> None:
    group = distributed.start()
    rank = group.rank()
    recipe = Recipe(
        name="one-sided",
        model=Model(path="-"),
        train=Train(),
        sync=Sync(bucket_mib=64 / 2**20),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=1),
        optimizer=Optimizer(lr=0.0),
        run=Run(steps=1),
    )
    tensors = source = sink = None
    if rank in HELD:
        tensors = {name: torch.empty(HELD[rank][1], SHAPE[1]) for name in NAMES}
        source = PlainSource(tensors, Holdings(pieces(*HELD[rank])), dict.fromkeys(NAMES, 0))
    if rank in WANTED:
        sink = Landing(*WANTED[rank])
    sync = weight_sync(recipe, group, source, sink)
    said: dict = {"lower_bound": sync.lower_bound}
    for version in (7, 8):
        if tensors is not None:
            first, rows = HELD[rank]
            for name, tensor in tensors.items():
                tensor.copy_(values(name, version)[first : first + rows])
        if version == 7:
            report = sync.run(version, verify=True)
        else:  # as beside an update: a rank that does not train has no bucket to report
            sync.begin(version, verify=True)
            if tensors is not None:
                sync.bucket_ready(0, last=True)
            report = sync.finish()
        if sink is not None:
            first, rows = WANTED[rank]
            wrong = [n for n in NAMES if not sink.tensors[n].equal(values(n, version)[first : first + rows])]
            said[f"wrong {version}"], said[f"version {version}"] = wrong, sink.version
        said[f"received {version}"], said[f"corrupted {version}"] = report.received_bytes, report.corrupted
    said["commits"] = None if sink is None else sink.commits
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
