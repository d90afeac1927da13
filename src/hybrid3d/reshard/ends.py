"""The two ends of a sync, what it asks of the ranks between them, and the ends of a rank that has only one.

A source is what a rank sends, a sink what it receives. Sources wrap sources (`reshard/sources.py`): every rank builds
the same chain, over its own weights or over `NoSource`, so that what is collective in it is called on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from hybrid3d.reshard.delta.encoding import Changes
from hybrid3d.reshard.move.memory import strided_view
from hybrid3d.reshard.plan.classes import Group
from hybrid3d.reshard.plan.layout import Demand, Fill, Holdings, Piece, Shape


class Exchange(Protocol):
    """The collectives of the ranks of a sync; every rank calls each of them together.

    Attributes:
        rank: this rank, as plans name it.
        ranks: that of each member, in the order of members; a rank's number says what node it is on.
    """

    rank: int
    ranks: Sequence[int]

    def unique(self, value: Any) -> list[tuple[list[int], Any]]:
        """Return each distinct value once, with the ranks that have it."""

    def minimum(self, number: int) -> int: ...

    def maximum(self, numbers: Sequence[int]) -> list[int]:
        """Return the element-wise maximum; every rank gives as many numbers."""

    def maximum_of(self, values: torch.Tensor) -> None:
        """Replace the elements of a tensor by their maximum over the ranks."""


class Source(Protocol):
    """Reads the pieces that a rank holds: the part of a `WeightSource` that an executor needs."""

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the piece's elements, shaped as its box; a view of live memory where possible."""


class Sink(Protocol):
    """Takes the pieces that a rank wants, layer by layer: the part of a `WeightSink` that an executor needs.

    Two layers may be open at a time: the next one may be arriving while the last one is finalized.
    """

    def write(self, piece: Piece) -> torch.Tensor:
        """Return a view, shaped as the piece's box, that may be written while the piece's layer is open.

        What was written may also be read until the layer is closed. The view stays valid until the next `prepare`.
        """

    def open(self, layer: int | None) -> None:
        """Prepare a layer for writing; None stands for the tensors outside of all layers."""

    def close(self, layer: int | None) -> None:
        """Finalize a layer that has been written completely."""


class ChangeSource(Protocol):
    """Tells which elements of a rank's weights have changed since `clear`; those that it does not track may have.

    Attributes:
        complete: False if tracked weights were changed by something that it does not see.
        elements: the number of tracked elements.
    """

    @property
    def complete(self) -> bool: ...

    @property
    def elements(self) -> int: ...

    def bitmaps(self) -> Changes:
        """Return a bitmap for each local tensor that is tracked, by its name."""

    def check(self) -> bool:
        """Return False if something else than updates has changed tracked weights, after a look at them."""

    def count_changed(self) -> int: ...

    def clear(self) -> None:
        """Begin anew: the weights as they are now have been synced."""


class WeightSource(Protocol):
    """What a rank sends.

    `agree` is called once; then, for each version, `begin`, `advance` any number of times, with the optimizer buckets
    that this rank has updated, `complete` and `end`, or `abandon` at any time after `begin`.

    Attributes:
        holdings: what is sent, which need not be what the rank owns.
        ready_after: by local tensor, the optimizer bucket after which it has its new values; others are not updated.
        changes: which elements changed since the last version.
    """

    @property
    def holdings(self) -> Holdings: ...

    @property
    def ready_after(self) -> Mapping[str, int]: ...

    @property
    def changes(self) -> ChangeSource: ...

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the elements of a piece, or of a part of one that is held: the same memory in each version.

        Its values are those of the version from when `advance` or `complete` allows it until `end`.
        """

    def agree(self, holders: Sequence[Group], rounded_scales: Collection[str]) -> None:
        """Learn what all ranks hold, and of which kinds of tensors some engine takes scales that are powers of two."""

    def begin(self) -> None:
        """Begin a version: allocate what it needs. After a version that failed, `abandon` is called first."""

    def advance(self, bucket: int) -> bool:
        """Make what the updates up to this optimizer bucket allow; False: nothing is sent before `complete`.

        The answer for a bucket is the same on every rank: otherwise buckets of the plan wait for each other.
        """

    def complete(self, exchange: Exchange) -> None:
        """Make the rest, together with all ranks; everything may be read then."""

    def end(self) -> None:
        """Undo `begin`, once all has arrived."""

    def abandon(self) -> None:
        """Undo `begin` of a version that does not arrive, in whatever state it is; twice is harmless."""


class WeightSink(Sink, Protocol):
    """What a rank receives.

    `demand_for` is called once, and `prepare` with each plan; then, for each version, `begin`, `open`, `write` and
    `close` of each layer, `end` and `commit`, or `abandon`.

    Attributes:
        version: of the weights that the engine has; None from `begin` to `commit`.
        keeps_weights: whether the weights stay from sync to sync, so that a sync may send changed elements alone.
        finalize_bytes: memory that open layers take beside the live weights.
        demand: what `demand_for` has returned.
        rounded_scales: the kinds of tensors in FP8 whose scales must be powers of two.
    """

    @property
    def version(self) -> int | None: ...

    @property
    def keeps_weights(self) -> bool: ...

    @property
    def finalize_bytes(self) -> int: ...

    @property
    def demand(self) -> Demand: ...

    @property
    def rounded_scales(self) -> Collection[str]: ...

    def demand_for(self, shapes: Mapping[str, Shape]) -> Demand:
        """Return what the rank needs of the canonical tensors of these shapes, and where it is written.

        Raises:
            UnsupportedLoader: the engine's loader cannot be replayed on shards.
        """

    def prepare(self, order: Sequence[int | None]) -> None:
        """Assign memory to the layers, which will be opened in this order."""

    def begin(self) -> None:
        """Begin a version, or begin it again where it arrived corrupted."""

    def skip(self, layer: int | None) -> None:
        """Count a layer as closed without `open` and `close`: what was written there is not finalized."""

    def end(self) -> None:
        """Free extra memory.

        Raises:
            RuntimeError: layers are missing; the engine is not usable until a sync succeeds.
        """

    def commit(self, version: int) -> None:
        """Let the engine use the weights: drop what it has computed with older ones, and set `version`."""

    def kept_tensors(self) -> Collection[str]:
        """Return the local names of the tensors that stay, between two syncs, in the memory that a sync writes."""

    def abandon(self) -> None:
        """Put the live weights back where a sync was interrupted; `version` stays None. Twice is harmless."""


class NothingTracked:
    """No change is known: all elements are sent in each sync."""

    complete = False
    elements = 0

    def bitmaps(self) -> Changes:
        return {}

    def check(self) -> bool:
        return True

    def count_changed(self) -> int:
        return 0

    def clear(self) -> None: ...


NOTHING_TRACKED = NothingTracked()


class NamedTensors:
    """A source and sink over local tensors by name: a piece is the strided view that its `View` describes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def read(self, piece: Piece) -> torch.Tensor:
        return strided_view(self._tensors[piece.view.tensor], piece.view, piece.box.size)

    write = read

    def open(self, layer: int | None) -> None: ...

    def close(self, layer: int | None) -> None: ...

    def fill(self, fill: Fill) -> None:
        strided_view(self._tensors[fill.view.tensor], fill.view, fill.size).fill_(fill.value)


class PlainSource(NamedTensors):
    """A `WeightSource` of tensors that need nothing made before they are sent."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        holdings: Holdings,
        ready_after: Mapping[str, int] | None = None,
        changes: ChangeSource = NOTHING_TRACKED,
    ):
        super().__init__(tensors)
        self.holdings, self.ready_after, self.changes = holdings, ready_after or {}, changes

    def agree(self, holders: Sequence[Group], rounded_scales: Collection[str]) -> None: ...

    def begin(self) -> None: ...

    def advance(self, bucket: int) -> bool:
        return True

    def complete(self, exchange: Exchange) -> None: ...

    def end(self) -> None: ...

    def abandon(self) -> None: ...


class PlainSink(NamedTensors):
    """A `WeightSink` of tensors that need no finalization."""

    version: int | None = None
    keeps_weights = True
    finalize_bytes = 0
    rounded_scales: Collection[str] = ()

    def __init__(self, tensors: Mapping[str, torch.Tensor], demand: Demand):
        super().__init__(tensors)
        self.demand = demand

    def demand_for(self, shapes: Mapping[str, Shape]) -> Demand:
        return self.demand

    def prepare(self, order: Sequence[int | None]) -> None: ...

    def begin(self) -> None:
        self.version = None

    def skip(self, layer: int | None) -> None: ...

    def end(self) -> None: ...

    def commit(self, version: int) -> None:
        self.version = version

    def kept_tensors(self) -> Collection[str]:
        return self._tensors.keys()

    def abandon(self) -> None: ...


class NoSource(PlainSource):
    """The source of a rank that does not train."""

    def __init__(self) -> None:
        super().__init__({}, Holdings(()))


class NoSink(PlainSink):
    """The sink of a rank that does not generate."""

    def __init__(self) -> None:
        super().__init__({}, Demand((), ()))
