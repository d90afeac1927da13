"""Syncs in which ranks hand on what they have received: values land bit for bit, and nothing deadlocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d import distributed
from hybrid3d.reshard.delta.encoding import pack_bits
from hybrid3d.reshard.delta.executor import DeltaExecutor
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.move.transport import Transport, make_transport
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import layer_of
from hybrid3d.reshard.plan.coverage import check_coverage, lower_bound
from hybrid3d.reshard.plan.planner import make_plan
from spawned import spawn
from test_reshard_box import Side, World
from test_reshard_delta import Deltas, changed
from test_reshard_executor import Posted, Ranks, Updated, by_element, canonical, memories, truth, unlike, write_pieces
from test_reshard_relays import LIMITS, bytes_into_nodes, network_bound, nodes, planned, relayed_of
from worlds import LocalTransport, Mailbox, Strict, run_in_threads


def replicas_on_nodes() -> World:
    """Return two nodes of three ranks, which all want everything, with boxes that are direct, packed and converted."""
    world = World({}, Side(6), Side(6))
    tensors = {
        "gate": ((256, 512), "bfloat16", "bfloat16", None),  # shares of whole rows, which need no staging
        "up": ((32, 100), "bfloat16", "bfloat16", (1, 0)),  # transposed by the reader
        "master": ((32, 64), "float32", "bfloat16", None),  # converted by the holder
        "norm": ((7,), "float32", "float32", None),
    }
    for layer, owners in (
        ("layers.0.", [0, 1]),
        ("layers.1.", [3, 4]),
        ("layers.2.", [0]),
        ("layers.3.", [5]),
        ("", [2]),
    ):
        for name, (shape, ours, theirs, order) in tensors.items():
            for rank in owners:
                world.held.add(rank, layer + name, Box.full(shape), ours)
            for rank in range(6):
                world.wanted.add(rank, layer + name, Box.full(shape), theirs, order)
            world.shapes[layer + name] = shape
    return world


@settings(max_examples=50, deadline=None)
@given(nodes(), LIMITS, st.integers(0, 99))
def test_values_land_bit_for_bit(case: tuple[World, int], limit: int, seed: int) -> None:
    """The sinks of `Ranks` are overwritten when a layer is closed, and sent memory is read until it has arrived."""
    world, per_node = case
    plan = planned(world, per_node, limit)
    ranks, bound = Ranks(world, plan), lower_bound(world.holdings, world.demand)
    for values in (canonical(world, seed), canonical(world, seed + 100)):
        for rank, report in enumerate(ranks.run(values)):
            assert report.received_bytes == plan[rank].received_bytes == bound[rank]
            assert report.staging_bytes == sum(plan[rank].staging_bytes) <= 2 * limit
        assert ranks.wrong(values) == []
    assert not ranks.mailbox


@pytest.mark.parametrize(
    ("bucket", "transport"),
    [
        *((1 << 30, Strict), (170 * 1024, Posted), (20_000, LocalTransport)),
        *(pytest.param(1 << 30, transport, marks=pytest.mark.further) for transport in (LocalTransport, Posted)),
        *(pytest.param(170 * 1024, transport, marks=pytest.mark.further) for transport in (Strict, LocalTransport)),
        *(pytest.param(20_000, transport, marks=pytest.mark.further) for transport in (Strict, Posted)),
    ],
)
def test_large_boxes(bucket: int, transport: Callable[..., Transport]) -> None:
    world = replicas_on_nodes()
    plan = planned(world, 3, bucket)
    check_coverage(plan, world.holdings, world.demand)
    assert bytes_into_nodes(plan, 3) == network_bound(world, 3)
    assert any(t.relayed and t.is_direct(t.src) for t in relayed_of(plan))
    ranks, values = Ranks(world, plan, transport), canonical(world, 1)
    reports = ranks.run(values)
    assert ranks.wrong(values) == []
    assert [r.received_bytes for r in reports] == [world.must_receive(rank) for rank in range(6)]


@settings(max_examples=40, deadline=None)
@given(nodes(), LIMITS, st.booleans(), st.data())
def test_relays_during_an_update_hand_on_only_updated_values(
    case: tuple[World, int], limit: int, blocks_host: bool, data: st.DataObject
) -> None:
    world, per_node = case
    plan, names = planned(world, per_node, limit), sorted(world.shapes)
    ranks = Updated(world, plan, Posted)
    for transport in ranks.transports:
        transport.blocks_host = blocks_host
    last = [data.draw(st.integers(0, 4)) for _ in ranks.ranks]
    parts = [data.draw(st.dictionaries(st.sampled_from(names), st.integers(0, of_rank))) for of_rank in last]
    for seed in (1, 2):
        values = canonical(world, seed)
        for rank, report in enumerate(ranks.update(values, parts, last)):
            assert report.received_bytes == plan[rank].received_bytes
        assert ranks.wrong(values) == []


@pytest.mark.parametrize("blocks_host", [False, True])
def test_sync_with_relays_begins_before_the_last_update(blocks_host: bool) -> None:
    world = replicas_on_nodes()
    ranks = Updated(world, planned(world, 3, 33_000), Posted)
    for transport in ranks.transports:
        transport.blocks_host = blocks_host
    of_layer = {0: 0, 1: 0, 2: 1, 3: 1, None: 1}
    parts = [{name: min(of_layer[layer_of(name)], rank % 2) for name in world.shapes} for rank in range(6)]
    ranks.update(canonical(world, 1), parts, [0, 1] * 3)
    assert ranks.wrong(canonical(world, 1)) == []
    assert ranks.early > 0


def verified(world: World, transport: Callable[..., Transport]) -> tuple[list[tuple[str, ...]], list[list[str]]]:
    """Return, by rank, the tensors that a verified run reports, and the memories that are wrong."""
    plan, mailbox, values = planned(world, 3, 66_000), Mailbox(), canonical(world, 1)

    def run(rank: int) -> tuple[tuple[str, ...], list[str]]:
        held, wanted = memories(world.held, rank, 0.0), memories(world.wanted, rank, 7.0)
        write_pieces(world.held.pieces[rank], values, held)
        with mailbox.failing_together():
            executor = Executor(plan[rank], NamedTensors(held), NamedTensors(wanted), transport(rank, mailbox))
            found = [executor.run(verify=True).corrupted for _ in range(2)]
        assert found[1] == ()
        return found[0] or (), unlike(wanted, truth(world, rank, values))

    reports = run_in_threads(run, range(6))
    return [corrupted for corrupted, _ in reports], [wrong for _, wrong in reports]


def test_verification_of_relays_finds_nothing_where_nothing_is_wrong() -> None:
    assert verified(replicas_on_nodes(), LocalTransport) == ([()] * 6, [[]] * 6)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.further) for n in range(4, 12))])
def test_bit_that_flips_on_any_way_is_found(seed: int) -> None:
    """Where it flips on its way to a relay, the relay reports it, and hands on what its readers then agree with."""
    draw = random.Random(seed)
    sender, at, bit = draw.randrange(6), draw.randrange(12), draw.randrange(1 << 20)

    class FlipsOneBit(LocalTransport):
        sends = 0

        def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
            if self._rank == sender:
                if self.sends == at:
                    tensor = tensor.clone()
                    tensor[bit % tensor.numel()] ^= 1 << bit % 8
                self.sends += 1
            super().submit_send(tensor, dst, tag)

    found, _ = verified(replicas_on_nodes(), FlipsOneBit)
    assert len({name for names in found for name in names}) == 1
    assert sum(map(len, found)) == 1


def test_relays_change_nothing_with_one_rank_a_node() -> None:
    world = replicas_on_nodes()
    assert planned(world, 1, 1 << 20) == make_plan(world.holdings, world.demand, 1 << 20, 1)


@settings(max_examples=50, deadline=None)
@given(nodes(), LIMITS, st.sampled_from([0.0, 0.02, 0.2, 0.9]), st.integers(0, 99), st.booleans(), st.booleans())
def test_changed_elements_that_are_handed_on_land_bit_for_bit(
    case: tuple[World, int], limit: int, share: float, seed: int, all_sparse: bool, verify: bool
) -> None:
    """Runs that arrive dense, as a bitmap or in Elias-Fano form are handed on; so are tensors that are sent in full."""
    world, per_node = case
    names = sorted(world.shapes)
    ranks = Deltas(world, limit, set(names if all_sparse else names[::2]), per_node, relays=True)
    ranks.verify = verify
    values = canonical(world, 0)
    for turn in range(3):
        values = changed(values, share, seed + turn)
        for report in ranks.send(values):
            assert report.corrupted == (() if verify else None)
            assert report.staging_bytes <= 2 * limit
        assert ranks.wrong(values) == []
    ranks.again()
    assert ranks.wrong(values) == []
    assert not ranks.mailbox


def test_sparse_changes_of_large_boxes_are_relayed_as_few_bytes() -> None:
    world = replicas_on_nodes()
    ranks = Deltas(world, 66_000, set(world.shapes), 3, relays=True)
    values = changed(canonical(world, 0), 0.01, 1)
    reports = ranks.send(values)
    assert ranks.wrong(values) == []
    received = sum(report.received_bytes for report in reports)
    assert received < 0.05 * sum(world.must_receive(rank) for rank in ranks.ranks)
    assert received < 1.2 * sum(report.bound_bytes for report in reports)


def gloo_rank(rank: int, folder: Path, shares_memory: bool) -> None:
    """Sync over gloo in one of four processes, two to a node, all elements and then those that changed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    world = four_of(replicas_on_nodes())
    plan = planned(world, 2, 66_000)[rank]
    held, wanted = memories(world.held, rank, 0.0), memories(world.wanted, rank, 7.0)
    ends, transport = (
        (NamedTensors(held), NamedTensors(wanted)),
        make_transport(torch.device("cpu"), dist.group.WORLD, 2, shares_memory=shares_memory),
    )
    first = canonical(world, 1)
    write_pieces(world.held.pieces[rank], first, held)
    dense = Executor(plan, *ends, transport).run(verify=True)
    assert unlike(wanted, truth(world, rank, first)) == []
    bound = network_bound(world, 2)[rank // 2]
    into = distributed.gather_objects(dense.network_bytes, dist.group.WORLD)
    assert sum(into[rank // 2 * 2 :][:2]) == bound > 0
    assert (dense.received_bytes, dense.corrupted) == (world.must_receive(rank), ())
    second, before = changed(first, 0.01, 1), {name: tensor.clone() for name, tensor in held.items()}
    write_pieces(world.held.pieces[rank], second, held)
    changes = {name: pack_bits((by_element(before[name]) != by_element(new)).any(1)) for name, new in held.items()}
    delta = DeltaExecutor(plan, set(world.shapes), *ends, transport).run_delta(changes, verify=True)
    assert unlike(wanted, truth(world, rank, second)) == []
    assert delta.corrupted == ()
    assert delta.received_bytes < 0.1 * dense.received_bytes
    (folder / f"rank{rank}.done").touch()
    dist.destroy_process_group()


def four_of(world: World) -> World:
    """Return the world in which rank r of four does what rank r of six does; nothing is held elsewhere."""
    held, wanted = Side(4), Side(4)
    held.pieces = {rank: world.held.pieces[rank] for rank in range(4)}
    known = {piece.name for pieces in held.pieces.values() for piece in pieces}
    wanted.pieces = {rank: [p for p in world.wanted.pieces[rank] if p.name in known] for rank in range(4)}
    held.length, wanted.length = world.held.length, world.wanted.length
    return World({name: shape for name, shape in world.shapes.items() if name in known}, held, wanted)


@pytest.mark.engines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shares_memory", [False, True])
def test_relays_over_gloo_between_processes(tmp_path: Path, shares_memory: bool) -> None:
    # One case in processes that hash alike, one in processes that do not: no order may come from that of a set
    start = spawn if shares_memory else mp.spawn
    start(gloo_rank, (tmp_path, shares_memory), 4)
    assert len(list(tmp_path.glob("rank*.done"))) == 4
