"""What `hybrid3d.reshard` gives to programs of others: its names, pieces of DTensors, exchanges, and an example."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybrid3d import reshard
from hybrid3d.reshard import (
    Box,
    CorruptTensors,
    Holdings,
    JsonExchange,
    NoSink,
    NoSource,
    Piece,
    PlainSink,
    PlainSource,
    PlanError,
    Resharder,
    View,
    local_shards,
    pieces_of,
    tensor_sink,
    tensor_source,
)
from hybrid3d.reshard.exchange import _from_json
from hybrid3d.reshard.move.memory import strided_view
from hybrid3d.reshard.sync_plan import plan_sync
from run_ranks import environment, kill_marked
from spawned import spawn

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "reshard_two_meshes.py"
RANKS = 4

PLACEMENTS = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
    (_StridedShard(0, split_factor=2), Shard(0)),  # FSDP over tensor parallelism
    (_StridedShard(1, split_factor=2), Shard(1)),
    (_StridedShard(0, split_factor=3), Replicate()),  # rows that are not consecutive
]


@pytest.fixture
def fake_rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of four ranks that do not exist."""
    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def test_names_are_there_and_the_documented_ones() -> None:
    for name in reshard.__all__:
        found = getattr(reshard, name)
        assert getattr(importlib.import_module(found.__module__), name) is found
    assert sorted(reshard.__all__) == list(reshard.__all__)
    assert set(reshard.__all__) <= set(dir(reshard))
    page = (ROOT / "docs" / "api.md").read_text()
    library = page[page.index("## The resharding library") :].split("\n## ")[0]
    assert {name for name in reshard.__all__ if f"`{name}`" not in library} == set()


def test_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'reshard_everything'"):
        reshard.reshard_everything  # noqa: B018


@pytest.mark.processes
def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, hybrid3d.reshard; print({'torch', 'numpy', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("fake_rank", range(RANKS), indirect=True)
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 9)])
def test_pieces_say_where_a_shard_lies(fake_rank: int, placements: tuple[Any, ...], shape: tuple[int, int]) -> None:
    """Values are the numbers of the elements: what torch has put in the shard is what the boxes must say."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    tensors = {"w": distribute_tensor(full, mesh, placements, src_data_rank=None)}
    memory, pieces = local_shards(tensors)["w"], pieces_of(tensors)
    found = []
    for piece in pieces:
        box = full[tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))]
        assert torch.equal(strided_view(memory, piece.view, piece.box.size), box)
        found += box.flatten().tolist()
    assert sorted(found) == sorted(memory.flatten().tolist())


@pytest.mark.parametrize("fake_rank", [2], indirect=True)
def test_pieces_of_a_mesh_without_this_rank_are_none(fake_rank: int) -> None:
    elsewhere = DeviceMesh("cpu", [0, 1])
    tensors = {"w": DTensor.from_local(torch.zeros(0), elsewhere, [Shard(0)], run_check=False)}
    assert (local_shards(tensors), pieces_of(tensors)) == ({}, ())


@pytest.mark.parametrize("fake_rank", [0], indirect=True)
def test_pieces_of_what_cannot_be_sent_are_refused(fake_rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    with pytest.raises(ValueError, match=r"w is placed as .*: redistribute it"):
        pieces_of({"w": DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)})
    with pytest.raises(ValueError, match=r"w has dtype int64: only float64, .* can be resharded"):
        pieces_of({"w": torch.zeros(2, dtype=torch.int64)})


VALUES = [
    None,
    "name",
    -1.5,
    (1, ("a", None)),
    {((Box((0, 2), (3, 4)), "bfloat16"),): ("model.layers.0.w", "b"), (): ()},
    frozenset({"q", "k"}),
    {Box((), ()): {1: ()}},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_exchange_gives_back_what_it_takes(alone: dist.ProcessGroup, value: Any) -> None:
    assert JsonExchange(alone).unique(value) == [([0], value)]
    assert JsonExchange(alone, [7]).unique(value) == [([7], value)]


@pytest.mark.parametrize(
    "sent",
    [
        '{"box": [[0], [-1]]}',
        '{"box": [[0], [1, 2]]}',
        '{"box": [[true], [1]]}',
        '{"box": "x"}',
        '{"map": [[1, 2, 3]]}',
        '{"set": 1}',
        '{"unknown": []}',
    ],
)
def test_exchange_refuses_what_no_rank_sends(sent: str) -> None:
    with pytest.raises(ValueError, match="no rank sends"):
        _from_json(json.loads(sent))


def test_exchange_does_not_unpickle(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stranger sends in the place of a rank is read as JSON, and is none."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("it was unpickled",))

    def broadcast(buffer: torch.Tensor, **more: Any) -> None:
        sent = bytearray(pickle.dumps(Trap())[: len(buffer)].ljust(len(buffer), b"."))
        buffer.copy_(torch.frombuffer(sent, dtype=torch.uint8))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    with pytest.raises(ValueError, match="not those that it announced"):
        JsonExchange(alone).unique("x" * 100)
    with pytest.raises(TypeError, match="a Trap is exchanged"):
        JsonExchange(alone).unique(Trap())


def test_resharder_moves_weights_as_they_are_now(alone: dist.ProcessGroup) -> None:
    held, wanted = torch.arange(12.0).view(3, 4), torch.zeros(3, 4)
    sink = tensor_sink({"w": wanted})
    resharder = Resharder(tensor_source({"w": held}), sink, alone)
    for version in (1, 2):
        held += 1
        assert resharder.run(version).corrupted == ()
        assert torch.equal(wanted, held)
        assert sink.version == version
    assert (resharder.lower_bound, resharder.plan.received_bytes) == (0, 0)


def test_resharder_binds_memory_that_has_moved(alone: dist.ProcessGroup) -> None:
    memory, wanted = {"w": torch.ones(2)}, torch.zeros(2)
    source = tensor_source(memory)
    resharder = Resharder(source, tensor_sink({"w": wanted}), alone)
    resharder.run()
    source._tensors["w"] = torch.full((2,), 5.0)  # type: ignore[index]
    resharder.bind()
    resharder.run()
    assert wanted.tolist() == [5.0, 5.0]


class FlippingSink(PlainSink):
    """Changes what has been written before it is verified."""

    def write(self, piece: Piece) -> torch.Tensor:
        return super().write(piece).clone()

    read = write


def test_resharder_finds_corrupted_tensors(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    good = tensor_sink({"v": torch.zeros(3), "w": torch.zeros(3)})
    sink = FlippingSink(good._tensors, good.demand)
    resharder = Resharder(tensor_source({"v": torch.ones(3), "w": torch.ones(3)}), sink, alone)
    with pytest.raises(CorruptTensors, match="2 tensors arrived corrupted: v, w"):
        resharder.run(1)
    assert sink.version is None


def test_resharder_refuses_tensors_that_one_side_lacks(alone: dist.ProcessGroup) -> None:
    held = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(PlanError, match="1 tensors are held by train ranks and wanted by no rollout rank: b"):
        Resharder(tensor_source(held), tensor_sink({"a": torch.ones(2)}), alone)
    with pytest.raises(PlanError):
        Resharder(tensor_source(held), NoSink(), alone)


class FullSink(PlainSink):
    """Has no memory for its first version."""

    tries = 0

    def begin(self) -> None:
        super().begin()
        self.tries += 1
        if self.tries == 1:
            raise MemoryError("full")


class CountingSource(PlainSource):
    """Refuses to begin before it has ended or abandoned what it has begun."""

    begun = False

    def begin(self) -> None:
        assert not self.begun
        self.begun = True

    def end(self) -> None:
        self.begun = False

    abandon = end


def test_resharder_abandons_what_cannot_begin(alone: dist.ProcessGroup) -> None:
    held, wanted = tensor_source({"w": torch.ones(3)}), tensor_sink({"w": torch.zeros(3)})
    source, sink = CountingSource(held._tensors, held.holdings), FullSink(wanted._tensors, wanted.demand)
    resharder = Resharder(source, sink, alone)
    with pytest.raises(MemoryError, match="full"):
        resharder.run(1)
    assert (source.begun, sink.version) == (False, None)
    resharder.run(2)
    assert (source.begun, sink.version, wanted._tensors["w"].tolist()) == (False, 2, [1.0] * 3)


@pytest.mark.parametrize("last", [0, 1])
def test_plan_waits_for_the_last_part_of_a_tensor(alone: dist.ProcessGroup, last: int) -> None:
    halves = {name: torch.ones(2) for name in "ab"}
    pieces = [Piece("t", Box((2 * i,), (2,)), View(name, 0, (1,)), "float32") for i, name in enumerate(halves)]
    updated_in = {"a": 1 - last, "b": last}
    source = PlainSource(halves, Holdings(tuple(pieces)), updated_in)
    sink = tensor_sink({"t": torch.zeros(4)})
    assert plan_sync(source, sink, JsonExchange(alone), 1 << 20, 8).ready == [1]


def rank_with_its_own_numbers(rank: int, folder: Path, numbers: list[dict[str, int]]) -> None:
    """Make a `Resharder` as one of two ranks, and keep what it says."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    tensors = {"w": torch.full((200_000,), 1.0 - rank)}
    ends = (NoSource(), tensor_sink(tensors)) if rank else (tensor_source(tensors), NoSink())
    said = ""
    try:
        Resharder(*ends, dist.group.WORLD, **numbers[rank]).run()
    except PlanError as error:
        said = str(error)
    (folder / f"{rank}.txt").write_text(said)
    dist.destroy_process_group()


@pytest.mark.engines
@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        (
            [{"bucket_bytes": 1 << 20}, {"bucket_bytes": 1 << 16}],
            "bucket_bytes (bucket_mib x 2**20) is 1048576 on rank 0; 65536 on rank 1",
        ),
        ([{"ranks_per_node": 1}, {}], "ranks_per_node is 1 on rank 0; 8 on rank 1"),
    ],
)
def test_resharder_refuses_ranks_with_other_numbers(tmp_path: Path, numbers: list[dict[str, int]], found: str) -> None:
    all_numbers = [{"bucket_bytes": 1 << 20, "ranks_per_node": 8} | each for each in numbers]
    spawn(rank_with_its_own_numbers, (tmp_path, all_numbers), 2)
    expected = f"{found}: give all 2 ranks the same"
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == [expected] * 2


def test_resharder_of_nothing_moves_nothing(alone: dist.ProcessGroup) -> None:
    assert Resharder(NoSource(), NoSink(), alone).run(1).received_bytes == 0


def test_example_imports_only_the_library() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 80
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name for name in imported if name and name.startswith("hybrid3d")} == {"hybrid3d.reshard"}


def lacking_bytes(rank: int) -> int:
    """Count the bytes that a rank of the example lacks, element by element, with torch's own `chunk`."""
    shapes = {(1000, 256): 1, (1024, 256): 0, (1024,): 0, (256, 1024): 1, (256,): None}
    total = 0
    for shape, dim in shapes.items():
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        held = set(numbers.chunk(RANKS, 0)[rank].flatten().tolist())
        wanted = numbers if dim is None else numbers.chunk(2, dim)[rank % 2]
        total += 4 * len(set(wanted.flatten().tolist()) - held)
    return total


@pytest.mark.engines
def test_example_receives_what_each_rank_lacks() -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(EXAMPLE)]
    try:
        variables = environment(mark, PYTHONFAULTHANDLER="1")  # where a rank is that a signal ends
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    finally:
        kill_marked(mark)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"version (\d), rank (\d): received (\d+) bytes, lower bound (\d+)", done.stdout)
    expected = [
        tuple(map(str, (version, rank, lacking_bytes(rank), lacking_bytes(rank))))
        for version, rank in product((1, 2), range(RANKS))
    ]
    assert sorted(said) == expected
    assert done.stdout.count("bit for bit equal") == RANKS
