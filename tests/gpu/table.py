"""The checks of a GPU, in their order: what each needs, and how long it may take. Imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: by which `--only` selects it.
        about: what it checks, in a few words.
        function: `module:function` of this folder. It is called as `function(record, device, **arguments)`.
        seconds: its time limit.
        needs: what must be present, as the names in `machine.py: NEEDS`.
        environment: variables of its process; None unsets one.
    """

    name: str
    about: str
    function: str
    seconds: float
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str | None] = field(default_factory=dict)


MEGATRON = ("megatron",)
BOTH_ENGINES = ("megatron", "vllm")

CHECKS = (
    Check("versions", "versions that can work together", "versions:versions", 30),
    Check("cudnn", "a convolution and attention through cuDNN", "versions:cudnn", 40),
    Check("ask_on_meta", "querying Megatron allocates nothing", "queries:ask_on_meta", 60, MEGATRON),
    Check("arenas", "buffers that are released between uses", "memory:arenas", 40, MEGATRON),
    Check("offload", "pinned offload, bit for bit, and its bandwidth", "memory:offload", 50, MEGATRON),
    Check("transport", "NCCL sends to itself, direct and staged", "transport:sends_to_itself", 60, MEGATRON),
    Check("executors", "a verified sync between two executors", "transport:executors", 60, MEGATRON),
    Check("local_copies", "packing and copies at the predicted rate", "copies:local_copies", 60, MEGATRON),
    Check(
        "train_dense",
        "training steps of a dense model against a CPU's",
        "training:training",
        90,
        MEGATRON,
        {"family": "dense"},
    ),
    Check(
        "train_experts",
        "training steps of a model with experts against a CPU's",
        "training:training",
        90,
        MEGATRON,
        {"family": "experts"},
    ),
    Check(
        "train_latent",
        "training steps of latent attention against a CPU's",
        "training:training",
        110,
        MEGATRON,
        {"family": "latent"},
    ),
    Check("stepping", "the optimizer in buckets equals the whole step", "optimizer:stepping", 70, MEGATRON),
    Check(
        "first_checkpoint",
        "a checkpoint before the first update",
        "optimizer:first_checkpoint",
        70,
        MEGATRON,
    ),
    Check(
        "overlap",
        "a sync during the optimizer's step, without synchronization",
        "overlap:overlap",
        70,
        MEGATRON,
        {"must_overlap": True},
        {"CUDA_DEVICE_MAX_CONNECTIONS": None},
    ),
    Check(
        "overlap_one_connection",
        "the same with one hardware queue",
        "overlap:overlap",
        70,
        MEGATRON,
        {"must_overlap": False},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    Check(
        "out_of_memory",
        "running out of GPU memory leads to a restart",
        "memory:out_of_memory",
        40,
        ("cuda", *MEGATRON),
    ),
    Check("sleep_graph", "sleep and wake-up under a CUDA graph", "sleep:sleep_graph", 50, ("cuda", "cumem")),
    Check(
        "wake_out_of_memory",
        "waking without room is recognized",
        "sleep:wake_out_of_memory",
        40,
        ("cuda", "cumem"),
    ),
    Check(
        "planned_memory",
        "the memory of a training step against the plan",
        "memory:planned_memory",
        60,
        ("cuda", *MEGATRON),
    ),
    Check("fp8", "FP8 checkpoints and FP8 tensors", "fp8:fp8", 40, MEGATRON),
    Check(
        "apex",
        "Apex's kernel for weight gradients",
        "kernels:apex_gradients",
        60,
        ("cuda", "apex", *MEGATRON),
    ),
    Check(
        "transformer_engine",
        "training steps with Transformer Engine's layers",
        "training:with_transformer_engine",
        120,
        ("cuda", "transformer_engine", *MEGATRON),
    ),
    Check(
        "train_fp8",
        "training steps in FP8, beside those in bfloat16",
        "training:in_fp8",
        120,
        ("cuda", "transformer_engine", *MEGATRON),
    ),
    Check(
        "two_ranks",
        "a verified sync over NCCL between two GPUs",
        "two_ranks:two_ranks",
        120,
        ("2 gpus", *MEGATRON),
    ),
    Check(
        "mixtral_graphs",
        "Mixtral at TP2 over ranks in descending order, with CUDA graphs",
        "engines:live_sync",
        240,
        ("2 gpus", *BOTH_ENGINES),
        {"family": "mixtral", "ranks": 2, "tp": 2},
    ),
    Check("bench", "`hybrid3d bench` moves every bit", "engines:bench", 240, BOTH_ENGINES),
    Check("plan", "`hybrid3d plan` with one visible GPU", "engines:plan", 120, BOTH_ENGINES),
    Check(
        "live_dense",
        "finalization in a running vLLM, dense",
        "engines:live_sync",
        180,
        BOTH_ENGINES,
        {"family": "dense"},
    ),
    Check(
        "live_experts",
        "finalization in a running vLLM, experts",
        "engines:live_sync",
        180,
        BOTH_ENGINES,
        {"family": "experts"},
    ),
    Check(
        "live_latent",
        "finalization in a running vLLM, latent attention",
        "engines:live_sync",
        180,
        BOTH_ENGINES,
        {"family": "latent"},
    ),
    *(
        Check(
            f"live_fp8_{family}",
            f"{what} in FP8 with block scales in a running vLLM",
            "engines:live_sync",
            180,
            BOTH_ENGINES,
            {"family": family, "quantization": "fp8"},
        )
        for family, what in (("dense", "a dense model"), ("experts", "experts"), ("latent", "latent attention"))
    ),
    Check(
        "live_kept",
        "sleep of a running vLLM that keeps its weights",
        "engines:live_sync",
        180,
        BOTH_ENGINES,
        {"family": "dense", "keeps": True},
    ),
)
