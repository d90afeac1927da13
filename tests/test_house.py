"""The house rules a machine can hold: who may import whom, how long code may be, one version per pin."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hybrid3d"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70

# What a part of hybrid3d may import of hybrid3d. A part is the first name below src/hybrid3d. A part that is not
# listed may import everything but the command line; the command line may import everything.
MAY_IMPORT = {
    "mistakes": set(),
    "launch_environment": {"mistakes"},
    "terminal": {"mistakes"},
    "user_files": {"mistakes"},
    "reshard": {"reshard", "mistakes", "user_files"},
    "families": {"families", "mistakes"},
    "rl": {"rl", "mistakes", "user_files", "lifetime"},
    "schema": {"schema", "mistakes", "user_files"},
    "sections": {"sections", "schema"},
    "shape": {"shape", "layout_rules", "schema", "config", "families", "user_files", "mistakes"},
    "layout_rules": {"layout_rules", "schema", "config", "shape"},
    "contradictions": {"config", "schema", "unused_settings"},
    "unused_settings": {"config"},
    "config": {"config", "sections", "contradictions", "schema", "shape", "reshard", "families"},
    "lifetime": {"launch_environment"},
    "train": {"train", "reshard", "families", "config", "rl", "lifetime", "mistakes", "user_files"},
    "rollout": {"rollout", "reshard", "families", "config"},
}
COMMAND_LINE = {"cli", "__main__"}

# Who may import a third party's package: a pattern that the part's name must match whole.
ONLY_IN = {
    "megatron": "train",
    "transformer_engine": "train",
    "apex": "train",
    "vllm": "rollout",
    "ray": "launch.*|ray_launcher",
    "torch": "(?!families$).*",  # families are data
}


def imported(source: str, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import in the file at `path`, which is relative to the package.

    Imports inside functions and under TYPE_CHECKING count, and so does importlib.import_module("a.literal.name").
    """
    package = ["hybrid3d", *path.parent.parts]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + ([node.module] if node.module else [])
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def forbidden(source: str, path: PurePosixPath) -> list[str]:
    """Say what the file at `path` (relative to the package) imports against the rules above."""
    part = path.parts[0].removesuffix(".py")
    allowed = MAY_IMPORT.get(part)
    found = []
    for line, name in imported(source, path):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "hybrid3d" and part not in COMMAND_LINE:
            wrong = target in COMMAND_LINE if allowed is None else target not in allowed
        else:
            wrong = top in ONLY_IN and not re.fullmatch(ONLY_IN[top], part)
        if wrong:
            found.append(f"{path}:{line}: {part} may not import {f'{top}.{target}' if target else top}")
    return list(dict.fromkeys(found))  # one line for `from x import a, b`


def relative(file: Path) -> PurePosixPath:
    return PurePosixPath(file.relative_to(PACKAGE).as_posix())


def test_imports_run_one_way() -> None:
    assert FILES, f"no Python file under {PACKAGE}"
    found = [line for file in FILES for line in forbidden(file.read_text(), relative(file))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rollout/engine.py", "import megatron.core"),
        ("reshard/planner.py", "from megatron.core import parallel_state"),
        ("trainer.py", "def f():\n    import vllm"),
        ("train/model.py", "from vllm.config import VllmConfig"),
        ("train/model.py", "import ray"),
        ("rl/data.py", "import importlib\nimportlib.import_module('ray.data')"),
        ("rollout/weights.py", "from transformer_engine import pytorch"),
        ("families/qwen2.py", "import torch"),
        ("families/qwen2.py", "from torch import Tensor"),
        ("families/qwen2.py", "from hybrid3d.reshard import Box"),
        ("families/qwen2.py", "from ..reshard.box import Box"),
        ("families/qwen2.py", "import hybrid3d"),
        ("reshard/planner.py", "from .. import families"),
        ("reshard/planner.py", "from hybrid3d import config"),
        ("reshard/deep/er.py", "from ...rl import losses"),
        ("reshard/__init__.py", "from ..families import qwen2"),
        ("rl/losses.py", "import hybrid3d.config"),
        ("config.py", "from hybrid3d.train import runtime"),
        ("config.py", "from .trainer import Trainer"),
        ("train/policy.py", "from ..rollout.engine import Engine"),
        ("train/policy.py", "if TYPE_CHECKING:\n    from hybrid3d.trainer.loops import Trainer"),
        ("rollout/engine.py", "from hybrid3d import train"),
        ("rollout/engine.py", "from hybrid3d.rewards.registry import gsm8k"),
        ("rollout/engine.py", "class A:\n    async def f(self):\n        from .. import cli"),
        ("trainer.py", "from .cli import main"),
        ("launch.py", "import hybrid3d.cli"),
        ("schema.py", "from hybrid3d.config import Recipe, load_recipe"),
    ],
)
def test_the_checker_catches(path: str, source: str) -> None:
    assert len(forbidden(source, PurePosixPath(path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("train/model.py", "import megatron.core, torch\nfrom ..rl import losses\nfrom ..config import Recipe"),
        ("rollout/weights.py", "from vllm import LLM\nfrom ..reshard.box import Box\nfrom . import engine"),
        ("reshard/executor.py", "import torch\nfrom .box import Box\nfrom hybrid3d.reshard import planner"),
        ("reshard/__init__.py", "from .box import Box"),
        ("families/__init__.py", "from .qwen2 import QWEN2\nimport dataclasses"),
        ("trainer.py", "from . import train, rollout, rl, config\nfrom hybrid3d import __version__"),
        ("launch_ray.py", "import ray"),
        ("launch/ray.py", "import ray"),
        ("cli.py", "from hybrid3d import config, trainer\nfrom . import cli"),
        ("rl/data.py", "import rayon, vllmish, torchdata"),
    ],
)
def test_the_checker_allows(path: str, source: str) -> None:
    assert forbidden(source, PurePosixPath(path)) == []


def test_no_utils() -> None:
    names = (part.removesuffix(".py") for file in FILES for part in relative(file).parts)
    assert [name for name in names if re.search(r"(^|_)(utils?|helpers?|misc)$", name)] == []


def long_functions(source: str) -> list[tuple[str, int]]:
    """Name and length in lines, from `def` to its last line, of every function that is too long."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = ((f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions)
    return [(name, lines) for name, lines in lengths if lines > MAX_FUNCTION_LINES]


def test_files_are_short() -> None:
    lengths = {str(relative(file)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {str(relative(file)): found for file in FILES if (found := long_functions(file.read_text()))}
    assert long == {}


def test_long_functions_are_found() -> None:
    at_limit = "class A:\n    def f(self):\n" + "        pass\n" * (MAX_FUNCTION_LINES - 1)
    assert long_functions(at_limit) == []
    assert long_functions(at_limit + "        pass\n") == [("f", MAX_FUNCTION_LINES + 1)]


def test_pins_agree_with_the_lock() -> None:
    """Core, cpu and dev dependencies are all pinned, as in the lock; the other extras agree with it where they meet."""

    def pins(lines: list[str]) -> dict[str, str]:
        matches = (re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;]+)", line) for line in lines)
        return {re.sub(r"[-_.]+", "-", m[1]).lower(): m[2] for m in matches if m}

    locked = pins((ROOT / "requirements" / "cpu.txt").read_text().splitlines())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = project["dependencies"] + extras["cpu"] + extras["dev"]
    asked = pins(required)
    assert len(asked) == len(required), "a core, cpu or dev dependency has no == pin"
    assert asked == {name: locked.get(name) for name in asked}
    demo = pins(extras["demo"])
    assert len(demo) == len(extras["demo"]), "a dependency of the demo has no == pin"
    assert demo == pins((ROOT / "requirements" / "demo.txt").read_text().splitlines())
    elsewhere = pins(extras["gpu"] + extras["ray"])
    assert {n: v for n, v in elsewhere.items() if n in locked} == {n: locked[n] for n in elsewhere if n in locked}
