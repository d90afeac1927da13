"""Bits flipped in synced tensors of every family, between their landing and their finalization: each is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints import FAMILIES
from grid import LAYOUTS, Cell, Grid, rollout_of
from hybrid3d.config import Train
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.move.verify import TransferChecksums
from hybrid3d.reshard.plan.planner import make_plan
from worlds import LocalTransport, Mailbox, run_in_threads

pytestmark = pytest.mark.engines

FLIPS = 13  # a family; 10 families: more than a hundred


@pytest.fixture(scope="module")
def grid(tiny_checkpoint: Callable[..., Path]) -> Grid:
    return Grid(tiny_checkpoint)


def flip(box: torch.Tensor, draw: random.Random) -> None:
    """One bit of one element."""
    at = tuple(draw.randrange(n) for n in box.shape)
    element = box[at].clone().view(1)
    raw = element.view(torch.uint8)
    raw[draw.randrange(raw.numel())] ^= 1 << draw.randrange(8)
    box[at] = element[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_finds_each_flipped_bit_in_its_tensor_alone(
    family: str, grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(family)
    train, rollout = (draw.choice(layouts) for layouts in LAYOUTS[family])
    cell = Cell(family, Train(**train), rollout_of(**rollout))
    trained, engine = grid._trained(family, cell.train), grid._wanted(family, cell.rollout)
    ranks = sorted(trained)
    wanted = {rank: engine[rank % len(engine)] for rank in ranks}
    holdings = {rank: trained[rank].holdings for rank in ranks}
    plan = make_plan(holdings, {rank: wanted[rank].demand for rank in ranks}, 100_000, 2)
    landing = [(rank, t) for rank in ranks for t in plan[rank].transfers if t.dst == rank and t.box.numel]
    chosen = draw.sample(landing, FLIPS)
    flipped = {id(t): draw.randrange(1 << 30) for _, t in chosen}
    record_layer = TransferChecksums.record_layer

    def flipping(checks: TransferChecksums, layer: int | None) -> None:
        for t, box in checks._targets[layer]:
            if id(t) in flipped:
                flip(box, random.Random(flipped[id(t)]))
        record_layer(checks, layer)

    monkeypatch.setattr(TransferChecksums, "record_layer", flipping)
    mailbox = Mailbox()

    def run(rank: int) -> tuple[str, ...] | None:
        got = NamedTensors({name: torch.zeros_like(tensor) for name, tensor in wanted[rank].truth.items()})
        with mailbox.failing_together():
            executor = Executor(plan[rank], NamedTensors(trained[rank].tensors), got, LocalTransport(rank, mailbox))
            return executor.run(verify=True).corrupted

    found = dict(zip(ranks, run_in_threads(run, ranks), strict=True))
    assert found == {rank: tuple(sorted({t.name for r, t in chosen if r == rank})) for rank in ranks}, str(cell)
