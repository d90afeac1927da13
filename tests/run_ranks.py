"""Runs a job of `tests/jobs/` as several ranks under torchrun, and always cleans up after it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import warm_python
from hybrid3d.process import is_resource_tracker

ROOT = Path(__file__).resolve().parent.parent
MARK = "HYBRID3D_TEST_RUN"  # in the environment of every process that a test starts, however deep
SHARED_MEMORY = Path("/dev/shm")
KILL_SECONDS = 7.0
TRACKER_SECONDS = 4.0  # within which a resource tracker of multiprocessing exits by itself
TAIL = 60  # lines of output in a failure's message


class RanksFailed(AssertionError):
    """Raised if a job fails or hangs; the message ends with the output of the rank that failed first."""


def run_ranks(job: Path, ranks: int, arguments: list[str], timeout: float) -> None:
    """Run `job` with `arguments` as `ranks` processes over gloo, and kill all of its processes afterwards.

    Raises:
        RanksFailed: a rank failed, or the job ran longer than `timeout` seconds.
    """
    mark = uuid.uuid4().hex
    run = f"hybrid3d-{mark[:12]}"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        logs = Path(folder)
        command = [warm_python.executable(), "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command += ["--log-dir", folder, "--redirects", "3", str(job), *arguments]
        with open(logs / "launcher.log", "wb") as log:
            variables = environment(mark, HYBRID3D_RUN=run)
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill_marked(mark)
                process.wait()
                for segment in SHARED_MEMORY.glob(f"*{run}*"):  # killed processes leave it
                    segment.unlink()
        if code != 0:
            what = f"was still running after {timeout} s" if code is None else f"failed with exit code {code}"
            raise RanksFailed(f"{Path(job).name} {what}\n{_first_failure(logs)}")


def environment(mark: str, **more: str) -> dict[str, str]:
    """Return the environment for a run: the package from `src`, one thread per rank, and no downloads."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src")]))
    ours = {MARK: mark, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **ours, **more}


def marked(mark: str) -> dict[int, dict[str, str]]:
    """Return the environment of each live process of a run by pid; ranks have their own sessions."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            raw = (folder / "environ").read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
        entries = dict(item.split("=", 1) for item in raw.decode(errors="replace").split("\0") if "=" in item)
        if entries.get(MARK) == mark:  # a zombie's environment is empty
            found[int(folder.name)] = entries
    return found


def kill_marked(mark: str, tracker_seconds: float = TRACKER_SECONDS) -> None:
    """Kill all processes of a run, and wait until they have exited.

    Resource trackers of multiprocessing get time to remove the shared memory of those that are killed.
    """
    start = time.monotonic()
    while pids := marked(mark):
        elapsed = time.monotonic() - start
        if elapsed > KILL_SECONDS:
            raise RuntimeError(f"processes that SIGKILL does not end: {sorted(pids)}")
        trackers = {pid for pid in pids if is_resource_tracker(pid)}
        for pid in sorted(pids, key=lambda pid: pid not in trackers):  # those first, which act when others have exited
            if elapsed >= tracker_seconds or pid not in trackers:
                with suppress(ProcessLookupError):  # ended by itself, which is as good
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def left_in_memory(run: str, before: set[Path]) -> list[str]:
    """Return new shared memory segments, except those of other runs and of live processes on this machine.

    A segment without the name of a run may be of another test's process that has just ended: its resource tracker gets
    time to remove it.
    """
    end = time.monotonic() + TRACKER_SECONDS
    while True:
        new = set(SHARED_MEMORY.iterdir()) - before
        used = _mapped()
        new = {path for path in new - used if path.exists()}  # others may end meanwhile
        left = sorted(path.name for path in new if run in path.name or "hybrid3d-" not in path.name)
        if not left or any(run in name for name in left) or time.monotonic() > end:
            return left
        time.sleep(0.05)


def _mapped() -> set[Path]:
    """Return the shared memory segments that live processes have mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # ended meanwhile, or another user's
            found |= {Path(line.split(None, 5)[5]) for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return found


def _first_failure(logs: Path) -> str:
    """Return the end of the output of the rank whose traceback was complete first."""
    failed = []
    for out in logs.glob("*/attempt_0/*/stderr.log"):
        # `error.json` is there where the job's main function is decorated with torch's `record`
        error = out.with_name("error.json")
        if error.exists() or "Traceback (most recent call last)" in out.read_text(errors="replace"):
            failed.append(((error if error.exists() else out).stat().st_mtime_ns, out.parent))
    if not failed:
        return f"no rank raised an error; the launcher said:\n{_tail(logs / 'launcher.log')}"
    first = min(failed)[1]
    return f"rank {first.name} was the first:\n{_tail(first / 'stdout.log')}\n{_tail(first / 'stderr.log')}"


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL:])
