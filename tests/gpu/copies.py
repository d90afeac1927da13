"""The local part of a sync against the copy bandwidth of the machine."""

from __future__ import annotations

from typing import Any

import torch
from copy_rates import copied_bytes, measure

from gpu.models import CONFIGS
from gpu.record import Record
from hybrid3d.config import Train
from hybrid3d.reshard.plan.layout import Demand
from hybrid3d.reshard.plan.planner import make_plan
from hybrid3d.train.megatron.probe import holdings_of

# Layers of Qwen2.5-7B
SIZES: dict[str, dict[str, Any]] = {
    "cuda": dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=32768,
        num_hidden_layers=4,
    ),
    "cpu": dict(hidden_size=512, intermediate_size=2048, num_attention_heads=8, vocab_size=4096, num_hidden_layers=2),
}
BUCKET_BYTES = 64 << 20
TOLERANCE = 0.25


def local_copies(record: Record, device: str) -> None:
    """Pack, unpack and copy what a rank of a sync from TP2 to TP1 does, without sending; predict its seconds.

    The prediction is that of `hybrid3d plan`: all bytes at the rate of one plain copy. A CPU's caches make parts of it
    faster, so that there it is only recorded.
    """
    config = {**CONFIGS["dense"], **SIZES[device]}
    held = {rank: holdings_of(config, Train(tp=2), rank, torch.bfloat16) for rank in (0, 1)}
    whole = holdings_of(config, Train(), 0, torch.bfloat16)
    plans = make_plan(held, {0: Demand(whole.pieces), 1: Demand(whole.pieces)}, BUCKET_BYTES)
    plan = max(plans.values(), key=copied_bytes)
    found = measure(plan, torch.device(device), repeats=7)
    ratio = found.seconds / found.predicted_seconds
    record(copied_bytes=found.nbytes, operations=found.operations, plain_copy_gb_per_s=round(found.plain_rate / 1e9, 1))
    record(milliseconds=round(found.seconds * 1e3, 3), predicted_milliseconds=round(found.predicted_seconds * 1e3, 3))
    record(measured_to_predicted=round(ratio, 3))
    if device == "cuda":
        message = f"the copies take {ratio:.2f} times the predicted seconds: expected within {TOLERANCE:.0%}"
        assert abs(ratio - 1) <= TOLERANCE, message
