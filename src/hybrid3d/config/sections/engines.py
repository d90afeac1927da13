"""Where a model is trained, where it generates, and how it comes from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid3d.config.schema import (
    FilePath,
    Fraction,
    Gibibytes,
    Layers,
    Mebibytes,
    Positive,
    Ranks,
    Sequences,
    Share,
    Temperature,
    Text,
    Times,
    Tokens,
    Verified,
)

OFFLOADS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Hugging Face checkpoint, and how it is computed.

    Attributes:
        path: the checkpoint's folder.
        dtype: in which both engines compute.
    """

    path: FilePath
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class Train:
    """The train layout, and how a step goes through it. There are `tp` x `pp` x `cp` x `dp` ranks.

    Attributes:
        tp: size of tensor parallelism.
        pp: of pipeline parallelism, its stages.
        cp: of context parallelism.
        dp: of data parallelism.
        vpp: virtual stages of each pipeline stage.
        ep: expert parallelism of routed experts. It regroups ranks and adds none, as does `etp`.
        etp: tensor parallelism of routed experts.
        first_stage_layers: layers of the first stage; `null`: as many as the others have.
        last_stage_layers: layers of the last, alike.
        expert_bias_update_rate: by which a step moves the router's bias towards experts that had too few tokens
            (arXiv 2412.19437, section 2.1.2); 0 leaves it alone.
        micro_batch_size: sequences of a micro batch.
        packed: sequences of a micro batch lie one behind the other, without padding.
        max_tokens_per_micro_batch: tokens of a micro batch, padding included; in place of `micro_batch_size`.
        recompute: under `full` a layer keeps its input only, and goes forward once more before it goes backward.
        offload_parameters, offload_optimizer: the host has them while vLLM generates.
        offload_gradients: free gradients while vLLM generates.
    """

    tp: Ranks = 1
    pp: Ranks = 1
    vpp: Ranks = 1
    ep: Ranks = 1
    etp: Ranks = 1
    cp: Ranks = 1
    dp: Ranks = 1
    first_stage_layers: Layers | None = None
    last_stage_layers: Layers | None = None
    expert_bias_update_rate: Share = 0.0
    micro_batch_size: Sequences = 8
    packed: bool = False
    max_tokens_per_micro_batch: Tokens | None = None
    recompute: Literal["none", "full"] = "none"
    offload_parameters: bool = False
    offload_gradients: bool = False
    offload_optimizer: bool = False

    @property
    def offloads(self) -> tuple[str, ...]:
        """What is offloaded, of `OFFLOADS`."""
        return tuple(kind for kind in OFFLOADS if getattr(self, f"offload_{kind}"))


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The rollout layout, on the ranks that train: as many engines as they make.

    Attributes:
        tp: size of an engine's tensor parallelism.
        dp: engines that share one set of experts under `expert_parallel`; without it each engine has its own.
        expert_parallel: experts are dealt out whole over the `dp` x `tp` ranks.
        max_model_len: tokens of a prompt and its answer.
        max_new_tokens: tokens of an answer, those that an environment writes included.
        temperature: of sampling, and of training's log-probabilities. Held-out answers are greedy.
        placement: shards are dealt out so that they overlap most with what a rank holds, or in the order of ranks.
        gpu_memory_utilization: of a GPU's memory, that vLLM may take.
        kv_cache_gib: of an engine's KV cache on a CPU.
        sleep: vLLM gives a GPU's memory to training between its turns.
        environment: what replies to the policy within an answer: `calculator`, or a function of one's own as
            `module:function`; `null`: nothing.
        max_turns: how often it replies in an answer, at most.
    """

    tp: Ranks = 1
    dp: Ranks = 1
    expert_parallel: bool = False
    max_model_len: Tokens
    max_new_tokens: Tokens
    temperature: Temperature = 1.0
    placement: Literal["overlap", "consecutive"] = "overlap"
    gpu_memory_utilization: Fraction = 0.5
    kv_cache_gib: Gibibytes = 1.0
    sleep: bool = True
    environment: Text | None = None
    max_turns: Times = 8


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How trained weights come to the rollout engine.

    Attributes:
        bucket_mib: MiB of a staging buffer.
        verify: which syncs are verified by checksums at both ends: `always`, `every-N` from the first on, or `never`.
        overlap: a sync begins with the first weights that are updated, while the rest still is.
        share_storage: vLLM's tensors lie in Megatron's memory, where layout and dtype are the same.
    """

    bucket_mib: Mebibytes = 64.0
    verify: Verified = "never"
    overlap: bool = True
    share_storage: bool = False

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mib * 2**20)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a run runs. GB are 10^9 bytes; rates of links are those of one GPU in each direction.

    Attributes:
        gpus_per_node: ranks of a node: of sources those on a rank's own node are near.
        kind: a machine that `hybrid3d plan` knows.
        memory_gb: of a GPU, where it is not that machine's; so are the next three.
        copies_gb_per_s: memory that a GPU reads and writes.
        nvlink_gb_per_s: within a node.
        network_gb_per_s: between nodes.
    """

    gpus_per_node: Ranks = 8
    kind: Literal["a100-8x200g", "h100-8x400g", "h200-8x400g"] = "h100-8x400g"
    memory_gb: Positive | None = None
    copies_gb_per_s: Positive | None = None
    nvlink_gb_per_s: Positive | None = None
    network_gb_per_s: Positive | None = None
