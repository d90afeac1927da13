"""Tests the scripts in launch/, and that each mistake on several nodes is one message before engines start."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from hybrid3d import launch_environment
from hybrid3d.config import Recipe, RecipeError, load_recipe
from hybrid3d.launch import launcher, rendezvous
from hybrid3d.launch.launcher import supervise
from hybrid3d.launch.preflight import check_ray
from hybrid3d.run.folder import RunFolder
from run_ranks import ROOT, environment, kill_marked
from slurm_cluster import free_ports

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*/*.sh"))
BODIES = sorted(LAUNCH.glob("*.sh"))
NOT_STARTED = {"demo-warmup", "demo-preferences", "demo-llm", "demo-agent"}  # part of `make demo` and the like only
DEMO = str(ROOT / "recipes" / "demo-cpu.yaml")
SECONDS = 180  # for a few starts of Python on a machine that is shared


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def recipe_of(script: Path) -> Recipe:
    found = re.findall(r"launch/\w+\.sh (recipes/\S+\.yaml) \"\$@\"", script.read_text())
    assert found == [f"recipes/{script.stem}.yaml"]
    return load_recipe(ROOT / found[0])


def test_recipes_each_have_both_scripts() -> None:
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")} - NOT_STARTED
    for kind in ("slurm", "torchrun"):
        assert {path.stem for path in (LAUNCH / kind).glob("*.sh")} == recipes


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.parent.name == "slurm"], ids=named)
def test_slurm_script_asks_for_its_recipe_s_gpus(script: Path) -> None:
    recipe = recipe_of(script)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", script.read_text(), re.MULTILINE))
    here = int(asked["ntasks-per-node"])
    assert int(asked["nodes"]) * here == recipe.world_size
    assert asked["job-name"] == recipe.name
    assert {"requeue", "signal", "time", "output"} <= asked.keys()
    assert asked["open-mode"] == "append"  # a requeued job's output follows its earlier one's
    if recipe.name == "demo-cpu":
        assert "gpus-per-node" not in asked
    else:
        assert asked["mem"] == "0"  # all of a node's, which `exclusive` alone does not give
        assert "exclusive" in asked
        assert int(asked["gpus-per-node"]) == here == min(recipe.machine.gpus_per_node, recipe.world_size)


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.parent.name == "torchrun"], ids=named)
def test_torchrun_script_asks_for_its_recipe_s_gpus(script: Path) -> None:
    recipe = recipe_of(script)
    [(nodes, here)] = re.findall(r"^NODES=(\d+) GPUS_PER_NODE=(\d+) exec", script.read_text(), re.MULTILINE)
    assert int(nodes) * int(here) == recipe.world_size
    assert int(here) == min(recipe.machine.gpus_per_node, recipe.world_size)


@pytest.mark.parametrize("script", SCRIPTS + BODIES, ids=named)
def test_bash_can_read_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_shellcheck_is_content() -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck, "shellcheck is missing: pip install --no-deps -r requirements/cpu.txt brings it"
    scripts = [str(script.relative_to(ROOT)) for script in SCRIPTS + BODIES]
    found = subprocess.run([shellcheck, "--external-sources", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def prepare(ranks_here: int, world: int, limit: str = "true") -> subprocess.CompletedProcess[str]:
    command = f"{limit} && exec bash {LAUNCH / 'prepare-node.sh'} {ranks_here} {world}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True)


def test_limits_that_suffice_are_not_mentioned() -> None:
    done = prepare(1, 4)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_limits_that_do_not_suffice() -> None:
    """One message has all limits: the current value, the needed value and the fix."""
    ranks_here = 10**6
    done = prepare(ranks_here, 1024, limit="ulimit -n 2000")
    assert done.returncode == 2
    assert re.search(
        rf"/dev/shm has \d+ MiB free, {ranks_here} ranks need {128 * ranks_here}: .*--shm-size", done.stderr
    )
    assert f"ulimit -n is 2000, 1024 ranks need {1024 + 8 * 1024}: raise" in done.stderr


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return `start(command, **environment)`, which starts a process that is killed after the test."""
    for name in ("launch", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    mark, started = uuid.uuid4().hex, []

    def begin(command: list[str], **variables: str) -> subprocess.Popen[str]:
        ours = {"HYBRID3D_CHECKED": "1", "HYBRID3D_RENDEZVOUS_SECONDS": "60", "PYTHON": sys.executable, **variables}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(mark, **ours), stdout=pipe, stderr=pipe, text=True
        )
        started.append(process)
        return process

    yield begin
    kill_marked(mark)
    for process in started:
        process.communicate()


Start = Callable[..., subprocess.Popen[str]]


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the message, and check that nothing else was printed."""
    out, message = process.communicate(timeout=SECONDS)
    assert out == ""
    assert "Traceback" not in message
    return process.returncode, message


def rank(start: Start, number: int, world: int, port: int, *settings: str, **more: str) -> subprocess.Popen[str]:
    """Start one rank of a demo with two ranks."""
    command = [sys.executable, "-m", "hybrid3d", "train", DEMO, "train.pp=1", *settings]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    who = {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}
    return start(command, **{**who, **where, **more})


@pytest.mark.engines
def test_ranks_that_differ(start: Start, tmp_path: Path) -> None:
    """Two settings and a package differ: rank 0 reports each with its ranks."""
    (tmp_path / "other" / "transformers-4.0.0.dist-info").mkdir(parents=True)
    (tmp_path / "other/transformers-4.0.0.dist-info/METADATA").write_text("Name: transformers\nVersion: 4.0.0\n")
    path = f"{tmp_path / 'other'}{os.pathsep}{environment('')['PYTHONPATH']}"
    [port] = free_ports(1)
    first = rank(start, 0, 2, port)
    second = rank(start, 1, 2, port, "optimizer.lr=0.1", "algorithm.kl.coef=0.5", PYTHONPATH=path)
    code, message = end(first)
    assert code == 2
    assert "optimizer.lr: 0.0002 on rank 0, 0.1 on rank 1\n" in message
    assert "algorithm.kl.coef: 0.001 on rank 0, 0.5 on rank 1\n" in message
    assert re.search(r"version of transformers: [5-9]\.\S+ on rank 0, 4\.0\.0 on rank 1\n", message)
    assert len(message.splitlines()) == 4
    assert end(second) == (2, "")


@pytest.mark.engines
def test_rank_that_knows_of_a_mistake_alone(start: Start) -> None:
    """Rank 1's layout does not fit the number of ranks, which rank 0 cannot know by itself."""
    [port] = free_ports(1)
    processes = [rank(start, 0, 2, port), rank(start, 1, 2, port, "train.dp=2")]
    code, message = end(processes[0])
    assert code == 2
    assert "rank 1: demo-cpu:\n" in message
    assert "= 4 ranks, but the launcher started 2" in message
    assert end(processes[1]) == (2, "")


@pytest.mark.engines
def test_rank_that_does_not_come(start: Start) -> None:
    [port] = free_ports(1)
    code, message = end(rank(start, 0, 2, port, HYBRID3D_RENDEZVOUS_SECONDS="2"))
    assert code == 1
    expected = (
        f"demo-cpu: 1 of 2 ranks have not arrived at 127.0.0.1:{port} within 2 s (HYBRID3D_RENDEZVOUS_SECONDS): rank 1."
    )
    assert message.startswith(expected)
    assert "NCCL_SOCKET_IFNAME" in message
    assert len(message.splitlines()) == 1


@pytest.mark.engines
def test_nobody_answers(start: Start) -> None:
    """The first rank of each node reports it, the others print nothing."""
    [port] = free_ports(1)
    patience = {"HYBRID3D_RENDEZVOUS_SECONDS": "2"}
    processes = [
        rank(start, number, 3, port, "train.tp=3", LOCAL_RANK=str(number - 1), **patience) for number in (1, 2)
    ]
    code, message = end(processes[0])
    assert code == 1
    assert f"rank 1: no answer from 127.0.0.1:{port} within 2 s" in message
    assert len(message.splitlines()) == 1
    assert end(processes[1]) == (1, "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"MASTER_PORT": "29500x"}, "MASTER_PORT=29500x is not a port"),
    ],
)
def test_address_that_is_none(more: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **more}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(rendezvous.RendezvousError, match=said) as raised:
        rendezvous.meet({})
    assert raised.value.code == 2


def node(start: Start, number: int, port: int, *settings: str, **more: str) -> subprocess.Popen[str]:
    """Start one of two nodes of the demo with its torchrun script."""
    variables = {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1"}
    return start(["bash", "launch/torchrun/demo-cpu.sh", *settings], **variables, MASTER_PORT=str(port), **more)


@pytest.mark.engines
def test_restart_finds_nothing_of_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store across a restart: ranks of the second start must not find keys of the first."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**ours, "TORCHELASTIC_USE_AGENT_STORE": "True", rendezvous.RENDEZVOUS_SECONDS: "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", launch_environment.ADDRESS):  # which `meet` sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    rendezvous.meet({}).set("left", "behind")
    assert rendezvous.meet({}).check(["left"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not rendezvous.meet({}).check(["left"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(rendezvous.RendezvousError, match="1 of 2 ranks have not arrived"):
        rendezvous.meet({})


@pytest.mark.engines
def test_node_that_does_not_come(start: Start) -> None:
    """Reported before torchrun starts, which would fail without a clear message."""
    [port] = free_ports(1)
    code, message = end(node(start, 0, port, HYBRID3D_RENDEZVOUS_SECONDS="2"))
    assert code == 1
    assert message.startswith(f"1 of 2 nodes have not arrived at 127.0.0.1:{port} within 2 s")
    assert len(message.splitlines()) == 1


@pytest.mark.engines
def test_nodes_that_differ(start: Start) -> None:
    [port] = free_ports(1)
    processes = [node(start, 0, port), node(start, 1, port, "run.seed=7")]
    code, message = end(processes[0])
    assert code == 2
    assert message.splitlines()[1:] == ["  run.seed: 1 on node 0, 7 on node 1"]
    assert end(processes[1]) == (2, "")


def test_node_that_is_not_told_who_it_is(start: Start) -> None:
    code, message = end(start(["bash", "launch/torchrun/demo-cpu.sh"], NNODES="3"))
    assert (code, len(message.splitlines())) == (2, 1)
    assert "runs on 3 nodes: set NODE_RANK (0 to 2) and MASTER_ADDR" in message


@pytest.mark.parametrize(
    ("gpus", "here", "settings", "said"),
    [
        (4, 8, [], "8 ranks were started on .*, but only 4 GPUs are visible to them"),
        (1, 8, [], "neither --gpus-per-task"),
        (8, 4, [], "4 ranks were started on .* expects 8 per node: start that many, or set machine.gpus_per_node=4"),
    ],
)
def test_gpus_of_a_node(gpus: int, here: int, settings: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(DEMO, ["train.dp=4", *settings])
    monkeypatch.setenv("WORLD_SIZE", str(recipe.world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(RecipeError, match=said):
        launcher.check_node(recipe)


@pytest.mark.parametrize(("gpus", "here", "dp"), [(0, 8, 4), (8, 8, 4), (8, 4, 1), (8, 4, 3)])
def test_gpus_of_a_node_suffice(gpus: int, here: int, dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU; a full node; a recipe smaller than a node; the last node of 12 ranks."""
    recipe = load_recipe(DEMO, [f"train.dp={dp}"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    launcher.check_node(recipe)


def test_srun_speaks_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that srun sets for the last task of 2 + 2 + 1, and for a shell on a node, which is not a rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that they are forgotten afterwards
        monkeypatch.delenv(name)
    step = {"PROCID": "4", "LOCALID": "0", "NODEID": "2", "NTASKS": "5", "STEP_ID": "0"}
    step |= {"STEP_NUM_TASKS": "1", "STEP_TASKS_PER_NODE": "1"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert not launch_environment.under_launcher()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "5")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2),1")
    assert launch_environment.under_launcher()
    launch_environment.adopt_slurm()
    assert (
        launch_environment.rank(),
        launch_environment.world_size(),
        launch_environment.local_rank(),
        launch_environment.local_world_size(),
    ) == (
        4,
        5,
        0,
        1,
    )


def test_ray_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"--ray needs the package ray: pip install 'hybrid3d\[ray\]'"):
        check_ray(load_recipe(ROOT / "recipes/demo-cpu.yaml"))


def test_ranks_are_started_again_as_often_as_the_recipe_says(tmp_path: Path) -> None:
    """But not after what all of them agree on, which would be the same again."""
    folder, printed = RunFolder(tmp_path / "run"), StringIO()
    folder.logs.mkdir(parents=True)
    killed, console = {1: -int(signal.SIGKILL)}, Console(file=printed, width=200)
    outcomes: list[dict[int, int]] = [killed, killed, {}]
    assert supervise(lambda: outcomes.pop(0), folder, console, max_restarts=2) == 0
    assert printed.getvalue().count("rank 1 failed: killed by SIGKILL") == 2
    assert "starting all ranks again, from the last checkpoint (2 of run.max_restarts=2)" in printed.getvalue()
    outcomes = [killed, killed]
    assert supervise(lambda: outcomes.pop(0), folder, console, max_restarts=1) == 1
    reason = {"rank": 0, "time": 0.0, "peer": False, "on_all_ranks": True, "reason": "no rewards", "kind": "error"}
    folder.failure_path(0).write_text(json.dumps(reason))
    outcomes = [killed]
    assert supervise(lambda: outcomes.pop(0), folder, console, max_restarts=5) == 1
