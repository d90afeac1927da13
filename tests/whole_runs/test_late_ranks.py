"""Ranks that generate and come when the run has begun: by hand, with other settings, and on a Ray node that joins."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import warm_python
from commands import ROOT, demo_folder, read_events, read_rows
from hybrid3d.launch_environment import CHECKED
from live_runs import child_of, ranks_of, ray_cluster, recorded, started, wait_for_rows, wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

RUN = [
    str(ROOT / "recipes/demo-cpu.yaml"),
    *("model.path=build/demo/base", "model.dtype=bfloat16", "guard.initial_mismatch=ignore", "train.tp=1"),
    *("train.pp=1", "rollout.tp=1", "roles.generation.ranks=2", "roles.generation.ranks_at_start=1"),
    *("algorithm.prompts_per_step=8", "optimizer.lr=1e-5", "run.eval_every=999", "sync.verify=always"),
    *("machine.gpus_per_node=1", "run.steps=9999"),  # control.yaml ends it
]
STARTED = 300  # seconds in which a rank has imported both engines and has built one, beside other work


def events_of(run: Path, *names: str) -> list[tuple[str, list[int]]]:
    return [(event["event"], event["ranks"]) for event in read_events(run) if event["event"] in names]


@contextmanager
def ranks_by_hand(work: Path, name: str) -> Iterator[Any]:
    """Yield `start(rank, *settings)`, which starts a rank as any launcher would."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for variable, value in where.items():
            patch.setenv(variable, value)

        def start(rank: int, *settings: str) -> subprocess.Popen[str]:
            patch.setenv("RANK", str(rank))
            arguments, output = [*RUN, f"name={name}", *settings], work / f"{rank}.txt"
            return stack.enter_context(started(work, arguments, output=output, python=warm_python.executable()))

        yield start


def test_rank_that_comes_later_generates_from_the_next_version(demo: Path, tmp_path: Path) -> None:
    work = demo_folder(tmp_path, demo)
    run = work / "runs/late"
    with ranks_by_hand(work, "late") as start:
        first, _ = start(0), start(1)
        wait_for_rows(run, 1, first)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CHECKED, "1")  # so that the ranks' rendezvous finds it, and not the check of the run's folder
            assert start(2, "rollout.temperature=0.5").wait(STARTED) == 2
        refused = (run / "logs/rank-2.log").read_text()
        late = start(2)
        wait_until(lambda: events_of(run, "engine_joined"), first, STARTED)
        begun = recorded(run)
        (run / "control.yaml").write_text(f"run.steps: {begun + 3}\n")
        assert [process.wait(300) for process in (first, late)] == [0, 0]
    assert events_of(run, "engine_joined", "engine_lost") == [("engine_joined", [2])]
    assert "rollout.temperature: 1.0 on rank 0, 0.5 on rank 2" in refused
    received = [row["sync/received_bytes"] for row in read_rows(run) if row["sync/dense"]]
    assert {*received} == {received[0], 2 * received[0]}  # all weights, verified, of one rank and of both
    assert received[-1] > received[0]


@pytest.mark.slow
def test_ray_node_that_joins_gives_an_engine(demo: Path, tmp_path: Path) -> None:
    work = demo_folder(tmp_path, demo)
    run = work / "runs/grows"
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_cluster(1, 1))
        settings = [*RUN, "name=grows", "--ray", cluster.address]
        process = stack.enter_context(started(work, settings, output=work / "printed.txt"))
        wait_for_rows(run, 2, process)
        assert ranks_of(run, 2) == []
        joined = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
        wait_until(lambda: events_of(run, "engine_joined") == [("engine_joined", [2])], process, STARTED)
        cluster.remove_node(joined, allow_graceful=False)
        wait_until(lambda: events_of(run, "engine_lost") == [("engine_lost", [2])], process)
        wait_for_rows(run, recorded(run) + 2, process)
        cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
        wait_until(lambda: len(events_of(run, "engine_joined")) == 2, process, STARTED)
        assert child_of(run, 2)
        (run / "control.yaml").write_text(f"run.steps: {recorded(run) + 3}\n")
        assert process.wait(600) == 0
    assert ranks_of(run) == []
