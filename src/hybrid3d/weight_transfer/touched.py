"""What this package touches of vLLM that `hybrid3d.engines` cannot read in its code: literals, never imported.

A training run touches none of it, but vLLM's server does once it loads the backend.
"""

# By a class or module, the attributes that are used of objects without a type
TOUCHED = {
    "vllm.config.VllmConfig": "parallel_config quant_config weight_transfer_config",
    "vllm.config.model.ModelConfig": "quantization",
    "vllm.config.parallel.ParallelConfig": "data_parallel_index data_parallel_size rank world_size",
    "vllm.config.weight_transfer.WeightTransferConfig": "backend",
    "vllm.v1.core.sched.scheduler.Scheduler": "pause_state set_pause_state",
    "vllm.v1.engine.core.EngineCore": "_reset_caches get_weight_version scheduler set_weight_version vllm_config",
    "vllm.v1.worker.gpu_worker.Worker": "_weight_update_active weight_transfer_engine",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "worker",
}

# The engine's names without which the code works too
OPTIONAL = ("vllm.distributed.weight_transfer.base.Shard",)
