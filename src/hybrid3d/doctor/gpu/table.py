"""The checks of `hybrid3d doctor --gpu`, in their order: what each needs, and how long it may take."""

from __future__ import annotations

from hybrid3d.doctor.gpu.check import Check

CHECKS = "hybrid3d.doctor.gpu.checks."
MEGATRON = ("megatron",)
BOTH_ENGINES = ("megatron", "vllm")

GPU_CHECKS = (
    Check("versions", "versions that can work together", CHECKS + "versions:versions", 30),
    Check("cudnn", "a convolution and attention through cuDNN", CHECKS + "versions:cudnn", 40),
    Check("ask_on_meta", "querying Megatron allocates nothing", CHECKS + "queries:ask_on_meta", 60, MEGATRON),
    Check("arenas", "buffers that are released between uses", CHECKS + "memory:arenas", 40, MEGATRON),
    Check("offload", "pinned offload, bit for bit, and its bandwidth", CHECKS + "memory:offload", 50, MEGATRON),
    Check("transport", "NCCL sends to itself, direct and staged", CHECKS + "transport:sends_to_itself", 60, MEGATRON),
    Check("executors", "a verified sync between two executors", CHECKS + "transport:executors", 60, MEGATRON),
    Check("local_copies", "packing and copies at the predicted rate", CHECKS + "copies:local_copies", 60, MEGATRON),
    Check(
        "train_dense",
        "training steps of a dense model against a CPU's",
        CHECKS + "training:training",
        90,
        MEGATRON,
        {"family": "dense"},
    ),
    Check(
        "train_experts",
        "training steps of a model with experts against a CPU's",
        CHECKS + "training:training",
        90,
        MEGATRON,
        {"family": "experts"},
    ),
    Check(
        "train_latent",
        "training steps of latent attention against a CPU's",
        CHECKS + "training:training",
        110,
        MEGATRON,
        {"family": "latent"},
    ),
    Check("stepping", "the optimizer in buckets equals the whole step", CHECKS + "optimizer:stepping", 70, MEGATRON),
    Check(
        "first_checkpoint",
        "a checkpoint before the first update",
        CHECKS + "optimizer:first_checkpoint",
        70,
        MEGATRON,
    ),
    Check(
        "overlap",
        "a sync during the optimizer's step, without synchronization",
        CHECKS + "overlap:overlap",
        70,
        MEGATRON,
        {"must_overlap": True},
        {"CUDA_DEVICE_MAX_CONNECTIONS": None},
    ),
    Check(
        "overlap_one_connection",
        "the same with one hardware queue",
        CHECKS + "overlap:overlap",
        70,
        MEGATRON,
        {"must_overlap": False},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    Check(
        "out_of_memory",
        "running out of GPU memory leads to a restart",
        CHECKS + "memory:out_of_memory",
        40,
        ("cuda", *MEGATRON),
    ),
    Check("sleep_graph", "sleep and wake-up under a CUDA graph", CHECKS + "sleep:sleep_graph", 50, ("cuda", "cumem")),
    Check(
        "wake_out_of_memory",
        "waking without room is recognized",
        CHECKS + "sleep:wake_out_of_memory",
        40,
        ("cuda", "cumem"),
    ),
    Check(
        "planned_memory",
        "the memory of a training step against the plan",
        CHECKS + "memory:planned_memory",
        60,
        ("cuda", *MEGATRON),
    ),
    Check("fp8", "FP8 checkpoints and FP8 tensors", CHECKS + "fp8:fp8", 40, MEGATRON),
    Check(
        "apex",
        "Apex's kernel for weight gradients",
        CHECKS + "kernels:apex_gradients",
        60,
        ("cuda", "apex", *MEGATRON),
    ),
    Check(
        "transformer_engine",
        "training steps with Transformer Engine's layers",
        CHECKS + "training:with_transformer_engine",
        120,
        ("cuda", "transformer_engine", *MEGATRON),
    ),
    Check(
        "train_fp8",
        "training steps in FP8, beside those in bfloat16",
        CHECKS + "training:in_fp8",
        120,
        ("cuda", "transformer_engine", *MEGATRON),
    ),
    Check(
        "two_ranks",
        "a verified sync over NCCL between two GPUs",
        CHECKS + "two_ranks:two_ranks",
        120,
        ("2 gpus", *MEGATRON),
    ),
    Check(
        "mixtral_graphs",
        "Mixtral at TP2 over ranks in descending order, with CUDA graphs",
        CHECKS + "engines:live_sync",
        240,
        ("2 gpus", *BOTH_ENGINES),
        {"family": "mixtral", "ranks": 2, "tp": 2},
    ),
    Check("bench", "`hybrid3d bench` moves every bit", CHECKS + "engines:bench", 240, BOTH_ENGINES),
    Check("plan", "`hybrid3d plan` with one visible GPU", CHECKS + "engines:plan", 120, BOTH_ENGINES),
    Check(
        "live_dense",
        "finalization in a running vLLM, dense",
        CHECKS + "engines:live_sync",
        180,
        BOTH_ENGINES,
        {"family": "dense"},
    ),
    Check(
        "live_experts",
        "finalization in a running vLLM, experts",
        CHECKS + "engines:live_sync",
        180,
        BOTH_ENGINES,
        {"family": "experts"},
    ),
    Check(
        "live_latent",
        "finalization in a running vLLM, latent attention",
        CHECKS + "engines:live_sync",
        180,
        BOTH_ENGINES,
        {"family": "latent"},
    ),
    *(
        Check(
            f"live_fp8_{family}",
            f"{what} in FP8 with block scales in a running vLLM",
            CHECKS + "engines:live_sync",
            180,
            BOTH_ENGINES,
            {"family": family, "quantization": "fp8"},
        )
        for family, what in (("dense", "a dense model"), ("experts", "experts"), ("latent", "latent attention"))
    ),
    Check(
        "live_kept",
        "sleep of a running vLLM that keeps its weights",
        CHECKS + "engines:live_sync",
        180,
        BOTH_ENGINES,
        {"family": "dense", "keeps": True},
    ),
)
