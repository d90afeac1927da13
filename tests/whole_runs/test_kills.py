"""Ranks of each role are lost in each way, under four launchers: the run goes on, names the cause and learns the same.

SLURM's lost nodes are in `test_slurm.py`; what follows from each end, without processes, in `test_policies.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import slurm_cluster
from commands import ROOT, demo_folder, hybrid3d, read_events, read_rows, without
from live_runs import child_of, ranks_of, ray_cluster, recorded, started, submitted, wait_for_rows, wait_until
from run_ranks import SHARED_MEMORY

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1500)]

# Rank 0 trains, 1 and 2 generate, 3 computes rewards
SETTINGS = [
    str(ROOT / "recipes/demo-cpu.yaml"),
    *("model.path=build/demo/base", "model.dtype=bfloat16", "guard.initial_mismatch=ignore", "train.tp=1"),
    *("train.pp=1", "rollout.tp=1", "roles.generation.ranks=2", "roles.reward.ranks=1", "machine.gpus_per_node=2"),
    *("algorithm.prompts_per_step=8", "optimizer.lr=1e-5", "run.eval_every=9999", "run.checkpoint_every=5"),
    *("sync.verify=always", "run.max_restarts=20"),
]
WAYS = {
    "killed by SIGKILL": signal.SIGKILL,
    "killed by SIGSEGV": signal.SIGSEGV,
    "killed by SIGABRT": signal.SIGABRT,
    "is stopped": signal.SIGSTOP,
    "ended with exit code 3": signal.SIGUSR2,
    "ValueError: boom": signal.SIGRTMIN,
    "MemoryError: boom": signal.SIGRTMIN + 1,
}
# In a process of Python, three signals are other ends
HANDLERS = """
import os, signal
def boom(number, frame):
    raise {signal.SIGRTMIN: ValueError, signal.SIGRTMIN + 1: MemoryError}[number]("boom")
signal.signal(signal.SIGUSR2, lambda number, frame: os._exit(3))
for number in (signal.SIGRTMIN, signal.SIGRTMIN + 1):
    signal.signal(number, boom)
"""
KILLS = {
    "hybrid3d": [
        (1, "killed by SIGKILL"),
        (0, "killed by SIGSEGV"),
        (2, "killed by SIGABRT"),
        (3, "killed by SIGKILL"),
        (1, "ended with exit code 3"),
        (0, "ValueError: boom"),
        (2, "is stopped"),
        (3, "ValueError: boom"),
        (0, "is stopped"),
        (3, "is stopped"),
        (1, "MemoryError: boom"),
        (2, "killed by SIGSEGV"),
        (0, "ended with exit code 3"),
    ],
    "torchrun": [
        (3, "killed by SIGSEGV"),
        (0, "killed by SIGKILL"),
        (1, "ValueError: boom"),
        (1, "is stopped"),
        (3, "MemoryError: boom"),
        (0, "killed by SIGABRT"),
    ],
    "ray": [
        (2, "killed by SIGKILL"),
        (0, "killed by SIGABRT"),
        (3, "ended with exit code 3"),
        (1, "killed by SIGSEGV"),
        (0, "killed by SIGKILL"),
    ],
    "slurm": [
        (1, "killed by SIGKILL"),
        (3, "killed by SIGABRT"),
        (0, "killed by SIGSEGV"),
        (2, "is stopped"),
        (0, "ValueError: boom"),
    ],
}
MIN_STEPS = 30
SECONDS = 300  # in which a rank is there again, beside other work


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in which nothing is lost."""
    work = demo_folder(tmp_path_factory.mktemp("kills"), demo)
    hybrid3d(work, "train", *SETTINGS, "name=steady", "run.steps=100")
    (work / "sitecustomize.py").write_text(HANDLERS)
    for name in ("launch", "recipes"):
        (work / name).symlink_to(ROOT / name)
    return work


@contextmanager
def launched(work: Path, launcher: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run that is named after its launcher, whose output is in a file."""
    agent, arguments = [], [*SETTINGS, f"name={launcher}", "run.steps=9999"]
    output = work / f"{launcher}.txt"
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("HYBRID3D_HEARTBEAT_SECONDS", "15")
        if launcher == "torchrun":
            agent = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]
            agent += ["--rdzv-endpoint", "127.0.0.1:0"]
        if launcher == "ray":
            arguments += ["--ray", stack.enter_context(ray_cluster(2, 2)).address]
        if launcher == "slurm":
            yield stack.enter_context(submitted(work, arguments[1:], output))  # the job's script names the recipe
        else:
            yield stack.enter_context(started(work, arguments, agent, output))


def told(work: Path, run: Path, rank: int, how: str) -> int:
    """Return how often it was told that a rank has ended in a way, and is there again."""
    if rank == 0:
        return (work / f"{run.name}.txt").read_text().count(f"rank 0 failed: {how}")
    events = read_events(run)
    again = ("engine_joined", "reward_worker_joined")
    return sum(event["event"] in again and event["ranks"] == [rank] and event["why"] == how for event in events)


@pytest.mark.parametrize("launcher", KILLS)
def test_run_goes_on_through_each_loss(launcher: str, work: Path) -> None:
    if launcher == "slurm" and (reason := slurm_cluster.why_not()):
        pytest.skip(reason)
    run, before = work / "runs" / launcher, set(SHARED_MEMORY.iterdir())
    with launched(work, launcher) as process:
        wait_for_rows(run, 3, process)
        for rank, how in KILLS[launcher]:
            said = how
            if how == "is stopped":  # it is killed by its parent, or where others watch it, by them
                said = "killed by SIGKILL" if rank else "it has not answered for"
            times, victim = told(work, run, rank, said), child_of(run, rank)
            others = [child_of(run, other) for other in range(1, 4)]
            assert victim is not None
            os.kill(victim, WAYS[how])
            wait_until(lambda: told(work, run, rank, said) == times + 1, process, SECONDS)  # noqa: B023
            wait_until(lambda: child_of(run, rank) not in (None, victim), process, SECONDS)  # noqa: B023
            rows = recorded(run)
            wait_until(lambda: recorded(run) > rows + 5, process, SECONDS)  # noqa: B023
            if rank == 0:  # nothing else is started again for it
                assert [child_of(run, other) for other in range(1, 4)] == others
        rows = max(recorded(run), MIN_STEPS)
        (run / "control.yaml").write_text(f"run.steps: {rows + 5}\n")
        assert process.wait(SECONDS) == 0
        assert ranks_of(run) == []
    end = time.monotonic() + SECONDS
    while launcher != "ray" and set(SHARED_MEMORY.iterdir()) - before:  # Ray has files of its own there
        assert time.monotonic() < end
        time.sleep(0.5)
    steady, shaken = (read_rows(work / "runs" / name)[:-1] for name in ("steady", launcher))
    both = min(len(steady), len(shaken))
    assert both >= MIN_STEPS
    of_traffic = [key for row in shaken for key in row if key.startswith("sync/")]
    assert without(steady[:both], *of_traffic) == without(shaken[:both], *of_traffic)
