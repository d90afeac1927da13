"""Measures the local part of a sync (packing, unpacking and local copies) without sending anything."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.plan.layout import Piece
from hybrid3d.reshard.plan.planner import RankPlan

PLAIN_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}


@dataclass(frozen=True)
class LocalCopies:
    """Median seconds of the copies of one rank, beside those of one plain copy.

    Attributes:
        nbytes: that are copied; each is read and written once.
        operations: sends, receives and copies.
        plain_rate: bytes per second of a plain copy.
    """

    nbytes: int
    operations: int
    seconds: float
    plain_rate: float

    @property
    def predicted_seconds(self) -> float:
        return self.nbytes / self.plain_rate


class NullTransport:
    """A transport that transfers nothing and never waits."""

    received_bytes = network_bytes = 0
    blocks_host = True
    shared_memory = None

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None: ...

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None: ...

    def run(self) -> NullTransport:
        return self

    def wait(self) -> None: ...


def copied_bytes(plan: RankPlan) -> int:
    """Return the bytes that the executor copies on a rank: staging and local copies."""
    staged = sum(m.staging_bytes_on(plan.rank) for bucket in plan.buckets for m in bucket.messages)
    return staged + plan.local_bytes


def measure(plan: RankPlan, device: torch.device, repeats: int) -> LocalCopies:
    """Execute a rank's part of a plan between tensors that are allocated for it."""
    held = allocate((t.source for t in plan.transfers if t.src == plan.rank), device)
    wanted = allocate((t.target for t in plan.transfers if t.dst == plan.rank), device)
    executor = Executor(plan, NamedTensors(held), NamedTensors(wanted), NullTransport(), device)
    taken = _seconds(executor.run, repeats, device)
    one, other = (torch.zeros(PLAIN_COPY_BYTES[device.type], dtype=torch.uint8, device=device) for _ in "ab")
    plain_rate = one.nbytes / _seconds(lambda: other.copy_(one), repeats, device)
    return LocalCopies(copied_bytes(plan), executor.operations, taken, plain_rate)


def allocate(pieces: Iterable[Piece | None], device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate the local tensors that the views of these pieces refer to, by name."""
    extents: dict[str, int] = defaultdict(int)
    dtypes: dict[str, str] = {}
    for piece in pieces:
        if piece is not None:
            steps = zip(piece.box.size, piece.view.stride, strict=True)
            last = piece.view.offset + sum((n - 1) * step for n, step in steps)
            extents[piece.view.tensor] = max(extents[piece.view.tensor], last + 1)
            dtypes[piece.view.tensor] = piece.dtype
    return {t: torch.zeros(n, dtype=getattr(torch, dtypes[t]), device=device) for t, n in extents.items()}


def _seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds of the median run, after two runs of warmup."""
    taken = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])
