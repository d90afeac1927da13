"""A real SLURM on this machine alone: munged, one slurmctld and several slurmd, from Debian's packages."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun")
PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
DAEMONS = ("/usr/sbin", "/sbin")  # where Debian has them, which need not be in a user's path
INSTALL_SECONDS = 240

CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=5
MinJobAge=3600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"


def why_not() -> str | None:
    """Why no cluster can be started here; None where it can. Installs Debian's packages where it may."""
    path = os.pathsep.join([os.environ["PATH"], *DAEMONS])
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if not missing:
        return None if os.geteuid() == 0 else "slurmd starts jobs as root only"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"{', '.join(missing)} missing: apt-get install {' '.join(PACKAGES)} (as root)"
    try:
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            _apt(command)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return f"{', '.join(missing)} missing, and {error}"
    return None


def _apt(arguments: Sequence[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    subprocess.run(
        ["apt-get", "-qq", *arguments], check=True, timeout=INSTALL_SECONDS, env=environment, capture_output=True
    )


class Cluster:
    """Nodes `n1`, `n2`... of `cpus` each, all of them this machine; as a context, ended by pid.

    Attributes:
        environment: of its users and daemons: what was given, and where the cluster is.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], nodes: int = 2, cpus: int = 2):
        self.folder = folder
        self.environment = {**_outside_slurm(environment), "SLURM_CONF": str(folder / "slurm.conf")}
        self._names = [f"n{number + 1}" for number in range(nodes)]
        self._cpus = cpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._open = ExitStack()

    def __enter__(self) -> Cluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._open.callback(self._end)
        try:
            self._begin()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def submit(self, script: str, *arguments: str, options: Sequence[str] = (), cwd: Path) -> int:
        """`sbatch OPTIONS SCRIPT ARGUMENTS` in `cwd`; the job's number."""
        return int(self.command("sbatch", "--parsable", *options, script, *arguments, cwd=cwd))

    def command(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}\n{self.log()}"
        return done.stdout.strip()

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode..."""
        words = self.command("scontrol", "--oneliner", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, number: int, states: Sequence[str], seconds: float) -> dict[str, str]:
        """What the job is like once it is in one of `states`."""
        end = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < end, f"after {seconds} s job {number} is {job}\n{self.log()}"
            time.sleep(0.5)
        return job

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, name: str) -> None:
        """As if its power were cut: the daemon and everything that runs in its jobs, and their shared memory."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        segments = {segment for pid in _processes(self.folder, name) for segment in _shared_memory(pid)}
        self._kill_all(name)
        for segment in segments:
            segment.unlink(missing_ok=True)

    def log(self) -> str:
        """The ends of the daemons' logs, for messages."""
        tails = (f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))
        return "\n".join(tails)

    def _begin(self) -> None:
        self._write_configuration()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        options = [f"--{what}={self.folder}/munge.{what}" for what in ("socket", "pid-file", "log-file", "seed-file")]
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._wait_for((self.folder / "munge.socket").exists)
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for name in self._names:
            self.start_node(name)
        self._wait_for(lambda: self._idle() == len(self._names))

    def _write_configuration(self) -> None:
        (self.folder / "state").mkdir(exist_ok=True)
        host = socket.gethostname().partition(".")[0]
        ports = free_ports(len(self._names) + 1)
        lines = [
            NODE.format(name=name, host=host, port=port, cpus=self._cpus)
            for name, port in zip(self._names, ports[1:], strict=True)
        ]
        text = CONF.format(host=host, control_port=ports[0], folder=self.folder, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)

    def _idle(self) -> int:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout.split().count("idle")

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def _wait_for(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            dead = {name: process.returncode for name, process in self._daemons.items() if process.poll() is not None}
            if dead or time.monotonic() > end:
                raise RuntimeError(f"the cluster does not start; ended: {dead}\n{self.log()}")
            time.sleep(0.2)

    def _end(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        self._kill_all()

    def _kill_all(self, node: str | None = None) -> None:
        """Until none is left: a process may start another while we look."""
        while pids := _processes(self.folder, node):
            for pid in pids:
                with suppress(ProcessLookupError):  # ended by itself, which is as good
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _outside_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with the daemons' folders in its path, and nothing of a SLURM that we may be in."""
    kept = {key: value for key, value in environment.items() if not key.startswith(("SLURM", "SBATCH"))}
    return {**kept, "PATH": os.pathsep.join([kept["PATH"], *DAEMONS])}


def _processes(folder: Path, node: str | None = None) -> list[int]:
    """What runs in the cluster's jobs, by its environment, and SLURM's own, by the log that it writes to."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = set((process / "environ").read_bytes().decode(errors="replace").split("\0"))
            links = list((process / "fd").iterdir())
        except OSError:  # ended meanwhile
            continue
        opened = set()
        for link in links:
            with suppress(OSError):  # closed meanwhile
                opened.add(os.readlink(link))
        in_job = f"SLURM_CONF={folder}/slurm.conf" in variables and "SLURM_JOB_ID" in str(variables)
        on_node = node is None or f"SLURMD_NODENAME={node}" in variables
        logs = {f"{folder}/{node}.log"} if node else {str(path) for path in folder.glob("*.log")}
        if (in_job and on_node) or logs & opened:
            found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def _shared_memory(pid: int) -> set[Path]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # ended meanwhile
        return set()
    return {Path(match) for match in re.findall(r"/dev/shm/\S+", maps)}
