"""A sink whose engine keeps twice what was sent: all that a new rollout engine takes to receive weights."""

from __future__ import annotations

from collections.abc import Collection

from hybrid3d.reshard.ends import PlainSink
from hybrid3d.reshard.plan.classes import layer_of


class Doubling(PlainSink):
    """Finalizes a layer by doubling it."""

    def close(self, layer: int | None) -> None:
        for piece in self.demand.pieces:
            if layer_of(piece.name) == layer:
                self.write(piece).mul_(2)

    def kept_tensors(self) -> Collection[str]:
        return ()  # what is there is not what was written
