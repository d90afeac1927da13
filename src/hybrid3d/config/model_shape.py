"""The sizes of a model that a layout must divide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid3d.config.schema import Count, RecipeError, read_value
from hybrid3d.families import Config, Experts, Latents, family_of


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that restrict its layouts. Messages use their names in `config.json`."""

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    experts: Experts | None = None
    latents: Latents | None = None

    @classmethod
    def of(cls, config: Config) -> ModelShape:
        """Read the sizes as `from_config` does, with those that the model's family has.

        Raises:
            UnsupportedModel: no family supports the model.
            RecipeError: as `from_config`.
        """
        family = family_of(config)
        return cls.from_config(config, family.experts(config), family.latents(config))

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], experts: Experts | None = None, latents: Latents | None = None
    ) -> ModelShape:
        """Read the sizes from a Hugging Face `config.json`.

        `num_key_value_heads` and `head_dim` may be absent and then have the defaults of `transformers`.

        Raises:
            RecipeError: a size is missing or invalid; with all problems.
        """
        problems: list[str] = []

        def size(key: str, default: int | None = None) -> int:
            if default is not None and config.get(key) is None:
                return default
            try:
                return int(read_value(Count, config[key]))
            except (KeyError, ValueError) as error:
                problems.append(f"{key}: {'missing' if isinstance(error, KeyError) else error}")
                return 1

        heads, hidden = size("num_attention_heads"), size("hidden_size")
        if config.get("head_dim") is None and hidden % heads:
            problems.append(f"head_dim: missing, and num_attention_heads={heads} does not divide hidden_size={hidden}")
        shape = cls(
            num_layers=size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=max(1, hidden // heads)),
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            vocab_size=size("vocab_size"),
            max_position_embeddings=size("max_position_embeddings"),
            experts=experts,
            latents=latents,
        )
        if problems:
            raise RecipeError("config.json of the model", problems)
        return shape
