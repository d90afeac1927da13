"""The rotary embedding of a checkpoint, read from its `config.json` as transformers 5 reads it, and vLLM through it.

Transformers 5 writes `rope_parameters`, older checkpoints have `rope_theta` and `rope_scaling`, and a file may have all
of them. What one reader would take and another would not is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid3d.families.values import COUNTS, Config, UnsupportedModel, abbreviate, is_finite_number, require_values

_CONSTANTS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# vLLM computes another embedding where one of these is said, transformers the same without it.
_VLLM_ALONE = (
    *("mrope_section", "xdrope_section", "use_fope", "rope_dim", "is_deepseek_v4", "llama_4_scaling"),
    *(
        "extrapolation_factor",
        "attn_factor",
        "apply_yarn_scaling",
        "apply_scale",
    ),
)
# Other names of the base and of the rotated share, which vLLM reads.
_ALIASES = ("rotary_emb_base", "rotary_pct", "rotary_emb_fraction")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: its base, and the constants of its scaling as the checkpoint configures them, by its kind."""

    theta: float
    llama3: Mapping[str, float] | None = None
    yarn: Mapping[str, float] | None = None


def rope_of(config: Config, known: str = "llama3", theta: float = 10000.0) -> Rope:
    """Rotary settings, in either form: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Where `rope_scaling` says anything, transformers 5 drops `rope_parameters`, the base in it included.

    Args:
        known: the kind of scaling that the family computes.
        theta: the base where none is said.

    Raises:
        UnsupportedModel: the scaling is of another kind, lacks a constant, or has one that is not computed; or two
            places say different things.
    """
    require_values(config, **dict.fromkeys(_ALIASES))
    scaling, parameters = _table(config, "rope_scaling"), _table(config, "rope_parameters")
    key = "rope_scaling" if scaling else "rope_parameters"
    used = _read(config, key, scaling or parameters, known, theta)
    if scaling and parameters:
        other = _read(config, "rope_parameters", parameters, known, used.theta)
        scaled = other.llama3 is not None or other.yarn is not None
        if other.theta != used.theta or (scaled and other != used):
            raise UnsupportedModel(
                f"rope_scaling and rope_parameters differ: transformers takes rope_scaling={dict(scaling)} alone, "
                f"with rope_theta={used.theta}, and leaves out rope_parameters={dict(parameters)}: "
                "write all of it, rope_theta included, in rope_parameters, and remove rope_scaling"
            )
    return used


def _table(config: Config, key: str) -> Mapping[str, Any]:
    table = config.get(key) or {}
    if not isinstance(table, Mapping):
        raise UnsupportedModel(f"{key}={table!r}: a table of constants is needed")
    nested = [name for name, value in table.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModel(f"{key} has a table for {', '.join(nested)}: only one for all layers is computed")
    return table


def _read(config: Config, key: str, table: Mapping[str, Any], known: str, theta: float) -> Rope:
    """What one of the two tables says, completed by keys beside it."""
    base = _agreed(config, key, table, "rope_theta")
    base = theta if base is None else base
    if not is_finite_number(base) or base <= 1:
        raise UnsupportedModel(f"rope_theta={abbreviate(base)}: a number above 1 is needed")
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        factor = table["partial_rotary_factor"]
        raise UnsupportedModel(f"partial_rotary_factor={factor}: only 1.0 is computed faithfully")
    require_values(table, **dict.fromkeys(_VLLM_ALONE))
    kind = _kind(key, table)
    if kind == "default":
        return Rope(base)
    if kind != known:
        raise UnsupportedModel(f"rope_type={kind!r}: this family knows 'default' and {known!r}")
    length = "original_max_position_embeddings"
    table = {**table, length: _agreed(config, key, table, length)}
    for name in _CONSTANTS[kind]:
        if table.get(name) is not None and not is_finite_number(table[name]):
            raise UnsupportedModel(f"{key} has {name}={abbreviate(table[name])}: a number is needed")
    lacking = [name for name in _CONSTANTS[kind] if table.get(name) is None]
    if lacking:
        raise UnsupportedModel(f"rope_type={kind!r} lacks {', '.join(lacking)}")
    _check_constants(config, key, table)
    if kind == "llama3":
        return Rope(base, llama3={name: table[name] for name in _CONSTANTS[kind]})
    require_values(table, attention_factor=None, truncate=True)
    if bool(table.get("mscale")) != bool(table.get("mscale_all_dim")):
        said = ", ".join(f"{name}={table.get(name)}" for name in ("mscale", "mscale_all_dim"))
        raise UnsupportedModel(f"{said}: one without the other is computed differently by each engine")
    return Rope(base, yarn={name: value for name, value in table.items() if is_finite_number(value)})


def _kind(key: str, table: Mapping[str, Any]) -> str:
    said = {name: table[name] for name in ("rope_type", "type") if name in table}
    if len({*map(repr, said.values())}) > 1 or not all(isinstance(kind, str) for kind in said.values()):
        values = ", ".join(f"{name}={kind!r}" for name, kind in said.items())
        raise UnsupportedModel(f"{key} has {values}: one name of a kind is needed, in rope_type")
    return next(iter(said.values()), "default")


def _agreed(config: Config, key: str, table: Mapping[str, Any], name: str) -> Any:
    """A value that may stand in the table or beside it, which must not differ."""
    if name in table and table[name] is None:
        raise UnsupportedModel(f"{key} has {name}=None: give a number, or remove the key")
    inside, beside = table.get(name), config.get(name)
    if inside is not None and beside is not None and inside != beside:
        raise UnsupportedModel(f"{name}={beside!r}, and {key} has {name}={inside!r}: keep one of the two")
    return beside if inside is None else inside


def _check_constants(config: Config, key: str, table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        least = 1 if name in ("factor", "original_max_position_embeddings") else 0
        if type(value) in (int, float) and (not is_finite_number(value) or value < least):
            raise UnsupportedModel(f"{key} has {name}={value!r}: a number of {least} or more is needed")
    length = table["original_max_position_embeddings"]
    longest = COUNTS["max_position_embeddings"]
    if type(length) is not int or length > longest:
        problem = f"original_max_position_embeddings={length!r}: an integer of at most {longest:,} is needed"
        raise UnsupportedModel(f"{key} has {problem}")
    if table["factor"] * length > longest:  # vLLM makes a table of so many rows
        problem = f"factor={table['factor']} x original_max_position_embeddings={length}: at most {longest:,} is needed"
        raise UnsupportedModel(f"{key} has {problem}")
    low, high = table.get("low_freq_factor", 0), table.get("high_freq_factor", 1)
    if low >= high:
        raise UnsupportedModel(f"{key} has low_freq_factor={low} and high_freq_factor={high}: the second must be more")
    for name in ("beta_fast", "beta_slow"):
        if table.get(name, 1) == 0:
            raise UnsupportedModel(f"{key} has {name}=0: a number above 0 is needed")
