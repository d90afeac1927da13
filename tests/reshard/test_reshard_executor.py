"""Execution of plans on real tensors: values are compared with numpy's, and counts with the plan."""

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d import distributed
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.exchange import JsonExchange
from hybrid3d.reshard.move.executor import ExecutionReport, Executor, run_local_plan
from hybrid3d.reshard.move.transport import GlooTransport, Transport, make_transport
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import layer_of, signature_of
from hybrid3d.reshard.plan.coverage import check_arrivals, check_coverage, lower_bound
from hybrid3d.reshard.plan.layout import FILES, Fill, Holdings, LocalPieces, Piece, View
from hybrid3d.reshard.plan.planner import Plan, RankPlan, Routes, local_plan, make_plan
from hybrid3d.reshard.sync_plan import required_optimizer_buckets
from hybrid3d.watch.stalls import Wait, find_wait
from spawned import spawn
from test_reshard_box import Shape, Side, World, addresses, index, worlds
from worlds import LocalTransport, Mailbox, Strict, run_in_threads

MIB = 1 << 20
BEFORE = 7.0  # what a destination holds until something lands there


class Bound(NamedTensors):
    """Tensors that may be requested only before the first run."""

    bound = False

    def read(self, piece: Piece) -> torch.Tensor:
        assert not self.bound, "views are found once"
        return super().read(piece)

    write = read


class Layers(Bound):
    """A sink that, like a live model, may be written only while the layer is open.

    Attributes:
        order: the layers in the order in which they were opened.
        landed: what memory looked like when the layers were closed.
    """

    def __init__(self, side: Side, rank: int):
        self._memory, self.landed = memories(side, rank, BEFORE), memories(side, rank, BEFORE)
        super().__init__(self._memory)
        self._pieces: dict[int | None, list[Piece]] = {}
        for piece in side.pieces[rank]:
            self._pieces.setdefault(layer_of(piece.name), []).append(piece)
        self.begin()

    def begin(self) -> None:
        """Start a run that must write all layers."""
        self._left, self._open = set(self._pieces), list[int | None]()
        self.order: list[int | None] = []

    def open(self, layer: int | None) -> None:
        self._left.remove(layer)
        self.order.append(layer)
        self._open.append(layer)
        assert len(self._open) <= 2
        for live, _, where in self._places(layer):
            assert (live[where] == BEFORE).all(), f"layer {layer} is written before it is open"

    def close(self, layer: int | None) -> None:
        assert self._open.pop(0) == layer, "closed in another order than opened"
        for live, landed, where in self._places(layer):
            landed[where] = live[where]
            live[where] = BEFORE

    def _places(self, layer: int | None) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the memory, the values that have arrived and the addresses in both, for each piece of a layer."""
        return [
            (self._memory[p.view.tensor], self.landed[p.view.tensor], torch.from_numpy(addresses(p)).flatten())
            for p in self._pieces[layer]
        ]

    def end(self) -> None:
        assert not self._left, "layers were never opened"
        assert not self._open, "layers were never closed"
        for memory in self._memory.values():
            assert (memory == BEFORE).all(), "written after its layer was closed, or beside all pieces"


def canonical(world: World, seed: int) -> dict[str, torch.Tensor]:
    """Return canonical tensors with random values of all magnitudes that bfloat16 can represent."""
    random = np.random.default_rng(seed)
    return {
        name: torch.as_tensor(random.standard_normal(shape) * 10.0 ** random.integers(-30, 30, shape)).float()
        for name, shape in world.shapes.items()
    }


def memories(side: Side, rank: int, value: float) -> dict[str, torch.Tensor]:
    """Return a rank's tensors; each is a view of a larger one, like a parameter in Megatron's buffer."""
    lengths = {dtype: n for (r, dtype), n in side.length.items() if r == rank}
    return {dtype: torch.full((n + 16,), value, dtype=getattr(torch, dtype))[16:] for dtype, n in lengths.items()}


def write_pieces(pieces: list[Piece], values: dict[str, torch.Tensor], memory: dict[str, torch.Tensor]) -> None:
    """Write boxes of the canonical values to the addresses that numpy computes."""
    for piece in pieces:
        content = values[piece.name][index(piece.box)].to(getattr(torch, piece.dtype))
        at = torch.from_numpy(addresses(piece)).flatten()
        as_integers(memory[piece.view.tensor]).index_copy_(0, at, as_integers(content))


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of their size, [elements]: copies keep every bit, and are fast for any dtype."""
    return tensor.contiguous().flatten().view(getattr(torch, f"int{8 * tensor.itemsize}"))


def by_element(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, [elements, bytes], to compare tensors of any dtype bit by bit."""
    return tensor.contiguous().flatten().view(torch.uint8).view(-1, tensor.itemsize)


def truth(world: World, rank: int, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the expected contents of a rank's memory after a run, gaps included."""
    held = {p.name: getattr(torch, p.dtype) for pieces in world.held.pieces.values() for p in pieces}
    memory = memories(world.wanted, rank, BEFORE)
    write_pieces(
        world.wanted.pieces[rank], {name: v.to(held[name]) for name, v in values.items() if name in held}, memory
    )
    return memory


def unlike(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that differ from the expected ones in any bit."""
    assert got.keys() == expected.keys()
    return [name for name in expected if not by_element(got[name]).equal(by_element(expected[name]))]


class Ranks:
    """Runs all ranks of a world in this process, one thread for each."""

    def __init__(self, world: World, plan: Plan, transport: Callable[..., Transport] = Strict):
        self.world, self.plan, self.ranks = world, plan, list(world.held.pieces)
        self.mailbox = Mailbox()
        self.transports = [transport(rank, self.mailbox) for rank in self.ranks]
        self.held = [memories(world.held, rank, 0.0) for rank in self.ranks]
        self.sinks = [Layers(world.wanted, rank) for rank in self.ranks]
        self.executors = []
        for rank, sink, via in zip(self.ranks, self.sinks, self.transports, strict=True):
            source = Bound(self.held[rank])
            self.executors.append(Executor(plan[rank], source, sink, via))
            source.bound = sink.bound = True

    def run(self, values: dict[str, torch.Tensor]) -> list[ExecutionReport]:
        for rank in self.ranks:
            write_pieces(self.world.held.pieces[rank], values, self.held[rank])
        return run_in_threads(self._run, self.ranks)

    def _run(self, rank: int) -> ExecutionReport:
        sink = self.sinks[rank]
        sink.begin()
        with self.mailbox.failing_together():
            report = self.executors[rank].run()
        sink.end()
        assert sink.order == self.plan[rank].layers
        return report

    def wrong(self, values: dict[str, torch.Tensor]) -> list[tuple[int, str]]:
        """Return (rank, tensor) for every tensor that differs from the expected one in any bit."""
        ranks = zip(self.ranks, self.sinks, strict=True)
        return [(rank, name) for rank, sink in ranks for name in unlike(sink.landed, truth(self.world, rank, values))]


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(4, 300), st.integers(0, 99))
def test_values_land_bit_for_bit_and_bytes_are_as_planned(world: World, limit: int, seed: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    ranks = Ranks(world, plan)
    bound = lower_bound(world.holdings, world.demand)
    for values in (canonical(world, seed), canonical(world, seed + 100)):
        for rank, report in enumerate(ranks.run(values)):
            assert report.received_bytes == plan[rank].received_bytes == bound[rank] == world.must_receive(rank)
            assert report.staging_bytes == sum(plan[rank].staging_bytes) <= 2 * limit
        assert ranks.wrong(values) == []


class Posted(LocalTransport):
    """A transport that, like NCCL, delivers a message as soon as both ends have posted it."""

    blocks_host = False

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._leaving = [*getattr(self, "_leaving", []), (self._rank, dst, tag)]
        super().submit_send(tensor, dst, tag)

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        super().submit_recv(tensor, src, tag)
        self._mailbox.post((src, self._rank, tag))

    def run(self) -> Any:
        pending, leaving, mailbox = super().run(), getattr(self, "_leaving", []), self._mailbox
        self._leaving = []

        class Both:
            def wait(self) -> None:
                pending.wait()
                for key in leaving:
                    mailbox.wait_until_posted(key)

        return Both()


class Updated(Ranks):
    """Ranks whose optimizer updates one bucket of weights after another, some in fewer buckets than others.

    Attributes:
        early: the number of transfer buckets that were started before the rank's last optimizer bucket.
    """

    def update(
        self, values: dict[str, torch.Tensor], parts: list[dict[str, int]], last: list[int]
    ) -> list[ExecutionReport]:
        self._parts, self._values, self.early = parts, values, 0
        numbers = [bucket.number for part in self.plan.values() for bucket in part.buckets]
        self._buckets = max(numbers, default=-1) + 1
        own: list[list[int]] = []
        for rank in self.ranks:
            required_optimizer_buckets(
                self.plan[rank], parts[rank], self._buckets, lambda last: own.append(last) or last
            )
        self._last = [max(of_bucket) for of_bucket in zip(*own, strict=True)]
        self._meet = threading.Barrier(len(self.ranks), timeout=60)
        return run_in_threads(lambda rank: self._update(rank, last[rank]), self.ranks)

    def _update(self, rank: int, last: int) -> ExecutionReport:
        sink, executor, held = self.sinks[rank], self.executors[rank], self.world.held.pieces[rank]
        ready = required_optimizer_buckets(self.plan[rank], self._parts[rank], self._buckets, lambda own: self._last)
        sink.begin()
        executor.begin()
        with self.mailbox.failing_together():
            for part in range(-1, last + 1):
                now = [p for p in held if self._parts[rank].get(p.name, -1) == part]
                write_pieces(now, self._values, self.held[rank])
                upto = len(ready) if part == last else bisect_right(ready, part)
                executor.start_ready_buckets(upto)
                self.early += upto if part < last else 0
            self._meet.wait()
            report = executor.finish()
        sink.end()
        return report


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(4, 300), st.booleans(), st.data())
def test_transfers_during_an_update_move_only_updated_values(
    world: World, limit: int, blocks_host: bool, data: st.DataObject
) -> None:
    plan, names = make_plan(world.holdings, world.demand, limit), sorted(world.shapes)
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


def test_parts_that_are_ready_move_first_without_mutual_waits() -> None:
    """Two ranks have one optimizer bucket and the others two; transfer buckets are small, so there are many."""
    world = large_world()
    ranks = Updated(world, make_plan(world.holdings, world.demand, 100_000), Posted)
    of_layer = {0: 0, 1: 1, None: 1}
    parts = [{name: min(of_layer[layer_of(name)], rank % 2) for name in world.shapes} for rank in range(4)]
    reports = ranks.update(canonical(world, 1), parts, [0, 1, 0, 1])
    assert ranks.wrong(canonical(world, 1)) == []
    assert sum(r.received_bytes for r in reports) > 0
    assert ranks.early > 0


@settings(max_examples=40, deadline=None)
@given(worlds(), st.integers(4, 100))
def test_messages_are_submitted_in_same_order_at_both_ends(world: World, limit: int) -> None:
    """NCCL has no tags, so the order of messages must be the same at both ends."""
    ranks = Ranks(world, make_plan(world.holdings, world.demand, limit))
    ranks.run(canonical(world, 1))
    for src, sender in enumerate(ranks.transports):
        for dst, receiver in enumerate(ranks.transports):
            sent = [(tag, nbytes) for rank, tag, nbytes in sender.sent if rank == dst]
            assert sent == [(tag, nbytes) for rank, tag, nbytes in receiver.received if rank == src]
            assert len(set(sent)) == len(sent)
    assert not ranks.mailbox


def large_world() -> World:
    """Return four ranks, TP2 x PP2 to TP4, with boxes that are direct, split, packed, transposed and converted."""
    world = World({}, Side(4), Side(4))
    shapes: dict[str, tuple[Shape, int, str, str]] = {
        "gate": ((1024, 512), 0, "bfloat16", "bfloat16"),  # whole rows: sent and received without staging
        "down": ((255, 1028), 1, "bfloat16", "bfloat16"),  # columns: packed, and an odd number of elements
        "master": ((256, 512), 0, "float32", "bfloat16"),  # converted by the sender
        "router.bias": ((64,), 0, "float32", "float32"),  # stays float32 among bfloat16
        "norm": ((128,), 0, "bfloat16", "float32"),
        "scale": ((4, 1), 0, "float16", "float16"),  # a lone element, whose stride torch lets be anything
    }
    for layer, owners in (("layers.0.", [0, 1]), ("layers.1.", [2, 3]), ("", [1, 2])):
        for name, (shape, dim, ours, theirs) in shapes.items():
            for side, those, dtype in ((world.held, owners, ours), (world.wanted, [0, 1, 2, 3], theirs)):
                order = (1, 0) if name == "scale" or (side is world.wanted and name == "master") else None
                for i, rank in enumerate(those):
                    size = tuple(n // len(those) if d == dim else n for d, n in enumerate(shape))
                    start = tuple(i * n if d == dim else 0 for d, n in enumerate(size))
                    side.add(rank, layer + name, Box(start, size), dtype, order, int(name == "scale"))
            world.shapes[layer + name] = shape
    return world


@pytest.mark.parametrize(
    ("bucket", "transport"),
    [
        *((1 << 30, LocalTransport), (256 * 1024, Strict), (100_000, LocalTransport)),
        *(pytest.param(bucket, Strict, marks=pytest.mark.further) for bucket in (1 << 30, 100_000)),
        pytest.param(256 * 1024, LocalTransport, marks=pytest.mark.further),
    ],
)
def test_large_boxes_of_several_dtypes(bucket: int, transport: Callable[..., Transport]) -> None:
    world = large_world()
    plan = make_plan(world.holdings, world.demand, bucket)
    check_coverage(plan, world.holdings, world.demand)
    ranks, values = Ranks(world, plan, transport), canonical(world, 1)
    reports = ranks.run(values)
    assert ranks.wrong(values) == []
    assert [r.received_bytes for r in reports] == [world.must_receive(rank) for rank in range(4)]
    assert [r.staging_bytes for r in reports] == [sum(plan[rank].staging_bytes) for rank in range(4)]
    assert 0 < max(r.staging_bytes for r in reports) <= 2 * bucket


class FlipsOneBit(Strict):
    """A transport that flips one bit in the last byte of rank 0's first message."""

    flipped: tuple[int, int] | None = None

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        if self._rank == 0 and self.flipped is None:
            self.flipped, tensor = (dst, tag), tensor.clone()
            tensor[-1] ^= 1
        super().submit_send(tensor, dst, tag)


def test_flipped_bit_in_a_message_is_seen() -> None:
    world, values = large_world(), canonical(large_world(), 1)
    plan = make_plan(world.holdings, world.demand, MIB)
    ranks = Ranks(world, plan, FlipsOneBit)
    ranks.run(values)
    messages = [m for bucket in plan[0].buckets for m in bucket.messages if m.src == 0]
    (first,) = [m for m in messages if (m.dst, m.tag) == ranks.transports[0].flipped]
    assert ranks.wrong(values) == [(first.dst, first.dtype)]


class Nothing(LocalTransport):
    """A transport that fails on every message."""

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        raise AssertionError(f"sends to rank {dst}")

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        raise AssertionError(f"receives from rank {src}")


def one_converted() -> World:
    world = World({"t": (4, 6)}, Side(1), Side(1))
    world.held.add(0, "t", Box.full((4, 6)), "float32")
    world.wanted.add(0, "t", Box.full((4, 6)), "bfloat16", order=(1, 0), gap=1)
    return world


def test_local_values_need_no_transport_and_no_staging() -> None:
    world, values = one_converted(), canonical(one_converted(), 1)
    ranks = Ranks(world, make_plan(world.holdings, world.demand, 4), Nothing)
    assert ranks.run(values) == [ExecutionReport(received_bytes=0, staging_bytes=0)]
    assert ranks.wrong(values) == []


@settings(max_examples=40, deadline=None)
@given(worlds(), st.integers(0, 99))
def test_load_is_copied_to_every_rank(world: World, seed: int) -> None:
    """`FILES` holds every tensor; values are converted, strided and in layers."""
    values, dtypes = canonical(world, seed), {p.name: p.dtype for ps in world.held.pieces.values() for p in ps}
    files = {name: value.to(getattr(torch, dtypes[name])) for name, value in values.items()}
    held = {
        FILES: Holdings(tuple(Piece(n, Box.full(f.shape), View(n, 0, f.stride()), dtypes[n]) for n, f in files.items()))
    }
    for rank in world.wanted.pieces:
        wanted = memories(world.wanted, rank, BEFORE)
        plan = local_plan(rank, held, {rank: world.demand[rank]})
        check_arrivals(plan, world.demand[rank])
        run_local_plan(plan, NamedTensors(files), NamedTensors(wanted))
        assert unlike(wanted, truth(world, rank, values)) == []


def test_local_copy_needs_both_pieces() -> None:
    world = World({"t": (4,)}, Side(2), Side(2))
    world.held.add(0, "t", Box.full((4,)))
    world.wanted.add(1, "t", Box.full((4,)))
    memory = NamedTensors({"float32": torch.zeros(4)})
    for rank in (0, 1):
        with pytest.raises(AssertionError):
            run_local_plan(plan_of_rank(world, rank, int, 64), memory, memory)


def plan_of_rank(world: World, rank: int, all_reduce_min: Callable[[int], int], bucket: int) -> RankPlan:
    """Return a rank's plan as `SyncPlan` makes it: from its own pieces and the signatures of all ranks."""
    held, wanted = world.holdings[rank], world.demand[rank]
    if dist.is_initialized():
        everyone = dist.group.WORLD
        holders, readers = (JsonExchange(everyone).unique(signature_of(side)) for side in (held, wanted))
    else:
        sides = (world.holdings, world.demand)
        holders, readers = ([([r], signature_of(side)) for r, side in of.items()] for of in sides)
    routes = Routes(holders, readers, bucket)
    transfers = routes.rank_transfers(rank, LocalPieces({rank: held}, {rank: wanted}))
    return routes.plan(rank, transfers, routes.bucket_boundaries([transfers], all_reduce_min))


def test_fill_writes_its_view_alone() -> None:
    memory = torch.arange(24.0)
    NamedTensors({"w": memory[4:]}).fill(Fill(View("w", 1, (6, 2)), (2, 2), -1.0))
    assert [i for i in range(24) if memory[i] == -1] == [5, 7, 11, 13]


def gloo_rank(rank: int, folder: Path, shares_memory: bool) -> None:
    """Plan and execute two syncs over gloo in one of four processes, and compare the values with numpy's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    everyone = dist.group.WORLD
    assert distributed.gather_objects(rank * 2, everyone) == [0, 2, 4, 6]
    assert JsonExchange(everyone).unique({"odd": rank % 2}) == [([0, 2], {"odd": 0}), ([1, 3], {"odd": 1})]
    assert [distributed.broadcast_object(value, everyone) for value in (None, [rank])] == [None, [0]]
    smallest = partial(distributed.all_reduce_min, group=everyone)
    assert [smallest(n) for n in (10 - rank, 1 << 40, rank)] == [7, 1 << 40, 0]
    assert distributed.all_reduce_max([rank, -rank, -1], everyone) == [3, 0, -1]
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1])]  # ranks of a group count within it
    pair = pairs[rank % 2]
    assert JsonExchange(pair).unique(rank) == [([0], rank % 2), ([1], rank % 2 + 2)]
    assert distributed.broadcast_object(rank, pair) == rank % 2
    assert smallest(rank) == 0
    world = large_world()
    plan = plan_of_rank(world, rank, smallest, 300_000)
    check_arrivals(plan, world.demand[rank])
    whole = make_plan(world.holdings, world.demand, 300_000)[rank]
    planned = [[[(t.name, t.box, t.src, t.dst) for t in b.transfers] for b in part.buckets] for part in (plan, whole)]
    assert planned[0] == planned[1]
    assert plan.staging_bytes == whole.staging_bytes
    transport = make_transport(torch.device("cpu"), dist.new_group(range(4)), 2, shares_memory=shares_memory)
    assert isinstance(transport, GlooTransport)
    if transport.shared_memory is not None:
        assert transport.shared_memory.peers == {rank ^ 1}
    assert (transport.shared_memory is not None) == shares_memory
    held, sink = memories(world.held, rank, 0.0), Layers(world.wanted, rank)
    executor = Executor(plan, NamedTensors(held), sink, transport)
    for step in (1, 2):
        values = canonical(world, step)
        write_pieces(world.held.pieces[rank], values, held)
        sink.begin()
        report = executor.run()
        sink.end()
        far = sum(t.nbytes for t in plan.transfers if t.dst == rank and t.src // 2 != rank // 2)
        assert (report.received_bytes, report.network_bytes) == (world.must_receive(rank), far)
        assert report.staging_bytes == sum(plan.staging_bytes)
        assert (report.lent_bytes > 0) == shares_memory
        assert report.lent_bytes <= 2 * 300_000
        assert transport.received_bytes == step * world.must_receive(rank)
        assert transport.network_bytes == step * far
        assert unlike(sink.landed, truth(world, rank, values)) == [], f"step {step}"
    check_waits(rank, executor, sink)
    (folder / f"rank{rank}.done").touch()
    dist.destroy_process_group()


def check_waits(rank: int, executor: Executor, sink: Layers) -> None:
    """Let rank 3 be late, and check what another thread of the others says: in which bucket they wait, and for whom."""
    found: list[Wait | None] = []
    main = threading.get_ident()
    watch = threading.Timer(1.0, lambda: found.append(find_wait(sys._current_frames()[main])))
    sink.begin()
    dist.barrier()
    if rank == 3:
        time.sleep(2)
    else:
        watch.start()
    executor.run()
    sink.end()
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, None if rank == 3 else found[0])
    buckets = len(executor._steps)
    for wait in [found[0]] if found else []:
        assert isinstance(wait, Wait), "every rank waits for rank 3, or for one that waits for it"
        (other,) = wait.ranks
        places = (f"bucket {number} of {buckets}" for number in range(1, buckets + 1))
        things = ("a message from", "a message to", "messages that are lent by", "the return of messages by")
        assert wait.call in [f"{place}, {thing} rank {other}" for place in places for thing in things]
        assert not wait.together
    assert 3 in [other for wait in told if wait is not None for other in wait.ranks]


@pytest.mark.engines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shares_memory", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gloo_between_processes(tmp_path: Path, shares_memory: bool) -> None:
    # One case in processes that hash alike, one in processes that do not: no order may come from that of a set.
    # Of the second kind make test has the one with relays
    start = spawn if shares_memory else mp.spawn
    start(gloo_rank, (tmp_path, shares_memory), 4)
    assert len(list(tmp_path.glob("rank*.done"))) == 4
