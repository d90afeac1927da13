"""Plans carried out on real tensors: what lands is compared with numpy's truth, what is counted with the plan."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.coverage import check_coverage, lower_bound
from hybrid3d.reshard.executor import Executor, Report, Tensors
from hybrid3d.reshard.layout import Fill, Piece, View
from hybrid3d.reshard.planner import Plan, make_plan
from hybrid3d.reshard.transport import GlooTransport, LocalTransport, NoTransport, Transport, make_transport
from test_reshard_box import Shape, Side, World, addresses, index, worlds
from worlds import Mailbox, run_in_threads

MIB = 1 << 20
BEFORE = 7.0  # what a destination holds until something lands there


class Unit(Tensors):
    """A sink as strict as a live model: writes what is not in place only when it is next, hears of each landing."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], wanted: list[Piece]):
        super().__init__(tensors)
        self.left = [(piece, piece.box.numel) for piece in wanted]

    def write(self, piece: Piece) -> torch.Tensor:
        assert piece.in_place or self.left[0][0].part(piece.box) == piece, "written before its module is open"
        return self.read(piece)

    def landed(self, piece: Piece) -> None:
        first, left = self.left[0]
        assert first.part(piece.box) == piece, "landed out of the demand's order"
        self.left[0] = (first, left - piece.box.numel)
        if left == piece.box.numel:
            del self.left[0]


def canonical(world: World, seed: int) -> dict[str, torch.Tensor]:
    """Canonical tensors of random values, of all magnitudes that bfloat16 knows."""
    random = np.random.default_rng(seed)
    return {
        name: torch.as_tensor(random.standard_normal(shape) * 10.0 ** random.integers(-30, 30, shape)).float()
        for name, shape in world.shapes.items()
    }


def memories(side: Side, rank: int, value: float) -> dict[str, torch.Tensor]:
    """A rank's tensors; each lies in a larger one, as a parameter lies in Megatron's buffer."""
    lengths = {dtype: n for (r, dtype), n in side.length.items() if r == rank}
    return {dtype: torch.full((n + 16,), value, dtype=getattr(torch, dtype))[16:] for dtype, n in lengths.items()}


def write_pieces(side: Side, rank: int, values: dict[str, torch.Tensor], memory: dict[str, torch.Tensor]) -> None:
    """Put a rank's boxes of the canonical values at the places that numpy's arithmetic gives them."""
    for piece in side.pieces[rank]:
        content = values[piece.name][index(piece.box)].to(getattr(torch, piece.dtype))
        by_element(memory[piece.view.tensor])[torch.from_numpy(addresses(piece)).flatten()] = by_element(content)


def by_element(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element: what two tensors must have in common to be the same, whatever their dtype."""
    return tensor.contiguous().flatten().view(torch.uint8).view(-1, tensor.itemsize)


def truth(world: World, rank: int, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What must be in a rank's memory afterwards, gaps included."""
    held = {p.name: getattr(torch, p.dtype) for pieces in world.held.pieces.values() for p in pieces}
    memory = memories(world.wanted, rank, BEFORE)
    write_pieces(world.wanted, rank, {name: v.to(held[name]) for name, v in values.items() if name in held}, memory)
    return memory


class Ranks:
    """All ranks of a world in this process, each in a thread of its own."""

    def __init__(self, world: World, plan: Plan, transport: Callable[..., Transport] = LocalTransport):
        self.world, self.ranks = world, list(world.held.pieces)
        self.mailbox = Mailbox()
        self.executors = [Executor(plan, rank, transport(rank, self.mailbox)) for rank in self.ranks]
        self.held = [memories(world.held, rank, 0.0) for rank in self.ranks]
        self.wanted = [memories(world.wanted, rank, BEFORE) for rank in self.ranks]

    def run(self, values: dict[str, torch.Tensor]) -> list[Report]:
        return run_in_threads(lambda rank: self._run(rank, values), self.ranks)

    def _run(self, rank: int, values: dict[str, torch.Tensor]) -> Report:
        write_pieces(self.world.held, rank, values, self.held[rank])
        sink = Unit(self.wanted[rank], self.world.wanted.pieces[rank])
        with self.mailbox.one_for_all():
            report = self.executors[rank].run(Tensors(self.held[rank]), sink)
        assert not sink.left, "not all landed"
        return report

    def wrong(self, values: dict[str, torch.Tensor]) -> list[tuple[int, str]]:
        """(rank, memory) of what is not, bit for bit, as it must be."""
        return [
            (rank, name)
            for rank in self.ranks
            for name, expected in truth(self.world, rank, values).items()
            if not by_element(self.wanted[rank][name]).equal(by_element(expected))
        ]


@settings(max_examples=50, deadline=None)
@given(worlds(), st.integers(4, 300), st.integers(0, 99))
def test_values_land_bit_for_bit_and_bytes_are_as_planned(world: World, limit: int, seed: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    ranks = Ranks(world, plan)
    bound = lower_bound(world.holdings, world.demand)
    for values in (canonical(world, seed), canonical(world, seed + 100)):
        for rank, report in enumerate(ranks.run(values)):
            assert report.received_bytes == plan.received_bytes.get(rank, 0) == bound[rank] == world.must_receive(rank)
            assert report.staging_bytes == plan.staging_bytes[rank] <= 2 * limit
        assert ranks.wrong(values) == []


def large_world() -> World:
    """Four ranks, TP2 x PP2 to TP4: boxes that travel alone and are cut, that are packed, transposed, converted."""
    world = World({}, Side(4), Side(4))
    shapes: dict[str, tuple[Shape, int, str, str]] = {
        "gate": ((1024, 512), 0, "bfloat16", "bfloat16"),  # whole rows: sent and received without staging
        "down": ((255, 1028), 1, "bfloat16", "bfloat16"),  # columns: packed, and an odd number of elements
        "master": ((256, 512), 0, "float32", "bfloat16"),  # converted by the sender
        "router.bias": ((64,), 0, "float32", "float32"),  # stays float32 among bfloat16
        "norm": ((128,), 0, "bfloat16", "float32"),
        "scale": ((4, 1), 0, "float16", "float16"),  # a lone element, whose stride torch lets be anything
    }
    for layer, owners in enumerate(([0, 1], [2, 3])):
        for name, (shape, dim, ours, theirs) in shapes.items():
            for side, ranks, dtype in ((world.held, owners, ours), (world.wanted, [0, 1, 2, 3], theirs)):
                order = (1, 0) if name == "scale" or (side is world.wanted and name == "master") else None
                in_place = (side, name) != (world.wanted, "gate") or layer == 1
                for i, rank in enumerate(ranks):
                    size = tuple(n // len(ranks) if d == dim else n for d, n in enumerate(shape))
                    start = tuple(i * n if d == dim else 0 for d, n in enumerate(size))
                    side.add(rank, f"{layer}.{name}", Box(start, size), dtype, order, int(name == "scale"), in_place)
            world.shapes[f"{layer}.{name}"] = shape
    return world


@pytest.mark.parametrize("bucket", [1 << 30, 256 * 1024, 100_000])
def test_large_boxes_of_several_dtypes(bucket: int) -> None:
    world = large_world()
    plan = make_plan(world.holdings, world.demand, bucket)
    check_coverage(plan, world.holdings, world.demand)
    ranks, values = Ranks(world, plan), canonical(world, 1)
    reports = ranks.run(values)
    assert ranks.wrong(values) == []
    assert [r.received_bytes for r in reports] == [world.must_receive(rank) for rank in range(4)]
    assert [r.staging_bytes for r in reports] == [plan.staging_bytes[rank] for rank in range(4)]
    assert max(r.staging_bytes for r in reports) <= 2 * bucket


class FlipsOneBit(LocalTransport):
    """Rank 0's first message arrives with one bit of its last byte changed."""

    flipped = False

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        if self._rank == 0 and not self.flipped:
            self.flipped, tensor = True, tensor.clone()
            tensor.view(-1).view(torch.uint8)[-1] ^= 1
        super().submit_send(tensor, dst, tag)


def test_one_flipped_bit_is_seen() -> None:
    world, values = large_world(), canonical(large_world(), 1)
    plan = make_plan(world.holdings, world.demand, MIB)
    ranks = Ranks(world, plan, FlipsOneBit)
    ranks.run(values)
    (where,) = ranks.wrong(values)
    first = next(m for m in plan.messages if m.src == 0)
    assert where == (first.dst, first.dtype)


def test_a_local_plan_needs_no_transport_and_no_staging() -> None:
    world = World({"t": (4, 6)}, Side(1), Side(1))
    world.held.add(0, "t", Box.whole((4, 6)), "float32")
    world.wanted.add(0, "t", Box.whole((4, 6)), "bfloat16", order=(1, 0), gap=1)
    values, wanted = canonical(world, 1), memories(world.wanted, 0, BEFORE)
    executor = Executor(make_plan(world.holdings, world.demand, 4), 0, NoTransport())
    held = memories(world.held, 0, 0.0)
    write_pieces(world.held, 0, values, held)
    assert executor.run(Tensors(held), Tensors(wanted)) == Report(received_bytes=0, staging_bytes=0)
    assert wanted["bfloat16"].equal(truth(world, 0, values)["bfloat16"])


def test_a_plan_that_sends_is_a_mistake_without_transport() -> None:
    world = World({"t": (4,)}, Side(2), Side(2))
    world.held.add(0, "t", Box.whole((4,)))
    world.wanted.add(1, "t", Box.whole((4,)))
    plan, memory = make_plan(world.holdings, world.demand, 64), Tensors({"float32": torch.zeros(4)})
    with pytest.raises(AssertionError, match="sends to rank 1"):
        Executor(plan, 0, NoTransport()).run(memory, memory)
    with pytest.raises(AssertionError, match="receives from rank 0"):
        Executor(plan, 1, NoTransport()).run(memory, memory)


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3).t(), torch.zeros(4, 3)[:, :2]], ids=["transposed", "gaps"])
def test_a_transport_refuses_what_is_not_contiguous(tensor: torch.Tensor) -> None:
    """Its bytes in a row are other elements than its own: sending them would be silent."""
    with pytest.raises(RuntimeError, match="view"):
        LocalTransport(0, {}).submit_send(tensor, dst=1, tag=0)
    with pytest.raises(RuntimeError, match="view"):
        LocalTransport(0, {}).submit_recv(tensor, src=1, tag=0)


def test_fill_writes_its_view_alone() -> None:
    memory = torch.arange(24.0)
    Tensors({"w": memory[4:]}).fill(Fill(View("w", 1, (6, 2)), (2, 2), -1.0))
    assert [i for i in range(24) if memory[i] == -1] == [5, 7, 11, 13]


def gloo_rank(rank: int, folder: Path) -> None:
    """One of four processes: two syncs with different values over gloo, each compared with the truth."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    world = large_world()
    plan = make_plan(world.holdings, world.demand, 300_000)
    transport = make_transport(torch.device("cpu"), dist.new_group(range(4)))
    assert isinstance(transport, GlooTransport)
    executor = Executor(plan, rank, transport)
    held, wanted = memories(world.held, rank, 0.0), memories(world.wanted, rank, BEFORE)
    for step in (1, 2):
        values = canonical(world, step)
        write_pieces(world.held, rank, values, held)
        sink = Unit(wanted, world.wanted.pieces[rank])
        report = executor.run(Tensors(held), sink)
        assert not sink.left
        assert report == Report(world.must_receive(rank), plan.staging_bytes[rank])
        assert transport.received_bytes == step * world.must_receive(rank)
        for name, expected in truth(world, rank, values).items():
            assert by_element(wanted[name]).equal(by_element(expected)), f"step {step}: {name}"
    (folder / f"rank{rank}.done").touch()
    dist.destroy_process_group()


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_gloo_between_processes(tmp_path: Path) -> None:
    mp.spawn(gloo_rank, (tmp_path,), nprocs=4)
    assert len(list(tmp_path.glob("rank*.done"))) == 4
