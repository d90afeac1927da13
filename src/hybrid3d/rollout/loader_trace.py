"""Records a vLLM rank's demand by tracing the model's own `load_weights()`.

The loader runs once on traced tensors that stand for the checkpoint's and hold no data. Views of them are tracked, and
every copy into a parameter is recorded with its source and destination views, as is every fill with a constant. Any
other operation on them raises an error that names the tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from hybrid3d.families import UnsupportedModel
from hybrid3d.reshard.plan.layout import Demand, Fill, Piece, Shape, View, boxes_of_copy

aten = torch.ops.aten
CONSTANTS = {aten.fill_.Scalar: lambda args: float(args[1]), aten.zero_.default: lambda args: 0.0}


class UnsupportedLoader(UnsupportedModel):
    """vLLM's loader of this model does something to a weight that a sync of shards cannot replay."""


@dataclass(frozen=True)
class Destination:
    """A parameter or buffer in loader layout, and views of it that vLLM clears in processing, and no loader writes."""

    name: str
    tensor: torch.Tensor
    padding: tuple[torch.Tensor, ...] = ()


class _TracedTensor(torch.Tensor):
    """A view of a checkpoint tensor: the name of that tensor, and the view of it on meta."""

    canonical: str
    view_on_meta: torch.Tensor

    @staticmethod
    def __new__(cls, name: str, view: torch.Tensor) -> _TracedTensor:
        traced = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=view.device,
        )
        traced.canonical, traced.view_on_meta = name, view
        return traced

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedLoader(f"{func} is applied to a traced tensor outside of a recording")


class _LoadRecorder(TorchDispatchMode):
    """Records copies of traced tensors into the destinations, and fills of the destinations, while it is active."""

    def __init__(self, shapes: Mapping[str, Shape], destinations: list[Destination]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[Piece] = []
        self.fills: list[Fill] = []
        self._shapes = shapes
        # Tied destinations share memory: they are recorded under the first name.
        self._destination_by_storage = {d.tensor.untyped_storage()._cdata: d for d in reversed(destinations)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = chain(args, tree_iter((args, kwargs)))  # most are arguments, and need no slow walk
        traced = next((a for a in values if isinstance(a, _TracedTensor)), None)
        if traced is not None:
            return self._trace(func, traced, args, kwargs)
        if func in CONSTANTS and self._destination(args[0]):
            self.fills.append(Fill(self._view(args[0]), tuple(args[0].shape), CONSTANTS[func](args)))
            return args[0]
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and (to := self._destination(args[0])):
            raise UnsupportedLoader(f"vLLM's loader applies {func} to {to.name}")
        return func(*args, **kwargs)

    def _trace(self, func: Any, traced: _TracedTensor, args: Any, kwargs: Any) -> Any:
        if func is aten.copy_.default and args[1] is traced:
            self._record_copy(traced, args[0])
            return args[0]
        if func._schema.is_mutable:
            raise UnsupportedLoader(f"vLLM's loader applies {func} to {traced.canonical}: only views can be replayed")
        out = func(*tree_map(lambda a: a.view_on_meta if isinstance(a, _TracedTensor) else a, args), **kwargs)
        storage = traced.view_on_meta.untyped_storage()._cdata

        def wrap(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            if result.untyped_storage()._cdata != storage or result.dtype != traced.dtype:
                raise UnsupportedLoader(
                    f"vLLM's loader computes {func} on {traced.canonical}: only views can be replayed"
                )
            return _TracedTensor(traced.canonical, result)

        return tree_map(wrap, out)

    def _record_copy(self, traced: _TracedTensor, target: torch.Tensor) -> None:
        destination, source = self._destination(target), traced.view_on_meta
        if destination is None:
            raise UnsupportedLoader(
                f"vLLM's loader copies {traced.canonical} into a tensor that is neither a parameter nor a buffer"
            )
        if target.shape != source.shape:
            raise UnsupportedLoader(
                f"vLLM's loader copies {traced.canonical} of shape {tuple(source.shape)} "
                f"into {destination.name} of shape {tuple(target.shape)}"
            )
        view = self._view(target)
        try:
            boxes = boxes_of_copy(
                self._shapes[traced.canonical],
                tuple(source.shape),
                (int(source.storage_offset()), source.stride()),
                (view.offset, view.stride),
            )
        except ValueError as error:
            raise UnsupportedLoader(f"{traced.canonical}: {error}") from None
        dtype = str(target.dtype).removeprefix("torch.")
        self.pieces += [
            Piece(traced.canonical, box, View(view.tensor, offset, stride), dtype) for box, offset, stride in boxes
        ]

    def first_of_tied(self, destination: Destination) -> Destination:
        """Return the destination under whose name writes to the same memory are recorded."""
        return self._destination_by_storage[destination.tensor.untyped_storage()._cdata]

    def padding_of(self, destination: Destination) -> list[tuple[View, Shape]]:
        """Return the views of a destination that count as written, and their sizes."""
        return [(self._view(padding), tuple(padding.shape)) for padding in destination.padding]

    def _destination(self, tensor: torch.Tensor) -> Destination | None:
        return self._destination_by_storage.get(tensor.untyped_storage()._cdata)

    def _view(self, tensor: torch.Tensor) -> View:
        destination = self._destination_by_storage[tensor.untyped_storage()._cdata]
        offset = int(tensor.storage_offset() - destination.tensor.storage_offset())
        return View(destination.name, offset, tensor.stride())


def record_copies(
    load: Callable[[Mapping[str, torch.Tensor]], None],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    destinations: list[Destination],
) -> tuple[Piece, ...]:
    """Return what a function of vLLM that is called with traced tensors copies from them into the destinations.

    Args:
        shapes: every tensor and its full shape; all have the same dtype.

    Raises:
        UnsupportedLoader: it does more than slice and copy.
    """
    recorder = _LoadRecorder(shapes, destinations)
    with torch.no_grad(), recorder:
        load({name: _TracedTensor(name, torch.empty(s, dtype=dtype, device="meta")) for name, s in shapes.items()})
    return tuple(recorder.pieces)


def record_demand(
    model: Any, shapes: Mapping[str, Shape], dtype: torch.dtype, destinations: list[Destination]
) -> Demand:
    """Run a model's `load_weights` on traced tensors and return the demand that it implies.

    Args:
        model: a vLLM model whose parameters are in loader layout; they and its buffers are the destinations.
        shapes: every canonical tensor and its full shape; all have the same dtype.

    Raises:
        UnsupportedLoader: the loader does more than slice, copy and fill, or leaves part of a parameter unwritten.
    """
    recorder = _LoadRecorder(shapes, destinations)
    current = ""

    def traced_tensors() -> Iterator[tuple[str, _TracedTensor]]:
        nonlocal current
        for name, shape in shapes.items():
            current = name
            yield name, _TracedTensor(name, torch.empty(shape, dtype=dtype, device="meta"))

    with torch.no_grad(), recorder:
        try:
            model.load_weights(traced_tensors())
        except UnsupportedLoader:
            raise
        except Exception as error:  # loaders fail differently on a tensor that they do not know
            raise UnsupportedLoader(
                f"vLLM's loader of {type(model).__name__} fails on {current}: {type(error).__name__}: {error}"
            ) from error
    _check_written(recorder, destinations)
    return Demand(tuple(recorder.pieces), tuple(recorder.fills))


def _check_written(recorder: _LoadRecorder, destinations: list[Destination]) -> None:
    """Check that each element of every parameter is written exactly once: one left out would keep an older value.

    UnsupportedLoader names the first 20 tensors for which this does not hold.
    """
    writes: dict[str, list[tuple[View, Shape]]] = defaultdict(list)
    for view, size in [*((p.view, p.box.size) for p in recorder.pieces), *((f.view, f.size) for f in recorder.fills)]:
        writes[view.tensor].append((view, size))
    problems: dict[str, str] = {}
    for destination in destinations:
        d = recorder.first_of_tied(destination)
        if d.name not in writes and not isinstance(d.tensor, torch.nn.Parameter):
            continue
        times, run = _count_writes(d.tensor, [*writes[d.name], *recorder.padding_of(d)])
        if not bool((times == 1).all()):
            problems[d.name] = (
                f"  {d.name}: of {d.tensor.numel()} elements {int((times == 0).sum()) * run} are left unwritten, "
                f"and {int((times > 1).sum()) * run} are written more than once"
            )
    if problems:
        summary = "tensors of vLLM would not be written exactly once by the tensors that Megatron holds:"
        lines = [
            f"{len(problems)} {summary}",
            *list(problems.values())[:20],
            *(["  ..."] if len(problems) > 20 else []),
        ]
        raise UnsupportedLoader("\n".join(lines))


def _count_writes(tensor: torch.Tensor, writes: list[tuple[View, Shape]]) -> tuple[torch.Tensor, int]:
    """Return how often each run of contiguous elements is written, and its length; no view begins or ends in a run."""
    full = (View("", 0, tensor.stride()), tuple(tensor.shape))
    run = math.gcd(*(n for view, size in (full, *writes) for n in _run_divisors(view, size))) or 1
    times = torch.zeros(span_bytes(tensor) // tensor.itemsize // run, dtype=torch.uint8)

    def runs(view: View, size: Shape) -> torch.Tensor:
        dims = [(n // run, 1) if s == 1 else (n, s // run) for n, s in zip(size, view.stride, strict=True) if n != 1]
        return times.as_strided([n for n, _ in dims], [s for _, s in dims], view.offset // run)

    for write in writes:
        runs(*write).add_(1)
    return runs(*full), run


def _run_divisors(view: View, size: Shape) -> list[int]:
    """Return the numbers that the length of a run must divide, so that the view consists of whole runs."""
    dims = [(n, s) for n, s in zip(size, view.stride, strict=True) if n != 1]
    row = next((n for n, s in dims if s == 1), 1)
    return [view.offset, row, *(s for _, s in dims if s != 1)]


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a strided tensor spans in memory."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0
