"""Recipe sections about the engines: the model, its train and rollout layouts, the sync and the hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid3d.config import schema
from hybrid3d.config.refusals import of_answers, of_own, of_recipe, of_sampling, only_if

OFFLOADS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The Hugging Face checkpoint that is trained.

    Attributes:
        path: Folder of the checkpoint.
        dtype: Dtype in which both engines compute.
    """

    path: schema.FilePath
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class Train:
    """The train layout and Megatron's settings. The number of ranks is `tp` x `pp` x `cp` x `dp`.

    Attributes:
        tp: Tensor parallel size.
        pp: Pipeline parallel size: the number of pipeline stages.
        cp: Context parallel size: the number of ranks that share each sequence. `rollout.max_model_len` must be a
            multiple of 2 x `cp`.
        dp: Data parallel size.
        vpp: Virtual pipeline stages per pipeline stage (interleaved schedule).
        ep: Expert parallel size of the routed experts. It regroups the existing ranks and adds none.
        etp: Tensor parallel size of the routed experts. It regroups the existing ranks and adds none.
        first_stage_layers: Layers of the first pipeline stage; `null`: as many as the other stages.
        last_stage_layers: Layers of the last pipeline stage; `null`: as many as the other stages.
        expert_bias_update_rate: Step by which the router's bias moves towards experts that received too few tokens
            (arXiv 2412.19437, section 2.1.2); 0 leaves the bias unchanged.
        micro_batch_size: Sequences per micro batch.
        packed: Concatenate the sequences of a micro batch without padding.
        max_tokens_per_micro_batch: Maximum tokens per micro batch, padding included; replaces `micro_batch_size`.
        recompute: With `full`, a layer keeps only its input and is recomputed in the backward pass.
        fp8: Multiply matrices in FP8 on GPUs with Transformer Engine: `tensorwise` has a scale for each tensor, and
            gradients in E5M2; `blockwise` one for each block, all in E4M3 (DeepSeek-V3, arXiv 2412.19437). Weights,
            gradients that are added up, attention, routers and the head stay in bfloat16.
        router_replay: Where routers of experts take their choices from when the policy is trained: `none`: from the
            weights that are trained; `old`: from the pass that computes the old log-probabilities (arXiv 2507.18071,
            section 5.3); `rollout`: from vLLM, also in that pass (arXiv 2510.11370).
        mtp_loss_coef: Coefficient of the loss of the layer for multi-token prediction of DeepSeek-V3 and GLM-4.5, which
            is trained beside the policy and does not change it (`docs/algorithms.md`). 0: the layer is not built, and
            an export copies it.
        offload_parameters: Offload the parameters to host memory while vLLM generates.
        offload_optimizer: Offload the optimizer state to host memory while vLLM generates.
        offload_gradients: Free gradients while vLLM generates.
    """

    tp: schema.Ranks = 1
    pp: schema.Ranks = 1
    vpp: schema.Ranks = 1
    ep: schema.Ranks = 1
    etp: schema.Ranks = 1
    cp: schema.Ranks = 1
    dp: schema.Ranks = 1
    first_stage_layers: schema.Layers | None = None
    last_stage_layers: schema.Layers | None = None
    expert_bias_update_rate: schema.ClosedFraction = 0.0
    micro_batch_size: schema.Sequences = 8
    packed: bool = False
    max_tokens_per_micro_batch: schema.Tokens | None = None
    recompute: Literal["none", "full"] = "none"
    fp8: Literal["none", "tensorwise", "blockwise"] = "none"
    router_replay: Literal["none", "old", "rollout"] = only_if("none", of_sampling("has no earlier choices"))
    mtp_loss_coef: schema.Coefficient = 0.0
    offload_parameters: bool = False
    offload_gradients: bool = False
    offload_optimizer: bool = False

    @property
    def offloads(self) -> tuple[str, ...]:
        """Return the kinds of `OFFLOADS` that are enabled."""
        return tuple(kind for kind in OFFLOADS if getattr(self, f"offload_{kind}"))


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Programs of your own that make the answers. They call an OpenAI-compatible endpoint (`docs/agents.md`).

    Attributes:
        command: The program, which each vLLM engine's first rank starts; `null`: start agents yourself.
        host: Address that ranks listen at. One that other machines can reach requires a key in the environment variable
            `HYBRID3D_API_KEY`.
        port: Port of rank 0; a rank r that leads a vLLM engine listens at this plus r.
        timeout_seconds: Time without a call after which a session ends with the default reward.
    """

    command: schema.Text | None = None
    host: schema.Text = "127.0.0.1"
    port: schema.Port = 8100
    timeout_seconds: schema.Seconds = 60.0


TRAINS_ON_SAMPLES = of_sampling("does not sample answers to train on")
SHARES_RANKS = of_recipe(lambda recipe: not recipe.is_split, "with roles.generation.ranks no rank has both engines")
HAS_ENVIRONMENT = of_own(
    lambda rollout: rollout.environment is not None, "without rollout.environment an answer has one turn"
)
SLEEPS = of_own(lambda rollout: rollout.sleep, "vLLM keeps its weights as rollout.sleep is false")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The rollout layout and vLLM's settings. The training ranks form as many vLLM engines as fit on them.

    Attributes:
        tp: Tensor parallel size of a vLLM engine.
        dp: With `expert_parallel`, the number of data parallel engines that share one set of experts; otherwise 1,
            because each engine holds all experts.
        expert_parallel: Distribute whole experts over the `dp` x `tp` ranks.
        max_model_len: Maximum tokens of a prompt and its answer together.
        max_new_tokens: Maximum tokens of an answer, including those that an environment writes into it.
        temperature: Temperature of sampling and of the trainer's log-probabilities.
        top_p: Sample from the smallest set of most likely tokens with at least this probability together; 1: all.
        top_k: Sample from so many most likely tokens; 0 or -1: all.
        min_p: Sample from the tokens with at least this fraction of the most likely token's probability; 0: all.
            `top_p`, `top_k` and `min_p` truncate the distribution that is sampled, not the one that is trained
            (`docs/algorithms.md`), and do not apply to held-out answers.
        stop: Texts that end an answer, held-out ones too; an answer ends with the token in which one is complete. A
            special token may be one by itself; texts that the tokenizer never writes are refused.
        quantization: With `fp8`, vLLM has the weights of linear layers and experts in FP8 (e4m3), with one scale for
            each block of 128 x 128 weights: each rank quantizes the weights that it holds, and half the bytes are sent.
            `null`: vLLM generates with `model.dtype`.
        gpu_memory_utilization: Fraction of a GPU's memory that vLLM may use.
        kv_cache_gib: Size in GiB of a vLLM engine's KV cache on CPU.
        sleep: Free vLLM's GPU memory while Megatron trains.
        keep_weights: While vLLM sleeps, keep its weights in GPU memory, which `sync.delta` needs: otherwise sleeping
            frees them, and each sync sends all.
        pack_weights: On CPU, let vLLM pack the weights of linear layers and experts for its kernels. Without, it keeps
            them as they are loaded and uses torch's: a sync writes them in place, and `sync.delta` applies to them.
        environment: What replies to the policy within an answer: `calculator`, or your own function as
            `module:function`; `null`: nothing, so that an answer has a single turn.
        max_turns: Maximum number of environment replies per answer.
        agents: A section of its own, below; `null`: vLLM answers the prompts of the data.
    """

    tp: schema.Ranks = 1
    dp: schema.Ranks = 1
    expert_parallel: bool = False
    max_model_len: schema.Tokens
    max_new_tokens: schema.Tokens
    temperature: schema.Temperature = 1.0
    top_p: schema.PositiveFraction = only_if(1.0, TRAINS_ON_SAMPLES)
    top_k: schema.TopK = only_if(0, TRAINS_ON_SAMPLES)
    min_p: schema.ClosedFraction = only_if(0.0, TRAINS_ON_SAMPLES)
    stop: tuple[schema.StopText, ...] = ()
    quantization: Literal["fp8"] | None = None
    gpu_memory_utilization: schema.OpenFraction = 0.5
    kv_cache_gib: schema.Gibibytes = 1.0
    sleep: bool = only_if(True, SHARES_RANKS)
    keep_weights: bool = only_if(False, SLEEPS)
    pack_weights: bool = True
    environment: schema.Text | None = None
    max_turns: schema.Repeats = only_if(8, HAS_ENVIRONMENT)
    agents: Agents | None = None

    @property
    def truncations(self) -> dict[str, float]:
        """Return the settings by which samples are of a part of the tokens only."""
        off = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
        return {key: getattr(self, key) for key, values in off.items() if getattr(self, key) not in values}


GENERATES_APART = of_own(
    lambda role: role.ranks is not None, "without roles.generation.ranks the ranks that train also generate"
)


@dataclass(frozen=True, kw_only=True)
class GenerationRole:
    """Where vLLM generates.

    Attributes:
        ranks: Number of ranks that only generate, in addition to those that train; `null`: the ranks that train also
            generate, in turns.
        max_restarts: With `ranks`, how many times each of them is started again when it is lost; training goes on
            meanwhile with the others.
        active_ranks: With `ranks`, how many of them generate; the others wait without a model, until this changes
            during the run. `null`: all.
        ranks_at_start: With `ranks`, how many of them the run waits for before it begins; the others join when they are
            started, on Ray as soon as a node has room for them. `null`: all.
    """

    ranks: schema.Ranks | None = None
    active_ranks: schema.Ranks | None = only_if(None, GENERATES_APART)
    ranks_at_start: schema.Ranks | None = only_if(None, GENERATES_APART)
    max_restarts: schema.RepeatsOrZero = only_if(10, GENERATES_APART)


SCORES_APART = of_own(lambda role: role.ranks is not None, "without roles.reward.ranks no rank only computes rewards")
HAS_REWARD_MODEL = of_recipe(
    lambda recipe: recipe.reward.model is not None, "without reward.model there is no model to distribute"
)


@dataclass(frozen=True, kw_only=True)
class RewardRole:
    """Where rewards are computed.

    Attributes:
        ranks: Number of ranks that only compute rewards, in addition to all others; `null`: the ranks that generate
            call `reward.name`, and the ranks that train have `reward.model`.
        tp: With `ranks`, the tensor parallel size of `reward.model`.
        pp: With `ranks`, the pipeline parallel size of `reward.model`; `ranks` is a multiple of `tp` x `pp`.
        ep: With `ranks`, the expert parallel size of `reward.model`. It regroups the `tp` ranks and adds none.
        max_restarts: With `ranks`, how many times each of them is started again when it is lost; the others compute
            its rewards.
    """

    ranks: schema.Ranks | None = None
    tp: schema.Ranks = only_if(1, SCORES_APART, HAS_REWARD_MODEL)
    pp: schema.Ranks = only_if(1, SCORES_APART, HAS_REWARD_MODEL)
    ep: schema.Ranks = only_if(1, SCORES_APART, HAS_REWARD_MODEL)
    max_restarts: schema.RepeatsOrZero = only_if(10, SCORES_APART)


@dataclass(frozen=True, kw_only=True)
class RoleRanks:
    """Which roles have ranks of their own. Ranks that train come first, then those that generate, then the others."""

    generation: GenerationRole = GenerationRole()
    reward: RewardRole = RewardRole()


GENERATES = of_sampling("does not generate")
IN_PARTS = of_own(lambda ahead: ahead.partial is not None, "without async.partial a step waits for all of its answers")


@dataclass(frozen=True, kw_only=True)
class Async:
    """How far generation runs ahead of training: on ranks of its own (`roles.generation.ranks`), or with `partial`.

    Attributes:
        max_staleness: By how many steps the weights that generated a token may be older than those that are trained
            with it; with 0, each of both waits for the other.
        partial: A step trains the first answers that are complete. With `continue`, the others keep their tokens and go
            on with the next weights, which compute their KV cache again; with `continue_with_cache`, they keep their
            tokens and the KV cache of the older weights; with `restart`, they begin again. `null`: a step waits for all
            of its answers.
        batches_in_flight: With `partial`, how many batches of `algorithm.prompts_per_step` prompts are answered at a
            time.
        late_answers: With `partial`, what is done with answers that would exceed `max_staleness` in the next step: the
            step waits for them, or their prompts are dropped, which favours short answers.
    """

    max_staleness: schema.Staleness = only_if(0, GENERATES)
    partial: Literal["continue", "continue_with_cache", "restart"] | None = only_if(None, GENERATES)
    batches_in_flight: schema.BatchesInFlight = only_if(2, IN_PARTS)
    late_answers: Literal["wait", "drop"] = only_if("wait", IN_PARTS)

    @property
    def keeps_cache(self) -> bool:
        """Return whether answers go on with the KV cache that older weights have computed."""
        return self.partial == "continue_with_cache"


SYNCS = of_answers("never syncs")
GENERATES_AFTERWARDS = of_recipe(
    lambda recipe: not (recipe.is_split and recipe.async_.max_staleness > 0),
    "with async.max_staleness samples are generated during the update",
)


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How the trained weights are transferred to vLLM.

    Attributes:
        bucket_mib: Size in MiB of a staging buffer.
        verify: Which syncs are verified by checksums on both sides: `always`, every N-th sync from the first one on
            (`every-N`), or `never`.
        overlap: Start the sync as soon as the first weights are updated, overlapping it with the rest of the
            optimizer step.
        delta: With `always`, a sync sends only the elements that changed since the last one, where that is known: of
            bfloat16 weights that vLLM keeps as they are loaded. With `auto`, it does so if it is expected to take less
            time, with finding, encoding and writing these elements, than sending all; the event `sync_choice` says what
            was chosen and why. With `never`, every sync sends all elements. Of sums with adapters
            (`lora.sync=merged`) it needs `always`, and a copy of the sums that were sent.
        shared_memory: With `auto`, ranks of one node on CPU read messages in the sender's memory, where the operating
            system allows it. With `never`, all messages are sent.
        transport: What sends messages: with `collective`, NCCL on GPUs and gloo on CPUs; with `nixl`, NVIDIA's library
            of that name, by which a rank writes them into the memory of another one. It must be installed:
            `pip install --no-deps -r requirements/nixl.txt`.
    """

    bucket_mib: schema.Mebibytes = only_if(64.0, SYNCS)
    verify: schema.Interval = only_if("never", SYNCS)
    overlap: bool = only_if(True, SYNCS, GENERATES_AFTERWARDS)
    delta: Literal["auto", "always", "never"] = only_if("auto", SYNCS)
    shared_memory: Literal["auto", "never"] = only_if("auto", SYNCS)
    transport: Literal["collective", "nixl"] = only_if("collective", SYNCS)

    @property
    def bucket_bytes(self) -> int:
        """Return the size of a staging buffer in bytes."""
        return int(self.bucket_mib * 2**20)


PLACES = of_recipe(lambda recipe: not (recipe.is_split or recipe.rollout is None), "no rank has both engines")


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Controls for experiments and tests, which no run needs.

    Attributes:
        placement: With `overlap`, vLLM shards go to the ranks that already hold most of their weights; with
            `consecutive`, they are assigned in rank order.
        shuffle_rewards: Permute rewards at random within a step: training must not learn from them.
    """

    placement: Literal["overlap", "consecutive"] = only_if("overlap", PLACES)
    shuffle_rewards: bool = only_if(False, of_sampling("has no rewards"))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware of a run. GB are 10^9 bytes; link rates are per GPU and direction.

    Attributes:
        gpus_per_node: Ranks per node. A sync prefers to receive from ranks of the same node, and what several of them
            lack reaches the node once.
        kind: A GPU and its links, whose published numbers `hybrid3d plan` knows (`docs/planning.md`). Longer names say
            how many of them a node has, and the rate of the network adapter of each.
        memory_gb: Memory of a GPU; `null`: that of `kind`.
        copies_gb_per_s: Memory bandwidth of a GPU for copies, reads plus writes; `null`: that of `kind`.
        nvlink_gb_per_s: Bandwidth between GPUs of one node; `null`: that of `kind`.
        network_gb_per_s: Bandwidth between nodes; `null`: that of `kind`.
    """

    gpus_per_node: schema.Ranks = 8
    kind: Literal["a100-8x200g", "h100-8x400g", "h200-8x400g", "a100", "h100", "h200", "b200", "gb200", "mi300x"] = (
        "h100-8x400g"
    )
    memory_gb: schema.Positive | None = None
    copies_gb_per_s: schema.Positive | None = None
    nvlink_gb_per_s: schema.Positive | None = None
    network_gb_per_s: schema.Positive | None = None
