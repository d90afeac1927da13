"""The pool against rewards that raise, hang, die and lie; and what is left of it when somebody is killed."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy
import pytest

import hybrid3d
from hybrid3d.scoring import pool_client
from hybrid3d.scoring.functions import LARGEST_REWARD
from hybrid3d.scoring.scorer import FunctionScorer, Query, Scores, check_reward, scores_of
from queries import score

pytestmark = pytest.mark.processes

MINE = """\
import os, sys, time
import numpy

print("imported")

def odd(answer, reference, prompt):
    print("noise")
    os.write(1, b"noise")
    match answer:
        case "raise": raise KeyError("no such thing")
        case "raise odd": raise type("Odd", (Exception,), {"__str__": lambda self: 1 / 0, "__reduce__": None})()
        case "leave": sys.exit(3)
        case "sleep": time.sleep(1000)
        case "spin in C": 9 ** 9 ** 9 ** 9
        case "die": os._exit(7)
        case "crash": os.kill(os.getpid(), 11)
        case "nan": return float("nan")
        case "huge": return 10 ** 400
        case "none": return None
        case "text": return "1.0"
        case "many": return numpy.ones(3)
        case "large": return 1e308
        case "one": return numpy.float32(0.25)
        case "true": return True
        case "who": return float(os.getpid())
    return float(answer)

def pause(answer, reference, prompt):
    time.sleep(0.3)
    return float(answer)

def equal(answer, reference, prompt):
    return 2.0 * (answer == reference) + (prompt == "ask")

def imported(answer, reference, prompt):
    return float(answer in sys.modules)

def told(answer, reference, prompt, *, seconds):
    return seconds

def batched(answers, references, prompts):
    return [float(len(answers)) if a == r else "?" for a, r in zip(answers, references, strict=True)]

def short(answers, references, prompts):
    return [1.0] * (len(answers) - 1)

def broken(answers, references, prompts):
    raise ValueError("all of it")

batched.batched = short.batched = broken.batched = True

def of_two(answer, reference): return 0.0

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a user's module in it."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def descendants(pid: int) -> list[int]:
    """Processes below a process, whichever of its threads started them."""
    try:
        below = [int(p) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for p in tasks.read_text().split()]
    except OSError:  # it has just ended
        return []
    return [*below, *(further for child in below for further in descendants(child))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def semaphores(pid: int) -> list[Path]:
    """The named ones that a process has mapped."""
    return [Path(name) for name in re.findall(r"/dev/shm/sem\.mp-\w+", Path(f"/proc/{pid}/maps").read_text())]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No process of the pool outlives a test."""
    mine = descendants(os.getpid())
    yield
    wait_for(lambda: not any(is_running(pid) for pid in set(descendants(os.getpid())) - set(mine)))


def items(*answers: str) -> list[tuple[str, str, str]]:
    return [(answer, "reference", "prompt") for answer in answers]


# ---- what is scored


def test_cheap_builtin_needs_no_process() -> None:
    before = descendants(os.getpid())
    with closing(FunctionScorer("gsm8k", workers=2, timeout_seconds=1.0, default=-1.0)) as scorer:
        assert score(scorer, [("#### 72", "#### 72", ""), ("#### 7", "#### 72", "")]) == Scores([1.0, 0.0], {}, {})
        assert descendants(os.getpid()) == before


@pytest.mark.usefixtures("mine")
def test_rewards_come_in_order() -> None:
    with closing(FunctionScorer("mine:equal", workers=2, timeout_seconds=5.0, default=0.0)) as scorer:
        assert score(scorer, []) == Scores([], {}, {})
        assert score(scorer, [("a", "a", "ask"), ("a", "b", "ask"), ("b", "b", "")]).rewards == [3.0, 1.0, 2.0]
    with closing(FunctionScorer("mine:odd", workers=2, timeout_seconds=5.0, default=0.0)) as scorer:
        many = [str(number / 8) for number in range(500)]
        assert score(scorer, items(*many)) == Scores([float(text) for text in many], {}, {})


@pytest.mark.usefixtures("mine")
def test_scorer_failures_are_counted_by_kind(capfd: pytest.CaptureFixture[str]) -> None:
    answers = {
        **dict.fromkeys(("raise", "raise odd", "leave"), "raised"),
        **dict.fromkeys(("sleep", "spin in C"), "hung"),
        **dict.fromkeys(("die", "crash"), "died"),
        **dict.fromkeys(("nan", "huge", "none", "text", "many"), "not_a_number"),
    }
    asked = ["0.5", *answers, "one", "true"]
    with closing(FunctionScorer("mine:odd", workers=2, timeout_seconds=1.0, default=-1.0)) as scorer:
        for _ in range(2):  # the second with the workers that the first left behind
            scores = score(scorer, items(*asked))
            assert scores.rewards == [0.5, *[-1.0] * len(answers), 0.25, 1.0]
            assert scores.failures == {"raised": 3, "hung": 2, "died": 2, "not_a_number": 5}
            assert scores.examples == {
                "raised": "KeyError: 'no such thing'",
                "hung": "no reward within 1 s",
                "died": scores.examples["died"],
                "not_a_number": "nan (float)",
            }
            assert scores.examples["died"] in (
                "the worker ended with exit code 7",
                "the worker ended with exit code -11",
            )
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("mine")
def test_reward_too_large_for_float32_is_named_with_its_row() -> None:
    """Sums and means of the largest that is accepted are finite; at 1e308 they raise OverflowError."""
    asked = items("0.5", "1e30", "large", "-1e31", "nan")
    with closing(FunctionScorer("mine:odd", workers=1, timeout_seconds=5.0, default=-1.0)) as scorer:
        rows = zip(asked, [3, 1, 4, 1, 5], strict=True)
        scores = scorer.score([Query(*item, row=row) for item, row in rows])
    assert scores.rewards == [0.5, 1e30, -1.0, -1.0, -1.0]
    assert scores.failures == {"too_large": 2, "not_a_number": 1}
    assert scores.examples == {
        "too_large": "row 4: 1e+308 (float): at most 1e+30 in magnitude",
        "not_a_number": "row 5: nan (float)",
    }
    assert numpy.isfinite(numpy.float32(LARGEST_REWARD) * numpy.float32(2**20))
    queries = [Query("", "", "", row=row) for row in (None, 7, 8, None)]
    of_model = scores_of(queries, [0.5, math.nan, -math.inf, 1e31], default=0.0)
    assert of_model.rewards == [0.5, 0.0, 0.0, 0.0]
    assert of_model.failures == {"not_a_number": 2, "too_large": 1}
    assert of_model.examples == {"not_a_number": "row 7: nan", "too_large": "1e+31"}


@pytest.mark.usefixtures("mine")
def test_batched_rewards() -> None:
    three = [("a", "a", ""), ("b", "b", ""), ("a", "b", "")]
    expected = {
        "batched": Scores([3.0, 3.0, -1.0], {"not_a_number": 1}, {"not_a_number": "'?' (str)"}),
        "short": Scores([-1.0] * 3, {"wrong_count": 3}, {"wrong_count": "2 rewards for 3 samples"}),
        "broken": Scores([-1.0] * 3, {"raised": 3}, {"raised": "ValueError: all of it"}),
    }
    for name, scores in expected.items():
        with closing(FunctionScorer(f"mine:{name}", workers=2, timeout_seconds=5.0, default=-1.0)) as scorer:
            assert score(scorer, three) == scores


@pytest.mark.usefixtures("mine")
def test_reward_may_be_told_its_limit() -> None:
    with closing(FunctionScorer("mine:told", workers=1, timeout_seconds=5.0, default=0.0)) as scorer:
        assert score(scorer, items("")).rewards == [pytest.approx(4.0)]


def test_builtins_of_the_pool() -> None:
    """The parentheses would keep a reader of LaTeX busy for half a minute; the program sleeps longer than it may."""
    with closing(FunctionScorer("math", workers=2, timeout_seconds=2.0, default=0.0)) as scorer:
        answers = [r"\boxed{\frac{2}{4}}", r"\boxed{0.51}", r"\boxed{" + "(" * 5000 + "}"]
        scores = score(scorer, [(answer, "0.5", "") for answer in answers])
        assert (scores.rewards, scores.failures) == ([1.0, 0.0, 0.0], {})
    with closing(FunctionScorer("code", workers=2, timeout_seconds=2.0, default=0.0)) as scorer:
        programs = ["x = 1", "x = 2", "import time; time.sleep(60)"]
        assert score(scorer, [(program, "assert x == 1", "") for program in programs]) == Scores(
            [1.0, 0.0, 0.0], {}, {}
        )
        assert score(scorer, [("x = 1", "assert x ==", "")]).failures == {"raised": 1}


# ---- whose process it is


@pytest.mark.usefixtures("mine")
def test_workers_have_no_engine_and_nothing_of_the_trainer() -> None:
    """Although this process has torch, and threads."""
    import torch

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    with closing(FunctionScorer("mine:imported", workers=2, timeout_seconds=5.0, default=0.0)) as scorer:
        assert score(scorer, items("numpy", "torch", "vllm", "megatron", "pytest")).rewards == [1.0, 0.0, 0.0, 0.0, 0.0]
    stop.set()
    thread.join()


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(hybrid3d.__file__).parents[1])}
SCRIPT = """\
import sys
from hybrid3d.scoring.scorer import FunctionScorer, Query
print("main", flush=True)
scorer = FunctionScorer("mine:odd", workers=2, timeout_seconds=1000, default=0.0)
print(scorer.score([Query("1", "", ""), Query("none", "", "")]), flush=True)
if sys.argv[1:]:
    scorer.score([Query("sleep", "", "")])
"""


def test_trainers_main_module_is_its_own(mine: Path) -> None:
    """A script without a `__main__` guard, which leaves without closing anything."""
    (mine / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], stdout=subprocess.PIPE, text=True, timeout=60, env=ENVIRONMENT)
    scores = Scores([1.0, 0.0], {"not_a_number": 1}, {"not_a_number": "None (NoneType)"})
    assert (done.returncode, done.stdout) == (0, f"main\n{scores}\n")


def test_pool_goes_with_a_trainer_that_is_killed(mine: Path) -> None:
    (mine / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "script.py", "sleep"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as trainer:
        assert trainer.stdout is not None
        assert [next(trainer.stdout)[:6] for _ in range(2)] == ["main\n", "Scores"]
        time.sleep(0.2)  # the worker that sleeps is asleep
        below = descendants(trainer.pid)
        named = [path for pid in below for path in semaphores(pid)]
        assert named
        assert len(below) >= 3  # the server and two workers
        trainer.kill()
    wait_for(lambda: not any(is_running(pid) for pid in below))
    wait_for(lambda: not any(path.exists() for path in named))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("victim", ["worker", "server"])
def test_process_that_is_killed_between_batches_is_replaced(victim: str) -> None:
    before = set(descendants(os.getpid()))
    with closing(FunctionScorer("mine:odd", workers=2, timeout_seconds=10.0, default=-1.0)) as scorer:
        (worker,) = score(scorer, items("who")).rewards
        server = next(pid for pid in descendants(os.getpid()) if pid not in before)
        os.kill(int(worker) if victim == "worker" else server, signal.SIGKILL)
        time.sleep(0.3)
        assert score(scorer, items("1", "2", "3")) == Scores([1.0, 2.0, 3.0], {}, {})


BATCH = """\
import time
from types import SimpleNamespace
from hybrid3d.scoring import pool_server

if __name__ == "__main__":
    # A clock on which each call takes a quarter of an hour
    pool_server.time = SimpleNamespace(monotonic=lambda: 3000 * time.monotonic(), sleep=time.sleep)
    pool = pool_server.Pool("mine:pause", "reward", workers=1, seconds=10.0)
    print(pool.call([(number, "", "") for number in "1234567"]))
    pool.close()
"""


def test_calls_of_a_batch_have_no_limit_together(mine: Path) -> None:
    (mine / "batch.py").write_text(BATCH)
    done = subprocess.run([sys.executable, "batch.py"], stdout=subprocess.PIPE, text=True, timeout=60, env=ENVIRONMENT)
    results = [(float(number), "", "") for number in range(1, 8)]
    assert (done.returncode, done.stdout) == (0, f"imported\n{results}\n")


@pytest.mark.usefixtures("mine")
def test_batch_may_take_longer_than_its_server_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(FunctionScorer("mine:pause", workers=1, timeout_seconds=1.0, default=-1.0)) as scorer:
        score(scorer, items("1"))
        monkeypatch.setattr(pool_client, "START_SECONDS", 0.5)
        begin = time.monotonic()
        assert score(scorer, items(*map(str, range(10)))) == Scores([*map(float, range(10))])
        assert time.monotonic() - begin > 2 * 0.5 + 1.0


@pytest.mark.usefixtures("mine")
def test_pool_that_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_client, "GRACE_SECONDS", 0.5)
    before = set(descendants(os.getpid()))
    with closing(FunctionScorer("mine:odd", workers=2, timeout_seconds=0.5, default=-1.0)) as scorer:
        score(scorer, items("1"))
        server = next(pid for pid in descendants(os.getpid()) if pid not in before)
        os.kill(server, signal.SIGSTOP)
        monkeypatch.setattr(pool_client, "START_SECONDS", 1)
        assert score(scorer, items("1", "2")) == Scores(
            [-1.0, -1.0], {"hung": 2}, {"hung": "the pool's server did not reply within 2.5 s"}
        )
        monkeypatch.setattr(pool_client, "START_SECONDS", 20)
        server = score(scorer, items("1")) and next(pid for pid in descendants(os.getpid()) if pid not in before)
        killer = threading.Timer(0.2, os.kill, (server, signal.SIGKILL))
        killer.start()
        scores = score(scorer, items("sleep"))
        assert scores == Scores([-1.0], {"died": 1}, {"died": "the pool's server ended with exit code -9"})
        killer.join()


# ---- mistakes, found early


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("spec", ["gsm8k", "math", "code", "mine:equal", "mine:batched", "mine:told"])
def test_rewards_that_load(spec: str, capfd: pytest.CaptureFixture[str]) -> None:
    check_reward(spec)
    assert "mine" not in sys.modules
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gsm9k", "unknown reward 'gsm9k'; known: code, gsm8k, math, or a function of your own as module:function"),
        ("nobodys:reward", "does not load: ModuleNotFoundError: No module named 'nobodys'"),
        ("mine:nothing", "does not load: AttributeError: module 'mine' has no attribute 'nothing'"),
        ("mine:number", "does not load: TypeError: mine:number is int, expected a function"),
        (
            "mine:of_two",
            "mine:of_two(answer, reference) does not take (answer, reference, prompt): too many positional",
        ),
        ("wrong:reward", "does not load: SyntaxError: expected ':'"),
        ("leaves:reward", "does not load: its process ended with exit code"),
    ],
)
def test_rewards_that_do_not_load(mine: Path, spec: str, said: str) -> None:
    (mine / "wrong.py").write_text("def reward(answer, reference, prompt)\n    return 0.0\n")
    (mine / "leaves.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(ValueError, match="reward") as caught:
        check_reward(spec)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_module_that_does_not_end(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(pool_client, "START_SECONDS", 1)
    with pytest.raises(ValueError, match="reward 'slow:reward' does not load within 1 s"):
        check_reward("slow:reward")


def test_module_that_breaks_after_it_was_checked(mine: Path) -> None:
    (mine / "mine.py").write_text("raise SystemExit('no licence')")
    with closing(FunctionScorer("mine:reward", workers=2, timeout_seconds=5.0, default=0.5)) as scorer:
        assert score(scorer, items("1", "2")) == Scores([0.5, 0.5], {"raised": 2}, {"raised": "SystemExit: no licence"})
