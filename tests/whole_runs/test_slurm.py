"""The demo through `sbatch` and `torchrun`, by the very scripts in launch/: same metrics, also when it is preempted.

On a real SLURM: three nodes, all of them this machine, of which the demo takes two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slurm_cluster
from commands import ROOT, hybrid3d, read_rows, warm_checkpoint, without
from run_ranks import environment, kill_marked
from slurm_cluster import Cluster, free_ports

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 4
SETTINGS = [
    "model.path=warm",
    f"run.steps={STEPS}",
    "run.checkpoint_every=1",
    "run.eval_every=2",
    "algorithm.prompts_per_step=8",
    "rollout.kv_cache_gib=0.0625",
]
SECONDS = 900  # for a run of a minute, on a machine that is shared


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as the repository is, a model that was warmed up a little, and a run of `hybrid3d train`."""
    work = warm_checkpoint(tmp_path_factory.mktemp("slurm"), demo)
    for name in ("launch", "recipes"):
        (work / name).symlink_to(ROOT / name)
    hybrid3d(work, "train", "recipes/demo-cpu.yaml", "name=direct", *SETTINGS, timeout=SECONDS)
    assert any(row["reward/mean"] > 0 for row in read_rows(work / "runs/direct"))  # else no update changes anything
    return work


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = slurm_cluster.why_not()
    if reason is not None:
        pytest.skip(reason)
    mark = uuid.uuid4().hex
    ours = environment(mark, PYTHON=sys.executable, VLLM_LOGGING_LEVEL="ERROR")
    try:
        with Cluster(tmp_path_factory.mktemp("cluster"), ours, nodes=3) as cluster:
            yield cluster
    finally:
        kill_marked(mark)


def same_metrics(work: Path, name: str) -> bool:
    """Whether a run measured, bit for bit, what the run of `hybrid3d train` did."""
    return without(read_rows(work / "runs" / name)) == without(read_rows(work / "runs/direct"))


def events(work: Path, name: str) -> list[str]:
    return [json.loads(line)["event"] for line in (work / "runs" / name / "events.jsonl").read_text().splitlines()]


def submit(cluster: Cluster, work: Path, name: str, *settings: str) -> tuple[int, Path]:
    """The demo's job, and its output."""
    job = cluster.submit("launch/slurm/demo-cpu.sh", f"name={name}", *SETTINGS, *settings, cwd=work)
    return job, work / f"demo-cpu-{job}.out"


def wait_until_it_has_a_checkpoint(cluster: Cluster, work: Path, name: str, job: int, output: Path) -> None:
    end = time.monotonic() + SECONDS
    while not list((work / "runs" / name / "checkpoints").glob("step-000001")):
        said = output.read_text() if output.exists() else "no output"
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), said
        assert time.monotonic() < end, said
        time.sleep(0.1)


def ended(cluster: Cluster, job: int, output: Path) -> dict[str, str]:
    job_says = cluster.wait_until(job, ["COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"], SECONDS)
    assert (job_says["JobState"], job_says["ExitCode"]) == ("COMPLETED", "0:0"), output.read_text()
    return job_says


def test_sbatch_gives_the_same_metrics(cluster: Cluster, work: Path) -> None:
    job, output = submit(cluster, work, "sbatch")
    assert ended(cluster, job, output)["Restarts"] == "0"
    assert cluster.job(job)["NodeList"] == "n[1-2]"
    assert same_metrics(work, "sbatch")
    assert sorted(path.name for path in (work / "runs/sbatch/logs").glob("*.log")) == [
        f"rank-{n}.log" for n in range(4)
    ]
    assert "sbatch step 4" in output.read_text()  # what rank 0 says, and no other rank
    assert output.read_text().count("sbatch step 4") == 1


def out_of_time(cluster: Cluster, job: int) -> None:
    """What `--signal=B:USR1@seconds` does."""
    cluster.command("scancel", "--signal=USR1", "--batch", str(job))


def preempted(cluster: Cluster, job: int) -> None:
    cluster.command("scontrol", "requeue", str(job))


def lost_node(cluster: Cluster, job: int) -> None:
    """The last test: the node does not come back, the job moves to the third."""
    cluster.kill_node("n2")


@pytest.mark.parametrize("interrupt", [out_of_time, preempted, lost_node])
def test_job_that_is_interrupted_goes_on(
    cluster: Cluster, work: Path, interrupt: Callable[[Cluster, int], None]
) -> None:
    name = interrupt.__name__
    job, output = submit(cluster, work, name)
    wait_until_it_has_a_checkpoint(cluster, work, name, job, output)
    interrupt(cluster, job)
    assert ended(cluster, job, output)["Restarts"] == "1"
    said = output.read_text()
    assert f"resumed from runs/{name}/checkpoints/step-00000" in said
    assert ("requeued: resumes from the last checkpoint" in said) == (interrupt is out_of_time)
    assert [
        event
        for event in events(work, name)
        if event not in ("kernels", "checkpoint", "data", "optimizer_sharding", "sync_dense")
    ] == [
        "start",
        "resume",
        "end",
    ]
    assert same_metrics(work, name)


def test_ranks_that_do_not_fit_are_one_message(cluster: Cluster, work: Path) -> None:
    job, output = submit(cluster, work, "misfit", "train.dp=2", "train.micro_batch_size=32")
    state = cluster.wait_until(job, ["COMPLETED", "FAILED"], SECONDS)["JobState"]
    said = output.read_text()
    assert state == "FAILED"
    assert said.count("ranks, but the launcher started") == 1, said
    assert "= 8 ranks, but the launcher started 4" in said
    assert not (work / "runs/misfit").exists()


def test_torchrun_on_two_nodes_gives_the_same_metrics(work: Path) -> None:
    [port] = free_ports(1)
    mark, nodes = uuid.uuid4().hex, []
    variables = {"NNODES": "2", "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ours = environment(mark, PYTHON=sys.executable, VLLM_LOGGING_LEVEL="ERROR", **variables)
    try:
        for number in range(2):
            with open(work / f"node-{number}.out", "wb") as out:
                command = ["bash", "launch/torchrun/demo-cpu.sh", "name=torchrun", *SETTINGS]
                ours["NODE_RANK"] = str(number)
                nodes.append(subprocess.Popen(command, cwd=work, env=ours, stdout=out, stderr=out))
        codes = [process.wait(SECONDS) for process in nodes]
    finally:
        kill_marked(mark)
    assert codes == [0, 0], "\n".join((work / f"node-{number}.out").read_text() for number in range(2))
    assert same_metrics(work, "torchrun")
