"""What ranks do about tensors that a verified sync finds corrupted."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid3d.reshard.ends import Exchange

LISTED = 5  # tensors that a message names


class CorruptSync(RuntimeError):
    """Tensors arrived corrupted twice: memory or a link of a machine is faulty."""

    def __init__(self, tensors: Sequence[str]):
        super().__init__(f"{len(tensors)} tensors arrived corrupted twice: {listed(tensors)}")


def corrupted_on_any(names: Sequence[str] | None, exchange: Exchange) -> tuple[str, ...]:
    """Return the corrupted tensors of all ranks, sorted; the same on every rank."""
    return tuple(sorted({name for _, of_ranks in exchange.unique(names) for name in of_ranks or ()}))


def listed(names: Sequence[str]) -> str:
    """Return the first names, for a message."""
    return ", ".join([*names[:LISTED], *(["..."] if len(names) > LISTED else [])])
