"""Rules of FP8: what a quantized rollout can be combined with and its whole blocks, and what training in FP8 needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid3d.config.refusals import TRANSFORMER_ENGINE, VLLM, Refusal, by_engine, definition, not_built

if TYPE_CHECKING:
    from hybrid3d.config.model_shape import ModelShape
    from hybrid3d.config.recipe import Recipe
    from hybrid3d.config.sections.engines import Train

BLOCK = 128
FP8_ALIGNMENT = 16  # of each dim of a matrix that is multiplied in FP8, tokens too


def check_fp8(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what cannot be combined with a quantized rollout, or with training in FP8."""
    setting = f"rollout.quantization={recipe.rollout.quantization}" if recipe.rollout is not None else ""
    if recipe.quantizes and recipe.model.dtype != "bfloat16":
        yield by_engine(
            VLLM,
            f"{setting}: vLLM computes with weights in FP8 in bfloat16, and model.dtype={recipe.model.dtype}: "
            "set model.dtype=bfloat16, or leave rollout.quantization out",
        )
    if recipe.quantizes and recipe.syncs_adapters:
        yield not_built(
            "vLLM has adapters over quantized layers; how both engines round their sums was not compared",
            f"lora.sync=adapter: with {setting} the weights below adapters would be quantized, which this version does "
            "not support: set lora.sync=merged, or leave rollout.quantization out",
        )
    if recipe.train.fp8 != "none" and recipe.model.dtype != "bfloat16":
        yield definition(
            f"train.fp8={recipe.train.fp8}: the matrices that are multiplied in FP8 are quantized from bfloat16, and "
            f"model.dtype={recipe.model.dtype}: set model.dtype=bfloat16, or leave train.fp8 out"
        )


@dataclass(frozen=True)
class Share:
    """A dim of an engine's matrices: `size` over so many shards, at least `least` on each.

    Attributes:
        is_expert: it is sharded as experts are, in training over `train.etp`.
    """

    what: str
    size: int
    least: int = 1
    is_sharded: bool = True
    is_expert: bool = False

    def on_each(self, tp: int) -> float:
        """Return the elements that a rank has of it."""
        return max(self.size / tp, self.least) if self.is_sharded else self.size

    def fits(self, tp: int) -> bool:
        """Return whether a rank has whole blocks."""
        return self.on_each(tp) % BLOCK == 0


def misaligned_dims(train: Train, model: ModelShape) -> Iterator[Refusal]:
    """Yield each dim of a rank's matrices that Transformer Engine cannot multiply in FP8."""
    needs = f"train.fp8={train.fp8} needs multiples of {FP8_ALIGNMENT}, and"
    for share in quantized_shares(model, shards_experts=True):
        axis, shards = ("etp", train.etp) if share.is_expert else ("tp", train.tp)
        size = share.on_each(shards)
        if size % FP8_ALIGNMENT:
            on_each = f", of which each rank has {size:g}," if size != share.size else ""
            message = f"{needs} {share.what}={share.size}{on_each} is not one"
            yield by_engine(TRANSFORMER_ENGINE, message, f"train.{axis}", "leave train.fp8 out")


def quantized_shares(model: ModelShape, shards_experts: bool) -> list[Share]:
    """Return the dims of the matrices that are multiplied in FP8.

    In rollouts each is of whole blocks: vLLM 0.32.0 requires it (`validate_fp8_block_shape`), or its kernels do.
    """
    heads, head_dim = model.num_attention_heads, model.head_dim
    shares = [Share("hidden_size", model.hidden_size, is_sharded=False)]
    if model.latents is None:
        shares.append(Share("num_attention_heads*head_dim", heads * head_dim))
        shares.append(Share("num_key_value_heads*head_dim", model.num_key_value_heads * head_dim, head_dim))
    else:
        mla = model.latents
        shares.append(Share("kv_lora_rank", mla.kv_rank, is_sharded=False))
        if mla.q_rank:
            shares.append(Share("q_lora_rank", mla.q_rank, is_sharded=False))
        head = "num_attention_heads*"
        shares.append(Share(f"{head}(qk_nope_head_dim+qk_rope_head_dim)", heads * (mla.nope + mla.rope)))
        shares.append(Share(f"{head}(qk_nope_head_dim+v_head_dim)", heads * (mla.nope + mla.value)))
        shares.append(Share(f"{head}v_head_dim", heads * mla.value))
    experts = model.experts
    if experts is None or not all(experts.sparse):
        shares.append(Share("intermediate_size", model.intermediate_size))
    if experts is not None:
        shares.append(Share("an expert's width", experts.width, is_sharded=shards_experts, is_expert=True))
        if experts.shared_width:
            shares.append(Share("the width of the shared experts", experts.shared_width))
    return shares
