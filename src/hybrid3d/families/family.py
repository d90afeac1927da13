"""What a model family is: how Megatron's global tensors are made of the checkpoint's, and Megatron's settings for it.

Pure data and arithmetic on rows: no torch, no engine. How any of it is sharded is not said here; the engines say it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Config = Mapping[str, Any]
"""A Hugging Face `config.json`."""


class UnsupportedModel(ValueError):
    """A model that this version would not compute faithfully: the message gives the key, its value and the reason."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows `start .. start + rows` of a Megatron tensor are rows `at .. at + rows` of a canonical tensor.

    `name` is None for rows that Megatron adds and no checkpoint has (a vocabulary padded to divide by TP).
    """

    start: int
    rows: int
    name: str | None
    at: int = 0


class RowMap(Protocol):
    """How the rows (dim 0) of one Megatron tensor are made of rows of canonical tensors."""

    def strips(self, rows: int, config: Config) -> list[Strip]:
        """Strips in ascending order that tile `rows` rows."""
        ...


@dataclass(frozen=True)
class Same:
    """The same tensor under another name."""

    name: str

    def strips(self, rows: int, config: Config) -> list[Strip]:
        return [Strip(0, rows, self.name)]


@dataclass(frozen=True)
class Vocabulary:
    """One row a token; rows from `vocab_size` on are padding."""

    name: str

    def strips(self, rows: int, config: Config) -> list[Strip]:
        tokens = config["vocab_size"]
        padding = [Strip(tokens, rows - tokens, None)] if rows > tokens else []
        return [Strip(0, tokens, self.name), *padding]


@dataclass(frozen=True)
class Stacked:
    """Tensors of equal height, one above the other: fc1 is gate above up."""

    names: tuple[str, ...]

    def strips(self, rows: int, config: Config) -> list[Strip]:
        each = rows // len(self.names)
        return [Strip(i * each, each, name) for i, name in enumerate(self.names)]


@dataclass(frozen=True)
class GroupedQKV:
    """Megatron's one real permutation: per query group, the group's queries, its key and its value."""

    q: str
    k: str
    v: str

    def strips(self, rows: int, config: Config) -> list[Strip]:
        groups, per_head = query_groups(config), head_dim(config)
        queries = config["num_attention_heads"] // groups * per_head
        strips, start = [], 0
        for group in range(groups):
            for name, height in ((self.q, queries), (self.k, per_head), (self.v, per_head)):
                strips.append(Strip(start, height, name, group * height))
                start += height
        return strips


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def query_groups(config: Config) -> int:
    """Keys and values that a layer has; where nothing is said, as many as heads."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: its base and, for Llama 3's scaling, the constants that the checkpoint configures."""

    theta: float
    llama3: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Family:
    """One row of the table of model families.

    Attributes:
        architecture: the name in the checkpoint's `architectures`.
        tensors: Megatron's global name (`{layer}` stands for a number) to how its rows are made.
        transformer_config: `config.json` to fields of Megatron's `TransformerConfig`, beyond those of every family.
        check: raises UnsupportedModel for what this version would not compute faithfully.
    """

    architecture: str
    tensors: Mapping[str, RowMap]
    transformer_config: Callable[[Config], dict[str, Any]] = field(default=lambda config: {})
    check: Callable[[Config], None] = field(default=lambda config: None)

    def strips(self, megatron_name: str, rows: int, config: Config) -> list[Strip] | None:
        """The canonical rows that make up one global tensor of Megatron's, or None for a tensor in no table."""
        for pattern, row_map in self.tensors.items():
            match = re.fullmatch(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)"), megatron_name)
            if match:
                named = match.groupdict()
                return [
                    Strip(s.start, s.rows, s.name and s.name.format(**named), s.at)
                    for s in row_map.strips(rows, config)
                ]
        return None


def rope_of(config: Config) -> Rope:
    """Rotary settings, in either form: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        factor = scaling["partial_rotary_factor"]
        raise UnsupportedModel(f"partial_rotary_factor={factor}: only 1.0 is computed faithfully")
    theta = scaling.get("rope_theta") or config.get("rope_theta", 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        lacking = [key for key in keys if key not in scaling]
        if lacking:
            raise UnsupportedModel(f"rope_type='llama3' lacks {', '.join(lacking)}")
        return Rope(theta, {key: scaling[key] for key in keys})
    raise UnsupportedModel(f"rope_type={kind!r}: dense families know 'default' and 'llama3'")
