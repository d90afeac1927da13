"""The methods of other trainers in `benchmarks/methods`, in threads: every bit, and every byte by hand."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from methods import trainer_gather
from methods.packed_broadcast import PackedBroadcast
from methods.trainer_gather import TrainerGather

from hybrid3d.bench.baselines import Peers
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import layer_of, signature_of
from hybrid3d.reshard.plan.layout import Demand, Holdings, Piece, View, contiguous_stride
from hybrid3d.reshard.plan.planner import make_plan

RANKS = range(4)  # TP2 x PP2, or EP2 of experts; the engines are two of TP2
STAGES = ((0, 1), (2, 3))
BUCKET = 4096
DENSE = {"model.embed_tokens.weight": 0, "model.layers.0.a.weight": 0, "model.layers.1.a.weight": 1}  # by stage
EXPERTS = {f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight": (layer, e) for layer in (0, 1) for e in (0, 1)}
SHAPE = (16, 32)  # of every tensor
NBYTES = 16 * 32 * 2


def value(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sorted([*DENSE, *EXPERTS]).index(name))
    return torch.randint(-99, 99, SHAPE, generator=generator).bfloat16()


def piece(name: str, box: Box) -> Piece:
    return Piece(name, box, View(name, 0, contiguous_stride(box.size)), "bfloat16")


def held_by(rank: int) -> Holdings:
    """Rows of what is no expert, by TP; whole experts, by EP."""
    stage, tp = divmod(rank, 2)
    rows = [piece(name, Box((8 * tp, 0), (8, 32))) for name, of_stage in DENSE.items() if of_stage == stage]
    return Holdings((*rows, *(piece(n, Box.full(SHAPE)) for n, place in EXPERTS.items() if place == (stage, tp))))


def wanted_by(rank: int) -> Demand:
    """Columns of everything."""
    return Demand(tuple(piece(name, Box((0, 16 * (rank % 2)), (16, 16))) for name in (*DENSE, *EXPERTS)))


class Threads:
    """A transport between threads that counts received bytes."""

    shared_memory, blocks_host, network_bytes = None, True, 0

    def __init__(self, rank: int, boxes: dict[tuple[int, int, int], queue.Queue]):
        self._rank, self._boxes, self.received_bytes = rank, boxes, 0
        self._receives: list[tuple[torch.Tensor, int]] = []

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._boxes.setdefault((self._rank, dst, tag), queue.Queue()).put(tensor.clone())

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._receives.append((tensor, src, tag))

    def run(self) -> Any:
        receives, self._receives = self._receives, []

        def wait() -> None:
            for tensor, src, tag in receives:
                data = self._boxes.setdefault((src, self._rank, tag), queue.Queue()).get(timeout=30)
                tensor.view(torch.uint8).view(-1).copy_(data.view(torch.uint8).view(-1))
                self.received_bytes += data.nbytes

        return SimpleNamespace(wait=wait)


class Closing(NamedTensors):
    """A sink all of whose layers share one memory, as vLLM's do in loader layout: it keeps what is there at `close`."""

    def __init__(self, pieces: tuple[Piece, ...]):
        memory, used = torch.zeros(16 * 16 * len(pieces), dtype=torch.bfloat16), dict[int | None, int]()
        tensors = {}
        for p in pieces:
            at = used.get(layer_of(p.name), 0)
            tensors[p.name] = memory[at : at + p.box.numel].view(p.box.size)
            used[layer_of(p.name)] = at + p.box.numel
        super().__init__(tensors)
        self.closed: list[int | None] = []
        self.kept: dict[str, torch.Tensor] = {}

    def close(self, layer: int | None) -> None:
        self.closed.append(layer)
        self.kept |= {name: t.clone() for name, t in self._tensors.items() if layer_of(name) == layer}


def run(make: Callable[..., Any]) -> tuple[list[dict[str, torch.Tensor]], list[int], list[list[int | None]]]:
    """Run a method on all ranks, twice; return what each has, received the second time, and which layers it closed."""
    signatures = [signature_of(held_by(rank)) for rank in RANKS]
    plan = make_plan({r: held_by(r) for r in RANKS}, {r: wanted_by(r) for r in RANKS}, BUCKET)
    boxes: dict[tuple[int, int, int], queue.Queue] = {}

    def of_rank(rank: int) -> tuple[dict[str, torch.Tensor], int, list[int | None]]:
        stage = rank // 2
        columns = [[r % 2, 2 + r % 2] for r in RANKS]
        peers = Peers(rank, signatures, dict.fromkeys((*DENSE, *EXPERTS), SHAPE), STAGES[stage], STAGES[stage], columns)
        source = {
            p.name: value(p.name)[tuple(slice(a, a + n) for a, n in zip(p.box.start, p.box.size, strict=True))]
            for p in held_by(rank).pieces
        }
        source = {name: tensor.contiguous() for name, tensor in source.items()}
        sink, transport = Closing(wanted_by(rank).pieces), Threads(rank, boxes)
        ends = (held_by(rank), NamedTensors(source)), (wanted_by(rank), sink)
        method = make(peers, plan[rank], ends, transport)
        method.run()
        sink.closed, sink.kept = [], {}
        received = method.run()
        return sink.kept, received, sink.closed

    with ThreadPoolExecutor(4) as pool:
        targets, received, closed = zip(*pool.map(of_rank, RANKS), strict=True)
    return list(targets), list(received), list(closed)


def check(targets: list[dict[str, torch.Tensor]], closed: list[list[int | None]]) -> None:
    for rank, target in enumerate(targets):
        assert target.keys() == {*DENSE, *EXPERTS}
        for name, tensor in target.items():
            assert tensor.equal(value(name)[:, 16 * (rank % 2) : 16 * (rank % 2) + 16]), (rank, name)
        assert sorted(closed[rank], key=str) == [0, 1, None]


def test_packed_broadcast_brings_dense_tensors_everywhere_and_experts_in_shards() -> None:
    targets, received, closed = run(
        lambda peers, plan, ends, transport: PackedBroadcast(peers, plan, *ends, transport, torch.device("cpu"))
    )
    check(targets, closed)
    counts = 6 * 8  # of each of six runs, to rank 0 from each other rank, and back
    halves = {rank: len([n for n, s in DENSE.items() if s == rank // 2]) / 2 for rank in RANKS}  # that it holds itself
    dense = [(len(DENSE) - halves[rank]) * NBYTES + (3 if rank == 0 else 1) * counts for rank in RANKS]
    experts = [3 / 2 * NBYTES] * 4  # half of each of the three that it does not hold
    assert received == [a + b for a, b in zip(dense, experts, strict=True)]


def test_gather_on_the_ranks_that_train_sends_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank lacks half of each dense tensor of its stage and one of two experts; and half of the other stage."""
    asked: dict[int, list[tuple[Holdings, Demand]]] = {rank: [] for rank in RANKS}

    def note(held: Holdings, wanted: Demand, bucket: int, per_node: int, group: Any) -> Any:
        """Plan without collectives, once all ranks have asked as often."""
        asked[group.rank].append((held, wanted))
        number = len(asked[group.rank])
        group.barrier.wait(timeout=30)
        ends = [{rank: asked[rank][number - 1][end] for rank in RANKS} for end in (0, 1)]
        return make_plan(ends[0], ends[1], bucket)[group.rank]

    barrier = threading.Barrier(4)
    monkeypatch.setattr(trainer_gather, "_plan", note)

    def make(peers: Peers, plan: Any, ends: Any, transport: Any) -> TrainerGather:
        group = SimpleNamespace(rank=peers.rank, barrier=barrier)
        return TrainerGather(peers, plan, *ends, BUCKET // 4, 1 << 30, transport, group, torch.device("cpu"))

    targets, received, closed = run(make)
    check(targets, closed)
    own = {0: 2 / 2 + 1, 1: 1 / 2 + 1}  # gathered by a rank of each stage: halves of dense tensors, and an expert
    others = {0: (1 + 2) / 2, 1: (2 + 2) / 2}  # halves of the other stage's
    assert received == [(own[rank // 2] + others[rank // 2]) * NBYTES for rank in RANKS]
