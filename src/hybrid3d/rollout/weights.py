"""A live vLLM model as a sink: its modules are opened in loader layout, written box by box, and finalized.

What vLLM does to a module after loading (packing, swizzling, derived tensors) leaves live tensors that its loaders
could not write any more. So a unit (a decoder layer, or all that is in none) is *opened*: tensors in the layout that
loaders write take the place of the live ones, in the same memory where the layout is the same. When its last box has
landed the unit is *finalized*: vLLM's own processing runs, and the result is put where the live tensors are, so that
no address changes. Two units are open at a time: one is being finalized while the next one is written.

The functions of vLLM's `model_loader.reload` used here are private to it: this file and the pinned version go together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from hybrid3d.reshard.classes import natural_sort_key
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Fill, Piece, Shape, View
from hybrid3d.reshard.memory import DeviceBuffer, align_up, strided_view
from hybrid3d.reshard.stamp import layer_of
from hybrid3d.rollout.record import Destination, UnsupportedLoader, record_demand

Module = torch.nn.Module
# Parameters that no loader writes: latent attention makes them of `kv_b_proj` when it is finalized.
DERIVED_PARAMETERS = ("W_UV", "W_UK_T")
MAX_OPEN_UNITS = 2  # units at a time


class RolloutWeights:
    """What one vLLM rank wants, and the sink that takes it.

    Attributes:
        demand: the rank's pieces.
        finalize_bytes: memory that opened tensors take besides the live ones.
    """

    def __init__(self, model: Module, vllm_config: VllmConfig, shapes: Mapping[str, Shape]):
        self._vllm_config = vllm_config
        self._device = vllm_config.device_config.device
        self._units = _units(model)
        self._layer_of = {name: layer for layer, unit in self._units.items() for name in unit.names()}
        self.demand = self._record(model, vllm_config, shapes)
        self._memory = [DeviceBuffer(0, self._device)] * MAX_OPEN_UNITS
        self._opened: dict[int | None, _OpenUnit] = {}
        self._left: set[int | None] = set()

    def _record(self, model: Module, vllm_config: VllmConfig, shapes: Mapping[str, Shape]) -> Demand:
        live = _swap_in_loader_layout(model, _on_meta())
        try:
            destinations = [
                Destination(name, tensor)
                for name, _, key, tensor in _tensors_of(model)
                if key not in DERIVED_PARAMETERS
            ]
            with set_current_vllm_config(vllm_config):
                demand = record_demand(model, shapes, vllm_config.model_config.dtype, destinations)
        finally:
            _swap_back(live)
        for piece in demand.pieces:
            if layer_of(piece.name) != self._layer_of[piece.view.tensor]:
                raise UnsupportedLoader(f"vLLM's loader writes {piece.name} into {piece.view.tensor}: of another layer")
        return replace(demand, pieces=tuple(sorted(demand.pieces, key=_place)))

    @property
    def max_finalize_bytes(self) -> int:
        """A bound on `finalize_bytes`: as many of the largest unit's weights as units are open."""
        tensors: dict[str, int] = defaultdict(int)
        dtypes = {piece.view.tensor: piece.dtype for piece in self.demand.pieces}
        for piece in self.demand.pieces:
            tensors[piece.view.tensor] += piece.nbytes
        # A shard of the vocabulary may be padding alone: filled, and nothing is copied into it that has a dtype.
        usual = self._vllm_config.model_config.dtype.itemsize
        for fill in self.demand.fills:
            dtype = dtypes.get(fill.view.tensor)
            tensors[fill.view.tensor] += math.prod(fill.size) * (usual if dtype is None else ITEMSIZE[dtype])
        units: dict[int | None, int] = defaultdict(int)
        for name, nbytes in tensors.items():
            units[self._layer_of[name]] += align_up(nbytes)
        return MAX_OPEN_UNITS * max(units.values())

    @property
    def finalize_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def prepare(self, order: Sequence[int | None]) -> None:
        """Find places for what is written, once.

        Args:
            order: the layers (None for what is in none) in the order in which they will be opened.
        """
        fills: dict[int | None, list[Fill]] = defaultdict(list)
        for fill in self.demand.fills:
            fills[self._layer_of[fill.view.tensor]].append(fill)
        opened = {layer: _OpenUnit(self._units[layer], fills[layer]) for layer in order}
        taken = [[opened[layer].extra_bytes for layer in order[turn::MAX_OPEN_UNITS]] for turn in range(MAX_OPEN_UNITS)]
        self._memory = [DeviceBuffer(max(sizes, default=0), self._device) for sizes in taken]
        for turn, layer in enumerate(order):
            opened[layer].place(self._memory[turn % MAX_OPEN_UNITS])
        self._opened = opened

    def in_place_tensors(self) -> dict[str, torch.Tensor]:
        """By local name, the live tensors that are written where they lie and stay there when they are finalized."""
        return {name: tensor for opened in self._opened.values() for name, tensor in opened.in_place_tensors()}

    def begin(self) -> None:
        """Expect all of the demand; what was live stays until its layer is opened."""
        for memory in self._memory:
            memory.allocate()
        self._left = set(self._opened)

    def write(self, piece: Piece) -> torch.Tensor:
        return self._opened[self._layer_of[piece.view.tensor]].view(piece.view, piece.box.size)

    def open(self, layer: int | None) -> None:
        self._opened[layer].open()

    def close(self, layer: int | None) -> None:
        self._opened[layer].finalize(self._vllm_config)
        self._left.remove(layer)

    def skip(self, layer: int | None) -> None:
        """In place of `open` and `close`: what is written stays where it is, and vLLM is not told."""
        self._left.remove(layer)

    def end(self) -> None:
        """Every layer must have been finalized.

        Raises:
            RuntimeError: part of the demand did not land; the model is not usable until a sync succeeds.
        """
        for memory in self._memory:
            memory.release()
        if self._left:
            raise RuntimeError(f"the sync left {len(self._left)} layers unwritten")


def _place(piece: Piece) -> tuple[float, list[tuple[int, str]]]:
    """Layer after layer, then what is in none: in one order, whatever the checkpoint's."""
    layer = layer_of(piece.name)
    return math.inf if layer is None else layer, natural_sort_key(piece.name)


class _Unit:
    """Modules that are opened and finalized together, with the path of each."""

    def __init__(self) -> None:
        self.root = torch.nn.ModuleList()
        self._paths: list[str] = []

    def add(self, path: str, module: Module) -> None:
        self.root.append(module)
        self._paths.append(path)

    def names(self) -> Iterator[str]:
        """Dotted names of every tensor that the unit could hold, live or in loader layout."""
        for path, root in zip(self._paths, self.root, strict=True):
            for below, module in root.named_modules():
                info = get_layerwise_info(module)
                for name in {**get_layer_tensors(module), **info.restore_metadata[0], **info.restore_metadata[1]}:
                    yield ".".join(part for part in (path, below, name) if part)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, root in zip(self._paths, self.root, strict=True):
            for name, _, _, tensor in _tensors_of(root, path):
                yield name, tensor


class _OpenUnit:
    """A unit's tensors in loader layout: in the live ones' memory where that has it, else in memory of their own."""

    def __init__(self, unit: _Unit, fills: Sequence[Fill]):
        self.unit = unit
        self._fills = fills
        self._own: dict[int, tuple[torch.Tensor, int]] = {}  # by id: a tensor that is needed, and where it lies
        self.extra_bytes = 0
        self._memory = DeviceBuffer(0, "cpu")
        self._tensors: dict[str, torch.Tensor] = {}
        self._written: set[str] = set()
        self._moved: set[int] = set()  # by id: what vLLM finalizes somewhere else
        self._live: _Live = {}
        self._attributes: dict[Module, dict[str, torch.Tensor]] = {}
        for module in unit.root.modules():
            for name, loader in _recorded(module):
                if not _same_layout(get_layer_tensors(module).get(name), loader):
                    self._own[id(loader)] = loader, self.extra_bytes
                    self.extra_bytes += align_up(_extent(loader))

    def place(self, memory: DeviceBuffer) -> None:
        """Lay what needs memory of its own into this."""
        self._memory = memory
        self._swap_in()
        self._tensors = {name: tensor.data for name, tensor in self.unit.tensors()}
        _swap_back(self._live)

    def in_place_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.unit.tensors():
            there = name in self._written and tensor.data_ptr() == self._tensors[name].data_ptr()
            if there and _same_layout(tensor, self._tensors[name]) and id(tensor) not in self._moved:
                yield name, tensor

    def view(self, view: View, size: Shape) -> torch.Tensor:
        self._written.add(view.tensor)
        return strided_view(self._tensors[view.tensor].data, view, size)

    def open(self) -> None:
        self._attributes = {module: _attributes_of(module) for module in self.unit.root.modules()}
        self._swap_in()
        for name, tensor in self.unit.tensors():
            if name in self._written and tensor.data_ptr() != self._tensors[name].data_ptr():
                raise RuntimeError(f"vLLM has moved {name}: what is written would not be what it reads")
        for fill in self._fills:
            self.view(fill.view, fill.size).fill_(fill.value)

    def _swap_in(self) -> None:
        def memory_for(loader: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
            if live is not None and _same_layout(live, loader):
                return live.data
            _, at = self._own[id(loader)]
            flat = self._memory.flat_view(at, _extent(loader), loader.dtype)
            return flat.as_strided(loader.shape, loader.stride())

        self._live = _swap_in_loader_layout(self.unit.root, memory_for)

    def finalize(self, vllm_config: VllmConfig) -> None:
        """Run what vLLM runs after loading, as if for the first time, and put the result where the live tensors are."""
        device = vllm_config.device_config.device
        if current_platform.is_cpu():
            for module in self.unit.root.modules():
                if hasattr(getattr(module, "quant_method", None), "moe_kernel"):
                    module.quant_method.moe_kernel = None  # else vLLM takes the weights for packed ones
        with (
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(vllm_config.model_config.dtype),
            device,
            torch.no_grad(),
        ):
            process_weights_after_loading(self.unit.root, vllm_config.model_config, device)
        for module, tensors in self._live.items():
            for name, old in tensors.items():
                if _keep_address(_holder(module, name), name, old):
                    self._moved.add(id(old))
        for module, tensors in self._attributes.items():
            for name, old in tensors.items():
                _keep_address(vars(module), name, old)
        for module in self.unit.root.modules():
            for tensor in (*get_layer_tensors(module).values(), *_attributes_of(module).values()):
                if self._memory.contains(tensor):  # where the next layer but one will be written
                    tensor.data = tensor.data.clone()


def _attributes_of(module: Module) -> dict[str, torch.Tensor]:
    """Tensors that are neither parameters nor buffers, such as the scales of attention, made anew with each load."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _keep_address(held: dict[str, Any], name: str, old: torch.Tensor | None) -> bool:
    """Move a finalized tensor into the memory of the live one, and put the live object back.

    Returns:
        Whether it was somewhere else.
    """
    new = held.get(name)
    if new is None or old is None or new is old:
        return False
    if not _same_layout(new, old):
        if not current_platform.is_cpu():  # captured graphs would go on reading the old memory
            raise RuntimeError(f"{name}: finalized as {_layout(new)}, but live as {_layout(old)}")
        return True
    moved = new.data_ptr() != old.data_ptr()
    if moved:
        old.data.copy_(new.data)
        new.data = old.data  # a kernel may keep the object that it was given
    held[name] = old
    return moved


def _recorded(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, a tensor on meta in the layout that loaders write) of what vLLM keeps a record of.

    What it keeps none of (`bias`) is in that layout already.
    """
    info = get_layerwise_info(module)
    for recorded in info.restore_metadata:
        for name, meta in recorded.items():
            if name not in module._non_persistent_buffers_set:
                yield name, meta


_Live = dict[Module, dict[str, "torch.Tensor | None"]]
"""Parameters and buffers by module and name."""

MemoryFor = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""Memory in the layout of a tensor on meta, given what is live."""


def _swap_in_loader_layout(root: Module, memory_for: MemoryFor) -> _Live:
    """Put tensors in loader layout into the modules below `root`; return what was live."""
    live: _Live = {module: {**module._parameters, **module._buffers} for module in root.modules()}
    for module, tensors in live.items():
        buffers = get_layerwise_info(module).restore_metadata[1]
        for name, meta in _recorded(module):
            held = module._buffers if name in buffers else module._parameters
            held[name] = _of_kind(restore_layer_refs(meta, module), memory_for(meta, tensors.get(name)).data)
    return live


def _on_meta() -> MemoryFor:
    """Memory on meta, one for all names of tied tensors."""
    tied: dict[int, torch.Tensor] = {}

    def memory_for(loader: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
        shared = live is not None and _same_layout(live, loader)
        key = live.untyped_storage()._cdata if live is not None and shared else id(loader)
        return tied.setdefault(key, torch.empty_like(loader, device="meta"))

    return memory_for


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def _of_kind(recorded: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Make `plain` the kind of parameter that vLLM recorded, with its loader and all its attributes."""
    plain.__class__ = recorded.__class__
    plain.__dict__ = recorded.__dict__.copy()
    return plain


def _swap_back(live: _Live) -> None:
    for module, tensors in live.items():
        for held in (module._parameters, module._buffers):
            for name in list(held):
                if name in tensors:
                    held[name] = tensors[name]
                else:
                    del held[name]


def _holder(module: Module, name: str) -> dict[str, Any]:
    return module._parameters if name in module._parameters else module._buffers


def _tensors_of(root: Module, path: str = "") -> Iterator[tuple[str, Module, str, torch.Tensor]]:
    """(dotted name, module, name in it, tensor) of every parameter and buffer below `root`."""
    for below, module in root.named_modules():
        for name, tensor in get_layer_tensors(module).items():
            yield ".".join(part for part in (path, below, name) if part), module, name, tensor


def _same_layout(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and _layout(a) == _layout(b)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _units(model: Module) -> dict[int | None, _Unit]:
    """By layer: the members of topmost ModuleLists (decoder layers); all the rest is one more, under None.

    The rest goes together because a tied head is derived from the embedding's memory.
    """
    units: dict[int | None, _Unit] = defaultdict(_Unit)

    def visit(path: str, module: Module) -> None:
        if isinstance(module, torch.nn.ModuleList):
            for name, child in module.named_children():
                units[layer_of(f"{path}.{name}.")].add(f"{path}.{name}", child)
        elif any(isinstance(m, torch.nn.ModuleList) for m in module.modules()):
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)
        else:
            units[None].add(path, module)

    visit("", model)
    return units
