"""Megatron's `GPTModel` from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from hybrid3d.config import Train
from hybrid3d.families import Config, Family, family_of, head_dim, query_groups
from hybrid3d.train.kernels import FUSE_GRADIENTS, USE_TE
from hybrid3d.train.runtime import ON_CUDA, device, on_device


def build_model(config: Config, layout: Train, dtype: torch.dtype, meta: bool = False) -> list[GPTModel]:
    """This rank's part of the model: one module per virtual pipeline stage, weights not set.

    Args:
        config: the checkpoint's `config.json`.
        layout: the train layout, whose groups are initialized.
        dtype: of the parameters.
        meta: allocate nothing; for asking only.
    """
    settings = transformer_config(config, layout, dtype)
    settings.init_model_with_meta_device = meta  # Transformer Engine's layers name their device themselves
    stages = range(layout.vpp) if layout.vpp > 1 else [None]
    with on_device(meta), torch.device("meta") if meta else device():
        return [_build_stage(config, settings, stage) for stage in stages]


def transformer_config(config: Config, layout: Train, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's settings: of the model, of its experts and latents where it has them, of the layout, of the device."""
    family = family_of(config)
    model: dict[str, Any] = dict(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        layernorm_epsilon=config["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    run: dict[str, Any] = dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        # Interleaved, two stages send to each other in both directions, which a batch of sends would mix up.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,  # the loss is a mean over the step's tokens, whatever micro batches they are in
        perform_initialization=False,  # weights come from a checkpoint
        use_cpu_initialization=not ON_CUDA,
        gradient_accumulation_fusion=FUSE_GRADIENTS,
        bias_activation_fusion=ON_CUDA,
        apply_rope_fusion=USE_TE and family.latents(config) is None,
        bias_dropout_fusion=False,
    )
    if layout.max_tokens_per_micro_batch is not None and not layout.packed:
        # Stages tell each other the shape of each micro batch, which Megatron wants no other dispatcher for.
        run |= dict(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    if layout.recompute == "full":
        run |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    settings = model | _attention(config, family) | _experts(config, family, layout) | run
    kind = TransformerConfig if family.latents(config) is None else MLATransformerConfig
    return kind(**(settings | family.transformer_config(config)))


def _attention(config: Config, family: Family) -> dict[str, Any]:
    latents = family.latents(config)
    if latents is None:
        return {"num_query_groups": query_groups(config), "kv_channels": head_dim(config)}
    return dict(
        kv_channels=latents.value,
        q_lora_rank=latents.q_rank or None,
        kv_lora_rank=latents.kv_rank,
        qk_head_dim=latents.nope,
        qk_pos_emb_head_dim=latents.rope,
        v_head_dim=latents.value,
    )


def _experts(config: Config, family: Family, layout: Train) -> dict[str, Any]:
    experts = family.experts(config)
    if experts is None:
        return {}
    return dict(
        num_moe_experts=experts.count,
        moe_router_topk=experts.per_token,
        moe_ffn_hidden_size=experts.width,
        moe_layer_freq=[int(sparse) for sparse in experts.sparse],
        moe_shared_expert_intermediate_size=experts.shared_width or None,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_router_bias_update_rate=layout.expert_bias_update_rate,
        moe_grouped_gemm=USE_TE,
        sequence_parallel=layout.tp > 1,  # Megatron trains experts under tensor parallelism in no other way
    )


def padded_vocabulary(config: Config, tp: int) -> int:
    """Megatron shards the vocabulary evenly, so it is padded to a multiple of TP, and no further."""
    return math.ceil(config["vocab_size"] / tp) * tp


def _build_stage(config: Config, settings: TransformerConfig, vp_stage: int | None) -> GPTModel:
    spec = get_gpt_decoder_block_spec(settings, USE_TE, normalization="RMSNorm", vp_stage=vp_stage)
    if not USE_TE:
        _use_torch_modules(spec)
    rope = family_of(config).rope(config)
    model = GPTModel(
        settings,
        spec,
        vocab_size=padded_vocabulary(config, settings.tensor_model_parallel_size),
        max_sequence_length=config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        share_embeddings_and_output_weights=bool(config.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=rope.theta,
        vp_stage=vp_stage,
    )
    _mark_shards(model)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._apply_expert_bias = partial(_count_tokens, module)
    if rope.llama3:  # GPTModel takes the factor alone and leaves the other constants at Llama 3.1's
        scaled = model.rotary_pos_emb._apply_scaling(model.rotary_pos_emb.inv_freq, **rope.llama3)
        model.rotary_pos_emb.inv_freq = scaled
    return model


def _mark_shards(model: GPTModel) -> None:
    """Mark sharded weights as Megatron does where it initializes them, which here a checkpoint does; and experts.

    Without the first mark a gradient norm counts the shard of TP rank 0 alone, and clips by it. Experts are reduced
    over data-parallel groups of their own; Megatron marks them at EP > 1 only, though those groups differ wherever
    ETP is not TP, and gradients of the other ranks' tokens would be lost.
    """
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if USE_TE and type(module) is TELinear:
            weight.tensor_model_parallel = False  # whole on every rank, but Transformer Engine marks every weight
        elif type(module) in dims and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dims[type(module)], 1)
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def _count_tokens(router: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Count what balances experts: 0.16.1 lays a mask of tokens along the experts (NVIDIA/Megatron-LM#6111)."""
    by_token = None if padding_mask is None else padding_mask.unsqueeze(-1)
    TopKRouter._apply_expert_bias(router, routing_map, by_token)


def _use_torch_modules(spec: TransformerBlockSubmodules) -> None:
    """Put plain PyTorch norms and attention into Megatron's layer specs, where there is no Transformer Engine."""
    spec.layer_norm = TorchRMSNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = TorchRMSNorm
        layer.submodules.pre_mlp_layernorm = TorchRMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = TorchAttention
        for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, norm, IdentityOp) is not IdentityOp:
                setattr(attention, norm, TorchRMSNorm)
        if isinstance(attention, multi_latent_attention.MLASelfAttentionSubmodules):
            attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
    multi_latent_attention.TELinear = DuplicatedLinear  # only this one may be whole on every rank


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMS norm with Megatron's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class DuplicatedLinear(torch.nn.Linear):
    """A linear that is whole on every TP rank, as Transformer Engine makes those that compress keys and queries.

    Megatron's own layer specs shard them instead, and lose the other ranks' part of the rotated keys' gradient.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, bias: bool, **unused: Any):
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(hidden), None


class TorchAttention(MegatronModule):
    """Causal attention on `scaled_dot_product_attention`.

    Megatron's local attention wants a materialized mask, cannot have fewer query groups than TP ranks, and knows no
    values of another head dim than the keys'.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """[sequence, batch, heads or groups, head_dim] each, to [sequence, batch, heads * head_dim of the values].

        Packed without [batch]. Each sequence then is a call of its own, which on CPU is twice as fast as one call on
        padded sequences, and six times as one with a mask of blocks.
        """
        if packed_seq_params is None:
            return self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        sequences = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)), strict=True)
        out = [self._attend(*(x[None] for x in qkv)).squeeze(0) for qkv in sequences]
        return torch.cat(out, dim=1).transpose(0, 1).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[batch, heads or groups, sequence, head_dim]."""
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
