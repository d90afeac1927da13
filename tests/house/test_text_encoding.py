"""Text files are UTF-8 whatever the locale is, and a console replaces what it cannot show."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("src", "recipes", "examples", "docs", "requirements", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
OTHER_OPENS = {"os", "tarfile", "zipfile", "webbrowser", "urllib", "request", "opener", "mmap"}
TEMPORARY = {"NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"}
RUNS = {"run", "Popen", "check_output", "check_call", "call", "getoutput"}


def calls_without_encoding(source: str) -> Iterator[ast.Call]:
    """Yield each call that opens a text in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_text(node) and not {"encoding", None} & {k.arg for k in node.keywords}:
            yield node


def _is_text(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = (
        getattr(function.value, "id", getattr(function.value, "attr", ""))
        if isinstance(function, ast.Attribute)
        else ""
    )
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "read_text":
        return not call.args
    if name == "write_text":
        return len(call.args) < 2
    if name == "open" and isinstance(function, ast.Name):
        return "b" not in _mode(given.get("mode") or (call.args[1] if len(call.args) > 1 else None), "r")
    if name == "open" and owner not in OTHER_OPENS:
        place = 1 if owner in ("io", "codecs", "gzip", "bz2", "lzma") else 0
        default = "b" if owner in ("gzip", "bz2", "lzma") else "r"
        mode = given.get("mode") or (call.args[place] if len(call.args) > place else None)
        is_path = mode is not None or not (call.args or isinstance(function.value, ast.Subscript))
        return is_path and re.fullmatch("[rwaxt+]*", _mode(mode, default)) is not None
    if name == "fdopen":
        return "b" not in _mode(given.get("mode") or (call.args[1] if len(call.args) > 1 else None), "r")
    if name in TEMPORARY:
        return "b" not in _mode(given.get("mode") or (call.args[0] if call.args else None), "w+b")
    if name in ("TextIOWrapper", "FileHandler", "RotatingFileHandler", "FileInput"):
        return True
    return name in RUNS and any(_is_true(given.get(key)) for key in ("text", "universal_newlines"))


def _mode(node: ast.AST | None, default: str) -> str:
    if node is None:
        return default
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "?b"


def _is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_text_files_are_opened_with_an_encoding(path: Path) -> None:
    lines = [call.lineno for call in calls_without_encoding(path.read_text(encoding="utf-8"))]
    assert not lines, f"{path}: lines {lines} open a text in the encoding of the locale: give encoding"


@pytest.mark.parametrize(
    "source",
    [
        *(
            "open(p)",
            "open(p, 'w')",
            "p.open()",
            "p.open('a')",
            "p.read_text()",
            "p.write_text(t)",
            "os.fdopen(2, 'w')",
        ),
        *(
            "subprocess.run(c, text=True)",
            "tempfile.NamedTemporaryFile('w')",
            "logging.FileHandler(p)",
            "io.TextIOWrapper(b)",
        ),
    ],
)
def test_check_finds(source: str) -> None:
    assert len(list(calls_without_encoding(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        *("open(p, 'rb')", "p.open('wb')", "os.open(p, 0)", "p.read_text(encoding='utf-8')", "gzip.open(p)"),
        *(
            "subprocess.run(c)",
            "tempfile.TemporaryFile()",
            "open(p, **options)",
            "subprocess.run(c, text=True, encoding='utf-8')",
        ),
    ],
)
def test_check_does_not_find(source: str) -> None:
    assert not list(calls_without_encoding(source))


CONSOLE = """
import sys, tempfile
from pathlib import Path
from hybrid3d.launch.rank import _redirect
from hybrid3d.run.logger import Display
with tempfile.TemporaryDirectory() as folder:
    log = Path(folder) / "rank-0.log"
    display = Display("caf\\u00e9", 3, _redirect(log, keep_console=True))
    display.show_step({"step": 0, "reward/mean": 0.5}, 3)
    display.print("12 \\u2192 13 \\udcff")
    print("log 12 \\u2192 13", flush=True)
    print("\\u2192 of stderr", file=sys.stderr, flush=True)
    assert "log 12 \\u2192 13" in log.read_text(encoding="utf-8")
    assert "\\u2192 of stderr" in log.read_text(encoding="utf-8")
"""
LOCALES = [("C", None, {}), ("pl_PL", "ISO-8859-2", {}), ("ja_JP", "EUC-JP", {}), ("de_DE", "ISO-8859-1", {})]
LOCALES += [("C", None, {"PYTHONIOENCODING": "ascii"}), ("pl_PL", "ISO-8859-2", {"PYTHONIOENCODING": "utf-8"})]


@pytest.fixture(params=LOCALES, ids=lambda case: "-".join(filter(None, [case[0], case[1], *case[2].values()])))
def other_locale(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a locale that is not UTF-8."""
    language, charmap, more = request.param
    name = language if charmap is None else f"{language}.{charmap}"
    if charmap is not None:
        if shutil.which("localedef") is None:
            pytest.skip("needs localedef")
        subprocess.run(["localedef", "-i", language, "-f", charmap, tmp_path / name], capture_output=True)
        if not (tmp_path / name).exists():
            pytest.skip(f"this machine cannot make the locale {name}")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO", "PYTHONUTF8"))}
    python = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT / "src")}
    return kept | python | {"LOCPATH": str(tmp_path), "LC_ALL": name} | more


@pytest.mark.processes
def test_rank_shows_and_logs_in_other_locales(other_locale: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", CONSOLE], capture_output=True, env=other_locale)
    assert done.returncode == 0, done.stderr
    assert b"reward 0.500" in done.stdout
    assert b"12" in done.stdout


@pytest.mark.processes
def test_mistake_is_told_in_other_locales(other_locale: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: caf\u00e9\nmodel: {path: /\u2192}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "hybrid3d", "plan", tmp_path / "r.yaml"], capture_output=True, env=other_locale
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"r.yaml" in done.stderr


REWARD = """
def of(answer, reference, prompt):
    print("\u2192 \u00e9")
    return 0.25
"""


PROGRAM = """
from contextlib import closing
from hybrid3d.scoring.scorer import FunctionScorer, Query
if __name__ == "__main__":
    with closing(FunctionScorer("mine:of", 1, 60.0, 0.0)) as scorer:
        print(scorer.score([Query("a", "b", "c")]))
"""


@pytest.mark.processes
def test_reward_may_print_in_other_locales(other_locale: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, env=other_locale, cwd=tmp_path)
    assert b"rewards=[0.25], failures={}" in done.stdout, done.stderr
