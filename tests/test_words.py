"""Names and phrases that were replaced by the field's own are not left, in code, settings, metrics or documents."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hybrid3d"
HISTORY = {"CHANGELOG.md"}  # which tells what became of them

# Names of anything: classes, functions, methods, parameters, attributes
NAMES = """
Trained Drawn HeldOut Conversation Conversations Heard Replier own_tokens mine Pooled Relief RanOut MAY_CHANGE bringing
bring_weights under_way put_away bring_back alike Ready gather_alike Known Routed outline_of Outline stamped Asked
ask_apart Writing Unwritten contradictions _not_yet adopt Control Held Planned Gathered Measured Offloaded Placed
way ways move moves whoever beside _Cut _Load furthest fix_turns _dequantized _block_of _size_by_header SCALES
_by_first _own_step_counts _move_kl_coef _scored_by_model of_answers _on_host
""".split()
# Names of members of one class, or of one module
MEMBERS = """
Models.judge Learner.experience Rollouts.draw MultiTurnRollout.hold Sample.own Sample.weights Batch.own Guard.calm
Guard.allows Guard.skipped Guard.acts LiveSettings.serve LiveSettings.before WeightSync.advance RolloutEngine.updates
MegatronModel.counts MegatronModel.parts distributed.most distributed.least distributed.first distributed.largest
distributed.ident Routes.moves Routes.ends RoutedClass.ways engine_queries.ask agreed_placement.agree Sync.hidden
Rollout.memory_fraction Algorithm.aggregation Data.max_broken Source.server planner._cut Routes.routed
routes.route files.NAMES files.DTYPES
""".split()
MODULES = """
trained critic relief control guard sync scoring_server scoring_worker sandboxed pooled room sides placing apart
measure resuming trainer.loops mistakes ranks lifetime
""".split()
SETTINGS_AND_METRICS = """
sync.hidden rollout.memory_fraction algorithm.aggregation data.max_broken guard.acts dull_groups longest_share old_kl
""".split()
PHRASES = [
    "so-manieth time",
    "place by place the largest",
    "No spike is what is not even clipped",
    "that a step may draw for groups which teach something",
    "or end the bringing that has begun",
    "What is done here nothing else is done during",
    "lie in what was trained, whoever writes them",
    "tells of the policy after s steps of updates",
    "No words are none of its business",
    "To a sum.",
    "its column",
    "nobody has them",
    "A rank's moves in buckets",
    "What every rank knows alike",
    "Who takes which part of a tensor from whom",
    "somebody wants what nobody holds",
    "as they read there",
    "to begin anew",
    "what each comes to",
    "so that only its size and the time tell something",
]


def defined(source: str, module: str, members: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (class or module, name) of everything that a file defines: parameters, variables and attributes included.

    Args:
        members: without what only a function knows, its parameters and variables.
    """

    def visit(node: ast.AST, owner: str, in_function: bool) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = owner
            if isinstance(child, ast.ClassDef):
                yield owner, child.name
                inner = child.name
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield owner, child.name
            elif isinstance(child, ast.arg) and not members:
                yield owner, child.arg
            elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                yield owner, child.attr
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and not (members and in_function):
                yield owner, child.id
            yield from visit(child, inner, in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from visit(ast.parse(source), module, in_function=False)


def files(*suffixes: str) -> Iterator[Path]:
    for folder in ("src", "docs", "recipes", "launch", "benchmarks"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    yield from (path for path in ROOT.glob("*") if path.suffix in suffixes and path.name not in HISTORY)


def test_no_name_is_left() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        names = [name for name in defined(path.read_text(), path.stem) if name[1] in NAMES]
        names += [name for name in defined(path.read_text(), path.stem, members=True) if ".".join(name) in MEMBERS]
        found += [f"{path.relative_to(PACKAGE)}: {owner}.{name}" for owner, name in names]
    assert found == []


def test_no_module_is_left() -> None:
    modules = {path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py")}
    assert [name for name in MODULES if name in {part for one in modules for part in (one, one.split(".")[-1])}] == []


@pytest.mark.parametrize("name", SETTINGS_AND_METRICS)
def test_no_setting_or_metric_is_left(name: str) -> None:
    pattern = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)|/{re.escape(name)}(?!\w)")
    left = [
        str(path.relative_to(ROOT)) for path in files(".py", ".md", ".yaml", ".sh") if pattern.search(path.read_text())
    ]
    assert left == []


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_phrase_is_left(phrase: str) -> None:
    left = []
    for path in files(".py", ".md"):
        if phrase in re.sub(r"\s+", " ", path.read_text()):
            left.append(str(path.relative_to(ROOT)))
    assert left == []


def test_what_is_defined_is_found() -> None:
    source = "class A:\n    b: int\n    def c(self, d):\n        self.e = 1\ndef f(): g = 2"
    names = {("m", "A"), ("A", "b"), ("A", "c"), ("A", "self"), ("A", "d"), ("A", "e"), ("m", "f"), ("m", "g")}
    assert set(defined(source, "m")) == names
    assert set(defined(source, "m", members=True)) == names - {("A", "self"), ("A", "d"), ("m", "g")}
