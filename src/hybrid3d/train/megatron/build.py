"""Megatron's `GPTModel` from a Hugging Face `config.json`."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from hybrid3d.config import RecipeError, Train
from hybrid3d.families import Config, Family, family_of, head_dim, query_groups
from hybrid3d.patches import apply
from hybrid3d.reshard.move.device import ON_CUDA, device
from hybrid3d.train.megatron import patches
from hybrid3d.train.megatron.cpu import use_torch_layers
from hybrid3d.train.megatron.mtp import MTP_LAYER
from hybrid3d.train.megatron.runtime import FUSE_GRADIENTS, USE_TE, in_use, on_device
from hybrid3d.train.megatron.versions import MTP_DECODER_LAYER, set_in_megatron, submodules_of

apply(patches.MODEL)


def build_model(
    config: Config,
    layout: Train,
    dtype: torch.dtype,
    meta: bool = False,
    adapted: bool = False,
    with_mtp: bool = False,
) -> list[GPTModel]:
    """Build this rank's part of the model: one module per virtual pipeline stage, weights not set.

    Args:
        layout: the train layout, whose groups are initialized.
        meta: allocate nothing; for queries, of which FP8 changes no answer.
        adapted: make each linear layer a module of its own, without a fused norm or grouped experts, as adapters need.
        with_mtp: build the layers for multi-token prediction too, as `mtp` of the last stage.
    """
    if not meta and layout.fp8 != "none" and not USE_TE:
        raise RecipeError(
            "training", [f"train.fp8={layout.fp8} needs Transformer Engine on a GPU; there are {in_use()}"]
        )
    settings = transformer_config(config, replace(layout, fp8="none") if meta else layout, dtype)
    if adapted:
        set_in_megatron(settings, moe_grouped_gemm=False)
    # Transformer Engine's layers name their device themselves
    set_in_megatron(settings, init_model_with_meta_device=meta)
    if meta:  # the weights are the same, and its attention makes a CUDA stream otherwise
        set_in_megatron(settings, context_parallel_size=1)
    stages = range(layout.vpp) if layout.vpp > 1 else [None]
    with on_device(meta), torch.device("meta") if meta else device():
        return [_build_stage(config, settings, stage, adapted, with_mtp) for stage in stages]


def transformer_config(config: Config, layout: Train, dtype: torch.dtype) -> TransformerConfig:
    """Return Megatron's settings for the model, with its experts and latent attention, the layout and the device."""
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
        # Interleaved, two stages send to each other in both directions, which batched sends would confuse.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        context_parallel_size=layout.cp,
        # Of Transformer Engine's attention: in a ring, the one way that packed sequences and any number of heads allow.
        cp_comm_type="p2p",
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
        # Stages exchange the shape of each micro batch, which Megatron supports with this dispatcher only.
        run |= dict(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    if layout.recompute == "full":
        run |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if layout.fp8 != "none":
        run |= _fp8(layout)
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
        sequence_parallel=layout.tp > 1,  # Megatron requires it for experts under tensor parallelism
    )


def _fp8(layout: Train) -> dict[str, Any]:
    return dict(
        fp8="e4m3" if layout.fp8 == "blockwise" else "hybrid",
        fp8_recipe=layout.fp8,
        # Else quantized weights stay in memory, also while vLLM generates, and those of before an update could be used
        disable_parameter_transpose_cache=True,
    )


def _build_stage(
    config: Config, settings: TransformerConfig, vp_stage: int | None, adapted: bool, with_mtp: bool
) -> GPTModel:
    spec = get_gpt_decoder_block_spec(settings, USE_TE, normalization="RMSNorm", vp_stage=vp_stage)
    if not USE_TE:
        use_torch_layers(spec)
    elif adapted:
        _separate_norms(spec)
    if isinstance(settings, MLATransformerConfig) and settings.q_lora_rank is None:
        for layer in spec.layer_specs:  # since 0.19 a norm of queries that are not compressed is refused
            set_in_megatron(layer.submodules.self_attention.submodules, q_layernorm=IdentityOp)
    rope, tp = family_of(config).rope(config), settings.tensor_model_parallel_size
    model = GPTModel(
        settings,
        spec,
        vocab_size=math.ceil(int(config["vocab_size"]) / tp) * tp,  # which Megatron shards evenly
        max_sequence_length=config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        share_embeddings_and_output_weights=bool(config.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=rope.theta,
        rotary_percent=rope.fraction,
        vp_stage=vp_stage,
    )
    if with_mtp and model.post_process:
        model.mtp = _mtp_block(settings, spec, len(family_of(config).mtp_layers(config)), vp_stage)
    _mark_shards(model)
    if rope.llama3:  # GPTModel takes the factor only, and has Llama 3.1's other constants
        scaled = model.rotary_pos_emb._apply_scaling(model.rotary_pos_emb.inv_freq, **rope.llama3)
        set_in_megatron(model.rotary_pos_emb, inv_freq=scaled)
    return model


def _mtp_block(
    settings: TransformerConfig, spec: TransformerBlockSubmodules, layers: int, vp_stage: int | None
) -> MultiTokenPredictionBlock:
    """Return Megatron's layers for multi-token prediction, each around a decoder layer like the model's last one.

    `GPTModel` would build them too, but calls them in every pass, and adds their loss to that of labels.
    """
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=spec.layer_norm,
        hnorm=spec.layer_norm,
        eh_proj=TEColumnParallelLinear if USE_TE else ColumnParallelLinear,
        layer_norm=spec.layer_norm,
        **{MTP_DECODER_LAYER: spec.layer_specs[-1]},
    )
    numbered = copy.copy(settings)
    set_in_megatron(numbered, mtp_num_layers=layers)  # since 0.17 layers are empty where this does not number them
    specs = MultiTokenPredictionBlockSubmodules([ModuleSpec(module=MTP_LAYER, submodules=layer)] * layers)
    groups = ProcessGroupCollection.use_mpu_process_groups()  # since 0.17 experts need all of them
    block = MultiTokenPredictionBlock(numbered, specs, vp_stage, groups)
    for module in block.modules():
        if hasattr(module, "finish_init"):  # of Transformer Engine's layers, which `GPTModel` calls for its own
            module.finish_init(None)
    return block


def _separate_norms(spec: TransformerBlockSubmodules) -> None:
    """Replace Transformer Engine's norms that are one layer with the linear layer after them by two layers.

    Their weights keep their names in a sharded state dict.
    """
    fused = TELayerNormColumnParallelLinear
    for layer in spec.layer_specs:
        parts = layer.submodules
        attention, mlp = parts.self_attention.submodules, submodules_of(parts.mlp)
        names = {}
        if getattr(attention, "linear_qkv", None) is fused:
            attention.linear_qkv = TEColumnParallelLinear
            set_in_megatron(parts, input_layernorm=TENorm)
            names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
        for linear, norm in (("linear_q_up_proj", "q_layernorm"), ("linear_kv_up_proj", "kv_layernorm")):
            if getattr(attention, linear, None) is fused:
                set_in_megatron(attention, **{linear: TEColumnParallelLinear, norm: TENorm})
                names[f"self_attention.{norm}."] = f"self_attention.{linear}.layer_norm_"
        if mlp is not None and getattr(mlp, "linear_fc1", None) is fused:
            mlp.linear_fc1 = TEColumnParallelLinear
            set_in_megatron(parts, pre_mlp_layernorm=TENorm)
            names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        parts.sharded_state_dict_keys_map = {**(parts.sharded_state_dict_keys_map or {}), **names}


def _mark_shards(model: GPTModel) -> None:
    """Mark sharded weights and experts as Megatron does where it initializes them, which a checkpoint does here.

    Without the first mark a gradient norm counts the shard of TP rank 0 alone, and clips by it. Experts are reduced
    over data-parallel groups of their own; Megatron marks them at EP > 1 only, though those groups differ wherever
    ETP is not TP, and gradients of the other ranks' tokens would be lost.
    """
    dims = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if USE_TE and type(module) is TELinear:
            weight.tensor_model_parallel = False  # whole on every rank, but Transformer Engine marks every weight
        elif type(module) in dims and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dims[type(module)], 1)
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False
