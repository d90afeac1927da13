"""Tests that background processes of rewards and environments are killed, however they detach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from hybrid3d import process
from hybrid3d.process import child_pids, engine_name, remove_shared_memory
from hybrid3d.run.ends import Ended, read_ends
from hybrid3d.run.folder import RunFolder
from hybrid3d.scoring.environments import EnvironmentRunner
from hybrid3d.scoring.pool_client import load_in_subprocess
from hybrid3d.scoring.scorer import FunctionScorer
from queries import score
from run_ranks import MARK, ROOT, SHARED_MEMORY, kill_marked, left_in_memory, marked

pytestmark = pytest.mark.processes

# Each leaves a process behind, and then does what its name says.
REWARDS = """
import os, signal, subprocess, sys, time

def child(answer):
    kind = answer.split()[0]
    sleep = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    if kind == "plain":
        subprocess.Popen(["sleep", "300"])
    elif kind == "session":
        subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    elif kind == "shell":
        subprocess.Popen("trap '' TERM HUP; (sleep 300; sleep 300) & sleep 300", shell=True)
    elif kind == "daemon":  # its parent is gone at once
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                os.closerange(0, 256)
                os.execv(sys.executable, [sys.executable, "-c", sleep])
            os._exit(0)
        time.sleep(0.2)

def returns(answer, reference, prompt):
    child(answer)
    return 1.0

def hangs(answer, reference, prompt):
    child(answer)
    time.sleep(300)

def raises(answer, reference, prompt):
    child(answer)
    raise ValueError("no")

def dies(answer, reference, prompt):
    child(answer)
    os._exit(3)

def kills_its_pool(answer, reference, prompt):
    child(answer)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(300)

def abandons(answer, reference, prompt):
    import subprocess
    subprocess.run("sleep 0.01 & exit 0", shell=True)
    return 1.0

def shares(answer, reference, prompt):
    from multiprocessing import shared_memory
    shared_memory.SharedMemory(create=True, size=100)
    return 1.0

def replies(turns, reference, prompt):
    child(turns[-1])
    time.sleep(300)

def surrogate(turns, reference, prompt):
    return "half a pair: \\ud83d"

class Text(str):
    pass

def of_a_class(turns, reference, prompt):
    return Text("words")
"""
KINDS = ("plain", "session", "shell", "daemon")
ENDS = {"returns": (1.0, None), "hangs": (0.0, "hung"), "raises": (0.0, "raised"), "dies": (0.0, "died")}
SOON = 15  # seconds, on a busy machine


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the environment of all processes that are started, and create the module `leaving`."""
    mark = uuid.uuid4().hex
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    (tmp_path / "leaving.py").write_text(REWARDS)
    yield mark
    kill_marked(mark)


def left(mark: str, within: float, most: Callable[[dict[int, dict[str, str]]], bool] = lambda found: not found) -> bool:
    """Return whether the number of remaining processes becomes as expected within the time limit."""
    end = time.monotonic() + within
    while not most(marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return most(marked(mark))


@pytest.mark.parametrize("ending", ENDS)
def test_reward_leaves_no_process(ending: str, mark: str) -> None:
    with closing(FunctionScorer(f"leaving:{ending}", workers=4, timeout_seconds=3.0, default=0.0)) as scorer:
        scores = score(scorer, [(kind, "", "") for kind in KINDS])
    reward, failure = ENDS[ending]
    assert (scores.rewards, scores.failures) == ([reward] * 4, {failure: 4} if failure else {})
    assert left(mark, 0.5)


def test_children_of_a_hanging_reward_end_with_its_worker(mark: str) -> None:
    """They must not survive until the end of the run, which may take days."""
    with closing(FunctionScorer("leaving:hangs", workers=4, timeout_seconds=3.0, default=0.0)) as scorer:
        score(scorer, [(kind, "", "") for kind in KINDS])
        assert left(mark, SOON, lambda found: not any("sleep" in command(pid) for pid in found))
        assert marked(mark)  # the pool is there, for the next batch


def test_environment_leaves_no_process(mark: str) -> None:
    replier = EnvironmentRunner("leaving:replies", workers=4, timeout_seconds=3.0)
    replies = replier.reply([((kind,), "", "") for kind in KINDS])
    replier.close()
    assert [(reply.text, reply.failure) for reply in replies] == [(None, "hung")] * 4
    assert left(mark, 0.5)


def test_killed_trainer_leaves_no_process(mark: str) -> None:
    items = [(kind, "", "") for kind in KINDS]
    script = (
        "from hybrid3d.scoring.scorer import FunctionScorer, Query\n"
        f"FunctionScorer('leaving:hangs', 4, 300.0, 0.0).score([Query(*item) for item in {items}])"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script])
    assert left(mark, 30, lambda found: sum("sleep" in command(pid) for pid in found) >= 4)
    trainer.kill()
    trainer.wait()
    assert left(mark, SOON)


def test_half_of_a_surrogate_pair_ends_its_conversation_only(mark: str) -> None:
    replier = EnvironmentRunner("leaving:surrogate", workers=1, timeout_seconds=10.0)
    (reply,) = replier.reply([(("",), "", "")])
    assert (reply.text, reply.failure) == (None, "not_a_text")
    assert r"\ud83d" in reply.message
    reply.message.encode()
    replier.close()


def test_reply_is_a_plain_text(mark: str) -> None:
    """A reply of a user's class would import the user's module in the rank that unpickles it."""
    replier = EnvironmentRunner("leaving:of_a_class", workers=1, timeout_seconds=10.0)
    (reply,) = replier.reply([(("",), "", "")])
    assert reply.text == "words"
    assert type(reply.text) is str
    assert "leaving" not in sys.modules
    replier.close()


@pytest.mark.parametrize("then", ["", "raise ValueError('no')", "import os; os._exit(0)"])
def test_tried_module_leaves_no_process(then: str, mark: str, tmp_path: Path) -> None:
    (tmp_path / "starting.py").write_text(f"import leaving\nleaving.child('daemon')\n{then}\ndef reward(a, r, p): pass")
    with nullcontext() if not then else pytest.raises(ValueError, match="does not load"):
        load_in_subprocess("starting:reward", "starting:reward", "reward", "reward.name")
    assert left(mark, 0.5)


def test_shared_memory_of_a_pool_bears_the_run_s_name(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is removed with the run even if all processes that would remove it were killed."""
    run = f"run-{mark}"
    monkeypatch.setenv("HYBRID3D_RUN", run)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    before = set(SHARED_MEMORY.iterdir())
    with closing(FunctionScorer("leaving:shares", workers=2, timeout_seconds=20.0, default=0.0)) as scorer:
        assert score(scorer, [("", "", "")] * 2).rewards == [1.0, 1.0]
        kill_marked(mark, tracker_seconds=0)
    found = {path.name for path in set(SHARED_MEMORY.iterdir()) - before if run in path.name}
    assert {name.partition(run)[0] for name in found} == {"psm_", "sem.mp-"}
    remove_shared_memory(run)
    assert not list(SHARED_MEMORY.glob(f"*{run}*"))


def test_remove_shared_memory_keeps_other_names_and_undeletable_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SHARED_MEMORY", tmp_path)
    ours = ["psm_run-1_0f0f", "sem.mp-run-1-ab_d0123", "run-1-tp:0-[0-1]-cpushm_0", "run-1-world-[0-3]-cpushm_1"]
    ours += [name.replace("run-1", engine_name("run-1", 12, 3)) for name in ours]
    others = [name.replace("run-1", "run-10") for name in ours] + [name.replace("run-1", "a-run-1") for name in ours]
    others += ["run-1-b-tp:0-[0-1]-cpushm_0", "psm_run-1_b_0f0f", "sem.mp-run-1-b-ab_d0123", "notes about run-1"]
    for name in [*ours, *others]:
        (tmp_path / name).touch()
    (tmp_path / "psm_run-1_00").mkdir()  # as another user's, which cannot be removed either
    remove_shared_memory("run-1")
    assert {path.name for path in tmp_path.iterdir()} == {*others, "psm_run-1_00"}


def test_worker_waits_for_what_it_adopts(mark: str) -> None:
    """Otherwise every call would leave a zombie, until the process table is full."""
    with closing(FunctionScorer("leaving:abandons", workers=1, timeout_seconds=20.0, default=0.0)) as scorer:
        for _ in range(4):
            assert score(scorer, [("", "", "")] * 10).rewards == [1.0] * 10
        found = [child_pids(pid) for pid in marked(mark)]
        assert sum(process.process_state(pid) == "Z" for pids in found for pid in pids) < 20


def test_record_of_an_end_keeps_the_first_reason(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    assert Ended(0, "first").write(folder, exclusive=True)
    with pytest.raises(FileExistsError):
        Ended(0, "second").write(folder, exclusive=True)
    assert [end.reason for _, end in read_ends(folder) if end is not None] == ["first"]
    assert list(folder.logs.iterdir()) == [folder.failure_path(0)]


@pytest.mark.engines
def test_ranks_that_end_at_different_times_leave_nothing(mark: str, tmp_path: Path) -> None:
    """Rank 0 runs for longer than the heartbeat timeout; an orphaned daemon of rank 1 is killed with its rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limit = 6.0
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"HYBRID3D_HEARTBEAT_SECONDS": str(limit), "PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}"}
    command = [sys.executable, str(ROOT / "tests/jobs/ending.py"), str(ROOT / "recipes/demo-cpu.yaml")]
    command += [str(tmp_path / "run"), str(2 * limit)]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=200)[1].decode() for process in processes]
    assert said == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]
    assert (tmp_path / "run/scores").read_text() == "{'died': 1}"
    assert left(mark, 0.5)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has ended
        return ""


def test_tracker_of_killed_processes_removes_their_shared_memory(mark: str) -> None:
    """Otherwise other tests find it, which look for what their own processes leave."""
    before = set(SHARED_MEMORY.iterdir())
    code = "import multiprocessing, time; lock = multiprocessing.get_context('spawn').Lock(); print(1, flush=True)"
    holder = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(300)"], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        kill_marked(mark)
    assert left_in_memory(f"run-{mark}", before) == []
