"""Patches of dependencies: every one stands in a table, with a reason, the pinned version and a test."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import threading
import tomllib
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid3d import patches

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hybrid3d"
TABLES = {"patches.py", "train/megatron/patches.py", "rollout/patches.py", "weight_transfer/hold.py"}
DEPENDENCIES = {"megatron", "vllm", "torch", "transformers", "apex", "transformer_engine"}

TARGETS = """
from hybrid3d import patches
from hybrid3d.rollout import patches as vllm
from hybrid3d.train import writing
from hybrid3d.train.megatron import build, patches as megatron, runtime
from hybrid3d.weight_transfer import hold
for patch in (*patches.TORCH, *megatron.ALL, *vllm.ALL, hold.ENGINE_CALLS):
    patch.resolve()  # an error where it is missing
    print(patch.target, patch.package, patch.test, patch.reason.endswith("."), sep=" | ")
"""


@pytest.mark.engines
def test_targets_exist_and_their_tests_too() -> None:
    done = subprocess.run([sys.executable, "-c", TARGETS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    assert len(rows) >= 15
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = project["dependencies"] + project["optional-dependencies"]["gpu"]
    for target, package, test, sentence in rows:
        assert package in ranges, f"{target}: {package} is not the range of pyproject.toml"
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


def test_patches_stand_nowhere_but_in_the_tables() -> None:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if path not in TABLES | {"train/megatron/cpu.py"}:  # the CPU backend's table of `torch.cuda`
            found |= {path: names} if (names := assigned(file.read_text())) else {}
    assert found == {}


def test_patch_is_found() -> None:
    assert assigned("import torch\ntorch.cuda.synchronize = None") == ["torch.cuda.synchronize"]
    assert assigned("from megatron.core import a as b\nb.C.d = 1\nself.b = 2") == ["b.C.d"]
    assert assigned("from vllm import x\nmock.patch.object(x, 'y', 1)") == ["mock.patch.object(x, 'y', 1)"]


def test_apply_replaces_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid3d.errors.UserMistake", patches.Patch)  # restores what `apply` changes below
    table = [patches.Patch("hybrid3d.errors.UserMistake", "-", "", "", lambda original: [original])]
    patches.apply(table)
    from hybrid3d import errors

    assert errors.UserMistake == [patches.Patch]


def missing(target: str, package: str = "torch>=1.2,<1.3", **more: Any) -> str:
    """What an error says about a patch of a target that another version had."""
    patch = patches.Patch(target, package, "", "", lambda original: original, **more)
    with pytest.raises(patches.MissingTarget) as raised:
        patches.apply([patch])
    for use in (patch.resolve, patch.original, lambda: patch.replace(1), patch.replaced(1).__enter__):
        with pytest.raises(patches.MissingTarget):
            use()
    return str(raised.value)


@pytest.mark.parametrize(
    "target",
    [
        "torch.distributed.new_groups_of_another_version",
        "torch.distributed.ProcessGroup.method_of_another_version",
        "torch.distributed.class_of_another_version.method",
        "torch.module_of_another_version.function",
    ],
)
def test_missing_target_is_an_error_that_names_both_versions(target: str) -> None:
    """Instead of a new attribute, which the dependency never reads."""
    assert missing(target) == (
        f"torch {version('torch')} has no {target}, which hybrid3d replaces as it is in torch>=1.2,<1.3: "
        "install one of these"
    )
    owner = target.rpartition(".")[0]
    assert owner != "torch.distributed" or not hasattr(dist, target.rpartition(".")[2])


def test_package_that_is_not_installed_is_named() -> None:
    said = missing("no_such_engine.core.step", "no-such-engine==2.0")
    assert said.startswith("no-such-engine, of which no version is installed, has no no_such_engine.core.step")


def test_module_that_cannot_import_another_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error is better than one that says that it is missing."""
    (tmp_path / "engine_of_test.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        patches.Patch("engine_of_test.step", "engine==1.0", "", "").resolve()


def test_name_that_a_dependency_uses_may_be_undefined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uses_names.py").write_text("def step():\n    return kernel is None\n")
    monkeypatch.syspath_prepend(tmp_path)
    patches.apply([patches.Patch("uses_names.kernel", "-", "", "", lambda original: original, may_be_undefined=True)])
    import uses_names

    assert uses_names.step()
    missing("uses_names.kernel_of_another_version", may_be_undefined=True)


def test_attribute_that_an_object_does_not_have_is_not_set() -> None:
    """Megatron's specs of layers are such objects: a layer under another name would leave its own in place."""
    spec = argparse.Namespace(core_attention=1, linear=2)
    patches.set_existing("torch>=1.2,<1.3", spec, core_attention=3)
    with pytest.raises(patches.MissingTarget) as raised:
        patches.set_existing("torch>=1.2,<1.3", spec, linear=4, input_norm=5)
    assert str(raised.value) == (
        f"torch {version('torch')}: Namespace has no input_norm, which hybrid3d sets as it is in torch>=1.2,<1.3: "
        "install one of these"
    )
    assert vars(spec) == {"core_attention": 3, "linear": 2}


def test_replaced_for_a_while() -> None:
    patch, before = patches.Patch("hybrid3d.errors.UserMistake", "-", "", ""), patches.Patch
    from hybrid3d import errors

    real = errors.UserMistake
    with patch.replaced(before):
        assert errors.UserMistake is before
    assert errors.UserMistake is real


@pytest.mark.engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gloo_scatters_unequal_shares(dtype: torch.dtype) -> None:
    """So that Megatron's own function needs no patch; gloo does not gather them, for which there is one."""
    from megatron.core.tensor_parallel import mappings

    store, splits = dist.HashStore(), [0, 40, 7, 2]
    shares = [torch.randint(-9, 9, (sum(splits), 3), generator=torch.Generator().manual_seed(r)) for r in range(4)]
    found: list[Any] = [None] * 4

    def run(rank: int) -> None:
        group = patches.GlooSharingThreads(store, rank, 4, timedelta(seconds=60), enable_reconfigure=False)
        found[rank] = mappings._reduce_scatter_along_first_dim(shares[rank].to(dtype), group, splits)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, expected in zip(found, sum(shares).split(splits), strict=True):  # sums are exact in either dtype
        assert one.dtype == dtype
        assert one.equal(expected.to(dtype))


def test_replacement_that_takes_fewer_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the function with which torch sends objects, which has taken `weights_only` since 2.15."""

    def send(value: Any, device: Any, weights_only: bool = False) -> None: ...

    def shorter(value: Any, device: Any) -> None: ...

    def whatever(*given: Any, **named: Any) -> None: ...

    module = ModuleType("changed")
    module.send = send  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "changed", module)
    patch = patches.Patch("changed.send", "torch>=2.13,<2.16", "It sends.", "a test", lambda original: shorter)
    with pytest.raises(patches.MissingTarget, match=r"changed\.send takes weights_only, and what hybrid3d"):
        patches.apply([patch])
    assert module.send is send
    patches.apply([replace(patch, replacement=lambda original: whatever)])
    assert module.send is whatever
