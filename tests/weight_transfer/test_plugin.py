"""vLLM finds the backend by itself, and in processes that do not use it that costs nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines

ROOT = Path(__file__).resolve().parents[2]

LOAD = """
import sys
from vllm.plugins import load_general_plugins
before = set(sys.modules)
load_general_plugins()
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
assert "hybrid3d" in WeightTransferEngineFactory._registry
assert "hybrid3d" in WeightTransferTrainerFactory._registry
print(sorted(name for name in set(sys.modules) - before if name.startswith("hybrid3d")))
"""
FORK = """
import os, sys
from hybrid3d.weight_transfer import register
register()
register()
assert "vllm.v1.engine.core" not in sys.modules
from vllm.v1.engine.core import EngineCore
assert not hasattr(EngineCore.collective_rpc, "holds_generation")
child = os.fork()
if child == 0:
    os._exit(0 if hasattr(EngineCore.collective_rpc, "holds_generation") else 1)
print(os.waitpid(child, 0)[1])
register()
print(hasattr(EngineCore.collective_rpc, "holds_generation"))
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_plugin_is_declared_under_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["hybrid3d"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_registering_imports_no_engine_and_says_nothing() -> None:
    assert run(LOAD).splitlines() == ["['hybrid3d', 'hybrid3d.weight_transfer']"]


def test_engine_that_is_forked_after_registering_holds_generation() -> None:
    assert run(FORK).split() == ["0", "True"]
