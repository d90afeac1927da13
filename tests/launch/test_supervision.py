"""How commands and ranks end: by a signal at any moment, with a broken console, without a network; and who is kept."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import warm_python
from commands import ROOT, demo_folder, read_events, read_rows
from hybrid3d import ledger
from hybrid3d.config import load_recipe
from hybrid3d.launch import rank_host, run_secret
from hybrid3d.launch.local_ranks import run_ranks
from hybrid3d.launch.policies import STOPPED
from hybrid3d.launch.rank import _fail_training, _report_seen
from hybrid3d.launch.rendezvous import RendezvousError
from hybrid3d.launch_environment import State
from hybrid3d.ledger import TrainingAttempts, share
from hybrid3d.process import FAILURE, RESTART_COUNT
from hybrid3d.run import terminal
from hybrid3d.run.ends import read_end
from hybrid3d.run.folder import RunFolder
from live_runs import child_of, ranks_of, recorded, started, wait_for_rows, wait_until
from run_ranks import environment

pytestmark = pytest.mark.processes

SOON = 60.0  # seconds, on a busy machine
DEMO = str(ROOT / "recipes/demo-cpu.yaml")
FULL = Path("/dev/full")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hybrid3d", *arguments]


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal, as the kernel says it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_command_that_is_stopped_early_says_so(number: signal.Signals, delay: float, tmp_path: Path) -> None:
    """While it imports what it needs, long before there are ranks."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command("train", DEMO), cwd=tmp_path, env=environment(""), stdout=pipe, stderr=pipe)
    end = time.monotonic() + SOON
    while not catches(process.pid, signal.SIGTERM):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(delay)
    ended = process.poll() is not None  # there is no model here, which it says by itself
    process.send_signal(number)
    printed = process.communicate(timeout=SOON)[1].decode()
    if not ended:
        assert (process.returncode, printed) == (1, f"stopped by {number.name}\n")


def test_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As nohup starts a command."""
    script = "import os, signal\nfrom hybrid3d.cli import raised_signals\nwith raised_signals():\n"
    script += "    os.kill(os.getpid(), signal.SIGHUP)\nprint('went on')"
    done = subprocess.run(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "-", sys.executable, "-c", script],
        env=environment(""),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
def test_console_that_takes_nothing_is_given_up() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for file in (FULL.open("w"), os.fdopen(writing, "w")):
        console = terminal.plain_console(file=file)
        for _ in range(3):
            console.print("x" * 10_000)
        try:
            file.close()
        except OSError:
            assert file.closed


@pytest.mark.parametrize("event", [True, False])
def test_ranks_that_stand_are_printed_on_a_full_disk(event: bool, tmp_path: Path) -> None:
    folder, printed = RunFolder(tmp_path / "run"), StringIO()
    if event:
        folder.path.mkdir()
    _report_seen(folder, terminal.plain_console(file=printed), "stalled", "rank 3 does not move", {"ranks": [3]})
    assert printed.getvalue() == "rank 3 does not move\n"
    assert folder.events.exists() is event


def test_secret_that_was_just_replaced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS says ESTALE of a file that another machine has replaced."""
    said: list[Any] = [
        OSError(errno.ESTALE, "Stale file handle"),
        FileNotFoundError(errno.ENOENT, "none"),
        b"old",
        b"new",
    ]
    taken: list[bytes] = []

    def read(path: Path, must_be_private: bool) -> bytes:
        if isinstance(said[0], OSError):
            raise said.pop(0)
        return bytes(said.pop(0))

    monkeypatch.setattr(run_secret, "_read", read)
    monkeypatch.setattr(run_secret, "set_secret", taken.append)
    monkeypatch.setattr(run_secret, "POLL_SECONDS", 0.0)
    store = dist.HashStore()
    share(store, 0, "secret's digest", lambda: hashlib.sha256(b"new").hexdigest())
    run_secret.adopt_secret(load_recipe(DEMO), RunFolder(tmp_path), store, 1)
    assert taken == [b"new"]
    said[:] = [PermissionError(errno.EACCES, "Permission denied")]
    monkeypatch.setattr(run_secret, "CLOSE_SECONDS", -1.0)
    with pytest.raises(RendezvousError, match=r"secret cannot be read \(Permission denied\): do all nodes"):
        run_secret.adopt_secret(load_recipe(DEMO), RunFolder(tmp_path), store, 1)


@pytest.mark.parametrize("redirected", [">/dev/full", ">&-", "| head -c 1", ">&- 2>&-"])
def test_broken_console_does_not_change_how_a_command_ends(redirected: str, tmp_path: Path) -> None:
    # A command that prints pages, and needs no model: its exit code is kept in a file
    script = f"({sys.executable} -m hybrid3d --help; echo $? >code) {redirected}"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment(""), capture_output=True, text=True)
    assert (tmp_path / "code").read_text() == "0\n"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


RANK = """
import os, signal, sys, time
import torch.distributed as dist
folder, wanted = sys.argv[1], sys.argv[2]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
starts = len([name for name in os.listdir(folder) if name.startswith(f"start-{rank}-")])
open(f"{folder}/start-{rank}-{starts}", "w").write(os.environ["MASTER_ADDR"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
if wanted == "killed" and rank == 1 and starts < 2:
    os.kill(os.getpid(), signal.SIGKILL)
if wanted == "fails" and rank == 1:
    sys.exit(3)
if wanted == "fails":
    time.sleep(300)
store.set(f"here/{rank}", "")
store.wait([f"here/{other}" for other in range(world)])
"""


def test_ranks_on_this_machine_meet_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    for name in ("all", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    assert run_ranks([sys.executable, str(tmp_path / "rank.py"), str(tmp_path / "all"), "all"], 3) == {}
    assert {path.name: path.read_text() for path in (tmp_path / "all").iterdir()} == {
        f"start-{rank}-0": "127.0.0.1" for rank in range(3)
    }
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(("most", "code"), [(2, 0), (1, -signal.SIGKILL), (0, -signal.SIGKILL)])
def test_rank_that_others_can_do_without_is_started_again(most: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    found = run_ranks([sys.executable, str(tmp_path / "rank.py"), str(tmp_path), "killed"], 2, {1: most})
    assert (found[1] if code else found) == (code or {})
    assert len(list(tmp_path.glob("start-1-*"))) == most + 1


def test_rank_that_fails_by_itself_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    begin = time.monotonic()
    found = run_ranks([sys.executable, str(tmp_path / "rank.py"), str(tmp_path), "fails"], 3, {1: 5})
    assert next(iter(found)) == 1  # the first
    assert found == {1: 3, 0: -signal.SIGTERM, 2: -signal.SIGTERM}
    assert time.monotonic() - begin < SOON


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")
def test_machine_without_loopback_is_told_at_once() -> None:
    """In a namespace whose loopback interface is down."""
    script = "from hybrid3d.launch.local_ranks import run_ranks\nfrom hybrid3d.errors import UserMistake\n"
    script += "try:\n    run_ranks(['true'], 2)\nexcept UserMistake as error:\n    print(error)"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", script],
        env=environment(""),
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("no namespaces can be made here")
    assert done.stdout.startswith("no connection to 127.0.0.1 of this machine (Network is unreachable)")
    assert done.stdout.endswith("ip link set lo up (as root)\n")
    assert done.stderr == ""


CHILD = "import os, signal, sys; os.write(1, {state!r}); os.kill(os.getpid(), signal.SIGSTOP)"


def test_stopped_child_does_not_outlast_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hear that the run has ended, and has never been ready, for which it would have ten minutes."""
    ended = threading.Event()

    def start(variables: dict[str, str], stdout: int) -> subprocess.Popen[bytes]:
        code = CHILD.format(state=State.CONNECTED.value)
        return subprocess.Popen([sys.executable, "-c", code], stdout=stdout)

    monkeypatch.setattr(rank_host.RunEnd, "wait", lambda self: ended.wait(SOON))
    monkeypatch.setattr(rank_host, "_start", start)
    monkeypatch.setattr(rank_host, "EXIT_SECONDS", 2.0)
    threading.Timer(4.0, ended.set).start()
    begin, host, run_end = time.monotonic(), rank_host.RankHost(tells=True), rank_host.RunEnd()
    run_end.begin()
    host.start()
    found = host.wait(lambda states: run_end.has_come)
    assert (found.code, found.states) == (STOPPED, State.CONNECTED.value)
    assert 4.0 < time.monotonic() - begin < SOON


def test_child_that_tells_nothing_is_ended_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that trains, when another one is lost; until then it may be silent, and may end by itself after it."""
    monkeypatch.setattr(rank_host, "EXIT_SECONDS", 2.0)
    host = rank_host.RankHost(tells=False)
    for script, code in (("sleep 600", STOPPED), ("sleep 1; exit 3", 3)):
        monkeypatch.setattr(
            rank_host, "_start", lambda variables, stdout, script=script: subprocess.Popen(["sh", "-c", script])
        )
        host.start()
        assert host.wait(lambda states: True, poll_seconds=0.1).code == code


BEATS = """
import os, time
os.write(1, {ready!r})
for beat in range(8):
    os.write(1, {alive!r})
    time.sleep(1)
os._exit(7)
"""
HOST = """
import subprocess, sys
from hybrid3d.launch import rank_host
rank_host._start = lambda variables, stdout: subprocess.Popen([sys.executable, "-c", {beats!r}], stdout=stdout)
host = rank_host.RankHost(tells=True)
host.start()
print(host._child.pid, flush=True)
print(host.wait(lambda states: False).code)
"""


def test_child_that_was_suspended_with_its_host_is_not_silent() -> None:
    """As in a terminal, or on a laptop that is closed: for longer than a child may be silent."""
    beats = BEATS.format(ready=State.READY.value, alive=State.ALIVE.value)
    variables = environment("", HYBRID3D_HEARTBEAT_SECONDS="6")
    command = [sys.executable, "-c", HOST.format(beats=beats)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as host:
        pids = [host.pid, int(host.stdout.readline())]
        time.sleep(1)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(9 if number == signal.SIGSTOP else 0)
        assert host.communicate(timeout=SOON)[0] == "7\n"


def test_failure_of_any_text_reaches_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a path whose bytes are no text, and with half of a character: both can be in an error's message."""
    told = list[str]()

    def start(variables: dict[str, str], stdout: int) -> subprocess.Popen[bytes]:
        told.append(variables[FAILURE])
        return subprocess.Popen(["true"], env=os.environ | variables, stdout=stdout)

    monkeypatch.setattr(rank_host, "_start", start)
    host = rank_host.RankHost(tells=True)
    host.start("no \udcff, \ud800\0 é")
    host.wait(lambda states: False)
    assert told == ["no \\udcff, \\ud800 é"]


def test_child_without_its_parent_ends() -> None:
    """The parent has died while the child was importing, so that the kernel was not yet asked to kill it with it."""
    script = "import time\nfrom hybrid3d.process import this_process\nthis_process()\ntime.sleep(600)"
    variables = environment("") | {RESTART_COUNT: "0", FAILURE: ""}
    with subprocess.Popen([sys.executable, "-c", script], env=variables, stdout=subprocess.PIPE) as process:
        process.stdout.close()
        try:
            assert process.wait(SOON) == -signal.SIGKILL
        finally:
            process.kill()


RUN = [
    DEMO,
    *("model.path=build/demo/base", "model.dtype=bfloat16", "guard.initial_mismatch=ignore", "train.tp=1"),
    *("train.pp=1", "rollout.tp=1", "roles.generation.ranks=2", "algorithm.prompts_per_step=8", "optimizer.lr=1e-5"),
    *("run.eval_every=99", "machine.gpus_per_node=4"),
]


def parent_of(run: Path, rank: int) -> int:
    (found,) = set(ranks_of(run, rank)) - set(ranks_of(run, rank, children=True))
    return found


def losses(run: Path, kind: str) -> list[list[int]]:
    return [event["ranks"] for event in read_events(run) if event["event"] == kind]


def test_hang_fails_only_the_start_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks watch the only one that trains, and one of them may report it when the next start has begun."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, folder = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), RunFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    starts = TrainingAttempts(store, 2)
    ledger.forget_beat(store, 0)  # by its parent, after the report of another rank
    starts.decide(0, again=True)
    _fail_training(folder, store, 0, "it has not answered", "its last beat")
    assert (starts.has_failed(1), read_end(folder, 0)) == (False, None)
    ledger.tell_beat(store, 0, "another beat")
    _fail_training(folder, store, 0, "it has not answered", "another beat")
    end = read_end(folder, 0)
    assert end is not None
    assert (starts.has_failed(1), end.reason) == (True, "it has not answered")


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_training_goes_on_while_a_generating_rank_comes_back(demo: Path, tmp_path: Path) -> None:
    """Its parent starts it again, whatever its recipe's file says by then."""
    work = demo_folder(tmp_path, demo)
    run, recipe = work / "runs/killed", work / "edited.yaml"
    shutil.copy(RUN[0], recipe)
    settings = [str(recipe), *RUN[1:], "name=killed", "run.steps=99"]
    with started(work, settings, python=warm_python.executable()) as process:
        wait_for_rows(run, 2, process)
        recipe.write_text("rollout: {temperature: 0.5, ")
        victim = child_of(run, 1)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: losses(run, "engine_joined"), process)
        wait_for_rows(run, recorded(run) + 2, process)
    assert losses(run, "engine_lost") == losses(run, "engine_joined") == [[1]]
    assert [row["step"] for row in read_rows(run)] == list(range(recorded(run)))


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(900)
def test_training_survives_kill_of_a_generating_rank_s_parent(demo: Path, tmp_path: Path) -> None:
    work = demo_folder(tmp_path, demo)
    run = work / "runs/orphaned"
    with started(work, [*RUN, "name=orphaned", "run.steps=7"]) as process:
        wait_for_rows(run, 2, process)
        os.kill(parent_of(run, 1), signal.SIGKILL)
        assert process.wait(600) == 0
    assert losses(run, "engine_lost") == [[1]]
    assert len(read_rows(run)) == 8


@pytest.mark.slow  # the console that it gives up is tested alone, too
@pytest.mark.engines
@pytest.mark.timeout(900)
def test_training_goes_on_where_its_console_takes_nothing(demo: Path, tmp_path: Path) -> None:
    work = demo_folder(tmp_path, demo)
    settings = [*RUN, "roles.generation.ranks=null", "run.steps=2", "name=full"]
    with FULL.open("w") as full:
        done = subprocess.run(command("train", *settings), cwd=work, env=environment(""), stdout=full)
    assert done.returncode == 0
    assert len(read_rows(work / "runs/full")) == 3


# The store is asked without a pause: the thread is nearly always within it
PARENT_THAT_ENDS = """
import time
from datetime import timedelta
import torch.distributed as dist
from hybrid3d.launch import rank_host

server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
rank_host.BEAT_SECONDS = 0.0
rank_host.rendezvous.connect = lambda members: dist.TCPStore("127.0.0.1", server.port, None, False)
run_end = rank_host.RunEnd()
run_end.begin()
time.sleep(0.2)
run_end.stop()
"""


def test_parent_of_a_rank_ends_while_the_store_is_asked() -> None:
    """A thread that returned from the store while the interpreter shuts down would abort the process: SIGABRT."""
    done = subprocess.run([sys.executable, "-c", PARENT_THAT_ENDS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
