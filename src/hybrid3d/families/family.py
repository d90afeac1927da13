"""Model families: how Megatron's global tensors are made of the checkpoint's tensors, and Megatron's settings.

This is pure data and arithmetic on rows, without torch or an engine. Sharding is not described here: the engines report
their own. A family also says which layers can have low-rank adapters, and how PEFT names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from hybrid3d.families.rope import Rope, rope_of
from hybrid3d.families.values import Config, UnsupportedModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of rows of a Megatron tensor, and the rows of a canonical tensor that it holds.

    Attributes:
        start: first row in the Megatron tensor.
        rows: number of rows.
        name: the canonical tensor; None for padding rows (a vocabulary padded to be divisible by TP).
        canonical_start: first row in the canonical tensor.
    """

    start: int
    rows: int
    name: str | None
    canonical_start: int = 0


class RowMap(Protocol):
    """Maps the rows (dim 0) of one Megatron tensor to rows of canonical tensors."""

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        """Return ranges in ascending order that cover a Megatron tensor of `rows` rows without gaps."""


@dataclass(frozen=True)
class SameTensor:
    """A canonical tensor that Megatron has under another name."""

    name: str

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        return [RowRange(0, rows, self.name)]


@dataclass(frozen=True)
class PaddedVocabulary:
    """A tensor with one row per token; the rows from `vocab_size` on are padding."""

    name: str

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        tokens = config["vocab_size"]
        padding = [RowRange(tokens, rows - tokens, None)] if rows > tokens else []
        return [RowRange(0, tokens, self.name), *padding]


@dataclass(frozen=True)
class StackedTensors:
    """Tensors with equally many rows, concatenated along dim 0: fc1 is the gate, then up."""

    names: tuple[str, ...]

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        rows_each = rows // len(self.names)
        return [RowRange(i * rows_each, rows_each, name) for i, name in enumerate(self.names)]


@dataclass(frozen=True)
class GroupedQKV:
    """Megatron's interleaved QKV: for each query group its query heads, then its key head, then its value head."""

    q: str
    k: str
    v: str

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        groups, kv_rows = query_groups(config), head_dim(config)
        q_rows = config["num_attention_heads"] // groups * kv_rows
        row_ranges, start = [], 0
        for group in range(groups):
            for name, num_rows in ((self.q, q_rows), (self.k, kv_rows), (self.v, kv_rows)):
                row_ranges.append(RowRange(start, num_rows, name, group * num_rows))
                start += num_rows
        return row_ranges


# Matches the number of a routed expert in the name of a canonical tensor.
EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def is_expert(name: str) -> bool:
    """Return whether a canonical tensor belongs to a routed expert."""
    return EXPERT.search(name) is not None


QUANTIZED = re.compile(
    r"\.layers\.\d+\.(self_attn|mlp|block_sparse_moe)\..*\b(\w+_proj|kv_a_proj_with_mqa|w[123])\.weight$"
)


def is_quantized(name: str) -> bool:
    """Return whether a canonical tensor is quantized where a model is: weights of linear layers and of experts.

    Embeddings, heads, norms, biases and routers are not, as in the FP8 checkpoints of DeepSeek-V3 and Qwen3.
    """
    return QUANTIZED.search(name) is not None


VALUE_HEAD = "score.weight"
"""Name of the one-row head of a sequence classifier with one label, which transformers has in place of `lm_head`."""


def head_dim(config: Config) -> int:
    """Return the dimension of an attention head: `head_dim`, or `hidden_size / num_attention_heads` without it."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def query_groups(config: Config) -> int:
    """Return the number of key-value heads of a layer: by default, the number of attention heads."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


@dataclass(frozen=True)
class Experts:
    """Sizes of the experts of a model's sparse layers.

    Attributes:
        count: routed experts per layer.
        per_token: routed experts per token (top-k).
        width: intermediate size of a routed expert.
        sparse: for each layer, whether it has experts instead of a dense MLP.
        shared_width: total intermediate size of the shared experts; 0 if there are none.
    """

    count: int
    per_token: int
    width: int
    sparse: tuple[bool, ...]
    shared_width: int = 0


@dataclass(frozen=True)
class Latents:
    """Ranks and head dims of multi-head latent attention; `q_rank` is 0 if queries are not compressed."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Family:
    """A model family. The callables take the checkpoint's `config.json`.

    Attributes:
        architecture: the name in the checkpoint's `architectures`.
        tensors: row map of each of Megatron's global tensors, by name (`{layer}` stands for a number). Names of
            canonical tensors contain `{expert}` where Megatron's tensor holds several experts.
        transformer_config: returns fields of Megatron's `TransformerConfig`, in addition to those set for all families.
        check: raises UnsupportedModel for configs that this version would not compute correctly.
        experts: returns the sizes of the experts; None for a dense model.
        latents: returns the sizes of multi-head latent attention; None for grouped-query attention.
        rope_scaling: the one type of scaled rotary embedding that the family supports.
        rope_theta: the rotary base of a config without one.
        rotary_fraction: the rotated fraction of each head of a config that does not give it; None if a family rotates
            whole heads only.
        mtp_layers: returns the numbers of the layers for multi-token prediction that a checkpoint may contain, after
            the model's. They are built and trained with `train.mtp_loss_coef` only.
        model_types: further values of `model_type` in configs of this architecture, which transformers does not know,
            and the one whose config class reads them.
    """

    architecture: str
    tensors: Mapping[str, RowMap]
    transformer_config: Callable[[Config], dict[str, Any]] = field(default=lambda config: {})
    check: Callable[[Config], None] = field(default=lambda config: None)
    experts: Callable[[Config], Experts | None] = field(default=lambda config: None)
    latents: Callable[[Config], Latents | None] = field(default=lambda config: None)
    rope_scaling: str = "llama3"
    rope_theta: float = 10000.0
    rotary_fraction: float | None = None
    mtp_layers: Callable[[Config], range] = field(default=lambda config: range(0))
    model_types: Mapping[str, str] = field(default_factory=dict)

    def rope(self, config: Config) -> Rope:
        """Return the rotary settings of a model of this family; raise UnsupportedModel if it does not support them."""
        rope = rope_of(config, self.rope_scaling, self.rope_theta, self.rotary_fraction)
        if rope.fraction != 1.0 and (dims := head_dim(config)) * rope.fraction % 2:  # each rotated dim with another
            raise UnsupportedModel(
                f"partial_rotary_factor={rope.fraction} of head_dim={dims} rotates {dims * rope.fraction:g} dims: "
                "expected an even number"
            )
        return rope

    def representative_layers(self, config: Config) -> tuple[int, ...]:
        """Return for each layer the first layer of its kind: layers differ only in being sparse or dense."""
        experts = self.experts(config)
        sparse = experts.sparse if experts else (False,) * config["num_hidden_layers"]
        return tuple(sparse.index(is_sparse) for is_sparse in sparse)

    def is_mtp(self, name: str, config: Config) -> bool:
        """Return whether a canonical tensor is of a layer for multi-token prediction."""
        return name.startswith(tuple(f"model.layers.{layer}." for layer in self.mtp_layers(config)))

    def without_mtp(self, shapes: Mapping[str, T], config: Config) -> dict[str, T]:
        """Return what is known of canonical tensors, by name, of those that are not of such layers."""
        return {name: shape for name, shape in shapes.items() if not self.is_mtp(name, config)}

    def mtp_copies(self, config: Config) -> dict[str, str]:
        """Return the tensors of these layers that are copies of the model's, by name, and the names of the latter."""
        copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        return {f"model.layers.{n}.{copy}": name for n in self.mtp_layers(config) for copy, name in copies.items()}

    def routers(self, config: Config) -> list[str]:
        """Return the canonical names of the modules that choose the experts of a layer."""
        names = (
            m.name for key, m in self.tensors.items() if key.endswith("router.weight") and isinstance(m, SameTensor)
        )
        layers = range(config["num_hidden_layers"])
        return [name.removesuffix(".weight").format(layer=layer) for name in names for layer in layers]

    def row_ranges(
        self, megatron_name: str, rows: int, config: Config, expert: int | None = None
    ) -> list[RowRange] | None:
        """Return the canonical rows that make up one of Megatron's global tensors; None if the table lacks it.

        Args:
            rows: size of the tensor's dim 0; that of one expert's if `expert` is given.
            expert: number of the expert, if dim 0 of Megatron's tensor counts experts.
        """
        megatron_name = MTP_LAYER.sub(partial(_as_layer, config), megatron_name)
        for pattern, row_map in self.tensors.items():
            match = re.fullmatch(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)"), megatron_name)
            if match:
                numbers = {**match.groupdict(), "expert": expert}
                return [
                    replace(row_range, name=row_range.name and row_range.name.format(**numbers))
                    for row_range in row_map.row_ranges(rows, config)
                ]
        return None


MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.(transformer_layer\.)?")


def _as_layer(config: Config, name: re.Match[str]) -> str:
    """Return the start of a name in a layer for multi-token prediction with the layer's number in the checkpoint.

    What is within its decoder layer is named like that of a layer of the model.
    """
    return f"{'decoder' if name[2] else 'mtp'}.layers.{config['num_hidden_layers'] + int(name[1])}."


def with_value_head(family: Family) -> Family:
    """Return the family with a value head (one row, `VALUE_HEAD`) in place of the language-model head."""
    return replace(family, tensors={**family.tensors, "output_layer.weight": SameTensor(VALUE_HEAD)})


PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules in the files of adapters."""

_IN_A_BLOCK = re.compile(r"\.layers\.\d+\.")
_ROUTER = ".mlp.gate.weight", ".block_sparse_moe.gate.weight"  # no linear layer of its own in either engine


def module_of(weight: str) -> str:
    """Return the last name of the layer with a canonical weight, such as `q_proj`."""
    return weight.removesuffix(".weight").rsplit(".", 1)[-1]


def can_be_adapted(weight: str, dims: int) -> bool:
    """Return whether a canonical tensor with so many dims is the weight of a linear layer in one of the blocks."""
    return (
        dims == 2 and weight.endswith(".weight") and not weight.endswith(_ROUTER) and bool(_IN_A_BLOCK.search(weight))
    )


def is_adapted(weight: str, dims: int, target_modules: Sequence[str] | None) -> bool:
    """Return whether a canonical tensor has an adapter; as in PEFT, by its last name. None selects all that can."""
    return can_be_adapted(weight, dims) and (target_modules is None or module_of(weight) in target_modules)


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the two matrices, A and B, of the adapter of a canonical tensor in PEFT's files."""
    module = PEFT_PREFIX + weight.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"
