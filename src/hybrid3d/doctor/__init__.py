"""What `hybrid3d doctor [RECIPE]` examines: this machine, and whether a recipe's run can start on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid3d import launch_environment
from hybrid3d.config import Recipe

Severity = Literal["ok", "slow", "cannot start"]
OK: Severity = "ok"
SLOW: Severity = "slow"  # a run starts, and it costs time, or may cost the run later
CANNOT_START: Severity = "cannot start"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        found: a sentence with what was found and, where it is not as it should be, what is needed.
        severity: what it costs.
        fix: the command or setting that mends it; empty if there is nothing to mend, or if `found` says it.
        numbers: what was measured, for programs.
    """

    found: str
    severity: Severity = OK
    fix: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What an examination may use: the recipe whose run should start here, if any, and the answers of `answers.ask`."""

    recipe: Recipe | None = None
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def ranks(self) -> int:
        """Return how many ranks run on this machine: those of the launcher, else those of the recipe, else one."""
        if launch_environment.under_launcher():
            return launch_environment.local_world_size()
        return 1 if self.recipe is None else self.recipe.world_size

    def answer(self, question: str) -> Any:
        """Return the answer to a question; None if it was not answered."""
        return self.answers.get(question, {}).get("answer")
