"""Estimates the memory of a GPU in each phase of a step.

Both engines report the sizes of their weights. The rest is computed from these and from the shapes of the model:

- gradients: float32, as Megatron reduces them, on every rank;
- optimizer: Adam's two moments and, in bfloat16, a float32 copy of the weights, sharded over the data-parallel ranks by
  Megatron's distributed optimizer; those of experts over the ranks that hold the same experts;
- activations: what each layer keeps for its backward pass (counted as in arXiv 2205.05198, section 4, for attention
  that keeps no scores, gated MLPs, grouped queries and latents), for the micro batches in flight on a stage. With full
  recompute: each layer's input, and the activations of one layer. The last stage also has the logits and their
  probabilities;
- reference: the weights of the frozen policy, if there is a KL term; of a policy with adapters it is the policy itself
  without them, and gradients and the optimizer have the elements of the adapters only;
- FP8 weights of `rollout.quantization`: one byte an element, on the ranks that train, in a sync; where it sends changed
  elements only, they stay, with one bit an element;
- reserve: contexts, communicators and CUDA graphs (`planning/hardware.py`);
- KV cache: vLLM's fraction, of all of the device's memory, minus its weights, its work space and its part of the
  reserve.

vLLM sleeps while Megatron trains. Training's memory stays allocated while vLLM generates, except for what
`train.offload_*` names. Where other GPUs generate than train, each phase has the memory of its own GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hybrid3d.config import Lora, Recipe, Train
from hybrid3d.config.model_shape import ModelShape
from hybrid3d.families import Config, is_adapted, is_expert
from hybrid3d.planning.hardware import Hardware, Reserve, reserve_of
from hybrid3d.reshard.plan.layout import ITEMSIZE, Piece, pieces_by_name
from hybrid3d.train.megatron.probe import layers_of_stages

if TYPE_CHECKING:  # the memory of training is estimated where there is no vLLM, too
    from hybrid3d.rollout.probe import SlotDemand

FLOAT32 = 4
GATHERED_FRACTION = 0.5  # of a node's memory; the rest is for processes, offloaded tensors and the page cache
# `max_num_batched_tokens` and `max_num_seqs` of vLLM 0.32.0 for an offline engine on a large GPU.
BATCHED_TOKENS, SEQUENCES = 16384, 1024


@dataclass(frozen=True)
class ParameterCounts:
    """The numbers of elements that a rank holds: of routed experts, and of all other parameters.

    Attributes:
        adapters: those of its adapters, which are then the only ones that are trained; None without adapters.
        mtp: those of layers for multi-token prediction that are trained beside the policy; None without such layers.
    """

    dense: int
    experts: int
    adapters: ParameterCounts | None = None
    mtp: ParameterCounts | None = None

    @property
    def total(self) -> int:
        return self.dense + self.experts


def count_parameters(
    pieces: Sequence[Piece], multiplicity: Callable[[str], int], lora: Lora | None = None
) -> ParameterCounts:
    """Count the elements of pieces, and of adapters beside them.

    Args:
        multiplicity: how many tensors the tensor of a piece represents.
    """
    counts = {True: 0, False: 0}
    for piece in pieces:
        counts[is_expert(piece.name)] += piece.box.numel * multiplicity(piece.name)
    adapters = None if lora is None else _count_adapters(pieces, multiplicity, lora)
    return ParameterCounts(counts[False], counts[True], adapters)


def _count_adapters(pieces: Sequence[Piece], multiplicity: Callable[[str], int], lora: Lora) -> ParameterCounts:
    """Count the elements of adapters: A has a rank's columns of each weight, and B its rows."""
    counts = {True: 0, False: 0}
    for name, boxes in pieces_by_name(pieces).items():
        if is_adapted(name, len(boxes[0].box.size), lora.target_modules):
            rows = max(p.box.stop[0] for p in boxes) - min(p.box.start[0] for p in boxes)
            counts[is_expert(name)] += lora.rank * (rows + boxes[0].box.size[1]) * multiplicity(name)
    return ParameterCounts(counts[False], counts[True])


@dataclass(frozen=True)
class StageMemory:
    """The bytes of each kind on the fullest rank of a stage."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    rollout_weights: int
    staging: int
    changes: int = 0

    @property
    def persistent(self) -> int:
        """Bytes that stay allocated for the whole step."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.changes

    def offloaded_bytes(self, offloads: Iterable[str]) -> int:
        """Return the bytes that these offloads free while vLLM generates."""
        nbytes = {
            "parameters": self.weights + self.reference,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
        }
        return sum(nbytes[kind] for kind in offloads)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory in each phase of a step on the GPU that is fullest in that phase, in bytes.

    Attributes:
        stages: the memory of each pipeline stage's fullest rank.
        fraction: the fraction of a GPU's memory, `capacity`, that vLLM may use.
        work_space: what vLLM uses besides its weights and its KV cache.
        sleeps: whether vLLM frees its memory during training.
        keeps_weights: whether it keeps its weights then.
        offloads: the kinds of training memory that are offloaded during generation (`train.offload_*`).
        split: whether each GPU either trains or generates.
        reserve: what is neither tensors nor vLLM's cache, in all phases.
    """

    stages: tuple[StageMemory, ...]
    capacity: int
    fraction: float
    work_space: int
    kv_bytes_per_token: int
    max_model_len: int  # in tokens
    sleeps: bool
    keeps_weights: bool
    offloads: tuple[str, ...]
    split: bool
    reserve: Reserve

    @cached_property
    def train(self) -> int:
        if self.split:
            return max(stage.persistent + stage.activations for stage in self.stages) + self.reserve.of_training
        return self._beside + max(
            stage.persistent
            + stage.activations
            + (stage.rollout_weights * self.keeps_weights if self.sleeps else self.rollout)
            for stage in self.stages
        )

    @cached_property
    def sync(self) -> int:
        if self.split:
            generates = self.rollout + self.reserve.contexts
            return max(
                max(stage.persistent + self.reserve.of_training, generates) + stage.staging for stage in self.stages
            )
        return self._beside + max(
            stage.persistent + (stage.rollout_weights if self.sleeps else self.rollout) + stage.staging
            for stage in self.stages
        )

    @cached_property
    def generate(self) -> int:
        if self.split:
            return self.rollout + self.reserve.contexts
        stays = max(stage.persistent - stage.offloaded_bytes(self.offloads) for stage in self.stages)
        return stays + self.rollout + self.reserve.of_training

    @property
    def _beside(self) -> int:
        """The reserve beside vLLM's memory in training and syncs: all if it sleeps, else but for its own part."""
        return self.reserve.total if self.sleeps else self.reserve.of_training

    @property
    def rollout(self) -> int:
        """The memory that vLLM may use."""
        return int(self.fraction * self.capacity)

    @cached_property
    def kv_cache(self) -> int:
        weights = max(stage.rollout_weights for stage in self.stages)
        return self.rollout - weights - self.work_space - self.reserve.of_rollout

    @property
    def kv_tokens(self) -> int:
        return max(0, self.kv_cache) // self.kv_bytes_per_token

    def problems(self) -> list[str]:
        """Return a message for each phase that does not fit, with the needed and the available bytes."""
        found = []
        for phase in ("train", "sync", "generate"):
            needed = getattr(self, phase)
            if needed > self.capacity:
                found.append(f"the {phase} phase needs {gb(needed)} of a GPU's {gb(self.capacity)}")
        if self.kv_tokens < self.max_model_len:
            found.append(
                f"vLLM's share of {gb(self.rollout)} leaves its KV cache {self.kv_tokens} tokens, less than one "
                f"sequence of rollout.max_model_len={self.max_model_len}"
            )
        return found


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def max_over_stages(stages: tuple[StageMemory, ...]) -> dict[str, int]:
    """Return the maximum over stages for each kind of bytes."""
    rows = [asdict(stage) for stage in stages]
    return {key: max(row[key] for row in rows) for key in rows[0]}


def estimate_memory(
    recipe: Recipe,
    config: Config,
    hardware: Hardware,
    held: Sequence[ParameterCounts],
    wanted: SlotDemand,
    wanted_bytes: int,
) -> MemoryEstimate:
    """Estimate the memory of each phase.

    Args:
        held: Megatron's parameter counts of a rank of each stage; all ranks of a stage have the same counts.
        wanted: vLLM's answer about an engine's first slot, which wants at least as much as any other.
    """
    rollout = recipe.rollout
    assert rollout is not None
    return MemoryEstimate(
        stages=estimate_stages(recipe, config, held, wanted_bytes, wanted.finalize_bytes),
        capacity=int(hardware.memory_bytes),
        fraction=rollout.gpu_memory_utilization,
        work_space=_work_space(ModelShape.of(config), rollout.tp, ITEMSIZE[recipe.model.dtype]),
        kv_bytes_per_token=sum(wanted.kv_bytes.values()),
        max_model_len=rollout.max_model_len,
        sleeps=rollout.sleep,
        keeps_weights=recipe.keeps_rollout_weights,
        offloads=recipe.train.offloads,
        split=recipe.is_split,
        reserve=reserve_of(recipe, ModelShape.of(config).experts is not None),
    )


def estimate_stages(
    recipe: Recipe, config: Config, held: Sequence[ParameterCounts], wanted_bytes: int, finalize_bytes: int
) -> tuple[StageMemory, ...]:
    """Estimate the memory of the fullest rank of each stage; finalizing vLLM's tensors takes `finalize_bytes`."""
    train, itemsize = recipe.train, ITEMSIZE[recipe.model.dtype]
    stage_ranks = recipe.train_ranks // train.pp
    activations = stage_activations(recipe, ModelShape.of(config), layers_of_stages(config, train))
    has_reward_model = recipe.reward.model is not None and recipe.roles.reward.ranks is None
    num_frozen = recipe.holds_reference + recipe.algorithm.uses_critic + has_reward_model
    stages = []
    for stage, counts in enumerate(held):
        policy = counts.adapters or counts
        trained = [policy, replace(counts, adapters=None)] if recipe.algorithm.uses_critic else [policy]
        trained += [] if counts.mtp is None else [counts.mtp]
        elements, weights = sum(one.total for one in trained), counts.total * itemsize
        quantized = counts.total * recipe.quantizes
        copied = weights * recipe.compares_changes  # at most: of the weights that have adapters
        added = sum(one.total * itemsize for one in (counts.adapters, counts.mtp) if one is not None)
        sharded = sum(
            one.dense / (train.dp * train.cp) + one.experts / (stage_ranks // (train.ep * train.etp)) for one in trained
        )
        stages.append(
            StageMemory(
                weights=weights + added,
                gradients=elements * FLOAT32,
                optimizer=round(sharded * FLOAT32 * (2 if itemsize == FLOAT32 else 3)),
                reference=weights * num_frozen,
                activations=activations[stage],
                rollout_weights=wanted_bytes,
                staging=2 * recipe.sync.bucket_bytes + finalize_bytes + quantized * (not recipe.can_sync_changes),
                changes=((counts.total + quantized) // 8 + (quantized or copied)) * recipe.can_sync_changes,
            )
        )
    return tuple(stages)


def stage_activations(recipe: Recipe, shape: ModelShape, stages: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the bytes of activations on a rank of each stage, for sequences of `rollout.max_model_len` tokens.

    Args:
        stages: the layers of each stage's chunks.
    """
    train = recipe.train
    assert recipe.rollout is not None
    longest, budget = recipe.rollout.max_model_len, train.max_tokens_per_micro_batch
    tokens = (budget or train.micro_batch_size * longest) // train.cp
    itemsize = ITEMSIZE[recipe.model.dtype]
    sequences = train.micro_batch_size if budget is None else budget // longest
    micro_batches = -(-recipe.sequences_per_step // (recipe.algorithm.minibatches * train.dp * sequences))
    sparse = shape.experts.sparse if shape.experts else (False,) * shape.num_layers
    kept = {kind: activation_elements_per_token(shape, train, kind) * itemsize for kind in set(sparse)}
    inputs = shape.hidden_size * itemsize // _sequence_shards(shape, train)
    found = []
    for stage, chunks in enumerate(stages):
        # Chunks that wait for their backward pass in Megatron's schedules, plain or interleaved.
        ahead = train.pp - stage - 1
        waiting = ahead + 1 if train.vpp == 1 else 2 * ahead + (train.vpp - 1) * train.pp + 1
        waiting = min(waiting, micro_batches * train.vpp)
        layers = [layer for chunk in chunks for layer in chunk]
        if train.recompute == "full":
            nbytes = waiting * len(layers) // train.vpp * inputs + max(kept[sparse[layer]] for layer in layers)
        else:
            nbytes = waiting * sum(kept[sparse[layer]] for layer in layers) // train.vpp
        embedding = 0
        if stage == train.pp - 1:
            # logits, and in float32: scaled by the temperature, their probabilities, their gradient
            logits = shape.vocab_size // train.tp * (itemsize + 3 * FLOAT32)
            nbytes += logits
            if train.mtp_loss_coef:  # one layer more, its logits, and a copy of the first stage's embedding
                nbytes += kept[sparse[-1]] + logits
                embedding = (train.pp > 1) * shape.vocab_size // train.tp * shape.hidden_size * itemsize
        if train.cp > 1:  # one layer's keys and values of whole sequences, and their gradients
            nbytes += train.cp * 2 * itemsize * _key_and_value_elements(shape, train)
        found.append(tokens * nbytes + embedding)
    return found


def _key_and_value_elements(shape: ModelShape, train: Train) -> int:
    """Return the elements of a token's keys and values on a rank, in one layer."""
    if shape.latents is None:
        return 2 * max(shape.num_key_value_heads, train.tp) * shape.head_dim // train.tp
    mla = shape.latents
    return shape.num_attention_heads * (mla.nope + mla.rope + mla.value) // train.tp


def activation_elements_per_token(shape: ModelShape, train: Train, sparse: bool) -> int:
    """Return the elements per token that one layer with a fused activation keeps on a rank for its backward pass.

    Replicated over TP: the inputs and outputs of both norms, and a sum between them. Sharded over TP: the inputs of
    attention before and after its norms and rotary embedding, its output in two layouts, and an MLP's gate, up and
    product.
    """
    hidden, tp, heads = shape.hidden_size, train.tp, shape.num_attention_heads
    rows = 5 * hidden
    if shape.latents is None:
        keys = max(shape.num_key_value_heads, tp) * shape.head_dim
        attention = 5 * heads * shape.head_dim + 4 * keys
    else:
        mla = shape.latents
        attention = heads * (3 * (mla.nope + mla.rope) + mla.nope + mla.value + 2 * mla.value)
        rows += 3 * mla.kv_rank + mla.rope + 2 * mla.q_rank
    shards = _sequence_shards(shape, train)
    kept = rows // shards + attention // tp
    if not sparse:
        return kept + 3 * shape.intermediate_size // tp
    experts = shape.experts
    assert experts is not None
    copies = experts.per_token * train.etp  # of a token over the ranks that share experts, with balanced routing
    routed = copies * (2 * hidden + 3 * experts.width // train.etp) // shards
    return kept + routed + 3 * experts.shared_width // tp + experts.count // shards


def _sequence_shards(shape: ModelShape, train: Train) -> int:
    """Return the number of ranks that shard a sequence: Megatron requires sequence parallelism for experts under TP."""
    return train.tp if shape.experts else 1


def _work_space(shape: ModelShape, tp: int, itemsize: int) -> int:
    """Return the bytes of vLLM's activations: the widest layer for a full batch of tokens, and the logits."""
    widest = 3 * shape.intermediate_size // tp
    if shape.experts:
        widest = max(widest, shape.experts.per_token * (3 * shape.experts.width // tp + shape.hidden_size))
    layer = BATCHED_TOKENS * (2 * shape.hidden_size + widest) * itemsize
    return layer + 2 * SEQUENCES * shape.vocab_size * FLOAT32


def choose_sharding(setting: str, gathered: float, capacity: float) -> str:
    """Return how optimizers are saved: as set or, with `auto`, so that any layout can load them if that fits the node.

    Args:
        gathered: bytes of optimizer state that `fully_reshardable` makes in a node's host memory.
        capacity: the node's memory in bytes.
    """
    if setting != "auto":
        return setting
    return "fully_reshardable" if gathered <= GATHERED_FRACTION * capacity else "dp_reshardable"
