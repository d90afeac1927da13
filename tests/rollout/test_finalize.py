"""Finalizing a unit: what vLLM's processing is given to work with, on a model in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from commands import ROOT
from hybrid3d.config import load_recipe
from hybrid3d.inputs.models import read_config
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


def test_scalars_of_attention_stay_on_the_host(tiny_checkpoint: Callable[..., Path]) -> None:
    """vLLM makes numbers such as `_k_scale_cpu`; on a GPU each would be a copy for which the host waits."""
    folder = tiny_checkpoint("qwen2")
    settings = ["train.tp=1", "train.pp=1", "rollout.tp=1", "rollout.max_model_len=128", "rollout.max_new_tokens=8"]
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.path={folder}", *settings])
    shapes = expected_shapes(read_config(str(folder)))
    with model_of_rank(recipe, 0, device="cpu") as (model, config):
        model_config = config.model_config
        with set_current_vllm_config(config), torch.no_grad(), set_default_torch_dtype(model_config.dtype):
            process_weights_after_loading(model, model_config, config.device_config.device)
        weights = VllmSink(model, config)
        weights.demand_for(shapes)
        weights.prepare([0])
        weights.begin()
        weights.open(0)
        with DevicesOfScalars() as seen:
            weights.close(0)
    assert len(seen.devices) >= 2, "vLLM does not make these scalars any more: this test no longer tests anything"
    assert set(seen.devices) == {None}
