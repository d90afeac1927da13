"""What a live vLLM model holds and computes, beside a model that vLLM makes of a checkpoint itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader import get_model

from hybrid3d.generation.engine import Completion, GenerationRequest, complete
from hybrid3d.rollout.engine import RolloutEngine

Module = torch.nn.Module

TOKENS = 64  # of the inputs of an expert block, so that all experts of a tiny model are used
MAX_UNIT_ROWS = 1024  # a linear with more inputs is given random rows instead of unit vectors
TRANSIENT = ("kv_cache",)  # attributes that requests write, and that no checkpoint determines


@dataclass(frozen=True)
class FreshModel:
    """A model that vLLM has loaded from a checkpoint, and its layers by the names under which vLLM finds them."""

    model: Module
    layers: dict[str, Any]


class Inspection:
    """Reads a rank's live vLLM model, and loads others beside it. All ranks of a replica call every method together."""

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._runner = engine.model_runner
        self._config = self._runner.vllm_config
        self._device = torch.device(self._config.device_config.device)

    @property
    def model(self) -> Module:
        """The live model, which the syncs write."""
        model: Module = self._runner.get_model()
        return model

    def load_fresh(self, folder: Path) -> FreshModel:
        """Return the model that vLLM's own loader makes of a checkpoint; it shares no tensor with the live one."""
        config = copy.copy(self._config)
        config.model_config = self._read_config(folder)
        config.load_config = copy.copy(config.load_config)
        config.load_config.load_format = "auto"
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        # vLLM shares one table of rotary embeddings among all models of a process
        with mock.patch.dict(_ROPE_DICT, clear=True), set_current_vllm_config(config), torch.random.fork_rng():
            model = get_model(vllm_config=config)
        return FreshModel(model, config.compilation_config.static_forward_context)

    def _read_config(self, folder: Path) -> ModelConfig:
        """Return what vLLM reads in a checkpoint's `config.json`, without the overrides of the live engine."""
        live = self._config.model_config
        return EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=str(live.dtype).removeprefix("torch."),
            max_model_len=live.max_model_len,
            enforce_eager=live.enforce_eager,
            seed=live.seed,
        ).create_model_config()

    @contextlib.contextmanager
    def using(self, fresh: FreshModel) -> Iterator[None]:
        """Let the engine compute with another model of the same layout, in the same KV cache."""
        layers, live = self._config.compilation_config.static_forward_context, self._runner.model
        before = dict(layers)
        for name, layer in before.items():
            self._start_layer(layer, fresh.layers[name])
        self._runner.model = fresh.model
        layers.update(fresh.layers)
        try:
            yield
        finally:
            self._runner.model = live
            layers.update(before)

    @staticmethod
    def _start_layer(live: Any, fresh: Any) -> None:
        """Give a layer what vLLM's start gives one after loading: its KV cache, and the kernel that it uses."""
        for key, value in vars(live).items():
            if key in TRANSIENT or not (hasattr(fresh, key) or isinstance(value, torch.Tensor)):
                setattr(fresh, key, value)

    def forget(self) -> None:
        """Drop the prefix cache by vLLM's own call, so that a sync that leaves it is found. No request runs."""
        if not self._engine.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache because requests are still running")

    def answers(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return what the engine samples with the model that it uses now."""
        return complete(self._engine, requests, 0)

    def contents(self, model: Module) -> dict[str, torch.Tensor]:
        """Return the parameters, buffers and other tensors of all modules, by dotted name; tied ones once for each."""
        found: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            expert_map = getattr(module, "expert_map", None)
            others = {"expert_map": expert_map} if isinstance(expert_map, torch.Tensor) else {}
            for name, tensor in {**vars(module), **module._parameters, **module._buffers, **others}.items():
                if isinstance(tensor, torch.Tensor) and name not in TRANSIENT:
                    found[f"{path}.{name}" if path else name] = tensor.detach()
        return found

    @torch.no_grad()
    def outputs(self, model: Module) -> dict[str, torch.Tensor]:
        """Return what each linear, embedding, head and expert block computes on fixed inputs, as `module (kind)`.

        A linear is given unit vectors where it has few inputs, so that its output shows each of its weights.
        """
        found, dtype = {}, self._config.model_config.dtype
        with set_current_vllm_config(self._config):
            for path, module in model.named_modules(remove_duplicate=False):
                method: Any = getattr(module, "quant_method", None)
                if hasattr(module, "num_embeddings_per_partition"):
                    rows = torch.arange(module.num_embeddings_per_partition, device=self._device)
                    found[f"{path} (embedding)"] = method.embedding(module, rows)
                    inputs = self._inputs(module.embedding_dim, dtype)
                    found[f"{path} (head)"] = method.apply(module, inputs)
                elif isinstance(module, LinearBase):
                    size = getattr(module, "input_size_per_partition", module.input_size)  # a replicated one is whole
                    inputs = self._inputs(size, module.params_dtype)  # of a router, float32 in a model of bfloat16
                    found[f"{path} (linear)"] = method.apply(module, inputs, module.bias)
                elif hasattr(module, "experts") and not hasattr(module, "layers"):
                    found[f"{path} (expert block)"] = self._expert_block(module)
        return found

    def _expert_block(self, module: Module) -> torch.Tensor:
        """Return what a sparse layer computes, its router and shared experts included, with the other ranks."""
        size = self._config.model_config.get_hidden_size()
        inputs = self._random(TOKENS, size).to(self._config.model_config.dtype)
        with set_forward_context(None, self._config, num_tokens=TOKENS):
            computed: torch.Tensor = module(inputs)
        return computed

    def _inputs(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        rows = torch.eye(size, device=self._device) if size <= MAX_UNIT_ROWS else self._random(TOKENS, size)
        return rows.to(dtype)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(self._device)
