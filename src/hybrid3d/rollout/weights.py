"""A live vLLM model as a sink: its modules are opened in loader layout, written box by box, and finalized.

What vLLM does to a module after loading (packing, swizzling, derived tensors) leaves live tensors that its loaders
could not write any more. So a unit (a decoder layer, or all that is in none) is *opened*: tensors in the layout that
loaders write take the place of the live ones, in the same memory where the layout is the same. When its last box has
landed the unit is *finalized*: vLLM's own processing runs, and the result is put where the live tensors are, so that
no address changes. One unit is open at a time.

The functions of vLLM's `model_loader.reload` used here are private to it: this file and the pinned version go together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from hybrid3d.reshard.layout import ITEMSIZE, Demand, Fill, Piece, Shape, View
from hybrid3d.rollout.record import Destination, record_demand

Module = torch.nn.Module
# Parameters that no loader writes: latent attention makes them of `kv_b_proj` when it is finalized.
DERIVED = ("W_UV", "W_UK_T")


class RolloutWeights:
    """What one vLLM rank wants, and the sink that takes it.

    Attributes:
        demand: the rank's pieces, unit after unit, so that a plan in this order opens one unit at a time.
        finalize_bytes: the most memory that opened tensors took besides the live ones, over the last sync.
    """

    def __init__(self, model: Module, vllm_config: VllmConfig, shapes: Mapping[str, Shape]):
        self._vllm_config = vllm_config
        self._units = _units(model)
        self._unit_of = {name: i for i, unit in enumerate(self._units) for name in unit.names(model)}
        self.demand = self._record(model, vllm_config, shapes)
        self._open: _Opened | None = None
        self._left: dict[int, int] = {}
        self.finalize_bytes = 0

    def _record(self, model: Module, vllm_config: VllmConfig, shapes: Mapping[str, Shape]) -> Demand:
        live = _swap_in_loader_layout(model, on_meta=True)
        try:
            destinations = [
                Destination(name, tensor) for name, _, key, tensor in _tensors_of(model) if key not in DERIVED
            ]
            with set_current_vllm_config(vllm_config):
                demand = record_demand(model, shapes, vllm_config.model_config.dtype, destinations)
        finally:
            _swap_back(live)
        order = lambda entry: self._unit_of[entry.view.tensor]  # noqa: E731
        return Demand(tuple(sorted(demand.pieces, key=order)), demand.fills)

    @property
    def largest_unit_bytes(self) -> int:
        """Bytes of the largest unit's weights: opening takes at most this much memory besides the live weights."""
        sizes: dict[int, int] = {}
        for piece in self.demand.pieces:
            unit = self._unit_of[piece.view.tensor]
            sizes[unit] = sizes.get(unit, 0) + piece.nbytes
        dtypes = {piece.view.tensor: piece.dtype for piece in self.demand.pieces}
        for fill in self.demand.fills:
            sizes[self._unit_of[fill.view.tensor]] += math.prod(fill.size) * ITEMSIZE[dtypes[fill.view.tensor]]
        return max(sizes.values())

    def begin(self) -> None:
        """Expect all of the demand; what was live stays until a unit is opened."""
        self._left = dict.fromkeys(range(len(self._units)), 0)
        for piece in self.demand.pieces:
            self._left[self._unit_of[piece.view.tensor]] += piece.box.numel
        self.finalize_bytes = 0

    def write(self, piece: Piece) -> torch.Tensor:
        return self._opened(piece).view(piece.view, piece.box.size)

    def landed(self, piece: Piece) -> None:
        unit = self._unit_of[piece.view.tensor]
        self._left[unit] -= piece.box.numel
        if self._left[unit] == 0:
            self._opened(piece).finalize(self._vllm_config)
            self._open = None

    def end(self) -> None:
        """Every unit must have been finalized.

        Raises:
            RuntimeError: part of the demand did not land; the model is not usable until a sync succeeds.
        """
        short = {i: n for i, n in self._left.items() if n}
        if short or self._open is not None:
            raise RuntimeError(f"the sync left {sum(short.values())} elements of {len(short)} units unwritten")

    def _opened(self, piece: Piece) -> _Opened:
        unit = self._unit_of[piece.view.tensor]
        if self._open is None:
            fills = [f for f in self.demand.fills if self._unit_of[f.view.tensor] == unit]
            self._open = _Opened(self._units[unit], unit, fills)
            self.finalize_bytes = max(self.finalize_bytes, self._open.extra_bytes)
        assert self._open.number == unit, "a plan in the demand's order writes one unit after the other"
        return self._open


class _Unit:
    """Modules that are opened and finalized together, with the path of each."""

    def __init__(self, roots: list[tuple[str, Module]]):
        self.root = torch.nn.ModuleList([module for _, module in roots])
        self._roots = roots

    def names(self, model: Module) -> Iterator[str]:
        """Dotted names of every tensor that the unit could hold, live or in loader layout."""
        for path, root in self._roots:
            for below, module in root.named_modules():
                info = get_layerwise_info(module)
                for name in {**get_layer_tensors(module), **info.restore_metadata[0], **info.restore_metadata[1]}:
                    yield ".".join(part for part in (path, below, name) if part)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, root in self._roots:
            for name, _, _, tensor in _tensors_of(root, path):
                yield name, tensor


class _Opened:
    """A unit whose modules hold tensors in loader layout."""

    def __init__(self, unit: _Unit, number: int, fills: list[Fill]):
        self.number = number
        self._unit = unit
        self._attributes = {module: _attributes_of(module) for module in unit.root.modules()}
        self._live = _swap_in_loader_layout(unit.root, on_meta=False)
        self._tensors = dict(unit.tensors())
        live = {t.untyped_storage()._cdata for held in self._live.values() for t in held.values()}
        fresh = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in self._tensors.values()
            if t.untyped_storage()._cdata not in live
        }
        self.extra_bytes = sum(fresh.values())
        for fill in fills:
            self.view(fill.view, fill.size).fill_(fill.value)

    def view(self, view: View, size: Shape) -> torch.Tensor:
        return _strided(self._tensors[view.tensor].data, view, size)

    def finalize(self, vllm_config: VllmConfig) -> None:
        """Run what vLLM runs after loading, as if for the first time, and put the result where the live tensors are."""
        device = vllm_config.device_config.device
        if current_platform.is_cpu():
            for module in self._unit.root.modules():
                if hasattr(getattr(module, "quant_method", None), "moe_kernel"):
                    module.quant_method.moe_kernel = None  # else vLLM takes the weights for packed ones
        with (
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(vllm_config.model_config.dtype),
            device,
            torch.no_grad(),
        ):
            process_weights_after_loading(self._unit.root, vllm_config.model_config, device)
        for module, tensors in self._live.items():
            for name, old in tensors.items():
                _keep_address(_holder(module, name), name, old)
        for module, tensors in self._attributes.items():
            for name, old in tensors.items():
                _keep_address(vars(module), name, old)


def _attributes_of(module: Module) -> dict[str, torch.Tensor]:
    """Tensors that are neither parameters nor buffers, such as the scales of attention, made anew with each load."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _strided(tensor: torch.Tensor, view: View, size: Shape) -> torch.Tensor:
    return tensor.data.as_strided(size, view.stride, tensor.storage_offset() + view.offset)


def _keep_address(held: dict[str, Any], name: str, old: torch.Tensor) -> None:
    """Move a finalized tensor into the memory of the live one, and put the live object back."""
    new = held.get(name)
    if new is None or new is old:
        return
    if not _same_layout(new, old):
        if not current_platform.is_cpu():  # captured graphs would go on reading the old memory
            raise RuntimeError(f"{name}: finalized as {_layout(new)}, but live as {_layout(old)}")
        return
    if new.data_ptr() != old.data_ptr():
        old.data.copy_(new.data)
        new.data = old.data  # a kernel may keep the object that it was given
    held[name] = old


def _swap_in_loader_layout(root: Module, on_meta: bool) -> dict[Module, dict[str, torch.Tensor]]:
    """Put tensors in loader layout into the modules below `root`; return what was live.

    A swapped-in tensor shares the live one's memory where the layout is the same, so that tied tensors stay tied
    and nothing is allocated. Tensors of which vLLM records no layout (`bias`) are in loader layout already.
    """
    live = {module: get_layer_tensors(module) for module in root.modules()}
    tied: dict[int, torch.Tensor] = {}
    for module, tensors in live.items():
        info = get_layerwise_info(module)
        for held, recorded in zip((module._parameters, module._buffers), info.restore_metadata, strict=True):
            for name, meta in recorded.items():
                if name in module._non_persistent_buffers_set:
                    continue
                loader = restore_layer_refs(meta, module)
                memory = _memory_for(loader, tensors.get(name), on_meta, info.restore_device, tied)
                held[name] = _of_kind(loader, memory)
    return live


def _memory_for(
    loader: torch.Tensor,
    live: torch.Tensor | None,
    on_meta: bool,
    device: torch.device,
    tied: dict[int, torch.Tensor],
) -> torch.Tensor:
    """A plain tensor in the layout of `loader`: the live one's memory where that has it, and one for all tied names."""
    shared = live if _same_layout(live, loader) else None
    if on_meta:
        key = id(loader) if shared is None else shared.untyped_storage()._cdata
        return tied.setdefault(key, torch.empty_like(loader)).data
    if shared is not None:
        return shared.data
    return torch.empty_strided(loader.shape, loader.stride(), dtype=loader.dtype, device=device)


def _of_kind(recorded: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Make `plain` the kind of parameter that vLLM recorded, with its loader and all its attributes."""
    plain.__class__ = recorded.__class__
    plain.__dict__ = recorded.__dict__.copy()
    return plain


def _swap_back(live: dict[Module, dict[str, torch.Tensor]]) -> None:
    for module, tensors in live.items():
        for name, tensor in tensors.items():
            _holder(module, name)[name] = tensor


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


def _units(model: Module) -> list[_Unit]:
    """Each member of a topmost ModuleList (a decoder layer) is a unit; all the rest is the last one.

    The rest goes together because a tied head is derived from the embedding's memory.
    """
    layers: list[_Unit] = []
    rest: list[tuple[str, Module]] = []

    def visit(path: str, module: Module) -> None:
        if isinstance(module, torch.nn.ModuleList):
            layers.extend(_Unit([(f"{path}.{name}", child)]) for name, child in module.named_children())
        elif any(isinstance(m, torch.nn.ModuleList) for m in module.modules()):
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)
        else:
            rest.append((path, module))

    visit("", model)
    return [*layers, _Unit(rest)]
