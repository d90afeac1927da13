"""Verification of a sync finds any flipped bit, and reports nothing if no bit was flipped."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.move.executor import ExecutionReport, Executor
from hybrid3d.reshard.plan.layout import Demand, Holdings
from hybrid3d.reshard.plan.planner import make_plan
from test_reshard_executor import canonical, large_world, memories, write_pieces
from worlds import LocalTransport, Mailbox, run_in_threads

WORLD = large_world()
RANKS = range(4)


def synced(transport: Any = LocalTransport) -> list[ExecutionReport]:
    plan = make_plan(WORLD.holdings, WORLD.demand, 300_000)
    mailbox, values = Mailbox(), canonical(WORLD, 1)

    def run(rank: int) -> ExecutionReport:
        held, wanted = memories(WORLD.held, rank, 0.0), memories(WORLD.wanted, rank, 7.0)
        write_pieces(WORLD.held.pieces[rank], values, held)
        with mailbox.failing_together():
            executor = Executor(plan[rank], NamedTensors(held), NamedTensors(wanted), transport(rank, mailbox))
            return executor.run(verify=True)

    return run_in_threads(run, RANKS)


def test_verification_finds_nothing_where_nothing_is_wrong() -> None:
    assert [report.corrupted for report in synced()] == [()] * 4


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.further) for n in range(5, 20))])
def test_bit_that_flips_in_transit_is_found_at_the_reader(seed: int) -> None:
    draw = random.Random(seed)
    sender, bit = draw.randrange(4), draw.randrange(1 << 20)

    class FlipsOneBit(LocalTransport):
        flipped = False

        def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
            if self._rank == sender and not self.flipped:
                self.flipped, tensor = True, tensor.clone()
                tensor[bit % tensor.numel()] ^= 1 << bit % 8
            super().submit_send(tensor, dst, tag)

    found = [report.corrupted for report in synced(FlipsOneBit)]
    assert sum(len(wrong or ()) for wrong in found) == 1


def test_sync_that_is_not_verified_says_nothing_of_it() -> None:
    plan = make_plan({0: Holdings(())}, {0: Demand(())}, 1 << 20)
    assert Executor(plan[0], NamedTensors({}), NamedTensors({}), LocalTransport(0, {})).run().corrupted is None
