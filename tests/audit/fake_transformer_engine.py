"""Transformer Engine's own Python, whole, with a stand-in for its compiled extension: its modules can be built."""

from __future__ import annotations

import enum
import os
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


class DType(enum.IntEnum):
    """`transformer_engine_torch.DType`: the members that Transformer Engine 2.20 knows too, which compares them."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


def members(folder: Path, name: str) -> enum.EnumMeta:
    """Return an enum with the members that Transformer Engine's Python names of one; 2.20 compares both."""
    files = (folder / "transformer_engine" / "pytorch").rglob("*.py")
    named = {member for file in files for member in re.findall(rf"\b{name}\.(NVTE_\w+)", file.read_text())}
    return enum.IntEnum(name, sorted(named))


# What is read at import, or where modules are built; `from transformer_engine_torch import *` takes these along.
ANSWERS = dict(
    DType=DType,
    get_cudnn_version=lambda: 92100,
    get_cublasLt_version=lambda: 130100,
    get_num_cublas_streams=lambda: 4,
)


class Extension(types.ModuleType):
    """Stands in for `transformer_engine_torch`: whatever is asked of it exists and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"transformer_engine_torch.{name}"))
        return getattr(self, name)


def install(folder: Path) -> None:
    """Make `transformer_engine` importable from the folder that its wheel was unpacked in; before Megatron's import."""
    sys.path.insert(0, str(folder))
    sys.modules["transformer_engine_torch"] = extension = Extension("transformer_engine_torch")
    vars(extension).update(ANSWERS, NVTE_Fused_Attn_Backend=members(folder, "NVTE_Fused_Attn_Backend"))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # so that the import does not load the core library
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
