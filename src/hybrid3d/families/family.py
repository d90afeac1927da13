"""What a model family is: how Megatron's global tensors are made of the checkpoint's, and Megatron's settings for it.

Pure data and arithmetic on rows: no torch, no engine. How any of it is sharded is not said here; the engines say it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybrid3d.families.rope import Rope, rope_of
from hybrid3d.families.values import Config


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start .. start + rows` of a Megatron tensor are rows `at .. at + rows` of a canonical tensor.

    `name` is None for rows that Megatron adds and no checkpoint has (a vocabulary padded to divide by TP).
    """

    start: int
    rows: int
    name: str | None
    canonical_start: int = 0


class RowMap(Protocol):
    """How the rows (dim 0) of one Megatron tensor are made of rows of canonical tensors."""

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        """Strips in ascending order that tile `rows` rows."""
        ...


@dataclass(frozen=True)
class SameTensor:
    """The same tensor under another name."""

    name: str

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        return [RowRange(0, rows, self.name)]


@dataclass(frozen=True)
class PaddedVocabulary:
    """One row a token; rows from `vocab_size` on are padding."""

    name: str

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        tokens = config["vocab_size"]
        padding = [RowRange(tokens, rows - tokens, None)] if rows > tokens else []
        return [RowRange(0, tokens, self.name), *padding]


@dataclass(frozen=True)
class StackedTensors:
    """Tensors of equal height, one above the other: fc1 is gate above up."""

    names: tuple[str, ...]

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        each = rows // len(self.names)
        return [RowRange(i * each, each, name) for i, name in enumerate(self.names)]


@dataclass(frozen=True)
class GroupedQKV:
    """Megatron's one real permutation: per query group, the group's queries, its key and its value."""

    q: str
    k: str
    v: str

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        groups, per_head = query_groups(config), head_dim(config)
        queries = config["num_attention_heads"] // groups * per_head
        row_ranges, start = [], 0
        for group in range(groups):
            for name, height in ((self.q, queries), (self.k, per_head), (self.v, per_head)):
                row_ranges.append(RowRange(start, height, name, group * height))
                start += height
        return row_ranges


VALUE_HEAD = "score.weight"
"""The one row of a sequence classifier of one label, which transformers puts in the place of `lm_head`."""


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def query_groups(config: Config) -> int:
    """Keys and values that a layer has; where nothing is said, as many as heads."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


@dataclass(frozen=True)
class Experts:
    """The experts of a model's sparse layers.

    Attributes:
        count: routed experts of a layer.
        per_token: how many of them a token is sent to.
        width: rows of an expert's gate.
        sparse: which layers have experts; the others have a dense MLP.
        shared_width: rows of the gate of the experts that every token is sent to, together; 0 where there are none.
    """

    count: int
    per_token: int
    width: int
    sparse: tuple[bool, ...]
    shared_width: int = 0


@dataclass(frozen=True)
class Latents:
    """Ranks and head dims of multi-head latent attention; `q_rank` is 0 where queries are not compressed."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Family:
    """One row of the table of model families.

    Attributes:
        architecture: the name in the checkpoint's `architectures`.
        tensors: Megatron's global name (`{layer}` stands for a number) to how its rows are made. Names of canonical
            tensors may have `{expert}` where Megatron puts experts one behind the other.
        transformer_config: `config.json` to fields of Megatron's `TransformerConfig`, beyond those of every family.
        check: raises UnsupportedModel for what this version would not compute faithfully.
        experts: of the sparse layers; None in a dense family.
        latents: of multi-head latent attention; None where attention has grouped queries.
        scaling: the kind of scaled rotary embedding that the family computes.
        theta: base of the rotary embedding where a config says none.
        untrained: patterns of tensors that a checkpoint may carry and training leaves as they are.
    """

    architecture: str
    tensors: Mapping[str, RowMap]
    transformer_config: Callable[[Config], dict[str, Any]] = field(default=lambda config: {})
    check: Callable[[Config], None] = field(default=lambda config: None)
    experts: Callable[[Config], Experts | None] = field(default=lambda config: None)
    latents: Callable[[Config], Latents | None] = field(default=lambda config: None)
    scaling: str = "llama3"
    theta: float = 10000.0
    untrained: Callable[[Config], Iterable[str]] = field(default=lambda config: ())

    def rope(self, config: Config) -> Rope:
        """Rotary settings of a model of this family; UnsupportedModel for what it does not compute."""
        return rope_of(config, self.scaling, self.theta)

    def representative_layers(self, config: Config) -> tuple[int, ...]:
        """For each layer the first one that is like it: layers differ in being sparse or dense, and in nothing else."""
        experts = self.experts(config)
        sparse = experts.sparse if experts else (False,) * config["num_hidden_layers"]
        return tuple(sparse.index(this) for this in sparse)

    def row_ranges(
        self, megatron_name: str, rows: int, config: Config, expert: int | None = None
    ) -> list[RowRange] | None:
        """The canonical rows that make up one global tensor of Megatron's, or None for a tensor in no table.

        Args:
            rows: of the tensor, in dim 0; of one expert's where `expert` is given.
            expert: its number, where Megatron's tensor has an axis of experts in front.
        """
        for pattern, row_map in self.tensors.items():
            match = re.fullmatch(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)"), megatron_name)
            if match:
                named = {**match.groupdict(), "expert": expert}
                return [
                    RowRange(s.start, s.rows, s.name and s.name.format(**named), s.canonical_start)
                    for s in row_map.row_ranges(rows, config)
                ]
        return None


def with_value_head(family: Family) -> Family:
    """The family's models with one row, `VALUE_HEAD`, in the place of the vocabulary's."""
    return replace(family, tensors={**family.tensors, "output_layer.weight": SameTensor(VALUE_HEAD)})
