"""What each rank of vLLM wants, by two recorders that have nothing in common: hybrid3d's, and vLLM's own.

vLLM's `sharded_rdt` weight transfer records loaders with fake tensors (`BakeSink`). For every element of every tensor
of a rank, both must say which element of which checkpoint tensor lands there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.sharded_rdt_engine import (
    BakeSink,
    FakeRDTTensor,
    ShardedRDTWeightTransferEngine,
)

from checkpoints import FAMILIES, SPARSE
from commands import ROOT
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.plan.layout import Demand, Shape
from hybrid3d.rollout.probe import model_of_rank
from hybrid3d.rollout.sink import VllmSink
from hybrid3d.train.megatron.probe import expected_shapes

pytestmark = pytest.mark.engines

Element = tuple[str, torch.Tensor, torch.Tensor]
"""A tensor of a rank, places in its memory, and for each the number of the checkpoint's element that lands there."""

DENSE_LAYOUTS = [(1, 1), (2, 1), (4, 1)]  # TP and DP of the engine
SPARSE_LAYOUTS = [(1, 1), (2, 1), (2, 2)]  # the last with expert parallelism
FAST = [("qwen3", (4, 1)), ("qwen3_moe", (2, 2)), ("deepseek_v3", (2, 1))]
CASES = [(f, layout) for f in FAMILIES for layout in (SPARSE_LAYOUTS if f in SPARSE else DENSE_LAYOUTS)]


class Checkpoint:
    """Numbers every element of every tensor of a checkpoint."""

    def __init__(self, shapes: dict[str, Shape]):
        self.shapes, self._first, at = shapes, dict[str, int](), 0
        for name, shape in shapes.items():
            self._first[name] = at
            at += math.prod(shape)

    def elements(self, name: str) -> torch.Tensor:
        first = self._first[name]
        return torch.arange(first, first + math.prod(self.shapes[name])).view(self.shapes[name])


def of_demand(demand: Demand, checkpoint: Checkpoint) -> Iterator[Element]:
    """What hybrid3d has recorded."""
    for piece in demand.pieces:
        box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        yield (
            piece.view.tensor,
            places(piece.box.size, piece.view.stride, piece.view.offset),
            checkpoint.elements(piece.name)[box],
        )


def of_vllm(model: torch.nn.Module, dtype: torch.dtype, checkpoint: Checkpoint) -> Iterator[Element]:
    """What vLLM records of its own loading of fake tensors."""
    names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    tied: dict[int, str] = {}  # the first name of each storage
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        tied.setdefault(tensor.untyped_storage()._cdata, name)
    engine = ShardedRDTWeightTransferEngine.__new__(ShardedRDTWeightTransferEngine)
    engine.model, sink = model, BakeSink()
    engine._install_recording_stamps(model, sink)
    settings: Any = dict(dtype=dtype, device=torch.device("meta"), sink=sink)
    model.load_weights(
        (name, FakeRDTTensor(name=name, shape=torch.Size(shape), **settings))
        for name, shape in checkpoint.shapes.items()
    )
    for module, copies in sink.copies_by_layer.items():
        for copy in copies:
            assert copy is not None, "vLLM could not tell which parameter it wrote"
            tensor = getattr(module, copy.param_name)
            name = tied.get(tensor.untyped_storage()._cdata, f"{names[module]}{copy.param_name}")
            source = checkpoint.elements(copy.src[0])
            for operation, arguments, more in copy.src[1]:
                source = getattr(source, operation)(*arguments, **dict(more))
            yield name, places(copy.shape, copy.stride, copy.offset), source


def places(size: Any, stride: Any, offset: int) -> torch.Tensor:
    """The places in memory of the elements of a strided view."""
    end = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
    return torch.arange(end).as_strided(tuple(size), tuple(stride), offset)


def table(elements: Iterator[Element]) -> dict[str, torch.Tensor]:
    """By tensor of the rank, pairs of a place and the number of the element that lands there, in order of places."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, place, source in elements:
        assert place.numel() == source.numel()
        found.setdefault(name, []).append(torch.stack([place.flatten(), source.flatten()], 1))
    return {name: pairs[pairs[:, 0].argsort()] for name, pairs in ((n, torch.cat(p)) for n, p in found.items())}


def recipe_of(folder: Path, tp: int, dp: int) -> Recipe:
    settings = [f"model.path={folder}", "rollout.max_model_len=128", "rollout.max_new_tokens=8"]
    settings += ["train.tp=1", "train.pp=1", f"train.dp={tp * dp}", f"rollout.tp={tp}", f"rollout.dp={dp}"]
    settings += ["rollout.expert_parallel=true"] if dp > 1 else []
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", settings)


def both(recipe: Recipe, rank: int, checkpoint: Checkpoint) -> tuple[Demand, dict[str, torch.Tensor]]:
    """The demand of a rank by hybrid3d, and by vLLM."""
    with model_of_rank(recipe, rank) as (model, config):
        demand = VllmSink(model, config).demand_for(checkpoint.shapes)
    with model_of_rank(recipe, rank) as (model, config), set_current_vllm_config(config):
        return demand, table(of_vllm(model, config.model_config.dtype, checkpoint))


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    names = found.keys() | expected.keys()
    return sorted(n for n in names if n not in found or n not in expected or not found[n].equal(expected[n]))


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES],
    ids=lambda value: value if isinstance(value, str) else "tp{}-dp{}".format(*value),
)
def test_demand_of_both_recorders_agrees(
    tiny_checkpoint: Callable[..., Path], family: str, layout: tuple[int, int]
) -> None:
    folder = tiny_checkpoint(family)
    checkpoint = Checkpoint(expected_shapes(read_config(str(folder))))
    recipe, elements = recipe_of(folder, *layout), 0
    for rank in range(math.prod(layout)):
        demand, expected = both(recipe, rank, checkpoint)
        assert differing(table(of_demand(demand, checkpoint)), expected) == [], f"rank {rank}"
        elements += sum(len(pairs) for pairs in expected.values())
    assert elements >= sum(math.prod(shape) for shape in checkpoint.shapes.values())


def test_recorder_error_makes_the_demand_differ(tiny_checkpoint: Callable[..., Path]) -> None:
    """Each error of a recorder shows: another row, another place, a piece less."""
    folder = tiny_checkpoint("qwen3")
    checkpoint = Checkpoint(expected_shapes(read_config(str(folder))))
    demand, expected = both(recipe_of(folder, 2, 1), 1, checkpoint)
    at, piece = next((i, p) for i, p in enumerate(demand.pieces) if "k_proj.weight" in p.name and p.box.start[0])
    moved = dataclasses.replace(piece.box, start=(piece.box.start[0] - 1, *piece.box.start[1:]))
    shifted = dataclasses.replace(piece.view, offset=piece.view.offset + piece.box.size[1])
    for wrong in ([dataclasses.replace(piece, box=moved)], [dataclasses.replace(piece, view=shifted)], []):
        pieces = (*demand.pieces[:at], *wrong, *demand.pieces[at + 1 :])
        found = table(of_demand(dataclasses.replace(demand, pieces=pieces), checkpoint))
        assert differing(found, expected) == [piece.view.tensor]
