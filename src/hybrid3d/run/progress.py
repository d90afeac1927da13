"""What a checkpoint holds besides models: how far a run has come, and the state of what adapts itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """How far a run has come. A run that begins has the defaults.

    Attributes:
        batch: number of the first batch of prompts that was not drawn yet.
        unfinished: places of the prompts that were drawn before and are not trained yet, of partial rollouts.
        kl: the state of the KL coefficient.
        guard: that of the guard.
        control: the settings that were changed so far, and the file of changes as it was read last.
    """

    batch: int = 0
    unfinished: tuple[tuple[int, int], ...] = ()
    kl: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] = field(default_factory=dict)
    control: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Progress:
        """Return what a checkpoint says; those of fine-tuning on data have no prompts and no KL."""
        unfinished = tuple((batch, place) for batch, place in saved.get("unfinished", ()))
        others = {key: saved[key] for key in ("batch", "kl", "guard", "control") if key in saved}
        return cls(unfinished=unfinished, **others)

    def as_json(self) -> dict[str, Any]:
        """Return what a checkpoint says."""
        return asdict(self)

    @property
    def learner(self) -> dict[str, Any]:
        """The part that a recorded step says: that of the learner."""
        return {"kl": self.kl, "guard": self.guard}
