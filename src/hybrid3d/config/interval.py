"""Settings that say at which steps something is done: `always`, `never` or `every-N`."""

from __future__ import annotations

import re
from typing import Annotated

from hybrid3d.config.schema import Rule

Interval = Annotated[
    str, Rule(lambda s: re.fullmatch(r"always|never|every-[1-9]\d{0,8}", s) is not None, "always, never or every-N")
]


def is_due(interval: str, number: int) -> bool:
    """Return whether an `Interval` includes a step or a sync of this number; `every-N` includes the multiples of N."""
    if interval.startswith("every-"):
        return number % int(interval.removeprefix("every-")) == 0
    return interval == "always"
