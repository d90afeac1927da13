"""The sink of a sync: writes new weights into a live vLLM model.

After loading, vLLM processes the weights of a module (packing, swizzling, derived tensors), and its loaders cannot
write the resulting live tensors. A unit (a decoder layer, or all modules outside of layers) is therefore *opened*:
tensors in loader layout replace the live ones, in the same memory if the layouts are equal. When its last box has
arrived the unit is *finalized*: vLLM's own processing runs, and the results are copied into the memory of the live
tensors, so that no address changes. Two units are open at a time: one is finalized while the next one is written.

The functions of vLLM's `model_loader.reload` used here are private: this file depends on the pinned version of vLLM.
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
# Parameters that no loader writes: latent attention derives them from `kv_b_proj` after loading.
DERIVED_PARAMETERS = ("W_UV", "W_UK_T")
MAX_OPEN_UNITS = 2


class RolloutWeights:
    """The demand of one vLLM rank, and the sink (`reshard.protocols.Sink`) that receives it.

    Attributes:
        demand: the pieces that the rank needs, ordered by layer.
        finalize_bytes: memory that open units take in addition to the live tensors.
    """

    def __init__(self, model: Module, vllm_config: VllmConfig, shapes: Mapping[str, Shape]):
        self._vllm_config = vllm_config
        self._device = vllm_config.device_config.device
        self._units = _units(model)
        self._layer_of = {name: layer for layer, unit in self._units.items() for name in unit.names()}
        self.demand = self._record(model, vllm_config, shapes)
        self._buffers = [DeviceBuffer(0, self._device)] * MAX_OPEN_UNITS
        self._open_units: dict[int | None, _OpenUnit] = {}
        self._pending: set[int | None] = set()

    def _record(self, model: Module, vllm_config: VllmConfig, shapes: Mapping[str, Shape]) -> Demand:
        live = _swap_in_loader_layout(model, _allocate_on_meta())
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
                raise UnsupportedLoader(
                    f"vLLM's loader writes {piece.name} into {piece.view.tensor}, which is in another layer"
                )
        return replace(demand, pieces=tuple(sorted(demand.pieces, key=_piece_order)))

    @property
    def max_finalize_bytes(self) -> int:
        """Upper bound of `finalize_bytes`: the size of the largest unit, times the number of open units."""
        tensors: dict[str, int] = defaultdict(int)
        dtypes = {piece.view.tensor: piece.dtype for piece in self.demand.pieces}
        for piece in self.demand.pieces:
            tensors[piece.view.tensor] += piece.nbytes
        # A vocabulary shard may be padding only: it is filled, and no piece has its dtype.
        default_itemsize = self._vllm_config.model_config.dtype.itemsize
        for fill in self.demand.fills:
            dtype = dtypes.get(fill.view.tensor)
            tensors[fill.view.tensor] += math.prod(fill.size) * (default_itemsize if dtype is None else ITEMSIZE[dtype])
        units: dict[int | None, int] = defaultdict(int)
        for name, nbytes in tensors.items():
            units[self._layer_of[name]] += align_up(nbytes)
        return MAX_OPEN_UNITS * max(units.values())

    @property
    def finalize_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def prepare(self, order: Sequence[int | None]) -> None:
        """Assign memory to the tensors of every unit. This is called once, before the first sync.

        Args:
            order: the layers in the order in which they will be opened; None stands for the modules outside of layers.
        """
        fills: dict[int | None, list[Fill]] = defaultdict(list)
        for fill in self.demand.fills:
            fills[self._layer_of[fill.view.tensor]].append(fill)
        open_units = {layer: _OpenUnit(self._units[layer], fills[layer]) for layer in order}
        sizes = [[open_units[layer].extra_bytes for layer in order[i::MAX_OPEN_UNITS]] for i in range(MAX_OPEN_UNITS)]
        self._buffers = [DeviceBuffer(max(unit_sizes, default=0), self._device) for unit_sizes in sizes]
        for i, layer in enumerate(order):
            open_units[layer].place(self._buffers[i % MAX_OPEN_UNITS])
        self._open_units = open_units

    def in_place_tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors, by local name, that a sync writes directly and that finalizing does not move."""
        return {name: tensor for unit in self._open_units.values() for name, tensor in unit.in_place_tensors()}

    def begin(self) -> None:
        """Begin a sync of all units; live tensors stay in place until their unit is opened."""
        for buffer in self._buffers:
            buffer.allocate()
        self._pending = set(self._open_units)

    def write(self, piece: Piece) -> torch.Tensor:
        return self._open_units[self._layer_of[piece.view.tensor]].view(piece.view, piece.box.size)

    def open(self, layer: int | None) -> None:
        self._open_units[layer].open()

    def close(self, layer: int | None) -> None:
        self._open_units[layer].finalize(self._vllm_config)
        self._pending.remove(layer)

    def skip(self, layer: int | None) -> None:
        """Count a layer as done without `open` and `close`: its data stays as written, and vLLM does not process it."""
        self._pending.remove(layer)

    def end(self) -> None:
        """End the sync and free the extra memory.

        Raises:
            RuntimeError: some units were not finalized; the model is not usable until a sync succeeds.
        """
        for buffer in self._buffers:
            buffer.release()
        if self._pending:
            raise RuntimeError(
                f"the sync ended with {len(self._pending)} of {len(self._open_units)} units not finalized"
            )


def _piece_order(piece: Piece) -> tuple[float, list[tuple[int, str]]]:
    """Sort key of pieces: by layer, tensors outside of layers last, independent of the order in the checkpoint."""
    layer = layer_of(piece.name)
    return math.inf if layer is None else layer, natural_sort_key(piece.name)


class _Unit:
    """Modules that are opened and finalized together, and the path of each in the model."""

    def __init__(self) -> None:
        self.root = torch.nn.ModuleList()
        self._paths: list[str] = []

    def add(self, path: str, module: Module) -> None:
        self.root.append(module)
        self._paths.append(path)

    def names(self) -> Iterator[str]:
        """Yield the dotted names of all tensors of the unit, live or in loader layout."""
        for path, root in zip(self._paths, self.root, strict=True):
            for subpath, module in root.named_modules():
                info = get_layerwise_info(module)
                for name in {**get_layer_tensors(module), **info.restore_metadata[0], **info.restore_metadata[1]}:
                    yield ".".join(part for part in (path, subpath, name) if part)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the dotted name of each tensor that the modules hold now, and the tensor."""
        for path, root in zip(self._paths, self.root, strict=True):
            for name, _, _, tensor in _tensors_of(root, path):
                yield name, tensor


class _OpenUnit:
    """A unit's tensors in loader layout, in the memory of live tensors with the same layout, else in extra memory."""

    def __init__(self, unit: _Unit, fills: Sequence[Fill]):
        self.unit = unit
        self._fills = fills
        # By id, a loader tensor that needs extra memory, and its offset there. The reference keeps the id valid.
        self._extra: dict[int, tuple[torch.Tensor, int]] = {}
        self.extra_bytes = 0
        self._buffer = DeviceBuffer(0, "cpu")
        self._tensors: dict[str, torch.Tensor] = {}
        self._written: set[str] = set()
        self._moved: set[int] = set()  # ids of live tensors that vLLM finalizes in other memory
        self._live: LiveTensors = {}
        self._attributes: dict[Module, dict[str, torch.Tensor]] = {}
        for module in unit.root.modules():
            for name, loader in _loader_tensors(module):
                if not _same_layout(get_layer_tensors(module).get(name), loader):
                    self._extra[id(loader)] = loader, self.extra_bytes
                    self.extra_bytes += align_up(_extent(loader))

    def place(self, buffer: DeviceBuffer) -> None:
        """Use this buffer as extra memory, and look up the memory of every tensor in loader layout."""
        self._buffer = buffer
        self._swap_in()
        self._tensors = {name: tensor.data for name, tensor in self.unit.tensors()}
        _swap_back(self._live)

    def in_place_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the live tensors that a sync writes directly and that finalizing does not move."""
        for name, tensor in self.unit.tensors():
            in_place = name in self._written and tensor.data_ptr() == self._tensors[name].data_ptr()
            if in_place and _same_layout(tensor, self._tensors[name]) and id(tensor) not in self._moved:
                yield name, tensor

    def view(self, view: View, size: Shape) -> torch.Tensor:
        """Return a view of a tensor in loader layout, to be written."""
        self._written.add(view.tensor)
        return strided_view(self._tensors[view.tensor].data, view, size)

    def open(self) -> None:
        """Replace the live tensors by those in loader layout, and write the constants.

        Raises:
            RuntimeError: vLLM has moved a tensor, so that the views given out are stale.
        """
        self._attributes = {module: _attributes_of(module) for module in self.unit.root.modules()}
        self._swap_in()
        for name, tensor in self.unit.tensors():
            if name in self._written and tensor.data_ptr() != self._tensors[name].data_ptr():
                raise RuntimeError(f"vLLM has moved {name} to other memory: it would not read what the sync writes")
        for fill in self._fills:
            self.view(fill.view, fill.size).fill_(fill.value)

    def _swap_in(self) -> None:
        def memory_for(loader: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
            if live is not None and _same_layout(live, loader):
                return live.data
            _, offset = self._extra[id(loader)]
            flat = self._buffer.flat_view(offset, _extent(loader), loader.dtype)
            return flat.as_strided(loader.shape, loader.stride())

        self._live = _swap_in_loader_layout(self.unit.root, memory_for)

    def finalize(self, vllm_config: VllmConfig) -> None:
        """Run vLLM's processing after loading, and copy its results into the memory of the live tensors."""
        device = vllm_config.device_config.device
        if current_platform.is_cpu():
            for module in self.unit.root.modules():
                if hasattr(getattr(module, "quant_method", None), "moe_kernel"):
                    module.quant_method.moe_kernel = None  # otherwise vLLM treats the weights as packed
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
                if self._buffer.contains(tensor):  # this memory is reused by the next unit but one
                    tensor.data = tensor.data.clone()


def _attributes_of(module: Module) -> dict[str, torch.Tensor]:
    """Return tensor attributes that are neither parameters nor buffers, such as attention scales."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _keep_address(tensors: dict[str, Any], name: str, old: torch.Tensor | None) -> bool:
    """Copy a finalized tensor into the memory of the live one, and put the live tensor object back.

    Args:
        tensors: a module's parameters, buffers or attributes.
        old: the live tensor.

    Returns:
        Whether the finalized tensor was in other memory.

    Raises:
        RuntimeError: on a GPU, the finalized tensor has another layout than the live one.
    """
    new = tensors.get(name)
    if new is None or old is None or new is old:
        return False
    if not _same_layout(new, old):
        if not current_platform.is_cpu():  # captured graphs would keep reading the old memory
            raise RuntimeError(
                f"{name}: finalizing changed (shape, stride, dtype) from {_layout(old)} to {_layout(new)}"
            )
        return True
    moved = new.data_ptr() != old.data_ptr()
    if moved:
        old.data.copy_(new.data)
        new.data = old.data  # a kernel may keep a reference to the new object
    tensors[name] = old
    return moved


def _loader_tensors(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and a meta tensor in loader layout of each tensor whose layout vLLM recorded before processing.

    Tensors without a record (`bias`) are in loader layout already.
    """
    info = get_layerwise_info(module)
    for recorded in info.restore_metadata:
        for name, meta in recorded.items():
            if name not in module._non_persistent_buffers_set:
                yield name, meta


LiveTensors = dict[Module, dict[str, "torch.Tensor | None"]]
"""Live parameters and buffers, by module and name."""

MemoryFor = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""Returns memory for a meta tensor in loader layout, given the live tensor of the same name, if any."""


def _swap_in_loader_layout(root: Module, memory_for: MemoryFor) -> LiveTensors:
    """Replace the tensors of all modules below `root` by tensors in loader layout; return the live ones."""
    live: LiveTensors = {module: {**module._parameters, **module._buffers} for module in root.modules()}
    for module, tensors in live.items():
        buffers = get_layerwise_info(module).restore_metadata[1]
        for name, meta in _loader_tensors(module):
            target = module._buffers if name in buffers else module._parameters
            target[name] = _as_parameter(restore_layer_refs(meta, module), memory_for(meta, tensors.get(name)).data)
    return live


def _allocate_on_meta() -> MemoryFor:
    """Return a function that allocates on meta, once for all names of a tied tensor."""
    tied: dict[int, torch.Tensor] = {}

    def memory_for(loader: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
        shared = live is not None and _same_layout(live, loader)
        key = live.untyped_storage()._cdata if live is not None and shared else id(loader)
        return tied.setdefault(key, torch.empty_like(loader, device="meta"))

    return memory_for


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor spans in memory."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def _as_parameter(recorded: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Give `plain` the class and attributes (such as the loader) of the parameter that vLLM recorded."""
    plain.__class__ = recorded.__class__
    plain.__dict__ = recorded.__dict__.copy()
    return plain


def _swap_back(live: LiveTensors) -> None:
    """Put the live tensors back into their modules."""
    for module, tensors in live.items():
        for current in (module._parameters, module._buffers):
            for name in list(current):
                if name in tensors:
                    current[name] = tensors[name]
                else:
                    del current[name]


def _holder(module: Module, name: str) -> dict[str, Any]:
    """Return the dictionary of a module that holds this tensor."""
    return module._parameters if name in module._parameters else module._buffers


def _tensors_of(root: Module, path: str = "") -> Iterator[tuple[str, Module, str, torch.Tensor]]:
    """Yield (dotted name, module, name within the module, tensor) of every parameter and buffer below `root`."""
    for subpath, module in root.named_modules():
        for name, tensor in get_layer_tensors(module).items():
            yield ".".join(part for part in (path, subpath, name) if part), module, name, tensor


def _same_layout(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and _layout(a) == _layout(b)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _units(model: Module) -> dict[int | None, _Unit]:
    """Return the units by layer: the members of the outermost ModuleLists are decoder layers, the rest is under None.

    The rest is one unit because a tied head uses the embedding's memory.
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
