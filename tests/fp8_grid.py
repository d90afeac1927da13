"""The proof grid with FP8 rollouts: vLLM gets what its loader makes of a checkpoint that vLLM's code has quantized."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from grid import Grid, MegatronModel
from hybrid3d.config import Recipe, Rollout, Train
from hybrid3d.families import is_quantized
from hybrid3d.reshard.ends import PlainSource
from hybrid3d.reshard.fp8 import BLOCK, SCALE_SUFFIX
from hybrid3d.reshard.quantized import Quantized
from quantizing import quantize_together

from vllm.utils.deep_gemm import per_block_cast_to_fp8  # isort: skip

cast_as_vllm_does = per_block_cast_to_fp8._torchdynamo_orig_callable  # compiling it takes seconds


def quantized_by_vllm(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint as DeepSeek-V3 is published: FP8 and scales, whole tensor by whole tensor."""
    found = {}
    for name, tensor in weights.items():
        if is_quantized(name):
            found[name], found[f"{name}{SCALE_SUFFIX}"] = cast_as_vllm_does(tensor, [BLOCK, BLOCK])
        else:
            found[name] = tensor
    return found


class Fp8Grid(Grid):
    """Proves cells whose rollout layouts have `quantization: fp8`."""

    dtype = torch.bfloat16
    split = 0  # blocks of the last train layout that several ranks have parts of

    def _recipe(self, family: str, train: Train, rollout: Rollout) -> Recipe:
        recipe = super()._recipe(family, train, rollout)
        return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dtype="bfloat16"))

    def _checkpoint(self, family: str) -> dict[str, torch.Tensor]:
        return quantized_by_vllm(self._weights(family)[1])

    def _trained(self, family: str, layout: Train) -> dict[int, MegatronModel]:
        """By rank: what it holds once it has quantized its shards, as the ranks of a sync do together."""
        found = super()._trained(family, layout)
        sources = {rank: PlainSource(model.tensors, model.holdings) for rank, model in found.items()}
        made = {rank: Quantized(source, is_quantized, "cpu", keep=False) for rank, source in sources.items()}
        self.split = quantize_together([*made.values()])
        return {
            rank: MegatronModel(one.holdings, found[rank].padding, {**found[rank].tensors, **one.made})
            for rank, one in made.items()
        }


def rollouts(*layouts: dict[str, Any]) -> list[Rollout]:
    return [Rollout(max_model_len=128, max_new_tokens=8, quantization="fp8", **layout) for layout in layouts]
