"""Rotary settings of a checkpoint, parsed from `config.json` as transformers 5 does (which vLLM uses).

Transformers 5 writes `rope_parameters`, older checkpoints have `rope_theta` and `rope_scaling`, and a file may contain
all of them. Configs that the libraries would read differently are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid3d.families.values import COUNTS, Config, UnsupportedModel, abbreviate, is_finite_number, require_values

_CONSTANTS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Keys that change the embedding that vLLM computes and that transformers ignores.
_VLLM_ONLY = (
    *("mrope_section", "xdrope_section", "use_fope", "rope_dim", "is_deepseek_v4", "llama_4_scaling"),
    *("extrapolation_factor", "attn_factor", "apply_yarn_scaling", "apply_scale"),
)
# Aliases of the base and of the rotated fraction, which only vLLM reads.
_ALIASES = ("rotary_emb_base", "rotary_pct", "rotary_emb_fraction")


@dataclass(frozen=True)
class Rope:
    """Rotary settings of a model.

    Attributes:
        theta: the base.
        llama3, yarn: constants of Llama 3's or of YaRN scaling; None if the model does not use it.
        fraction: the part of each head's dims, from the first on, that is rotated.
    """

    theta: float
    llama3: Mapping[str, float] | None = None
    yarn: Mapping[str, float] | None = None
    fraction: float = 1.0


def rope_of(
    config: Config, scaling_type: str = "llama3", default_theta: float = 10000.0, default_fraction: float | None = None
) -> Rope:
    """Parse the rotary settings from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`.

    If `rope_scaling` is not empty, transformers 5 ignores `rope_parameters`, including the base in it.

    Args:
        scaling_type: the one type of scaling that the family supports.
        default_theta: the base of a config without one.
        default_fraction: the rotated fraction of a config without one; None supports whole heads only.

    Raises:
        UnsupportedModel: the scaling is of another type, lacks a constant or has an unsupported one, or two keys
            contradict each other.
    """
    require_values(config, **dict.fromkeys(_ALIASES))
    scaling, parameters = _table(config, "rope_scaling"), _table(config, "rope_parameters")
    key = "rope_scaling" if scaling else "rope_parameters"
    rope = _parse_table(config, key, scaling or parameters, scaling_type, default_theta)
    rope = replace(rope, fraction=_fraction(config, key, scaling or parameters, default_fraction))
    if scaling and parameters:
        other = _parse_table(config, "rope_parameters", parameters, scaling_type, rope.theta)
        other = replace(other, fraction=_fraction(config, "rope_parameters", parameters, default_fraction))
        other_is_scaled = other.llama3 is not None or other.yarn is not None
        same_basis = (other.theta, other.fraction) == (rope.theta, rope.fraction)
        if not same_basis or (other_is_scaled and other != rope):
            raise UnsupportedModel(
                f"rope_scaling and rope_parameters differ: transformers uses rope_scaling={dict(scaling)} "
                f"with rope_theta={rope.theta} and ignores rope_parameters={dict(parameters)}: "
                "put all settings, including rope_theta, into rope_parameters and remove rope_scaling"
            )
    return rope


def _table(config: Config, key: str) -> Mapping[str, Any]:
    """Return one of the two tables of rotary settings; an empty one if it is missing."""
    table = config.get(key) or {}
    if not isinstance(table, Mapping):
        raise UnsupportedModel(f"{key}={table!r}: expected an object")
    nested = [name for name, value in table.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModel(
            f"{key} has objects for {', '.join(nested)}: only one object for all layers is supported"
        )
    return table


def _parse_table(config: Config, key: str, table: Mapping[str, Any], scaling_type: str, default_theta: float) -> Rope:
    """Parse one of the two tables, with top-level keys of the config where the table lacks them."""
    theta = _value_of_either(config, key, table, "rope_theta")
    theta = default_theta if theta is None else theta
    if not is_finite_number(theta) or theta <= 1:
        raise UnsupportedModel(f"rope_theta={abbreviate(theta)}: expected a number above 1")
    require_values(table, **dict.fromkeys(_VLLM_ONLY))
    rope_type = _rope_type(key, table)
    if rope_type == "default":
        return Rope(theta)
    if rope_type != scaling_type:
        raise UnsupportedModel(f"rope_type={rope_type!r}: this family supports 'default' and {scaling_type!r}")
    length = "original_max_position_embeddings"
    table = {**table, length: _value_of_either(config, key, table, length)}
    for name in _CONSTANTS[rope_type]:
        if table.get(name) is not None and not is_finite_number(table[name]):
            raise UnsupportedModel(f"{key} has {name}={abbreviate(table[name])}: expected a number")
    missing = [name for name in _CONSTANTS[rope_type] if table.get(name) is None]
    if missing:
        raise UnsupportedModel(f"rope_type={rope_type!r} lacks {', '.join(missing)}")
    _check_constants(config, key, table)
    if rope_type == "llama3":
        return Rope(theta, llama3={name: table[name] for name in _CONSTANTS[rope_type]})
    require_values(table, attention_factor=None, truncate=True)
    if bool(table.get("mscale")) != bool(table.get("mscale_all_dim")):
        settings = ", ".join(f"{name}={table.get(name)}" for name in ("mscale", "mscale_all_dim"))
        raise UnsupportedModel(f"{settings}: the engines compute one without the other differently; set both or none")
    return Rope(theta, yarn={name: value for name, value in table.items() if is_finite_number(value)})


def _fraction(config: Config, key: str, table: Mapping[str, Any], default: float | None) -> float:
    """Return the rotated fraction of each head."""
    fraction = _value_of_either(config, key, table, "partial_rotary_factor")
    if default is None and fraction not in (None, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor={fraction}: only 1.0 is supported")
    if fraction is None:
        return 1.0 if default is None else default
    if not is_finite_number(fraction) or not 0 < fraction <= 1:
        raise UnsupportedModel(f"partial_rotary_factor={abbreviate(fraction)}: expected a number above 0, at most 1")
    return float(fraction)


def _rope_type(key: str, table: Mapping[str, Any]) -> str:
    """Return the type of scaling from `rope_type` or its older name `type`, which must not differ."""
    types = {name: table[name] for name in ("rope_type", "type") if name in table}
    if len({*map(repr, types.values())}) > 1 or not all(isinstance(value, str) for value in types.values()):
        values = ", ".join(f"{name}={value!r}" for name, value in types.items())
        raise UnsupportedModel(f"{key} has {values}: expected one string, in rope_type")
    return next(iter(types.values()), "default")


def _value_of_either(config: Config, key: str, table: Mapping[str, Any], name: str) -> Any:
    """Return a value from the table or from the top level of the config; if both have it, they must be equal."""
    if name in table and table[name] is None:
        raise UnsupportedModel(f"{key} has {name}=None: set a number or remove the key")
    nested, top_level = table.get(name), config.get(name)
    if nested is not None and top_level is not None and nested != top_level:
        raise UnsupportedModel(f"{name}={top_level!r}, but {key} has {name}={nested!r}: keep one of the two")
    return top_level if nested is None else nested


def _check_constants(config: Config, key: str, table: Mapping[str, Any]) -> None:
    """Check the ranges of the constants of a scaled rotary embedding."""
    for name, value in table.items():
        minimum = 1 if name in ("factor", "original_max_position_embeddings") else 0
        if type(value) in (int, float) and (not is_finite_number(value) or value < minimum):
            raise UnsupportedModel(f"{key} has {name}={value!r}: expected a number of at least {minimum}")
    length = table["original_max_position_embeddings"]
    max_positions = COUNTS["max_position_embeddings"]
    if type(length) is not int or length > max_positions:
        problem = f"original_max_position_embeddings={length!r}: expected an integer of at most {max_positions:,}"
        raise UnsupportedModel(f"{key} has {problem}")
    if table["factor"] * length > max_positions:  # vLLM allocates a table with one row per position
        product = f"factor={table['factor']} x original_max_position_embeddings={length}"
        problem = f"{product}: expected a product of at most {max_positions:,}"
        raise UnsupportedModel(f"{key} has {problem}")
    low, high = table.get("low_freq_factor", 0), table.get("high_freq_factor", 1)
    if low >= high:
        raise UnsupportedModel(
            f"{key} has low_freq_factor={low} and high_freq_factor={high}: high_freq_factor must be the larger one"
        )
    for name in ("beta_fast", "beta_slow"):
        if table.get(name, 1) == 0:
            raise UnsupportedModel(f"{key} has {name}=0: expected a number above 0")
