"""Querying Megatron on meta: nothing is allocated, and no GPU but the process's own gets a context."""

from __future__ import annotations

from typing import Any

import torch

from gpu import one_rank
from gpu.models import CONFIGS
from gpu.record import Record
from hybrid3d.config import Train
from hybrid3d.reshard.plan.layout import Holdings
from hybrid3d.train.megatron.build import build_model
from hybrid3d.train.megatron.probe import holdings_of
from hybrid3d.train.megatron.source import megatron_weights

LAYOUTS = {
    "dense": Train(tp=2, pp=2, dp=2),
    "experts": Train(tp=2, dp=2, ep=2),
    "latent": Train(tp=2, dp=2, ep=2),
}


def ask_on_meta(record: Record, device: str) -> None:
    """Query Megatron about ranks of layouts that are not here, and compare TP1 with a model that is built."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    own = gpus - 1
    if gpus:
        torch.cuda.set_device(own)  # the last one, so that a context on the first one shows
    asked = {}
    for family, layout in LAYOUTS.items():
        world, config = layout.tp * layout.pp * layout.dp, {**CONFIGS[family], "num_hidden_layers": 4}
        found = [holdings_of(config, layout, rank, torch.bfloat16) for rank in (0, world - 1)]
        record(**{f"{family}_pieces": [len(one.pieces) for one in found]})
        asked[family] = holdings_of(CONFIGS[family], Train(), 0, torch.bfloat16)
    if gpus:
        of_torch: Any = torch._C
        contexts = [gpu for gpu in range(gpus) if of_torch._cuda_hasPrimaryContext(gpu)]
        record(allocated_bytes=torch.cuda.max_memory_allocated(own), contexts=contexts, own_gpu=own)
        assert torch.cuda.max_memory_allocated(own) == 0, "querying on meta has allocated GPU memory"
        assert set(contexts) <= {own}, f"GPU {own} was queried from, and GPUs {contexts} have a context"
        torch.cuda.set_device(0)
    one_rank.start()
    for family, answer in asked.items():
        stages = build_model(CONFIGS[family], Train(), torch.bfloat16)
        assert {p.device.type for p in stages[0].parameters()} == {device}, (
            f"{family}: built elsewhere than on {device}"
        )
        built = megatron_weights(stages, CONFIGS[family]).holdings
        assert _boxes(built) == _boxes(answer), f"{family}: a model on meta and one that is built hold different pieces"
    record(built=sorted(asked))


def _boxes(holdings: Holdings) -> list[tuple[Any, ...]]:
    return sorted((piece.name, piece.box.start, piece.box.size, piece.dtype) for piece in holdings.pieces)
