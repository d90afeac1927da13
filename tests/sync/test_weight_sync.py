"""A sync in which a rank has a source, a sink or both; plain tensors stand for both engines' weights."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid3d.distributed import LostPeer
from hybrid3d.reshard import JsonExchange, PlainSink, PlainSource, make_transport, tensor_sink, tensor_source
from hybrid3d.reshard.ends import NothingTracked
from hybrid3d.sync import SyncSettings, WeightSync
from run_ranks import run_ranks

JOB = Path(__file__).parents[1] / "jobs/one_sided_sync.py"
ROW, TENSORS = 16, 3  # bytes of a row of a tensor


class SlowChanges(NothingTracked):
    """Tells what has changed, and takes its time."""

    elements = 3
    complete = True

    def clear(self) -> None:
        time.sleep(0.1)


class SlowSink(PlainSink):
    """Drops what it has computed with older weights, and takes its time."""

    @property
    def keeps_weights(self) -> bool:  # type: ignore[override]  # asked as each sync begins
        time.sleep(0.1)
        return True

    def commit(self, version: int) -> None:
        time.sleep(0.1)
        super().commit(version)


def test_sync_without_overlap_is_exposed_from_begin_to_commit(alone: dist.ProcessGroup) -> None:
    held, wanted = tensor_source({"w": torch.ones(3)}), tensor_sink({"w": torch.zeros(3)})
    source = PlainSource(held._tensors, held.holdings, changes=SlowChanges())
    sink = SlowSink(wanted._tensors, wanted.demand)
    transport = make_transport(torch.device("cpu"), alone, 8)
    sync = WeightSync(source, sink, SyncSettings(1 << 20, 8), JsonExchange(alone), transport)
    report = sync.run(1)
    assert sink.version == 1
    assert 0.3 <= report.exposed_seconds <= report.seconds


class NobodyThere(JsonExchange):
    """The collectives of ranks of which one is lost once all have planned together."""

    lost = False

    def minimum(self, number: int) -> int:
        if self.lost:
            raise dist.DistBackendError("Connection closed by peer")
        return super().minimum(number)


@pytest.mark.parametrize("blocks_host", [True, False])
def test_weights_of_a_lost_rank_are_not_committed(alone: dist.ProcessGroup, blocks_host: bool) -> None:
    """Where a wait blocks a stream alone, it may end without an error when the rank that is waited for is lost."""
    source, sink = tensor_source({"w": torch.ones(3)}), tensor_sink({"w": torch.zeros(3)})
    transport, exchange = make_transport(torch.device("cpu"), alone, 8), NobodyThere(alone)
    transport.blocks_host = blocks_host
    sync = WeightSync(source, sink, SyncSettings(1 << 20, 8), exchange, transport)
    sync.run(1)
    exchange.lost = True
    if blocks_host:  # the wait itself would have failed
        sync.run(2)
        return
    with pytest.raises(dist.DistBackendError):
        sync.run(2)
    assert (sync.in_progress, sink.version) == (2, None)
    exchange.lost = False  # all ranks are there, and one of them has lost its connection to another
    sync.interrupt()
    with pytest.raises(LostPeer):
        sync.run(3)
    assert (sync.in_progress, sink.version) == (3, None)


@pytest.mark.engines
def test_rank_has_a_source_a_sink_or_both(tmp_path: Path) -> None:
    run_ranks(JOB, 3, [str(tmp_path)], timeout=120)
    trainer, both, generator = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3))
    for one in (both, generator):
        for version in (7, 8):
            assert one[f"wrong {version}"] == []
            assert one[f"version {version}"] == version
        assert one["commits"] == 2
    # rank 1 wants rows 4 to 12 and holds 8 to 12; rank 2 wants all 12 and holds none
    received = [0, 4 * ROW * TENSORS, 12 * ROW * TENSORS]
    for version in (7, 8):
        assert [one[f"received {version}"] for one in (trainer, both, generator)] == received
        assert all(one[f"corrupted {version}"] == [] for one in (trainer, both, generator))
    assert [one["lower_bound"] for one in (trainer, both, generator)] == received
