"""`hybrid3d doctor` in environments that are really broken: it names what is wrong, and its advice mends it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

import warm_python
from hybrid3d import cli
from hybrid3d.config import load_recipe
from hybrid3d.doctor import CANNOT_START, OK, SLOW, Context, Finding, answers, files, groups, network, resources
from hybrid3d.doctor import resources as devices
from hybrid3d.doctor.page import EXAMINATIONS, can_start, format_json, format_page
from hybrid3d.run.folder import RunFolder
from run_ranks import environment

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "demo-cpu.yaml"
DOCTOR = ["-m", "hybrid3d", "doctor"]
TWO_RANKS = ["train.pp=1", "rollout.tp=2"]

# Makes flock(2) fail with ENOLCK, as on a file system without locks, and runs Python with the other arguments
WITHOUT_LOCKS = """
import ctypes, errno, os, platform, struct, sys
number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.ENOLCK), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("=HBBI", *row) for row in rows)
buffer, libc = ctypes.create_string_buffer(code, len(code)), ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.c_char_p(struct.pack("HP", len(rows), ctypes.addressof(buffer))), 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def can_unshare(*options: str) -> bool:
    """Return whether this user may have namespaces of its own, in which a test can mount and rename."""
    try:
        return subprocess.run(["unshare", *options, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


namespaces = pytest.mark.skipif(not can_unshare("--mount", "--uts", "--net"), reason="needs root, for namespaces")


class Doctor:
    """Runs `hybrid3d doctor` in a folder, in an environment that a script of bash prepares."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __call__(
        self,
        *arguments: str,
        expect: int = 0,
        before: str = "",
        apart: str = "",
        python: tuple[str, ...] = (),
        has_engines: bool = False,
        **variables: str,
    ) -> list[dict[str, Any]]:
        """Return the findings; the command must end with the expected exit code.

        Args:
            before: commands of bash that come first, in the same process.
            apart: options of `unshare`: the namespaces that the commands have for themselves.
            python: arguments of Python that come before the command's.
            has_engines: fork its processes from servers that have imported both engines, and have their namespaces.
        """
        program = warm_python.executable() if has_engines else sys.executable
        command = shlex.join([program, *python, *DOCTOR, *arguments, "--json"])
        run = ["bash", "-ec", f"{before}\nexec {command}"]
        path = os.pathsep.join(filter(None, [variables.pop("PYTHONPATH", ""), str(ROOT / "src")]))
        given = {key: value for key, value in os.environ.items() if not key.startswith(("MASTER_", "GLOO_"))}
        done = subprocess.run(
            ["unshare", *apart.split(), *run] if apart else run,
            cwd=self._folder,
            env={**given, "PYTHONPATH": path, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        page = json.loads(done.stdout)
        assert page["can_start"] == (expect == 0)
        assert done.stderr == ""
        return page["findings"]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


def only(*subjects: str) -> list[str]:
    return [word for subject in subjects for word in ("--only", subject)]


def the_one(findings: list[dict[str, Any]], severity: str) -> dict[str, Any]:
    """Return the only finding that is not ok."""
    (found,) = [finding for finding in findings if finding["severity"] != OK]
    assert found["severity"] == severity
    return found


def install(folder: Path, name: str, version: str) -> None:
    """Write what pip writes about a package's version, so that it is found before the one that is really installed."""
    for old in folder.glob(f"{name.replace('-', '_')}-*"):
        shutil.rmtree(old)
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.processes
@pytest.mark.parametrize(("name", "severity"), [("transformers", CANNOT_START), ("rich", SLOW)])
def test_package_of_another_version(doctor: Doctor, tmp_path: Path, name: str, severity: str) -> None:
    install(tmp_path / "site", name, "4.0.0")
    expect = 1 if severity == CANNOT_START else 0
    findings = doctor(*only("packages"), expect=expect, PYTHONPATH=str(tmp_path / "site"))
    (found,) = (one for one in findings if f"{name} 4.0.0 is installed" in one["found"])
    assert found["severity"] == severity
    match = re.fullmatch(rf"(\S+) -m pip install --no-deps '?{name}([=<>].*?)'?", found["fix"])
    assert match is not None
    assert match[1] == sys.executable
    assert SpecifierSet(match[2]).contains(pinned(name))
    install(tmp_path / "site", name, pinned(name))
    the_rest = doctor(*only("packages"), PYTHONPATH=str(tmp_path / "site"))
    assert [one for one in the_rest if "is installed" in one["found"]] == []


def pinned(name: str) -> str:
    lock = (ROOT / "requirements" / "cpu.txt").read_text()
    match = re.search(rf"^{name}==(\S+)", lock, re.MULTILINE)
    assert match is not None
    return match[1]


@pytest.mark.processes
def test_open_files_limit_too_low_is_found_and_mended(doctor: Doctor) -> None:
    arguments = [str(RECIPE), *only("limits")]
    found = the_one(doctor(*arguments, before="ulimit -Sn 100", expect=1), CANNOT_START)
    assert found["found"].startswith("ulimit -n (open files) is 100")
    assert "ulimit -n" in found["fix"]
    doctor(*arguments, before=f"ulimit -Sn 100; {found['fix']}")
    few = the_one(doctor(*arguments, before="ulimit -Sn 800"), SLOW)
    assert few["fix"] == found["fix"]
    hard = the_one(doctor(*arguments, before="ulimit -n 100", expect=1), CANNOT_START)
    assert "limits.conf" in hard["fix"]


@pytest.mark.processes
@namespaces
def test_shared_memory_too_small_is_found_and_mended(doctor: Doctor) -> None:
    arguments, small = [str(RECIPE), *only("shared-memory")], "mount -t tmpfs -o size=64m none /dev/shm"
    found = the_one(doctor(*arguments, before=small, apart="--mount", expect=1), CANNOT_START)
    assert "64 MiB free of 64, 4 ranks need 512" in found["found"]
    assert "--shm-size=512m" in found["fix"]
    command = found["fix"].partition("without a container: ")[2].removesuffix(" (as root)")
    doctor(*arguments, before=f"{small}; {command}", apart="--mount")


@pytest.mark.processes
@namespaces
@pytest.mark.parametrize(
    ("mount", "why"),
    [
        ("mount -t tmpfs -o ro none runs", "Read-only file system"),
        (
            "mount -t tmpfs -o size=64k none runs; head -c 70k /dev/zero > runs/file 2> /dev/null || true",
            "No space left",
        ),
    ],
    ids=["read-only", "full"],
)
def test_run_folder_that_cannot_be_written(doctor: Doctor, tmp_path: Path, mount: str, why: str) -> None:
    (tmp_path / "runs").mkdir()
    arguments = [str(RECIPE), *only("run-folder")]
    found = the_one(doctor(*arguments, before=mount, apart="--mount", expect=1), CANNOT_START)
    assert str(tmp_path / "runs") in found["found"]
    assert why in found["found"]
    assert found["fix"].startswith("run.dir=FOLDER")
    doctor(*arguments, "run.dir=elsewhere", before=mount, apart="--mount")
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]  # nothing stays behind


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs seccomp")
def test_locks_that_fail(doctor: Doctor) -> None:
    arguments = [str(RECIPE), *only("run-folder")]
    found = the_one(doctor(*arguments, python=("-c", WITHOUT_LOCKS)), SLOW)
    assert "has no locks (No locks available)" in found["found"]
    assert "run.dir=" in found["fix"]
    doctor(*arguments)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("other", "severity", "found"),
    [
        ("print(100)\nprint('refused')", CANNOT_START, "another process reads 100 of"),
        ("raise OSError", CANNOT_START, "another process reads nothing of"),
        ("import sys\nprint(len(open(sys.argv[1]).read()))\nprint('taken')", SLOW, "keep another process out"),
    ],
)
def test_run_folder_check_reports_what_another_process_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, severity: str, found: str
) -> None:
    """What it does is replaced, because a file system that is not coherent cannot be made here."""
    monkeypatch.setattr(files, "OTHER", other)
    recipe = load_recipe(RECIPE, [f"run.dir={tmp_path}"])
    (finding,) = files.check_run_folder(Context(recipe))
    assert finding.severity == severity
    assert found in finding.found


@pytest.mark.processes
@namespaces
def test_host_name_that_does_not_resolve(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files\n")
    mounts = [f"mount --bind {tmp_path / name} /etc/{name}" for name in ("hosts", "nsswitch.conf") if exists(name)]
    broken = "; ".join([*mounts, "hostname no-such-host.invalid"])
    apart = {"before": broken, "apart": "--mount --uts"}
    found = the_one(doctor(str(RECIPE), *only("host"), **apart), SLOW)
    assert "'no-such-host.invalid' does not resolve" in found["found"]
    several = [str(RECIPE), *only("host"), "machine.gpus_per_node=2"]
    assert the_one(doctor(*several, **apart, expect=1), CANNOT_START)["fix"] == found["fix"]
    command = found["fix"].partition(" (as root)")[0].replace("ADDRESS", "192.0.2.7")
    elsewhere = {"before": f"{broken}; {command}", "apart": "--mount --uts"}
    assert (
        "which no interface of this machine has"
        in the_one(doctor(*several, **elsewhere, expect=1), CANNOT_START)["found"]
    )
    command = command.replace("192.0.2.7", "127.0.0.1")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    assert (
        "127.0.0.1"
        in doctor(str(RECIPE), *only("host"), before=f"{broken}; {command}", apart="--mount --uts")[0]["found"]
    )


def exists(name: str) -> bool:
    return Path("/etc", name).exists()


@pytest.mark.processes
@namespaces
def test_loopback_that_is_down(doctor: Doctor) -> None:
    findings = doctor(*only("host"), apart="--net", expect=1)
    found = the_one([one for one in findings if "127.0.0.1 (" in one["found"]], CANNOT_START)
    command = found["fix"].removesuffix(" (as root)")
    doctor(*only("host"), apart="--net", before=command)


@pytest.mark.processes
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_interface_that_does_not_exist(doctor: Doctor, variable: str) -> None:
    found = the_one(doctor(*only("interfaces"), expect=1, **{variable: "nosuch0"}), CANNOT_START)
    assert f"{variable}='nosuch0' selects no interface" in found["found"]
    assert f"unset {variable}" in found["fix"]
    one_there = found["fix"].rpartition(", ")[2].removeprefix("or set it to one of ").rpartition(" ")[2]
    assert one_there in dict(socket.if_nameindex()).values()
    doctor(*only("interfaces"), **{variable: "lo"})
    doctor(*only("interfaces"))


@pytest.mark.processes
def test_port_that_is_in_use(doctor: Doctor) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        found = the_one(doctor(*only("rendezvous"), expect=1, **where), CANNOT_START)
        assert f"port {port} of MASTER_PORT cannot be used here (Address already in use)" in found["found"]
    doctor(*only("rendezvous"), **where)


@pytest.mark.processes
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_fewer_than_ranks_are_found_and_mended(doctor: Doctor) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    arguments = [str(RECIPE), *only("cores"), *TWO_RANKS]
    found = the_one(doctor(*arguments, before=f"taskset -cp {first} $$ > /dev/null"), SLOW)
    assert found["found"].startswith(f"1 of {os.cpu_count()} cores may be used")
    assert "2 ranks take turns" in found["found"]
    assert "taskset -c" in found["fix"]
    assert doctor(*arguments, before=f"taskset -cp {first},{second} $$ > /dev/null")[0]["severity"] == OK


@pytest.mark.engines
@namespaces
def test_recipe_that_cannot_start_here(doctor: Doctor, demo: Path, tmp_path: Path) -> None:
    """Everything that is wrong is named at once, in three rounds of advice."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "demo").symlink_to(demo)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo-cpu").write_text("not a folder")
    arguments = [str(RECIPE), *only("start", "memory", "checkpoints"), "model.path=build/demo/base"]
    findings = doctor(*arguments, "model.path=nothing", "rollout.kv_cache_gib=4000", expect=1, has_engines=True)
    assert {finding["severity"] for finding in findings} == {CANNOT_START}
    start = "\n".join(finding["found"] for finding in findings if finding["subject"] == "start")
    assert "exceed the 0 that this machine can start" in start
    assert "nothing" in start
    assert "demo-cpu is not a folder" in start
    (memory,) = [finding for finding in findings if finding["subject"] == "memory"]
    assert "rollout.kv_cache_gib" in memory["fix"]
    (tmp_path / "runs" / "demo-cpu").unlink()

    small = {"before": "mount -t tmpfs -o size=1m none runs", "apart": "--mount"}
    checkpoints = [str(RECIPE), *only("checkpoints"), "model.path=build/demo/base"]
    found = the_one(doctor(*checkpoints, **small, expect=1), CANNOT_START)
    assert found["subject"] == "checkpoints"
    assert "1.0 MB are free for checkpoints of about" in found["found"]
    assert "run.dir=FOLDER" in found["fix"]
    findings = doctor(*arguments, "run.dir=elsewhere", **small)
    assert {finding["severity"] for finding in findings} == {OK}
    assert {finding["subject"] for finding in findings} == {"start", "memory", "checkpoints"}


@pytest.mark.engines
@pytest.mark.slow
@namespaces
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc, to limit the rate of an interface")
def test_groups_are_measured_against_what_plan_assumes(doctor: Doctor) -> None:
    """Over an interface that carries 400 Mb/s, each of two ranks sends half of them, whatever the operation."""
    limited = "ip link set lo up; tc qdisc add dev lo root tbf rate 400mbit burst 256kb latency 200ms"
    arguments = [str(RECIPE), *only("groups"), *TWO_RANKS, "machine.nvlink_gb_per_s=25"]
    findings = doctor(*arguments, before=limited, apart="--net")
    found = {finding["found"].split(",")[0]: finding for finding in findings}
    assert set(found) == {"tp", "sync", "copies of one rank"}
    for name in ("tp", "sync"):
        assert 0.5 * 25e6 < found[name]["numbers"]["measured"] < 1.15 * 25e6
        assert found[name]["numbers"]["assumed"] == 25e9
    assert (found["tp"]["severity"], found["sync"]["severity"]) == (OK, SLOW)
    setting, _, rate = found["sync"]["fix"].partition("=")
    assert setting == "machine.nvlink_gb_per_s"
    assert float(rate) == pytest.approx(found["sync"]["numbers"]["measured"] / 1e9, rel=0.01)


@pytest.mark.engines
@pytest.mark.slow
def test_nodes_of_a_launcher_are_examined_by_their_first_ranks(tmp_path: Path) -> None:
    """Groups are not measured where the nodes cannot start a run, so that the page is printed all the same."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", *DOCTOR, str(RECIPE), *TWO_RANKS, "--json"]
    command += only("limits", "interfaces", "groups")
    variables = environment("doctor", GLOO_SOCKET_IFNAME="nosuch0", TMPDIR=str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    page = json.loads(done.stdout)
    assert page["can_start"] is False
    host = socket.gethostname()
    found = {finding["subject"]: finding for finding in page["findings"] if finding["severity"] != OK}
    assert list(found) == [f"{host}: interfaces"]
    assert "selects no interface" in found[f"{host}: interfaces"]["found"]
    assert any("2 ranks need" in finding["found"] for finding in page["findings"])
    assert len([finding for finding in page["findings"] if finding["subject"] == f"{host}: limits"]) == 1
    assert not list(tmp_path.glob("hybrid3d-doctor-*"))


def measurement(name: str, link: str, gb_per_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "operation": "x",
        "ranks": 8,
        "link": link,
        "bandwidth": gb_per_s * 1e9,
        "latency": 1e-5,
        "nbytes": 1,
    }


@pytest.mark.parametrize(
    ("name", "gb_per_s", "on_gpus", "severity", "fix"),
    [
        ("sync", 41, True, SLOW, "machine.network_gb_per_s=41"),
        ("sync", 42, True, OK, ""),
        ("sync", 59, True, OK, ""),
        ("sync", 61, True, OK, "machine.network_gb_per_s=61"),
        ("dp", 24, True, SLOW, "nvidia-smi topo -m shows the connections, NCCL_DEBUG=INFO which of them NCCL uses"),
        ("dp", 26, True, OK, ""),
        ("dp", 1, False, OK, ""),
        ("sync", 1, False, SLOW, "machine.network_gb_per_s=1"),
    ],
)
def test_measured_bandwidth_off_by_a_fifth_is_told(
    name: str, gb_per_s: float, on_gpus: bool, severity: str, fix: str
) -> None:
    recipe = load_recipe(RECIPE)  # its machine has 50 GB/s between nodes
    (found,) = groups.describe(recipe, [measurement(name, "network", gb_per_s)], on_gpus)
    assert (found.severity, found.fix) == (severity, fix)
    if name == "sync" and fix:
        setting = load_recipe(RECIPE, [fix])
        (found,) = groups.describe(setting, [measurement(name, "network", gb_per_s)], on_gpus)
        assert (found.severity, found.fix) == (OK, "")


NVIDIA_SMI = """#!/bin/sh
case "$1" in
nvlink) echo "GPU 0: NVIDIA H100 80GB HBM3"; echo "	 Link 0: 26.562 GB/s"; echo "	 Link 1: 26.562 GB/s";;
*) cat "$(dirname "$0")/rows";;
esac
"""
HEALTHY = "0, NVIDIA H100 80GB HBM3, 580.82.07, Enabled, 81559, 0, Not Active, Not Active, Not Active, Not Active"
HEALTHY += ", Not Active"


def gpu_findings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[str], machine: dict[str, Any], **variables: str
) -> list[Finding]:
    """Return what is found with an `nvidia-smi` that prints these rows, and a torch that answers this."""
    (folder / "rows").write_text("\n".join(rows) + "\n")
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    answers = {"machine": {"answer": {"cuda_error": "", **machine}}, "nccl": {"answer": "2.29.7"}}
    return list(devices.check_gpus(Context(load_recipe(RECIPE), answers, variables)))


SEEN = {"gpus": [{"name": "NVIDIA H100 80GB HBM3", "bytes": 85_000_000_000}], "cuda": "13.0"}
UNSEEN = {"gpus": [], "cuda": "13.0"}


@pytest.mark.parametrize(
    ("column", "value", "severity", "found", "fix"),
    [
        (3, "Disabled", SLOW, "persistence mode is off", "nvidia-smi -pm 1"),
        (5, "3", CANNOT_START, "3 ECC errors", "nvidia-smi -r -i 0"),
        (7, "Active", SLOW, "hw_thermal_slowdown", "cooling"),
        (10, "Active", SLOW, "sw_power_cap", "nvidia-smi -pl"),
        (6, "Active", SLOW, "(hw_slowdown)", "nvidia-smi -q"),
    ],
)
def test_gpu_that_is_not_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: int, value: str, severity: str, found: str, fix: str
) -> None:
    assert {one.severity for one in gpu_findings(tmp_path, monkeypatch, [HEALTHY], SEEN)} == {OK}
    row = HEALTHY.split(", ")
    row[column] = value
    (bad,) = [one for one in gpu_findings(tmp_path, monkeypatch, [", ".join(row)], SEEN) if one.severity != OK]
    assert bad.severity == severity
    assert found in bad.found
    assert fix in bad.fix


def test_gpus_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = gpu_findings(tmp_path, monkeypatch, [HEALTHY], UNSEEN, CUDA_VISIBLE_DEVICES="")
    assert (hidden[0].severity, hidden[0].fix) == (SLOW, "unset CUDA_VISIBLE_DEVICES")
    on_cpu = {"gpus": [], "cuda": "None"}
    assert "this build of torch is for CPUs" in gpu_findings(tmp_path, monkeypatch, [HEALTHY], on_cpu)[0].found
    old = {**UNSEEN, "cuda_error": "The NVIDIA driver on your system is too old (found version 12020)."}
    found = gpu_findings(tmp_path, monkeypatch, [HEALTHY], old)[0]
    assert found.severity == CANNOT_START
    assert "too old (found version 12020)" in found.found
    assert "a driver for CUDA 13.0" in found.fix
    small = {**SEEN, "gpus": [{"name": "NVIDIA L4", "bytes": 24_000_000_000}]}
    assert gpu_findings(tmp_path, monkeypatch, [HEALTHY], small)[1].fix == "machine.memory_gb=24"
    two = gpu_findings(tmp_path, monkeypatch, [HEALTHY, HEALTHY.replace("0,", "1,", 1)], SEEN)
    assert two[-1].found == "NVLink: 1 links of a GPU, 27 GB/s together"


def test_gpus_that_nvidia_smi_does_not_tell_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, silent = gpu_findings(tmp_path, monkeypatch, [], SEEN)
    assert (found.severity, silent.severity) == (OK, SLOW)
    assert "ECC errors, clocks, persistence mode and NVLink are not checked" in silent.found
    assert silent.fix.startswith("nvidia-smi --query-gpu=index,")
    assert [one.severity for one in gpu_findings(tmp_path, monkeypatch, [], UNSEEN)] == [OK]


@pytest.mark.parametrize("name", ["a..b", "a" * 70])
def test_host_that_no_name_service_takes_does_not_resolve(name: str) -> None:
    (found,) = network.check_rendezvous(Context(None, {}, {"MASTER_ADDR": name}))
    assert found.severity == CANNOT_START
    assert f"MASTER_ADDR={name!r} does not resolve (" in found.found


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1", ["eth1"]),
        ("^lo,docker", ["eth0", "eth1", "ib0"]),
        ("ib,eth1", ["eth1", "ib0"]),
        ("^=eth0", ["lo", "eth1", "docker0", "ib0"]),
    ],
)
def test_nccl_interface_selection_follows_its_documentation(text: str, selected: list[str]) -> None:
    """The rules of NCCL_SOCKET_IFNAME in NCCL's documentation."""
    assert network._nccl(text, ["lo", "eth0", "eth1", "docker0", "ib0"]) == selected


def test_limits_are_those_of_the_launch_scripts() -> None:
    script = (ROOT / "launch" / "prepare-node.sh").read_text()
    numbers = re.findall(r"needed=\$\(\((?:(\d+) \+ )?(\d+) \* (?:ranks|world)\)\)", script)
    assert numbers == [
        ("", str(resources.SHARED_MIB_PER_RANK)),
        (str(resources.FILES), str(resources.FILES_PER_RANK)),
    ]


def test_checkpoints_that_stay(tmp_path: Path) -> None:
    """At the same time there are those that `run.keep_last` keeps, and the one that is being written."""
    run, folder = load_recipe(RECIPE).run, RunFolder(tmp_path)
    counts = {
        (steps, every, keep): files._new_checkpoints(
            replace(run, steps=steps, checkpoint_every=every, keep_last=keep), folder
        )
        for steps, every, keep in [(40, 20, 0), (50, 20, 0), (40, 0, 0), (1000, 10, 0), (1000, 10, 2), (10, 10, 2)]
    }
    assert list(counts.values()) == [2, 3, 1, 100, 3, 1]
    (tmp_path / "checkpoints" / "step-000020").mkdir(parents=True)
    assert files._new_checkpoints(replace(run, steps=1000, checkpoint_every=10, keep_last=2), folder) == 2


@pytest.mark.engines
@pytest.mark.parametrize("critic", [0, 1])
def test_checkpoint_bytes_are_of_what_is_trained(critic: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Of adapters by PEFT's count; a critic is whole. An element has its moments, and its weight twice."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint("qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = sum(p.numel() for p in model.parameters())
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    adapters, _ = adapted.get_nb_trainable_parameters()
    algorithm = ["algorithm.name=ppo"] if critic else []
    for lora, policy in ((["lora.rank=4"], adapters), ([], whole)):
        recipe = load_recipe(RECIPE, [f"model.path={folder}", "model.dtype=float32", *lora, *algorithm])
        assert answers._needs(recipe)["checkpoint_bytes"] == (policy + critic * whole) * 16


SUBJECTS = [
    ("limits", (Finding("enough", OK), Finding("little [bold]", SLOW, "ulimit -n 7"))),
    ("rendezvous", ()),
]


def test_page_has_every_finding_and_the_verdict() -> None:
    text = [line for line, _ in format_page(None, SUBJECTS, None)]
    assert text == [
        "limits",
        "  ok            enough",
        "  slow          little [bold]",
        "                -> ulimit -n 7",
        "",
        "a run can start here: 1 ok, 1 slow, 0 cannot start",
    ]
    assert can_start(SUBJECTS)
    bad = [*SUBJECTS, ("host", (Finding("no name\nat all", CANNOT_START),))]
    assert not can_start(bad)
    lines = list(format_page(load_recipe(RECIPE), bad, 40))
    assert lines[-1][0] == "demo-cpu cannot start here: 1 ok, 1 slow, 1 cannot start"
    assert ("                at all", "bold red") in lines
    page = json.loads(format_json(None, bad))
    assert page["can_start"] is False
    assert page["findings"][1] == {
        "subject": "limits",
        "found": "little [bold]",
        "severity": "slow",
        "fix": "ulimit -n 7",
        "numbers": {},
    }


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["doctor", "nothing.yaml"], "nothing.yaml"),
        (["doctor", "--only", "nvlink"], "--only nvlink: there is no such check; there are devices, packages"),
        (["doctor", str(RECIPE), "train.tp=x"], "train.tp"),
        (["doctor", "train.tp=2"], "settings need the recipe"),
        (["doctor", str(RECIPE), "--json", "out.json"], "expected one recipe"),
    ):
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_recipe_may_follow_json(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--json", str(RECIPE), "name=other"], [str(RECIPE), "--json", "name=other"]):
        assert cli.main(["doctor", *only("cores"), *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["recipe"] == "other"


def test_page_of_the_documentation_has_every_subject() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    _, _, table = page.partition("## What is examined")
    named = re.findall(r"^\| `([\w-]+)` \|", table.partition("\n## ")[0], re.MULTILINE)
    assert named == [examination.subject for examination in EXAMINATIONS]
