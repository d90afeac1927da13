"""The reward `code`: right and wrong programs, and hostile ones, which end with 0.0 soon and leave nothing behind."""

import json
import os
import platform
import socket
import sys
import time
from pathlib import Path

import pytest

from hybrid3d.scoring.code import sandbox, sandbox_child
from hybrid3d.scoring.code.reward import code, extract_program, read_tests, same_output
from leftovers import nothing_left  # noqa: F401  # a fixture

pytestmark = pytest.mark.processes

SECONDS = 2.0
ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
DOUBLE = {"stdin_stdout": [["2\n", "4\n"], ["-3\n", "-6\n"]]}
DOUBLES = "print(2 * int(input()))"

confined = pytest.mark.skipif(
    "seccomp" not in sandbox.protection(), reason=f"this kernel gives {sandbox.protection()} only"
)


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nIt adds."


# ---- what is right


@pytest.mark.parametrize("reference", [ASSERTS, json.dumps({"tests": ASSERTS})])
@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (ADD, 1.0),
        ("def add(a, b):\n    return a - b", 0.0),
        ("def add(a, b):\n    return 3", 0.0),
        ("", 0.0),
        ("def add(a, b)\n    return a + b", 0.0),
        ("import numpy\n" + ADD, 0.0),  # the standard library only
        ("from collections import Counter\nimport math, re, heapq\n" + ADD, 1.0),
        (ADD + "if __name__ == '__main__':\n    raise SystemExit", 1.0),
    ],
)
def test_asserts(program: str, reward: float, reference: str) -> None:
    assert code(fenced(program), reference) == reward


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (DOUBLES, 1.0),
        ("if __name__ == '__main__':\n    " + DOUBLES, 1.0),
        ("import sys\nfor line in sys.stdin:\n    print(int(line) * 2, '  ')\nprint()", 1.0),
        ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
         "print(2 * A(int(input())).x)", 1.0),
        ("print(4)", 0.0),
        ("print(2 * int(input()), 'is the answer')", 0.0),
        (DOUBLES + "\nraise ValueError", 0.0),
        (DOUBLES + "\nraise SystemExit(1)", 0.0),
        (DOUBLES + "\nraise SystemExit", 1.0),
        (DOUBLES + "\nexit()\nraise ValueError", 1.0),
        (DOUBLES + "\nquit(1)", 0.0),
        ("", 0.0),
    ],
)  # fmt: skip
def test_input_and_output(program: str, reward: float) -> None:
    assert code(program, json.dumps(DOUBLE)) == reward


OWN_ERROR = """
class Broke(Exception):
    def __init__(self, have, need):
        super().__init__(have)
        self.need = need
    def __str__(self):
        return f"have {self.args[0]}, need {self.need}"
def spend(n):
    raise Broke(3, n)
"""
CAUGHT = "try:\n    spend(5)\nexcept {}:\n    assert {}\nelse:\n    assert False\nassert callable(spend)"


@pytest.mark.parametrize(
    ("program", "caught", "holds"),
    [
        (OWN_ERROR, "Broke as error", "str(error) == 'have 3, need 5' and error.need == 5"),
        ("def spend(n): open('/nowhere/at/all')", "OSError as error", "error.errno == 2"),
        ("def spend(n): {}[n]", "KeyError as error", "error.args == (5,)"),
        ("import json\ndef spend(n): json.loads('{')", "json.JSONDecodeError as error", "error.pos == 1"),
        ("import decimal\ndef spend(n): decimal.Decimal('x')", "decimal.InvalidOperation", "True is not False"),
        (
            "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int = 1\n"
            "def spend(n): P().x = n",
            "dataclasses.FrozenInstanceError as error",
            "'x' in str(error)",
        ),
    ],
)
def test_errors_of_the_answer(program: str, caught: str, holds: str) -> None:
    assert code(program, "import dataclasses, decimal, json\n" + CAUGHT.format(caught, holds)) == 1.0


def test_object_met_twice_in_arguments_reaches_the_tests_twice() -> None:
    program = "def run(f):\n    x = [1]\n    f([x, x], key=[2])"
    tests = "seen = []\ndef take(a, key=None): seen.append((a, key))\nrun(take)\nassert seen == [([[1], [1]], [2])]"
    assert code(program, tests) == 1.0


def test_items_can_be_deleted() -> None:
    program = "class Box:\n    kept = {'a': 1}\n    def __delitem__(self, key): del self.kept[key]"
    assert code(program, "box = Box()\ndel box['a']\nassert box.kept == {}") == 1.0


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        ("def parse(s): raise ValueError('x')\ndef total(v): return sum(v)", "assert total(map(parse, ['1'])) == 1"),
        ("def apply(f, x): return f('a' * 5_000_000)", "assert apply(lambda s: s * 2, 'a') == 'aa'"),
        ("def double(s): return 'a' * 5_000_000", "assert double(double('ab') * 2) == 'abab'"),
        ("def numbers(n): return range(10**7)\ndef total(v): return 3", "assert total(iter(numbers(3))) == 3"),
    ],
)
def test_wrong_answer_is_not_the_references_fault(answer: str, tests: str) -> None:
    assert code(answer, tests) == 0.0


def test_tests_together_have_the_time_that_one_has() -> None:
    slow = json.dumps({"stdin_stdout": [["", "done"]] * 4})
    began = time.monotonic()
    assert code("import time; time.sleep(0.4); print('done')", slow, seconds=1.0) == 0.0
    assert time.monotonic() - began < 1 + 1


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nor better\n```py\nprint(2)\n```\nso", "print(2)\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("```bash\nls\n```\nand then\n```python\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\n```text\n1\n```", "print(1)\n"),
        ('```Python title="a.py"\nprint(1)\n```', "print(1)\n"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
    ],
)
def test_program_in_an_answer(answer: str, program: str) -> None:
    assert extract_program(answer) == program


def test_program_behind_fences_that_never_close() -> None:
    began = time.monotonic()
    answer = "```python\nprint(1)\n```\n" + "```x\n" * 10_000
    assert extract_program(answer) == "print(1)\n"
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "reference",
    ["", "{}", "[]", "3", '{"tests": ""}', '{"tests": 3}', '{"stdin_stdout": []}', '{"stdin_stdout": [["1"]]}'],
)
def test_references_that_are_none(reference: str) -> None:
    with pytest.raises(ValueError, match="a reference for code needs tests, or stdin_stdout with pairs of text"):
        read_tests(reference)


def test_tests_that_are_not_python() -> None:
    with pytest.raises(SyntaxError):
        code(ADD, "assert add(1, 2) ==")


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        (b"1 \n2\n\n", "1\n2", True),
        (b"1\r\n2", "1\n2", True),
        (b"", "\n", True),
        (b"1\n\n2", "1\n2", False),
        (b" 1", "1", False),
        (b"1.0", "1", False),
        (b"\xff", "1", False),
    ],
)
def test_output_comparison_tells_same_output(printed: bytes, wanted: str, same: bool) -> None:
    assert same_output(printed, wanted) is same


# ---- what is hostile

HOSTILE = {
    "exits early": "import os\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "exits from a test": "import os\ndef add(a, b): os._exit(0)",
    "loops for ever": "while True: pass",
    "loops in C": "9 ** 9 ** 9 ** 9",
    "ignores the end": "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
    "closes all and sleeps": "import os, time\nos.closerange(0, 32)\nwhile True: time.sleep(1)",
    "eats memory": "x = [bytearray(2**26) for _ in range(10**6)]",
    "prints without end": "while True: print('passed' * 1000)",
    "reports without end": "import os\nwhile True:\n    for n in range(3, 32):\n"
    "        try: os.write(n, b'passed' * 10000)\n        except OSError: pass",
    "breaks the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "replaces builtins": "import builtins, os\nbuiltins.exec = builtins.compile = lambda *a, **k: None\n"
    "os.read = lambda *a: b''\nAssertionError = KeyError",
    "forks without end": "import os\nwhile True: os.fork()",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills its group": "import os\nos.killpg(os.getpgrp(), 9)",
    "kills all": "import os\nos.kill(-1, 15)",
}


def is_dangerous(program: str) -> bool:
    """What only the filter of system calls stops, where the limits of a root's processes do not."""
    return any(word in program for word in ("fork", "kill"))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("nothing_left")
def test_hostile_programs_get_nothing_and_end(name: str) -> None:
    program = HOSTILE[name]
    if is_dangerous(program) and "seccomp" not in sandbox.protection():
        pytest.skip("not to be tried without the filter")
    for reference in (ASSERTS, json.dumps(DOUBLE)):
        began = time.monotonic()
        assert code(program, reference, seconds=0.5) == 0.0
        assert time.monotonic() - began < 0.5 + 2


ATTEMPTS = {
    "write": "open('written', 'w')",
    "append": "open({path!r}, 'a')",
    "update": "open({path!r}, 'r+')",
    "unlink": "os.unlink({path!r})",
    "rename": "os.rename({path!r}, {path!r} + '2')",
    "chmod": "os.chmod({path!r}, 0)",
    "mkdir": "os.mkdir({path!r} + '2')",
    "link": "os.symlink('/', {path!r} + '2')",
    "memory file": "os.memfd_create('x')",
    "socket": "socket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "unix socket": "socket.socketpair()",
    "fork": "os.fork()",
    "process": "subprocess.run(['true'])",
    "program": "os.execv('/bin/true', ['true'])",
    "thread": "threading.Thread(target=print).start()",
    "signal": "os.kill(os.getppid(), 0)",
    "owner of signals": "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
    "limit": "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))",
    "limit of another": "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "session": "os.setsid()",
    "raw call": "1 / (ctypes.CDLL(None).fork() + 1)",
}
READING = {"file": "open({path!r})", "folder": "os.listdir({folder!r})", "environment": "open('/proc/self/environ')"}


def attempt(source: str, tmp_path: Path) -> str:
    """What a program says of an expression: `done`, or the error's type."""
    path = tmp_path / "kept"
    path.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = source.format(path=str(path), folder=str(tmp_path), port=server.getsockname()[1])
        program = (
            "import ctypes, fcntl, os, resource, socket, subprocess, threading\n"
            f"try:\n    {source}\n    print('done')\nexcept Exception as error:\n    print(type(error).__name__)\n"
        )
        outcome = sandbox.run(program, seconds=5.0)
    assert outcome.finished
    assert path.read_text() == "kept"
    assert os.listdir(tmp_path) == ["kept"]
    return outcome.output.decode().split()[-1]


@confined
@pytest.mark.parametrize("name", ATTEMPTS)
@pytest.mark.usefixtures("nothing_left")
def test_sandbox_refuses_forbidden_attempts(name: str, tmp_path: Path) -> None:
    expected = {"thread": "RuntimeError", "raw call": "ZeroDivisionError", "limit": "ValueError"}
    assert attempt(ATTEMPTS[name], tmp_path) == expected.get(name, "PermissionError")


@pytest.mark.skipif("landlock" not in sandbox.protection(), reason=f"this kernel gives {sandbox.protection()} only")
@pytest.mark.parametrize("name", READING)
def test_files_of_others_cannot_be_read(name: str, tmp_path: Path) -> None:
    """The data set with all references is one of them."""
    assert attempt(READING[name], tmp_path) == "PermissionError"


def test_sandbox_tells_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID3D_SECRET", "secret")
    shown = sandbox.run("import os, sys\nprint(dict(os.environ), sys.argv, sys.path)", seconds=SECONDS)
    assert shown.finished
    assert b"secret" not in shown.output
    assert b"hybrid3d" not in shown.output


def test_sandbox_goes_with_its_parent(tmp_path: Path) -> None:
    """Its parent, a worker of the pool, is killed where the time limit is shorter than the sandbox's own."""
    script = "from hybrid3d.scoring.code import sandbox\nsandbox.run('import time; time.sleep(60)', seconds=60)"
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", script], dict(os.environ))
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 20
    while not (inside := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # until it has asked to go with its parent
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    while Path(f"/proc/{inside[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{inside[0]}").exists()


# ---- how it is confined


def test_protection_says_what_holds() -> None:
    assert sandbox.protection() in ("seccomp, landlock, limits", "seccomp, limits", "landlock, limits", "limits")


def test_sandbox_warning_says_what_does_not_hold() -> None:
    assert sandbox.warning("seccomp, landlock, limits") == ""
    said = sandbox.warning("landlock, limits")
    assert "confined by landlock, limits only: without seccomp they can open sockets" in said
    assert "read files" not in said
    assert all(name in sandbox.warning("limits") for name in ("without seccomp", "without landlock"))


@pytest.mark.usefixtures("nothing_left")
def test_kernel_that_has_neither(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same file for a machine that the filter knows no numbers of, on a kernel older than Landlock."""
    source = Path(sandbox_child.__file__).read_text()
    source = source.replace('"x86_64": (0,', '"vax": (0,').replace('"aarch64": (1,', '"pdp11": (1,')
    inside = tmp_path / "sandbox_child.py"
    inside.write_text(source.replace("444, 445, 446", "4444, 4445, 4446"))
    monkeypatch.setattr(sandbox, "_CHILD_SCRIPT", inside)
    assert sandbox.run("", seconds=SECONDS).confined_by == ()
    assert code(ADD, ASSERTS) == code(DOUBLES, json.dumps(DOUBLE)) == 1.0
    for program in ("open('x', 'w')", "raise SystemExit(0)", "while True: pass", "x = [0] * 10**9"):
        assert code(program, ASSERTS, seconds=0.5) == 0.0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the table of numbers is that of x86_64")
def test_numbers_of_system_calls_are_the_kernels() -> None:
    """Against the headers of Linux, where they are installed."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no kernel headers here")
    words = (line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
    numbers = {name.removeprefix("__NR_"): int(number) for _, name, number in words}
    ours = {name: pair[0] for name, pair in sandbox_child.CALLS.items()} | sandbox_child.OLD_CALLS
    ours |= dict(openat=sandbox_child.OPENAT[0], ioctl=sandbox_child.IOCTL[0], fcntl=sandbox_child.FCNTL[0])
    assert ours == {name: numbers[name] for name in ours}


def test_numbers_of_aarch64_are_the_kernels() -> None:
    """Against the generic table of Linux, which is that of aarch64."""
    header = Path("/usr/include/asm-generic/unistd.h")
    if not header.exists():
        pytest.skip("no kernel headers here")
    words = (line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR"))
    numbers = {w[1].removeprefix("__NR_").removeprefix("__NR3264_"): int(w[2]) for w in words if w[2].isdigit()}
    ours = {name: pair[1] for name, pair in sandbox_child.CALLS.items()}
    ours |= dict(openat=sandbox_child.OPENAT[1], ioctl=sandbox_child.IOCTL[1], fcntl=sandbox_child.FCNTL[1])
    renamed = {"newfstatat": "fstatat"}
    assert ours == {name: numbers[renamed.get(name, name)] for name in ours}
