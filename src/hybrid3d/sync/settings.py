"""What a sync reads of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid3d.config import Recipe


@dataclass(frozen=True)
class SyncSettings:
    """The settings of a sync, equal on every rank.

    Attributes:
        bucket_bytes: the size of a staging buffer.
        ranks_per_node: the number of consecutive ranks that share a node.
        always_dense: why no sync may send changed elements alone; empty if some may.
    """

    bucket_bytes: int
    ranks_per_node: int
    always_dense: str = ""

    @classmethod
    def of(cls, recipe: Recipe) -> SyncSettings:
        return cls(recipe.sync.bucket_bytes, recipe.machine.gpus_per_node, recipe.always_dense)
