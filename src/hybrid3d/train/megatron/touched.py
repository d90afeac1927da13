"""What this package touches of Megatron-Core that `hybrid3d.engines` cannot read in its code: literals, never imported.

`hybrid3d certify --touch-points` and each start look for these names in the sources of the installed version.
"""

# By a class or module, the attributes that are used of objects without a type
TOUCHED = {
    "megatron.core.dist_checkpointing.mapping.ShardedTensor": (
        "key data global_shape global_offset local_shape prepend_axis_num"
    ),
    "megatron.core.dist_checkpointing.mapping.ShardedTensorFactory": "build data",
    "megatron.core.dist_checkpointing.strategies.async_utils.AsyncRequest": "async_fn async_fn_args preload_fn",
    "megatron.core.distributed.DistributedDataParallel": (
        "buffers expert_parallel_buffers bucket_groups expert_parallel_bucket_groups zero_grad_buffer no_sync"
    ),
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer": (
        "buckets grad_data param_dtype param_index_map"
    ),
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucket": (
        "params param_data grad_data numel_unpadded"
    ),
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup": (
        "buckets start_param_sync intra_distributed_optimizer_instance_group"
    ),
    "megatron.core.extensions.transformer_engine.TELinear": "finish_init sharded_state_dict",
    "megatron.core.models.common.embeddings.language_model_embedding.LanguageModelEmbedding": "word_embeddings",
    "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding": "_apply_scaling inv_freq",
    "megatron.core.models.gpt.gpt_model.GPTModel": (
        "config decoder embedding forward output_layer post_process pre_process rotary_pos_emb sharded_state_dict"
    ),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "buffers gbuf_ranges is_stub_optimizer model_float16_groups model_fp32_groups model_param_gbuf_map "
        "model_param_group_index_map optimizer shard_fp32_from_float16_groups shard_fp32_groups "
        "_copy_main_params_to_model_params _get_model_param_range_map _init_optimizer_states_with_dummy_values "
        "load_state_dict sharded_param_state_fully_reshardable sharded_state_dict"
    ),
    "megatron.core.optimizer.optimizer.ChainedOptimizer": (
        "chained_optimizers config get_grad_norm param_groups scale_loss step step_with_ready_grads zero_grad"
    ),
    "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler": "load_state_dict state_dict step",
    "megatron.core.pipeline_parallel.schedules": (
        "forward_backward_no_pipelining forward_backward_pipelining_with_interleaving "
        "forward_backward_pipelining_without_interleaving"
    ),
    "megatron.core.process_groups_config.ProcessGroupCollection": "pp",
    "megatron.core.tensor_parallel.layers.ColumnParallelLinear": "forward sequence_parallel weight",
    "megatron.core.tensor_parallel.layers.RowParallelLinear": "sequence_parallel weight",
    "megatron.core.transformer.attention.SelfAttentionSubmodules": "core_attention k_layernorm linear_qkv q_layernorm",
    "megatron.core.transformer.mlp.MLPSubmodules": "linear_fc1",
    "megatron.core.transformer.moe.moe_utils": "topk_routing_with_score_function",
    "megatron.core.transformer.moe.router.TopKRouter": "expert_bias layer_number router_replay",
    "megatron.core.transformer.moe.router_replay.RouterReplay": "get_replay_topk",
    "megatron.core.transformer.multi_latent_attention.MLASelfAttentionSubmodules": (
        "core_attention kv_layernorm linear_kv_down_proj linear_kv_up_proj linear_q_down_proj linear_q_proj "
        "linear_q_up_proj q_layernorm"
    ),
    "megatron.core.transformer.multi_token_prediction.MultiTokenPredictionBlock": "forward layers",
    "megatron.core.transformer.spec_utils.ModuleSpec": "submodules",
    "megatron.core.transformer.transformer_block.TransformerBlock": "forward",
    "megatron.core.transformer.transformer_block.TransformerBlockSubmodules": "layer_norm layer_specs",
    "megatron.core.transformer.transformer_config.TransformerConfig": (
        "context_parallel_size finalize_model_grads_func grad_scale_func init_model_with_meta_device "
        "moe_grouped_gemm moe_router_enable_expert_bias mtp_num_layers no_sync_func num_moe_experts params_dtype "
        "sequence_parallel"
    ),
    "megatron.core.transformer.transformer_layer.TransformerLayer": "forward",
    "megatron.core.transformer.transformer_layer.TransformerLayerSubmodules": (
        "input_layernorm mlp pre_mlp_layernorm self_attention sharded_state_dict_keys_map"
    ),
}

# Settings of a class, the file or folder that makes dicts of them, and the functions and constants there that do
SETTINGS = (
    (
        "megatron.core.transformer.transformer_config.MLATransformerConfig",
        "train/megatron/build.py",
        "transformer_config _attention _experts _fp8",
    ),
    (
        "megatron.core.transformer.transformer_config.MLATransformerConfig",
        "families",
        "transformer_config _transformer_config _qwen3_config _v2_config _v3_config",
    ),
    ("megatron.core.distributed.DistributedDataParallelConfig", "train/megatron/model.py", "DDP"),
)

# Classes that are used with some versions only, by what `versions.py` finds
CHOSEN = ("_PackedMtpLayer", "_UnmaskedMtpLayer")
