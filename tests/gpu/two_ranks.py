"""A sync between two ranks: NCCL between two GPUs, or gloo between two processes on a CPU. It needs no vLLM."""

from __future__ import annotations

from typing import Any

import torch
from copy_rates import allocate

from gpu import one_rank
from gpu.host_waits import no_synchronization
from gpu.models import CONFIGS
from gpu.ranks import run_on_ranks
from gpu.record import Record
from hybrid3d import distributed
from hybrid3d.bench.values import SyntheticWeights, fill, wrong
from hybrid3d.config import Sync, Train
from hybrid3d.reshard.ends import NamedTensors, PlainSink, PlainSource
from hybrid3d.reshard.move.device import device as own_device
from hybrid3d.reshard.plan.layout import Demand
from hybrid3d.sync import weight_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.build import build_model
from hybrid3d.train.megatron.probe import holdings_of
from hybrid3d.train.megatron.source import megatron_weights

WIDE = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16)
CONFIG = {"cuda": {**CONFIGS["dense"], **WIDE}, "cpu": CONFIGS["dense"]}
BUCKET_MIB = {"cuda": 16, "cpu": 0.25}
SYNCS = 10


def two_ranks(record: Record, device: str) -> None:
    """Sync from TP2 to tensors that are whole on both ranks, verified, at once and as beside an update."""
    record(**run_on_ranks(2, "gpu.two_ranks:sync_between_ranks", device=device))


def sync_between_ranks(device: str) -> dict[str, Any]:
    """Run as one of the ranks; every sync has other weights.

    Raises:
        AssertionError: some bit is wrong afterwards, or the host waited where it must not.
    """
    config = CONFIG[device]
    whole = holdings_of(config, Train(), 0, torch.bfloat16)
    group = distributed.start()
    layout, rank = Train(tp=2), group.rank()
    runtime.initialize(layout, seed=1)
    trained = megatron_weights(build_model(config, layout, torch.bfloat16), config)
    landing = PlainSink(allocate(whole.pieces, own_device()), Demand(whole.pieces))
    recipe = one_rank.recipe_for("-", "bfloat16", sync=Sync(bucket_mib=BUCKET_MIB[device], delta="never"), tp=2)
    source = PlainSource(trained.tensors, trained.holdings, dict.fromkeys(trained.tensors, 0))
    sync = weight_sync(recipe, group, source, landing)
    dtypes = {piece.name: piece.dtype for piece in whole.pieces}
    seconds = []
    for version in range(SYNCS):
        fill(trained.holdings, NamedTensors(trained.tensors), SyntheticWeights(version))
        if version % 2:
            sync.begin(version, verify=True)
            with no_synchronization(device):
                sync.bucket_ready(0, last=True)
            report = sync.finish()
        else:
            report = sync.run(version, verify=True)
        assert not report.corrupted, f"sync {version}: {report.corrupted[:1]} arrived corrupted"
        differing = wrong(whole.pieces, landing, SyntheticWeights(version), dtypes)
        assert not differing, f"sync {version}: {differing[:1]} on rank {rank} has other bits"
        assert report.received_bytes == report.lower_bound_bytes, f"received {report.received_bytes} bytes"
        seconds.append(report.seconds)
    return {"syncs": SYNCS, "received_bytes": report.received_bytes, "median_seconds": sorted(seconds)[SYNCS // 2]}
