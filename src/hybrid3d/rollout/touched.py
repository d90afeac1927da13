"""What this package touches of vLLM that `hybrid3d.engines` cannot read in its code: literals, never imported.

`hybrid3d certify --touch-points` and each start look for these names in the sources of the installed version.
"""

# By a class or module, the attributes that are used of objects without a type
TOUCHED = {
    "vllm._custom_ops": "get_graph_buffer_ipc_meta register_graph_buffers",
    "vllm.config.VllmConfig": (
        "aux_output_config compilation_config device_config load_config lora_config model_config scheduler_config"
    ),
    "vllm.config.compilation.CompilationConfig": "static_all_moe_layers static_forward_context",
    "vllm.config.device.DeviceConfig": "device",
    "vllm.config.load.LoadConfig": "load_format",
    "vllm.config.model.ModelConfig": (
        "dtype enforce_eager get_hidden_size get_vocab_size max_model_len seed try_get_generation_config"
    ),
    "vllm.device_allocator.cumem.AllocationData": "handle is_asleep",
    "vllm.device_allocator.cumem.CuMemAllocator": "get_instance pointer_to_data",
    "vllm.distributed.aux_output_connector.worker.AuxOutputWorkerConnector": "begin_step prepare_output",
    "vllm.distributed.aux_output_connector.worker.PendingAuxOutput": "enqueue_cpu_copy process_output",
    "vllm.distributed.parallel_state.GroupCoordinator": "broadcast_object",
    "vllm.logprobs.Logprob": "logprob",
    "vllm.lora.layers.base.BaseLayerWithLoRA": "reset_lora set_lora",
    "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA": (
        "base_layer lora_a_stacked lora_b_stacked reset_lora set_lora"
    ),
    "vllm.lora.worker_manager.WorkerLoRAManager": "_adapter_manager",
    "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel.FP8BlockParams": "block_scale",
    "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase": "get_kv_cache_spec",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase": "moe_kernel",
    "vllm.model_executor.layers.linear.LinearBase": "input_size params_dtype quant_method",
    "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase": (
        "apply embedding process_weights_after_loading"
    ),
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding": (
        "embedding_dim num_embeddings_per_partition quant_method"
    ),
    "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo": "restore_metadata",
    "vllm.outputs.CompletionOutput": "finish_reason logprobs routed_experts stop_reason token_ids",
    "vllm.outputs.RequestOutput": "finished outputs request_id",
    "vllm.v1.core.sched.output.SchedulerOutput": "aux_output_connector_metadata",
    "vllm.v1.core.sched.scheduler.Scheduler": "set_pause_state",
    "vllm.v1.engine.core.EngineCore": "batch_queue scheduler",
    "vllm.v1.engine.core_client.InprocClient": "engine_core shutdown",
    "vllm.v1.engine.llm_engine.LLMEngine": (
        "abort_request add_request engine_core has_unfinished_requests model_config model_executor output_processor "
        "step"
    ),
    "vllm.v1.engine.output_processor.OutputProcessor": "external_req_ids request_states",
    "vllm.v1.engine.output_processor.RequestState": "routed_experts_chunks",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": "driver_worker",
    "vllm.v1.kv_cache_interface.AttentionSpec": "block_size page_size_bytes",
    "vllm.v1.outputs.LogprobsTensors": "logprob_token_ids logprobs",
    "vllm.v1.outputs.ModelRunnerOutput": "aux_output_connector_output sampled_token_ids",
    "vllm.v1.outputs.SamplerOutput": "logprobs_tensors sampled_token_ids",
    "vllm.v1.sample.metadata.SamplingMetadata": "max_num_logprobs temperature",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner": (
        "execute_model_state get_model input_batch kv_cache_config lora_manager model query_start_loc vllm_config"
    ),
    "vllm.v1.worker.gpu.input_batch.InputBatch": "expanded_idx_mapping idx_mapping_np",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "get_model lora_manager model vllm_config",
    "vllm.v1.worker.gpu.sample.sampler.Sampler": "get_logprobs_dims sampling_states",
    "vllm.v1.worker.gpu.sample.states.SamplingStates": "temperature",
    "vllm.v1.worker.gpu_input_batch.InputBatch": "num_computed_tokens_cpu num_reqs req_ids",
    "vllm.v1.worker.gpu_worker.Worker": "model_runner",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "worker",
}

# Settings of a class, the file or folder that makes dicts of them, and the functions there that do
SETTINGS = (
    ("vllm.engine.arg_utils.EngineArgs", "rollout/engine.py", "engine_settings __init__"),
    ("vllm.engine.arg_utils.EngineArgs", "rollout/adapters.py", "adapter_settings"),
)
