"""vLLM's slot for the policy's adapters, and the sink of a sync that writes them there.

vLLM keeps the adapters of a layer stacked, one per slot, and shards them itself: which part of which matrix a rank
keeps, and where, is recorded from its own `set_lora`, as its loaders tell it for weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager, create_lora_manager
from vllm.lora.request import LoRARequest

from hybrid3d.config import Lora
from hybrid3d.families import PEFT_PREFIX, is_adapted, module_of
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.plan.layout import Demand, Shape
from hybrid3d.rollout.loader_trace import Destination, UnsupportedLoader, record_copies
from hybrid3d.rollout.sink import EngineSink, SinkOwner

SLOT = 0
ADAPTER = LoRARequest("policy", 1, "policy")  # its path is never read, as the adapter is registered
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32.0 allows (`MaxLoRARanks` in vllm/config/lora.py)


def adapter_settings(lora: Lora, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the vLLM arguments for one adapter, which every request uses.

    Args:
        shapes: the full shape of each tensor of the model, without layers for multi-token prediction.
    """
    # By default vLLM would also have slots for embeddings and the head
    modules = sorted({module_of(n) for n, shape in shapes.items() if is_adapted(n, len(shape), lora.target_modules)})
    rank = next(allowed for allowed in RANKS if allowed >= lora.rank)
    return dict(enable_lora=True, max_loras=1, max_lora_rank=rank, lora_target_modules=modules)


def manager_of(model_runner: Any) -> LoRAModelManager:
    """Return what vLLM has wrapped this rank's model with."""
    manager: LoRAModelManager = model_runner.lora_manager._adapter_manager
    return manager


def wrap_on_meta(model: torch.nn.Module, config: VllmConfig) -> LoRAModelManager:
    """Wrap a model on meta as vLLM does where it runs; `config` has the settings of `adapter_settings`.

    Raises:
        UnsupportedLoader: vLLM has no adapters of a layer.
    """
    scheduler, lora = config.scheduler_config, config.lora_config
    assert lora is not None, "made with the settings of adapters"
    tokens, vocabulary = scheduler.max_num_batched_tokens, config.model_config.get_vocab_size()
    try:
        return create_lora_manager(
            model, scheduler.max_num_seqs, tokens, vocabulary, lora, config, torch.device("meta")
        )
    except ValueError as error:
        raise UnsupportedLoader(f"{error}: leave it out of lora.target_modules, or set lora.sync=merged") from error


def register_adapter(manager: LoRAModelManager, lora: Lora) -> None:
    """Register the adapter that requests name, without any layers yet: a sync fills its slot."""
    # `add_adapter` takes adapters with at least one layer only
    manager._registered_adapters[ADAPTER.lora_int_id] = LoRAModel(ADAPTER.lora_int_id, lora.rank, {})
    manager.activate_adapter(ADAPTER.lora_int_id)


class VllmAdapterSink(EngineSink, NamedTensors):
    """The demand of one vLLM rank for adapters, and the sink (`reshard.ends.WeightSink`) that receives them, in place.

    Attributes:
        demand: the parts of the matrices in PEFT's files that the rank needs; known once `demand_for` has been called.
    """

    demand: Demand
    finalize_bytes = 0
    rounded_scales: Collection[str] = ()

    def __init__(self, manager: LoRAModelManager, lora: Lora, owner: SinkOwner | None = None):
        """Take what vLLM has wrapped the rank's model with, and the engine that has the model, if there is one."""
        EngineSink.__init__(self, owner)
        self._manager = manager
        self._scale = lora.alpha / lora.rank
        slots: dict[str, torch.Tensor] = {}
        for name, module in manager.modules.items():
            for kind in ("a", "b"):
                for number, stacked in enumerate(getattr(module, f"lora_{kind}_stacked")):
                    slots[f"{name}.lora_{kind}_stacked.{number}"] = stacked
        NamedTensors.__init__(self, slots)

    def demand_for(self, shapes: Mapping[str, Shape]) -> Demand:
        """Return where vLLM's `set_lora` writes what of the matrices in PEFT's files, given their full shapes."""
        manager = self._manager
        modules = {
            name: [f"{PEFT_PREFIX}{part}" for part in manager.packed_modules.get(name, [name])]
            for name in manager.modules
        }
        known = {part for parts in modules.values() for part in parts}
        unknown = sorted(name for name in shapes if name.rsplit(".lora_", 1)[0] not in known)
        if unknown:
            raise UnsupportedLoader(
                f"vLLM has no slot for {len(unknown)} adapters: {', '.join(unknown[:4])}: leave them out of "
                "lora.target_modules, or set lora.sync=merged"
            )
        dtype = next(iter(self._tensors.values())).dtype

        def set_all(traced: Mapping[str, torch.Tensor]) -> None:
            for name, parts in modules.items():
                a, b = ([traced.get(f"{part}.lora_{kind}.weight") for part in parts] for kind in "AB")
                module = manager.modules[name]
                if any(matrix is not None for matrix in a):
                    with mock.patch.object(module, "reset_lora"):
                        module.set_lora(SLOT, *((a, b) if name in manager.packed_modules else (a[0], b[0])))

        destinations = [Destination(name, tensor) for name, tensor in self._tensors.items()]
        self.demand = Demand(record_copies(set_all, shapes, dtype, destinations), ())
        return self.demand

    def prepare(self, order: Sequence[int | None]) -> None: ...

    def kept_tensors(self) -> set[str]:
        return set()

    def begin(self) -> None:
        """Begin a sync of all adapters: what none is written to in a slot must be 0, also after sleep mode."""
        super().begin()
        for tensor in self._tensors.values():
            tensor.zero_()

    def skip(self, layer: int | None) -> None: ...

    def abandon(self) -> None: ...

    def end(self) -> None:
        """Scale B, as vLLM does when it loads an adapter, because its kernels do not."""
        for name, tensor in self._tensors.items():
            if ".lora_b_stacked." in name:
                tensor.mul_(self._scale)
