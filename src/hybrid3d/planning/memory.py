"""What a GPU's memory holds in each phase of a step, and what is left of it.

Weights are as both engines say; the rest follows from their number and from the shapes of the model:

- gradients: float32, as Megatron reduces them, on every rank;
- optimizer: Adam's two moments and, in bfloat16, a float32 copy of the weights, over the data-parallel ranks, as
  Megatron's distributed optimizer shards them; experts over the ranks that hold the same ones;
- activations: what a layer keeps for its backward pass (as arXiv 2205.05198, section 4, counts it, here for attention
  that keeps no scores, gated MLPs, grouped queries and latents), of as many micro batches as are in flight on a stage;
  under full recompute a layer's input, and all that one layer keeps; on the last stage the logits and their
  probabilities besides;
- reference: the frozen policy's weights, where there is a KL term;
- KV cache: what is left to vLLM of its fraction after its weights and its work space.

vLLM sleeps while Megatron trains; what training has stays while vLLM generates, but for what `train.offload_*` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from hybrid3d.config import Recipe, Train
from hybrid3d.config.model_shape import ModelShape
from hybrid3d.families import Config, family_of, is_expert
from hybrid3d.planning.hardware import Hardware
from hybrid3d.reshard.layout import ITEMSIZE, Piece
from hybrid3d.rollout.probe import SlotDemand
from hybrid3d.train.probe import layers_of_stages

FLOAT32 = 4
# `max_num_batched_tokens` and `max_num_seqs` of vLLM 0.32.0 for an offline engine on a large GPU: its work space.
BATCHED_TOKENS, SEQUENCES = 16384, 1024


@dataclass(frozen=True)
class ParameterCounts:
    """Elements that a rank holds: of routed experts, and of all else."""

    dense: int
    experts: int


def count_parameters(pieces: Iterable[Piece], times: Callable[[str], int]) -> ParameterCounts:
    """What pieces add up to, where a tensor stands for `times` of them."""
    counts = {True: 0, False: 0}
    for piece in pieces:
        counts[is_expert(piece.name)] += piece.box.numel * times(piece.name)
    return ParameterCounts(dense=counts[False], experts=counts[True])


@dataclass(frozen=True)
class StageMemory:
    """Bytes on the fullest rank of a stage, by what they are."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    rollout_weights: int
    staging: int

    @property
    def persistent(self) -> int:
        """What stays through the whole step."""
        return self.weights + self.gradients + self.optimizer + self.reference

    def offloaded_bytes(self, offloads: Iterable[str]) -> int:
        """What is not there while vLLM generates."""
        of_kind = {
            "parameters": self.weights + self.reference,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
        }
        return sum(of_kind[kind] for kind in offloads)


@dataclass(frozen=True)
class MemoryEstimate:
    """The phases of a step on the GPU that is fullest in each.

    Attributes:
        stages: what each pipeline stage's fullest rank has.
        capacity: of a GPU.
        fraction: of it that vLLM may take.
        work_space: what vLLM takes besides its weights and its KV cache.
        kv_bytes_per_token: of the KV cache.
        max_model_len: tokens of the longest sequence.
        sleeps: whether vLLM's memory is given to training.
        offloads: what of training's is given to vLLM, as `train.offload_*` says.
    """

    stages: tuple[StageMemory, ...]
    capacity: int
    fraction: float
    work_space: int
    kv_bytes_per_token: int
    max_model_len: int
    sleeps: bool = True
    offloads: tuple[str, ...] = ()

    @cached_property
    def train(self) -> int:
        beside = 0 if self.sleeps else self.rollout
        return max(stage.persistent + stage.activations for stage in self.stages) + beside

    @cached_property
    def sync(self) -> int:
        return max(
            stage.persistent + (stage.rollout_weights if self.sleeps else self.rollout) + stage.staging
            for stage in self.stages
        )

    @cached_property
    def generate(self) -> int:
        return max(stage.persistent - stage.offloaded_bytes(self.offloads) for stage in self.stages) + self.rollout

    @property
    def rollout(self) -> int:
        """All that vLLM may take."""
        return int(self.fraction * self.capacity)

    @cached_property
    def kv_cache(self) -> int:
        return self.rollout - max(stage.rollout_weights for stage in self.stages) - self.work_space

    @property
    def kv_tokens(self) -> int:
        return max(0, self.kv_cache) // self.kv_bytes_per_token

    def problems(self) -> list[str]:
        """What does not fit, with both numbers."""
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
    """Of each kind of bytes the most that a stage has."""
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
    """Each phase's memory.

    Args:
        held: what Megatron says that a rank of each stage holds: those of one stage hold equally much.
        wanted: what vLLM says of an engine's first slot, which wants a largest share.
        wanted_bytes: of that share.
    """
    rollout, train = recipe.rollout, recipe.train
    assert rollout is not None
    family = family_of(config)
    shape = ModelShape.from_config(config, family.experts(config), family.latents(config))
    itemsize = ITEMSIZE[recipe.model.dtype]
    stage_ranks = recipe.world_size // train.pp
    activations = stage_activations(recipe, shape, layers_of_stages(config, train))
    trained = 2 if recipe.algorithm.uses_critic else 1
    beside = (recipe.algorithm.kl.where != "none") + recipe.algorithm.uses_critic + (recipe.reward.model is not None)
    stages = []
    for stage, its in enumerate(held):
        elements = its.dense + its.experts
        weights = elements * itemsize
        sharded = its.dense / (train.dp * train.cp) + its.experts / (stage_ranks // (train.ep * train.etp))
        stages.append(
            StageMemory(
                weights=weights,
                gradients=elements * FLOAT32 * trained,
                optimizer=round(sharded * FLOAT32 * (2 if itemsize == FLOAT32 else 3)) * trained,
                reference=weights * beside,
                activations=activations[stage],
                rollout_weights=wanted_bytes,
                staging=2 * recipe.sync.bucket_bytes + wanted.finalize_bytes,
            )
        )
    return MemoryEstimate(
        stages=tuple(stages),
        capacity=int(hardware.memory_bytes),
        fraction=rollout.gpu_memory_utilization,
        work_space=_work_space(shape, rollout.tp, itemsize),
        kv_bytes_per_token=sum(wanted.kv_bytes.values()),
        max_model_len=rollout.max_model_len,
        sleeps=rollout.sleep,
        offloads=train.offloads,
    )


def stage_activations(recipe: Recipe, shape: ModelShape, stages: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Bytes that are kept for the backward pass on each stage's ranks, in sequences of `rollout.max_model_len`.

    Args:
        stages: the layers of each stage's chunks.
    """
    train = recipe.train
    assert recipe.rollout is not None
    longest, budget = recipe.rollout.max_model_len, train.max_tokens_per_micro_batch
    tokens = (budget or train.micro_batch_size * longest) // train.cp
    itemsize = ITEMSIZE[recipe.model.dtype]
    sequences = train.micro_batch_size if budget is None else budget // longest
    micro_batches = -(-recipe.sequences_per_step // (train.dp * sequences))
    sparse = shape.experts.sparse if shape.experts else (False,) * shape.num_layers
    kept = {kind: activation_elements_per_token(shape, train, kind) * itemsize for kind in set(sparse)}
    inputs = shape.hidden_size * itemsize // _sequence_shards(shape, train)
    found = []
    for stage, chunks in enumerate(stages):
        # Chunks that have gone forward and wait for their backward pass in Megatron's schedules, plain or interleaved.
        ahead = train.pp - stage - 1
        waiting = ahead + 1 if train.vpp == 1 else 2 * ahead + (train.vpp - 1) * train.pp + 1
        waiting = min(waiting, micro_batches * train.vpp)
        layers = [layer for chunk in chunks for layer in chunk]
        if train.recompute == "full":
            nbytes = waiting * len(layers) // train.vpp * inputs + max(kept[sparse[layer]] for layer in layers)
        else:
            nbytes = waiting * sum(kept[sparse[layer]] for layer in layers) // train.vpp
        if stage == train.pp - 1:
            # logits, and in float32: scaled by the temperature, their probabilities, their gradient
            nbytes += shape.vocab_size // train.tp * (itemsize + 3 * FLOAT32)
        found.append(tokens * nbytes)
    return found


def activation_elements_per_token(shape: ModelShape, train: Train, sparse: bool) -> int:
    """Elements that one layer keeps of a token on a rank, for the backward pass, where its activation is fused.

    Whole rows: the inputs and the outputs of both norms, and a sum between them. Split over TP: what attention is
    given, before and after its norms and its rotation, its output in two layouts, an MLP's gate, up and product.
    """
    hidden, tp, heads = shape.hidden_size, train.tp, shape.num_attention_heads
    rows = 5 * hidden
    if shape.latents is None:
        keys = max(shape.num_key_value_heads, tp) * shape.head_dim
        attention = 5 * heads * shape.head_dim + 4 * keys
    else:
        its = shape.latents
        attention = heads * (3 * (its.nope + its.rope) + its.nope + its.value + 2 * its.value)
        rows += 3 * its.kv_rank + its.rope + 2 * its.q_rank
    shards = _sequence_shards(shape, train)
    kept = rows // shards + attention // tp
    if not sparse:
        return kept + 3 * shape.intermediate_size // tp
    experts = shape.experts
    assert experts is not None
    copies = experts.per_token * train.etp  # of a token, over the ranks that share experts, when they are balanced
    routed = copies * (2 * hidden + 3 * experts.width // train.etp) // shards
    return kept + routed + 3 * experts.shared_width // tp + experts.count // shards


def _sequence_shards(shape: ModelShape, train: Train) -> int:
    """Over how many ranks whole rows are split: Megatron trains experts under TP with sequence parallelism only."""
    return train.tp if shape.experts else 1


def _work_space(shape: ModelShape, tp: int, itemsize: int) -> int:
    """What vLLM computes in: the widest layer over a full batch of tokens, and logits of as many sequences."""
    widest = 3 * shape.intermediate_size // tp
    if shape.experts:
        widest = max(widest, shape.experts.per_token * (3 * shape.experts.width // tp + shape.hidden_size))
    layer = BATCHED_TOKENS * (2 * shape.hidden_size + widest) * itemsize
    return layer + 2 * SEQUENCES * shape.vocab_size * FLOAT32
