"""A backend for vLLM's own weight-transfer API: each worker of vLLM receives exactly the boxes that it lacks.

vLLM loads `register` in each of its processes, as a general plugin, and a server started with
`--weight-transfer-config '{"backend": "hybrid3d"}'` uses it. A trainer makes its end with vLLM's own
`WeightTransferTrainerFactory`, or with `TrainerEngine`. `docs/weight-transfer.md` says how, and what is promised.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid3d.weight_transfer.sources import ParamMeta, Replicate, Shard
    from hybrid3d.weight_transfer.trainer import TrainerEngine, TrainerInitInfo, WorkerReport

BACKEND = "hybrid3d"
ENGINE_CORE = "vllm.v1.engine.core"

_MODULE_OF = {
    **dict.fromkeys(("ParamMeta", "Replicate", "Shard"), "sources"),
    **dict.fromkeys(("TrainerEngine", "TrainerInitInfo", "WorkerReport"), "trainer"),
}

__all__ = ["ParamMeta", "Replicate", "Shard", "TrainerEngine", "TrainerInitInfo", "WorkerReport", "register"]


def register() -> None:
    """Register the backend in this process; vLLM calls this in each of its own, most of which never use it."""
    from vllm.distributed.weight_transfer import factory

    for made_by, module, name in (
        (factory.WeightTransferEngineFactory, "worker", "WorkerEngine"),
        (factory.WeightTransferTrainerFactory, "trainer", "TrainerEngine"),
    ):
        if BACKEND not in made_by._registry:
            made_by.register_engine(BACKEND, f"{__name__}.{module}", name)
    if not _hold_generation():  # vLLM's engine may run in a fork of this process
        os.register_at_fork(after_in_child=_hold_generation)


def _hold_generation() -> bool:
    """Let vLLM's engine hold generation during updates, if this process has imported the engine; return whether."""
    if ENGINE_CORE not in sys.modules:
        return False
    from hybrid3d.weight_transfer import hold

    hold.install()
    return True


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
