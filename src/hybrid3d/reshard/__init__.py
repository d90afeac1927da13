"""Resharding: move boxes of canonical tensors from the ranks that hold them to the ranks that want them.

Planning (`box`, `layout`, `planner`, `coverage`) is pure and needs no ranks. Execution (`transport`, `executor`,
`files`) needs torch. This package imports neither Megatron nor vLLM.

The names in `__all__` are those for programs of others: `docs/api.md` documents them, and they stay. They are imported
when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid3d.reshard.ends import NoSink, NoSource, PlainSink, PlainSource, WeightSink, WeightSource
    from hybrid3d.reshard.exchange import JsonExchange
    from hybrid3d.reshard.move.executor import ExecutionReport, Executor
    from hybrid3d.reshard.move.transport import GlooTransport, NcclTransport, Transport, make_transport
    from hybrid3d.reshard.move.verify import checksum
    from hybrid3d.reshard.plan.box import Box
    from hybrid3d.reshard.plan.coverage import (
        check_arrivals,
        check_coverage,
        lower_bound,
        network_lower_bound,
        route_sync,
    )
    from hybrid3d.reshard.plan.layout import Demand, Fill, Holdings, Piece, View
    from hybrid3d.reshard.plan.planner import PlanError, RankPlan, local_plan, make_plan
    from hybrid3d.reshard.resharder import (
        CorruptTensors,
        Resharder,
        local_shards,
        pieces_of,
        tensor_sink,
        tensor_source,
    )

_MODULES = {
    "ends": ("NoSink", "NoSource", "PlainSink", "PlainSource", "WeightSink", "WeightSource"),
    "exchange": ("JsonExchange",),
    "move.executor": ("ExecutionReport", "Executor"),
    "move.transport": ("GlooTransport", "NcclTransport", "Transport", "make_transport"),
    "move.verify": ("checksum",),
    "plan.box": ("Box",),
    "plan.coverage": ("check_arrivals", "check_coverage", "lower_bound", "network_lower_bound", "route_sync"),
    "plan.layout": ("Demand", "Fill", "Holdings", "Piece", "View"),
    "plan.planner": ("PlanError", "RankPlan", "local_plan", "make_plan"),
    "resharder": ("CorruptTensors", "Resharder", "local_shards", "pieces_of", "tensor_sink", "tensor_source"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Box",
    "CorruptTensors",
    "Demand",
    "ExecutionReport",
    "Executor",
    "Fill",
    "GlooTransport",
    "Holdings",
    "JsonExchange",
    "NcclTransport",
    "NoSink",
    "NoSource",
    "Piece",
    "PlainSink",
    "PlainSource",
    "PlanError",
    "RankPlan",
    "Resharder",
    "Transport",
    "View",
    "WeightSink",
    "WeightSource",
    "check_arrivals",
    "check_coverage",
    "checksum",
    "local_plan",
    "local_shards",
    "lower_bound",
    "make_plan",
    "make_transport",
    "network_lower_bound",
    "pieces_of",
    "route_sync",
    "tensor_sink",
    "tensor_source",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
