"""Starts runs through the command, and finds their processes while they run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT
from run_ranks import environment, kill_marked
from slurm_cluster import Cluster


@contextmanager
def started(
    work: Path,
    arguments: Sequence[str],
    agent: Sequence[str] = (),
    output: Path | None = None,
    python: str = sys.executable,
) -> Iterator[subprocess.Popen[str]]:
    """Start `hybrid3d train` in a folder; at the end none of its processes is left.

    Args:
        agent: the arguments of Python that start it as ranks.
        output: the file that has what it prints; None if that is read later, and fits in a pipe.
        python: `warm_python.executable()` where no process that has others is killed. What is found of warm ones are
            their clients; to kill a client is to kill its process, a moment later.
    """
    mark = uuid.uuid4().hex
    command = [python, *agent, "-m", "hybrid3d", "train", *arguments]
    with ExitStack() as stack:
        printed = subprocess.PIPE if output is None else stack.enter_context(output.open("w"))
        yield stack.enter_context(_running(command, work, mark, _variables(work, mark), printed))


@contextmanager
def submitted(work: Path, settings: Sequence[str], output: Path) -> Iterator[subprocess.Popen[str]]:
    """Submit the demo's job to a SLURM of two nodes, all of them this machine; at the end nothing of it is left.

    Args:
        work: a folder that has `launch` and `recipes`.
        output: the file that has what the job prints.

    Yields:
        The process that waits for the job, and ends as it does.
    """
    mark = uuid.uuid4().hex
    variables = {**_variables(work, mark), "PYTHON": sys.executable}
    command = ["sbatch", "--wait", f"--output={output}", "launch/slurm/demo-cpu.sh", *settings]
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        Cluster(Path(folder), variables) as cluster,
        _running(command, work, mark, cluster.environment) as process,
    ):
        yield process


def _variables(work: Path, mark: str) -> dict[str, str]:
    """Return the environment of a run whose processes can import what is in its folder, too."""
    paths = [str(work), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return environment(mark, PYTHONPATH=os.pathsep.join(filter(None, paths)))


@contextmanager
def _running(
    command: Sequence[str], work: Path, mark: str, variables: dict[str, str], stdout: Any = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a folder; at the end none of the processes with its mark is left."""
    process = subprocess.Popen(command, cwd=work, env=variables, stdout=stdout, text=True)
    try:
        yield process
    finally:
        kill_marked(mark)
        process.wait()


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Any]:
    """Start a Ray cluster on this machine, of nodes with so many CPUs, and yield Ray's own `Cluster`."""
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100_000_000}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)  # paths of sockets must be short
        head = {"num_cpus": cpus[0], "include_dashboard": False, **memory}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for number in cpus[1:]:
                cluster.add_node(num_cpus=number, **memory)
            yield cluster
        finally:
            cluster.shutdown()


def recorded(run: Path) -> int:
    """Return how many steps a run has recorded."""
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def wait_for_rows(run: Path, rows: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has recorded so many steps."""
    end = time.monotonic() + 300
    while recorded(run) < rows:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.002)


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait until a condition of a run is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)


def child_of(run: Path, rank: int) -> int | None:
    """Return the process that generates as this rank now, which its parent starts again when it is lost."""
    return next(iter(ranks_of(run, rank, children=True)), None)


def ranks_of(run: Path, rank: int | None = None, children: bool = False) -> list[int]:
    """Return the processes of a run's ranks, or of one of them; or only those that are children of another one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, variables = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:  # it has ended, or is another user's
            continue
        numbers = [v for v in variables if v.startswith(b"RANK=")]
        is_child = any(v.startswith(b"HYBRID3D_RESTART_COUNT=") for v in variables)
        if f"name={run.name}".encode() in command and numbers and (rank is None or f"RANK={rank}".encode() in numbers):
            found += [int(folder.name)] if is_child or not children else []
    return found
