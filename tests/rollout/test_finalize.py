"""Finalizing a unit: what vLLM's processing is given to work with, on a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.oracle.unquantized import _zero_intermediate_padding
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from commands import ROOT
from hybrid3d.config import load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.plan.layout import Demand
from hybrid3d.rollout.finalize import padding_of
from hybrid3d.rollout.loader_trace import Destination, UnsupportedLoader, record_demand
from hybrid3d.rollout.probe import model_of_rank
from hybrid3d.rollout.sink import VllmSink
from hybrid3d.train.megatron.probe import expected_shapes

pytestmark = pytest.mark.engines


class DevicesOfScalars(TorchFunctionMode):
    """Records the device that each call of `torch.tensor` is given, by an argument or by a device context."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            self.devices.append((kwargs or {}).get("device"))
        return func(*args, **(kwargs or {}))


@contextmanager
def sink_of_first_layer(
    folder: Path, methods: Mapping[str, QuantizeMethodBase] = MappingProxyType({})
) -> Iterator[tuple[VllmSink, torch.nn.Module]]:
    """A sink that has prepared one layer of a model that vLLM has started, and the model.

    Args:
        methods: of its layers, by their paths, in place of vLLM's.
    """
    settings = ["train.tp=1", "train.pp=1", "rollout.tp=1", "rollout.max_model_len=128", "rollout.max_new_tokens=8"]
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.path={folder}", *settings])
    shapes = expected_shapes(read_config(str(folder)))
    with model_of_rank(recipe, 0, device="cpu") as (model, config):
        for path, method in methods.items():
            model.get_submodule(path).quant_method = method
        model_config = config.model_config
        with set_current_vllm_config(config), torch.no_grad(), set_default_torch_dtype(model_config.dtype):
            process_weights_after_loading(model, model_config, config.device_config.device)
        sink = VllmSink(model, config)
        sink.demand_for(shapes)
        sink.prepare([0])
        yield sink, model


def test_scalars_of_attention_stay_on_the_host(tiny_checkpoint: Callable[..., Path]) -> None:
    """vLLM makes numbers such as `_k_scale_cpu`; on a GPU each would be a copy for which the host waits."""
    with sink_of_first_layer(tiny_checkpoint("qwen2")) as (weights, _):
        weights.begin()
        weights.open(0)
        with DevicesOfScalars() as seen:
            weights.close(0)
    assert len(seen.devices) >= 2, "vLLM does not make these scalars any more: this test no longer tests anything"
    assert set(seen.devices) == {None}


class Doubles(QuantizeMethodBase):
    """Doubles a weight once, as vLLM's method of experts in MXFP8 processes them once: then it notes that it has."""

    def create_weights(self, layer: torch.nn.Module, *unused: Any, **also_unused: Any) -> None: ...

    def apply(self, layer: torch.nn.Module, *unused: Any, **also_unused: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not getattr(layer, "_already_called_process_weights_after_loading", False):
            layer._already_called_process_weights_after_loading = True
            layer.weight.data.mul_(2)


def test_layers_that_vllm_processes_once_are_processed_again(tiny_checkpoint: Callable[..., Path]) -> None:
    path = "model.layers.0.mlp.down_proj"
    with sink_of_first_layer(tiny_checkpoint("qwen2"), {path: Doubles()}) as (sink, model):
        layer = model.get_submodule(path)
        for _ in range(2):
            sink.begin()
            sink.open(0)
            for piece in sink.demand.pieces:
                if piece.name.startswith("model.layers.0."):
                    sink.write(piece).fill_(3)
            sink.close(0)
            assert set(layer.weight.unique().tolist()) == {6.0}


@pytest.mark.parametrize("gated", [True, False])
def test_padding_of_experts_is_what_vllm_clears(gated: bool) -> None:
    """`_zero_intermediate_padding` is what vLLM calls before it lays experts out for FlashInfer on Blackwell."""
    sizes = SimpleNamespace(
        intermediate_size_per_partition=8, intermediate_size_per_partition_unpadded=5, is_act_and_mul=gated
    )
    layer = torch.nn.Module()
    layer.quant_method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    vars(layer.quant_method)["moe"] = sizes
    theirs, ours = ((torch.ones(2, 16 if gated else 8, 3), torch.ones(2, 3, 8)) for _ in range(2))
    _zero_intermediate_padding(sizes, *theirs)
    for name, tensor in zip(("w13_weight", "w2_weight"), ours, strict=True):
        for padding in padding_of(layer, name, tensor):
            padding.zero_()
    assert all(map(torch.equal, ours, theirs))
    assert padding_of(layer, "w13_bias", torch.ones(2, 16)) == ()
    sizes.intermediate_size_per_partition_unpadded = 8
    assert padding_of(layer, "w2_weight", ours[1]) == ()


class Loads(torch.nn.Module):
    """A model whose loader leaves the last rows of its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8, 3, device="meta"), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, loaded in weights:
            self.weight.data[:5].copy_(loaded)


def test_unwritten_rows_are_refused_unless_vllm_clears_them() -> None:
    model = Loads()
    weight = model.weight.data

    def record(padding: tuple[torch.Tensor, ...]) -> Demand:
        destination = Destination("weight", weight, padding)
        return record_demand(model, {"weight": (5, 3)}, torch.bfloat16, [destination])

    (piece,) = record((weight[5:],)).pieces
    assert (piece.view.offset, piece.box.size) == (0, (5, 3))
    unwritten = "of 24 elements {} are left unwritten, and {} are written more than once"
    for padding, counts in (((), (9, 0)), ((weight[6:],), (3, 0)), ((weight[4:],), (0, 3))):
        with pytest.raises(UnsupportedLoader, match=unwritten.format(*counts)):
            record(padding)
