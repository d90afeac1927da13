"""What a vLLM rank wants, said by its own `load_weights()`.

The loader runs once over tensors that stand for the checkpoint's and hold no data. Every slice it takes is followed,
every copy into a parameter is written down with its source and destination views, and so is every constant that it
fills in. A loader may do nothing else: anything but a view, a copy or a constant is an error that names the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from hybrid3d.families import UnsupportedModel
from hybrid3d.reshard.layout import Demand, Fill, Piece, Shape, View, boxes_of_copy

aten = torch.ops.aten
CONSTANTS = {aten.fill_.Scalar: lambda args: float(args[1]), aten.zero_.default: lambda args: 0.0}


class UnsupportedLoader(UnsupportedModel):
    """vLLM's loader of this model does something to a weight that cannot be replayed on its shards."""


@dataclass(frozen=True)
class Destination:
    """A parameter or buffer in the layout in which the loader writes it."""

    name: str
    tensor: torch.Tensor


class _StandIn(torch.Tensor):
    """Stands for one tensor of the checkpoint: a view on meta, and the name of the tensor that it is a view of."""

    canonical: str
    view_on_meta: torch.Tensor

    @staticmethod
    def __new__(cls, name: str, view: torch.Tensor) -> _StandIn:
        stand = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=view.device,
        )
        stand.canonical, stand.view_on_meta = name, view
        return stand

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedLoader(f"{func} outside of a recording")


class _Recording(TorchDispatchMode):
    def __init__(self, shapes: Mapping[str, Shape], destinations: list[Destination]):
        super().__init__()
        self.pieces: list[Piece] = []
        self.fills: list[Fill] = []
        self._shapes = shapes
        self._at = {d.tensor.untyped_storage()._cdata: d for d in reversed(destinations)}  # tied: the first name counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stands = [a for a in tree_iter((args, kwargs)) if isinstance(a, _StandIn)]
        if stands:
            return self._follow(func, stands[0], args, kwargs)
        if func in CONSTANTS and self._destination(args[0]):
            self.fills.append(Fill(self._view(args[0]), tuple(args[0].shape), CONSTANTS[func](args)))
            return args[0]
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and self._destination(args[0]):
            raise UnsupportedLoader(f"vLLM's loader applies {func} to {self._destination(args[0]).name}")
        return func(*args, **kwargs)

    def _follow(self, func: Any, stand: _StandIn, args: Any, kwargs: Any) -> Any:
        if func is aten.copy_.default and args[1] is stand:
            self._record_copy(stand, args[0])
            return args[0]
        if func._schema.is_mutable:
            raise UnsupportedLoader(f"vLLM's loader applies {func} to {stand.canonical}: only views can be replayed")
        out = func(*tree_map(lambda a: a.view_on_meta if isinstance(a, _StandIn) else a, args), **kwargs)
        storage = stand.view_on_meta.untyped_storage()._cdata

        def wrap(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            if result.untyped_storage()._cdata != storage or result.dtype != stand.dtype:
                raise UnsupportedLoader(
                    f"vLLM's loader computes {func} on {stand.canonical}: only views can be replayed"
                )
            return _StandIn(stand.canonical, result)

        return tree_map(wrap, out)

    def _record_copy(self, stand: _StandIn, target: torch.Tensor) -> None:
        destination, source = self._destination(target), stand.view_on_meta
        if destination is None:
            raise UnsupportedLoader(
                f"vLLM's loader copies {stand.canonical} into a tensor that is no parameter or buffer"
            )
        if target.shape != source.shape:
            raise UnsupportedLoader(
                f"vLLM's loader copies {stand.canonical} of shape {tuple(source.shape)} "
                f"into {destination.name} of shape {tuple(target.shape)}"
            )
        view = self._view(target)
        try:
            boxes = boxes_of_copy(
                self._shapes[stand.canonical],
                tuple(source.shape),
                (source.storage_offset(), source.stride()),
                (view.offset, view.stride),
            )
        except ValueError as error:
            raise UnsupportedLoader(f"{stand.canonical}: {error}") from None
        dtype = str(target.dtype).removeprefix("torch.")
        self.pieces += [
            Piece(stand.canonical, box, View(view.tensor, offset, stride), dtype) for box, offset, stride in boxes
        ]

    def first_of_tied(self, destination: Destination) -> Destination:
        """The destination under whose name the memory of a tied one is written."""
        return self._at[destination.tensor.untyped_storage()._cdata]

    def _destination(self, tensor: torch.Tensor) -> Destination | None:
        return self._at.get(tensor.untyped_storage()._cdata)

    def _view(self, tensor: torch.Tensor) -> View:
        destination = self._at[tensor.untyped_storage()._cdata]
        return View(destination.name, tensor.storage_offset() - destination.tensor.storage_offset(), tensor.stride())


def record_demand(
    model: Any, shapes: Mapping[str, Shape], dtype: torch.dtype, destinations: list[Destination]
) -> Demand:
    """Run a model's `load_weights` over stand-ins for canonical tensors and write down what it wants.

    Args:
        model: a vLLM model whose parameters are in loader layout.
        shapes: every canonical tensor and its full shape.
        dtype: of the canonical tensors.
        destinations: the model's parameters and buffers.

    Raises:
        UnsupportedLoader: the loader does more than slice, copy and fill, or leaves part of a parameter unwritten.
    """
    recording = _Recording(shapes, destinations)
    given = [""]

    def stands() -> Iterator[tuple[str, _StandIn]]:
        for name, shape in shapes.items():
            given[0] = name
            yield name, _StandIn(name, torch.empty(shape, dtype=dtype, device="meta"))

    with torch.no_grad(), recording:
        try:
            model.load_weights(stands())
        except UnsupportedLoader:
            raise
        except Exception as error:  # a loader that knows no such tensor fails in its own way
            raise UnsupportedLoader(
                f"vLLM's loader of {type(model).__name__} fails on {given[0]}: {type(error).__name__}: {error}"
            ) from error
    _check_written(recording, destinations)
    return Demand(tuple(recording.pieces), tuple(recording.fills))


def _check_written(recording: _Recording, destinations: list[Destination]) -> None:
    """The loader must write every element of every parameter, once: what it leaves out would keep an older value."""
    writes: dict[str, list[tuple[View, Shape]]] = {}
    for piece in recording.pieces:
        writes.setdefault(piece.view.tensor, []).append((piece.view, piece.box.size))
    for fill in recording.fills:
        writes.setdefault(fill.view.tensor, []).append((fill.view, fill.size))
    wrong: dict[str, str] = {}
    for destination in destinations:
        d = recording.first_of_tied(destination)
        if d.name not in writes and not isinstance(d.tensor, torch.nn.Parameter):
            continue
        times, run = _times_written(d.tensor, writes.get(d.name, []))
        if not bool((times == 1).all()):
            wrong[d.name] = (
                f"  {d.name}: of {d.tensor.numel()} elements {int((times == 0).sum()) * run} are left unwritten, "
                f"and {int((times > 1).sum()) * run} are written more than once"
            )
    if wrong:
        lines = [*list(wrong.values())[:20], *(["  ..."] if len(wrong) > 20 else [])]
        said = f"{len(wrong)} tensors of vLLM's are not written by what Megatron holds, each element once:"
        raise UnsupportedLoader("\n".join([said, *lines]))


def _times_written(tensor: torch.Tensor, writes: list[tuple[View, Shape]]) -> tuple[torch.Tensor, int]:
    """How often each run of elements is written, and the length of the runs: no view begins or ends within one."""
    whole = (View("", 0, tensor.stride()), tuple(tensor.shape))
    run = math.gcd(*(n for view, size in (whole, *writes) for n in _steps(view, size))) or 1
    times = torch.zeros(_extent(tensor.shape, tensor.stride()) // run, dtype=torch.uint8)

    def runs(view: View, size: Shape) -> torch.Tensor:
        dims = [(n // run, 1) if s == 1 else (n, s // run) for n, s in zip(size, view.stride, strict=True) if n != 1]
        return times.as_strided([n for n, _ in dims], [s for _, s in dims], view.offset // run)

    for write in writes:
        runs(*write).add_(1)
    return runs(*whole), run


def _steps(view: View, size: Shape) -> list[int]:
    """Lengths of which every run of contiguous elements in a view must be a divisor."""
    dims = [(n, s) for n, s in zip(size, view.stride, strict=True) if n != 1]
    row = next((n for n, s in dims if s == 1), 1)
    return [view.offset, row, *(s for _, s in dims if s != 1)]


def _extent(shape: Shape, stride: tuple[int, ...]) -> int:
    """Elements of memory from the first of a strided tensor to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0
