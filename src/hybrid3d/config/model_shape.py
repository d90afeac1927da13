"""Whether a recipe fits a model, and which values would.

Every problem names the keys whose values could solve it. What a message offers for a key has been tried: with it, the
recipe has no problem of that key left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid3d.config.layout_rules import CPU_HEAD_DIMS, MAX_PROMPTS, STAGES, Device, misfits, prompts_step
from hybrid3d.config.schema import MAX_RANKS, Count, RecipeError, read_value
from hybrid3d.errors import UserMistake
from hybrid3d.families import family_of
from hybrid3d.storage.user_files import read_json_file

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe
    from hybrid3d.families import Experts, Latents

MOST_STAGES = 1_000  # that are tried in looking for a valid value


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that layouts must divide. In messages they bear their names in `config.json`."""

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
    def from_config(
        cls, config: Mapping[str, object], experts: Experts | None = None, latents: Latents | None = None
    ) -> ModelShape:
        """From a Hugging Face `config.json`; the two sizes that may be absent there take that library's defaults."""
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


def check_layout(recipe: Recipe, model: ModelShape, *, device: Device | None) -> None:
    """RecipeError listing every way in which the recipe does not fit the model on this device.

    What follows from a wrong layout is not held against the rest: its count of ranks, for one, means nothing.

    Args:
        device: where it will run; None where it is only planned, and what this machine cannot run does not matter.
    """
    problems = misfits(recipe, model, device)
    if problems:
        offers: dict[str, list[str]] = {}
        lines = []
        for problem in problems:
            for key in problem.keys if not problem.fix else ():
                if key not in offers:
                    offers[key] = _offers(recipe, model, device, key)
            lines.append(f"{problem.says}: {problem.fix or _offered(problem.keys, offers)}")
        raise RecipeError(f"recipe {recipe.name} does not fit its model", lines)


def _offers(recipe: Recipe, model: ModelShape, device: Device | None, key: str) -> list[str]:
    """The nearest values of a key on both sides with which none of its problems is left; `null`, where nothing else."""
    section, _, name = key.partition(".")
    if key == "head_dim":
        value, valid = model.head_dim, [*CPU_HEAD_DIMS]
    else:
        value, valid = getattr(getattr(recipe, section), name), _candidates(recipe, model, key)

    def fits(other: int | None) -> bool:
        if key == "head_dim":
            return True
        tried = replace(recipe, **{section: replace(getattr(recipe, section), **{name: other})})
        return not any(key in problem.keys for problem in misfits(tried, model, device))

    below = next((n for n in reversed(valid) if n < value and fits(n)), None)
    near = [n for n in (below, next((n for n in valid if n > value and fits(n)), None)) if n is not None]
    if not near and name in STAGES and fits(None):
        return ["null"]
    return [str(n) for n in near]


def _offered(keys: Sequence[str], offers: Mapping[str, Sequence[str]]) -> str:
    said = [
        f"nearest valid {'value' if len(offers[key]) == 1 else 'values'} of {key} "
        f"{'is' if len(offers[key]) == 1 else 'are'} {', '.join(offers[key])}"
        for key in keys
        if offers[key]
    ]
    return "; ".join(said) or f"no value of {' or '.join(keys)} alone is valid here"


def _candidates(recipe: Recipe, model: ModelShape, key: str) -> list[int]:
    """Values of a key among which the valid ones are, ascending."""
    if key in ("train.tp", "rollout.tp"):
        return _divisors(model.num_attention_heads)
    if key == "train.pp":
        return [*range(1, min(model.num_layers, MOST_STAGES) + 1)]
    if key == "train.vpp" or key.endswith("_stage_layers"):
        return [*range(1, min(model.num_layers, MOST_STAGES) + 1)]
    if key == "train.ep" and model.experts is not None:
        return _divisors(model.experts.count)
    if key == "train.etp" and model.experts is not None:
        return _divisors(model.experts.width)
    if key == "rollout.dp":
        return _divisors(recipe.world_size)
    if key == "algorithm.prompts_per_step":
        step, prompts = prompts_step(recipe), recipe.algorithm.prompts_per_step
        around = range(max(step, prompts // step * step), prompts + step + 1, step)
        return [n for n in around if n <= MAX_PROMPTS]
    return [1]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, MAX_RANKS) + 1) if number % n == 0]


def check_layout_early(recipe: Recipe) -> None:
    """`check_layout` by the model's `config.json` alone: no torch is imported, so that a refusal comes at once.

    Raises:
        UserMistake: the config cannot be read, no family computes it, or the recipe does not fit it.
    """
    config = read_json_file(Path(recipe.model.path) / "config.json")
    try:
        family = family_of(config)
        shape = ModelShape.from_config(config, experts=family.experts(config), latents=family.latents(config))
    except UserMistake:
        raise
    except Exception:  # values of wrong types: the full check of the checkpoint names them
        return
    check_layout(recipe, shape, device=None)
