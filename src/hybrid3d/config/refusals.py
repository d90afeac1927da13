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
        message: what is wrong, with the values.
        settings: of a layout, the settings for which valid values are suggested, or keys of the model's `config.json`.
        engine: the engine and its range of versions, of the kind `engine`.
        fix: of a layout, the suggestion, if it is not a value of `settings` that can be searched for.
    """

    kind: Kind
    message: str
    settings: tuple[str, ...] = ()
    engine: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        assert (self.kind == "engine") == bool(self.engine), "an engine's limit names the engine, and no other does"


def arithmetic(message: str, settings: str = "", fix: str = "") -> Refusal:
    """Return a refusal by arithmetic; `settings` are separated by spaces, as in the functions below."""
    return Refusal("arithmetic", message, tuple(settings.split()), fix=fix)


def by_engine(engine: str, message: str, settings: str = "", fix: str = "") -> Refusal:
    """Return a refusal of what no version of an engine in hybrid3d's range can do."""
    return Refusal("engine", message, tuple(settings.split()), engine, fix)


def definition(message: str, settings: str = "", fix: str = "") -> Refusal:
    """Return a refusal of settings that contradict each other, or of one without an effect."""
    return Refusal("definition", message, tuple(settings.split()), fix=fix)


def not_built(message: str, settings: str = "", fix: str = "") -> Refusal:
    """Return a refusal of what could be built and is not."""
    return Refusal("not_built", message, tuple(settings.split()), fix=fix)
