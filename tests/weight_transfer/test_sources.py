"""What a trainer's rank holds, as vLLM's sources say it, against torch's own shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed.weight_transfer import base

from hybrid3d.reshard import Box
from hybrid3d.weight_transfer import sources
from hybrid3d.weight_transfer.sources import ParamMeta, read_source

pytestmark = pytest.mark.engines

PLACEMENTS = list(itertools.product([Shard(0), Shard(1), Replicate()], repeat=2))


class LocalSource:
    """A source as vLLM 0.33 has them: each rank yields its piece of each parameter that it owns."""

    def __init__(self, metadata: list[Any], tensors: dict[str, torch.Tensor]):
        self.metadata, self.tensors = metadata, tensors

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class FullSource(LocalSource):
    """One that yields whole tensors."""

    def implements_iter_local(self) -> bool:
        return False

    iter_full = LocalSource.iter_local


class OlderSource:
    """A source as vLLM 0.32 has them, with None for what other ranks hold."""

    def __init__(self, tensors: dict[str, torch.Tensor | None], shapes: dict[str, tuple[int, ...]], **layout: Any):
        self.tensors, self.shapes, self.layout = tensors, shapes, layout

    def metadata(self) -> list[Any]:
        return [ParamMeta(name, torch.float32, shape, **self.layout) for name, shape in self.shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield from self.tensors.items()

    iter_local = __iter__


def declared(placement: Any) -> Any:
    return sources.Shard(placement.dim) if isinstance(placement, Shard) else sources.Replicate()


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 3)])
def test_boxes_of_declared_placements_are_those_of_torch(placements: tuple[Any, ...], shape: tuple[int, int]) -> None:
    owners = (2, 0, 3, 1)
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh = DeviceMesh("cpu", torch.tensor(owners).view(2, 2))
        local = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
        dist.destroy_process_group()
        layout = {"owners": owners, "mesh_shape": (2, 2), "placements": tuple(map(declared, placements))}
        meta = ParamMeta("w", torch.float32, shape, **layout)
        for source in (LocalSource([meta], {"w": local}), OlderSource({"w": local}, {"w": shape}, **layout)):
            read, holdings = read_source(source, rank)
            assert len(holdings.pieces) == bool(local.numel())
            for piece in holdings.pieces:
                cut = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
                assert torch.equal(full[cut], read()["w"])


def test_whole_tensors_are_held_by_those_that_yield_them() -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    read, holdings = read_source(OlderSource({"a": torch.ones(2, 3), "b": None}, shapes), 1)
    assert [(piece.name, piece.box) for piece in holdings.pieces] == [("a", Box((0, 0), (2, 3)))]
    assert list(read()) == ["a"]
    metas = [ParamMeta(name, torch.float32, shape) for name, shape in shapes.items()]
    read, holdings = read_source(FullSource(metas, {"b": torch.ones(8)[::2]}), 0)
    assert [(piece.name, piece.box, piece.contiguous) for piece in holdings.pieces] == [("b", Box((0,), (4,)), True)]
    assert read()["b"].is_contiguous()


def test_piece_of_another_shape_is_refused() -> None:
    source = OlderSource({"w": torch.ones(3)}, {"w": (4,)})
    with pytest.raises(ValueError, match=r"rank 0 has w of shape \(3,\): its metadata says \(4,\)"):
        read_source(source, 0)


def test_piece_of_a_rank_that_owns_none_is_refused() -> None:
    layout = {"owners": (0, 2), "placements": (sources.Shard(0),)}
    with pytest.raises(ValueError, match=r"rank 1 has w: its metadata says that ranks \(0, 2\) own it"):
        read_source(OlderSource({"w": torch.ones(2)}, {"w": (4,)}, **layout), 1)


def test_module_is_read_in_place_with_its_shards() -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    module = torch.nn.Linear(4, 6)
    weight = distribute_tensor(module.weight.data, mesh, [Shard(0)], src_data_rank=None)
    module.weight = torch.nn.Parameter(weight)
    read, holdings = read_source(base.ModuleSource(module), 1)
    of_mapping = read_source(dict(module.named_parameters()), 1)[1]
    dist.destroy_process_group()
    boxes = {piece.name: piece.box for piece in holdings.pieces}
    assert boxes == {"weight": Box((3, 0), (3, 4)), "bias": Box((0,), (6,))}
    assert of_mapping == holdings
    module.weight.data.to_local().fill_(7)
    assert read()["weight"].tolist() == [[7] * 4] * 3
    assert read()["weight"].data_ptr() == weight.to_local().data_ptr()


def test_subclass_of_a_module_source_is_iterated() -> None:
    """It may rename what it yields."""

    class Renamed(base.ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "renamed", self._module.weight

        iter_full = iter_local = __iter__

    renamed = Renamed(torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(ValueError, match="rank 0 has renamed, which the source's metadata does not name"):
        read_source(renamed, 0)


def test_metas_have_the_fields_of_the_newer_vllm() -> None:
    meta = ParamMeta("w", torch.float32, (2,), owners=(0, 1), mesh_shape=(2,), placements=(sources.Shard(0),))
    assert isinstance(meta, base.ParamMeta)
    assert (meta.owners, meta.mesh_shape, meta.placements[0].dim) == ((0, 1), (2,), 0)
    assert ParamMeta("w", torch.float32, (2,)).owners is None
