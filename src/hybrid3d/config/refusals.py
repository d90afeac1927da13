"""Records of refused combinations of settings: what is refused, and whether it could be otherwise.

Rule functions yield a record for each problem of a recipe. The number of combinations that could be built and are not
only falls (`tests/config/test_refusals.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MEGATRON = "megatron-core >=0.16.1,<0.20"
TRANSFORMER_ENGINE = "transformer-engine >=2.9,<2.21"
VLLM = "vllm >=0.31,<0.34"

Kind = Literal["arithmetic", "engine", "definition", "not_built"]
"""Why settings are refused:

- `arithmetic`: numbers do not divide or exceed each other, or mathematics gives them no meaning together;
- `engine`: no version of an engine in hybrid3d's range can do it;
- `definition`: a setting contradicts the other one, or has no effect or no meaning with it;
- `not_built`: it could be built, and is not.
"""


@dataclass(frozen=True)
class Refusal:
    """A problem of a recipe.

    Attributes:
        settings: dotted names of the settings, the refused one first. Of a layout they are those for which valid values
            are suggested, and may be keys of the model's `config.json`.
        message: what is wrong, with the values.
        engine: the engine and its range of versions, of the kind `engine`.
        fix: of a layout, the suggestion, if it is not a value of `settings` that can be searched for.
    """

    settings: tuple[str, ...]
    kind: Kind
    message: str
    engine: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        assert (self.kind == "engine") == bool(self.engine), "an engine's limit names the engine, and no other does"


def arithmetic(settings: str, message: str, fix: str = "") -> Refusal:
    """Return a refusal by arithmetic; `settings` are separated by spaces, as in the functions below."""
    return Refusal(tuple(settings.split()), "arithmetic", message, fix=fix)


def by_engine(engine: str, settings: str, message: str, fix: str = "") -> Refusal:
    """Return a refusal of what no version of an engine in hybrid3d's range can do."""
    return Refusal(tuple(settings.split()), "engine", message, engine, fix)


def definition(settings: str, message: str, fix: str = "") -> Refusal:
    """Return a refusal of settings that contradict each other, or of one without an effect."""
    return Refusal(tuple(settings.split()), "definition", message, fix=fix)


def not_built(settings: str, message: str, fix: str = "") -> Refusal:
    """Return a refusal of what could be built and is not."""
    return Refusal(tuple(settings.split()), "not_built", message, fix=fix)
