"""Opens and finalizes the units of a live vLLM model, for a sync to write new weights into them.

After loading, vLLM processes the weights of a module (packing, swizzling, derived tensors), and its loaders cannot
write the resulting live tensors. A unit (a decoder layer, or all modules outside of layers) is therefore *opened*:
tensors in loader layout replace the live ones, in the same memory if the layouts are equal. When its last box has
arrived the unit is *finalized*: vLLM's own processing runs, and the results are copied into the memory of the live
tensors, so that no address changes.

The functions of vLLM's `model_loader.reload` used here are private: this file depends on the pinned version of vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from hybrid3d.patches import set_existing
from hybrid3d.reshard.move.memory import DeviceBuffer, align_up, strided_view
from hybrid3d.reshard.plan.classes import layer_of
from hybrid3d.reshard.plan.layout import Fill, Shape, View
from hybrid3d.rollout.loader_trace import span_bytes
from hybrid3d.rollout.patches import VLLM, without_requantization

Module = torch.nn.Module

LiveTensors = dict[Module, dict[str, "torch.Tensor | None"]]
"""Live parameters and buffers, by module and name."""

MemoryFor = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""Returns memory for a meta tensor in loader layout, given the live tensor of the same name, if any."""


class Unit:
    """Modules that are opened and finalized together, and the path of each in the model."""

    def __init__(self) -> None:
        self.root = torch.nn.ModuleList()
        self._paths: list[str] = []

    def add(self, path: str, module: Module) -> None:
        self.root.append(module)
        self._paths.append(path)

    def modules(self) -> Iterator[tuple[str, Module]]:
        """Yield the dotted path of each module, and the module."""
        for path, root in zip(self._paths, self.root, strict=True):
            for subpath, module in root.named_modules():
                yield _join(path, subpath), module

    def names(self) -> Iterator[str]:
        """Yield the dotted names of all tensors of the unit, live or in loader layout."""
        for path, module in self.modules():
            info = get_layerwise_info(module)
            for name in {**get_layer_tensors(module), **info.restore_metadata[0], **info.restore_metadata[1]}:
                yield _join(path, name)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the dotted name of each tensor that the modules hold now, and the tensor."""
        for path, root in zip(self._paths, self.root, strict=True):
            for name, _, _, tensor in tensors_of(root, path):
                yield name, tensor


class OpenUnit:
    """A unit's tensors in loader layout, in the memory of live tensors with the same layout, else in extra memory.

    Weights of the `requantized` names arrive as vLLM would quantize them anew.
    """

    def __init__(self, unit: Unit, fills: Sequence[Fill], requantized: Container[str] = ()):
        self.unit, self._requantized = unit, requantized
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
        for _, module in unit.modules():
            for name, loader in _loader_tensors(module):
                if not _same_layout(get_layer_tensors(module).get(name), loader):
                    self._extra[id(loader)] = loader, self.extra_bytes
                    self.extra_bytes += align_up(span_bytes(loader))

    def place(self, buffer: DeviceBuffer) -> None:
        """Use this buffer as extra memory, and look up the memory of every tensor in loader layout."""
        self._buffer = buffer
        self._swap_in()
        self._tensors = {name: tensor.data for name, tensor in self.unit.tensors()}
        swap_back(self._live)

    def kept_tensors(self) -> Iterator[str]:
        """Yield the names of the live tensors that a sync writes directly and that finalizing does not move."""
        for name, tensor in self.unit.tensors():
            in_place = name in self._written and tensor.data_ptr() == self._tensors[name].data_ptr()
            if in_place and _same_layout(tensor, self._tensors[name]) and id(tensor) not in self._moved:
                yield name

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
        for module in self.unit.root.modules():
            _reset_cache_scales(module)
            _forget_processing(module)
        for fill in self._fills:
            self.view(fill.view, fill.size).fill_(fill.value)

    def _swap_in(self) -> None:
        def memory_for(loader: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
            if live is not None and id(loader) not in self._extra:
                return live.data
            _, offset = self._extra[id(loader)]
            flat = self._buffer.flat_view(offset, span_bytes(loader), loader.dtype)
            return flat.as_strided(loader.shape, loader.stride())

        self._live = swap_in_loader_layout(self.unit.root, memory_for)

    def abandon(self) -> None:
        """Put the live tensors back into an open unit, whose new weights are not complete."""
        swap_back(self._live)

    def finalize(self, vllm_config: VllmConfig) -> None:
        """Run vLLM's processing after loading, and copy its results into the memory of the live tensors."""
        device = vllm_config.device_config.device
        if current_platform.is_cpu():
            for module in self.unit.root.modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, FusedMoEMethodBase):
                    set_existing(VLLM, method, moe_kernel=None)  # otherwise vLLM treats the weights as packed
        # Not in a context of the device, as in vLLM's own loading: attention keeps scalars on the host, which would be
        # made on the GPU, and the host would wait for each.
        with (
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(vllm_config.model_config.dtype),
            torch.no_grad(),
            unwrapped_layers(self.unit.root),  # else vLLM processes layers that it has wrapped for adapters twice
            without_requantization({t.data_ptr() for name, t in self._tensors.items() if name in self._requantized}),
        ):
            process_weights_after_loading(self.unit.root, vllm_config.model_config, device)
        for module, tensors in self._live.items():
            for name, old in tensors.items():
                holder: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                if _keep_address(holder, name, old):
                    self._moved.add(id(old))
        for module, attributes in self._attributes.items():
            for name, attribute in attributes.items():
                _keep_address(vars(module), name, attribute)
        for module in self.unit.root.modules():
            for tensor in (*get_layer_tensors(module).values(), *_attributes_of(module).values()):
                if self._buffer.contains(tensor):  # this memory is reused by the next unit but one
                    tensor.data = tensor.data.clone()


def _reset_cache_scales(module: Module) -> None:
    """Set the scales of a quantized model's KV cache to what they are where a checkpoint has none.

    No loader writes them, and those of a model that was started with dummy weights are random. Without the parameters
    from which vLLM would set them it leaves them, and does not wait for a GPU to read these.
    """
    scales = [name for name, tensor in module._parameters.items() if isinstance(tensor, KVCacheScaleParameter)]
    if scales:
        set_default_quant_scales(module)
    for name in scales:
        del module._parameters[name]


def _forget_processing(module: Module) -> None:
    """Have vLLM process a quantized module once more: of some methods it notes that it has, and does nothing then.

    With a layout like the loader's, unprocessed weights would be taken for processed ones.
    """
    if module._parameters and isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
        vars(module).pop("_already_called_process_weights_after_loading", None)


def _attributes_of(module: Module) -> dict[str, torch.Tensor]:
    """Return tensor attributes that are neither parameters nor buffers, such as attention scales."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _keep_address(tensors: dict[str, Any], name: str, old: torch.Tensor | None) -> bool:
    """Copy a finalized tensor into the memory of the live one, `old`, and put the live tensor object back.

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
    moved: bool = new.data_ptr() != old.data_ptr()
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


def swap_in_loader_layout(root: Module, memory_for: MemoryFor) -> LiveTensors:
    """Replace the tensors of all modules below `root` by tensors in loader layout; return the live ones."""
    live: LiveTensors = {module: {**module._parameters, **module._buffers} for module in root.modules()}
    for module, tensors in live.items():
        buffers = get_layerwise_info(module).restore_metadata[1]
        for name, meta in _loader_tensors(module):
            target: dict[str, Any] = module._buffers if name in buffers else module._parameters
            target[name] = _as_parameter(restore_layer_refs(meta, module), memory_for(meta, tensors.get(name)).data)
    return live


def allocate_on_meta() -> MemoryFor:
    """Return a function that allocates on meta, once for all names of a tied tensor."""
    tied: dict[int, torch.Tensor] = {}

    def memory_for(loader: torch.Tensor, live: torch.Tensor | None) -> torch.Tensor:
        shared = live is not None and _same_layout(live, loader)
        key = live.untyped_storage()._cdata if live is not None and shared else id(loader)
        return tied.setdefault(key, torch.empty_like(loader, device="meta"))

    return memory_for


def padding_of(module: Module, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of what vLLM adds to experts' weights for the kernels of some GPUs, and clears as it processes them.

    That is FlashInfer's block layout on Blackwell, which has whole blocks of 128 of an expert's width.

    Args:
        name: of the tensor within the module.
        tensor: in loader layout, w13 as [experts, gate and up, hidden], w2 as [experts, hidden, width].
    """
    method = getattr(module, "quant_method", None)
    if not isinstance(method, UnquantizedFusedMoEMethod) or name not in ("w13_weight", "w2_weight"):
        return ()
    padded, width = method.moe.intermediate_size_per_partition, method.moe.intermediate_size_per_partition_unpadded
    if width is None or padded <= width:
        return ()
    if name == "w2_weight":
        return (tensor[:, :, width:],)
    return tuple(part[:, width:] for part in tensor.split(padded, 1))


def _as_parameter(recorded: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Give `plain` the class and attributes (such as the loader) of the parameter that vLLM recorded."""
    plain.__class__ = recorded.__class__
    plain.__dict__ = recorded.__dict__.copy()
    return plain


def swap_back(live: LiveTensors) -> None:
    """Put the live tensors back into their modules."""
    for module, tensors in live.items():
        places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for current in places:
            before = {name: tensors[name] for name in current if name in tensors}
            current.clear()
            current.update(before)


def tensors_of(root: Module, path: str = "") -> Iterator[tuple[str, Module, str, torch.Tensor]]:
    """Yield (dotted name, module, name within the module, tensor) of every parameter and buffer below `root`."""
    for subpath, module in root.named_modules():
        for name, tensor in get_layer_tensors(module).items():
            yield _join(path, subpath, name), module, name, tensor


def _join(*parts: str) -> str:
    """Join the parts of a path; a layer that vLLM has wrapped for adapters has the name of the wrapper."""
    return ".".join(part for part in parts if part).replace(".base_layer", "")


def _same_layout(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and _layout(a) == _layout(b)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


@contextmanager
def unwrapped_layers(model: torch.nn.Module) -> Iterator[None]:
    """Replace each layer that has adapters by the layer that it wraps, by whose name loaders find its weights."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "lora_a_stacked") and hasattr(child, "base_layer")
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def units_of(model: Module) -> dict[int | None, Unit]:
    """Return the units by layer: the members of the outermost ModuleLists are decoder layers, the rest is under None.

    The rest is one unit because a tied head uses the embedding's memory.
    """
    units: dict[int | None, Unit] = defaultdict(Unit)

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
