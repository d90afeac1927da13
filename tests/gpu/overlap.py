"""A sync that overlaps the optimizer's step: no synchronization, overlapping intervals, and every bit arrives."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gpu import one_rank
from gpu.comparisons import Interval, in_both
from gpu.host_waits import no_synchronization
from gpu.models import SIZES
from gpu.record import Record
from hybrid3d.certify.tiny_models import write_checkpoint
from hybrid3d.config import Recipe, Sync
from hybrid3d.reshard.ends import PlainSink
from hybrid3d.reshard.move.device import SideStream, synchronize
from hybrid3d.rl.objective import sft_loss
from hybrid3d.sync import WeightSync, weight_sync
from hybrid3d.train.megatron.policy import Policy

# Weights of 0.6 GB in bfloat16, so that the optimizer's step and the copies take milliseconds
LARGE = {
    "cuda": dict(
        vocab_size=16384, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=16
    ),
    "cpu": {},
}
CONFIG = SIZES | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=False)
ROUNDS = 4


class Clock:
    """Marks points on the current CUDA stream, or in time on a CPU, and returns intervals between them."""

    def __init__(self, device: str):
        self._cuda = device == "cuda"
        self._start = self.mark()

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def interval(self, marks: tuple[Any, Any]) -> Interval:
        """Return an interval since the clock was made; the GPU must be idle."""
        if not self._cuda:
            return marks[0] - self._start, marks[1] - self._start
        return self._start.elapsed_time(marks[0]), self._start.elapsed_time(marks[1])


class MarkedStream(SideStream):
    """The side stream of a sync, with a mark where work on it begins and ends."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock
        self.marks: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        with super().behind():
            before = self.clock.mark()
            yield
            self.marks.append((before, self.clock.mark()))


def overlap(record: Record, device: str, must_overlap: bool) -> None:
    """Update a model several times, each time syncing its optimizer buckets as they are ready, and compare all bits.

    Args:
        must_overlap: whether copies must run at the same time as the optimizer's later buckets; otherwise it is only
            recorded whether they do.
    """
    config = CONFIG | LARGE[device]
    record(cuda_device_max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    with tempfile.TemporaryDirectory() as path:
        folder = write_checkpoint(Path(path), config)
        group = one_rank.start()
        recipe = one_rank.recipe_for(
            folder, "bfloat16", sync=Sync(bucket_mib=64 if device == "cuda" else 0.25, delta="never")
        )
        policy, other = (one_rank.make_policy(config, recipe, trainable) for trainable in (True, False))
    landing = PlainSink(other.weights.tensors, other.weights.demand)
    sync = weight_sync(recipe, group, policy.source(), landing)
    sync._stream = stream = MarkedStream(Clock(device))
    record(weight_bytes=sum(p.nbytes for p in landing.demand.pieces), optimizer_buckets=len(policy._stepping))
    apart, together = [], []
    for version in range(ROUNDS):
        apart.append(_apart(policy, sync, recipe, config, version, device))
        _expect_arrived(policy, other, f"version {version}, synced after the step")
    for version in range(ROUNDS, 2 * ROUNDS):
        steps, copies, milliseconds = _together(policy, sync, stream, recipe, config, version, device)
        together.append(milliseconds)
        _expect_arrived(policy, other, f"version {version}, synced during the step")
        assert landing.version == version, f"the sink has version {landing.version}, expected {version}"
        record(rounds=version + 1 - ROUNDS)
    step, synced = (statistics.median(numbers) for numbers in zip(*apart, strict=True))
    common, copied = in_both(steps, copies), sum(end - start for start, end in copies)
    record(step_ms=round(step, 3), sync_ms=round(synced, 3), together_ms=round(statistics.median(together), 3))
    record(saved_ms=round(step + synced - statistics.median(together), 3))
    record(copies_ms=round(copied, 3), copies_during_steps_ms=round(common, 3), overlapped=round(common / copied, 3))
    if device == "cuda" and must_overlap:
        said = f"{common:.3f} of {copied:.3f} ms of copies overlap the optimizer's step: expected a tenth or more"
        assert common > 0.1 * copied, said


def _apart(
    policy: Policy, sync: WeightSync, recipe: Recipe, config: Mapping[str, Any], version: int, device: str
) -> tuple[float, float]:
    """Update, then sync; return the milliseconds of the optimizer's buckets after the first, and of the sync."""
    clock, marks = Clock(device), []
    batch = one_rank.make_batch(config, version)
    policy.train_step(batch, sft_loss, recipe, lambda *unused: marks.append(clock.mark()))
    synchronize()
    began = time.perf_counter()
    sync.run(version)
    taken = (time.perf_counter() - began) * 1e3
    first, last = clock.interval((marks[0], marks[-1]))
    return last - first, taken


def _together(
    policy: Policy,
    sync: WeightSync,
    stream: MarkedStream,
    recipe: Recipe,
    config: Mapping[str, Any],
    version: int,
    device: str,
) -> tuple[list[Interval], list[Interval], float]:
    """Update and sync at the same time; return the intervals of the buckets' steps after the first, and of the copies.

    The last number is the milliseconds from the first bucket's end to the end of the sync.
    """
    clock = stream.clock = Clock(device)
    steps: list[tuple[Any, Any]] = []
    began: list[Any] = []

    def hook(bucket: int, last: bool) -> None:
        if began:
            steps.append((began[-1], clock.mark()))
        else:
            sync.begin(version)
            stream.marks.clear()  # only what `bucket_ready` starts
        with no_synchronization(device):
            sync.bucket_ready(bucket, last)
        began.append(clock.mark())

    policy.train_step(one_rank.make_batch(config, version), sft_loss, recipe, hook)
    copies = list(stream.marks)
    sync.finish()
    end = clock.mark()
    synchronize()
    total = clock.interval((began[0], end))
    return [clock.interval(one) for one in steps], [clock.interval(one) for one in copies], total[1] - total[0]


def _expect_arrived(policy: Policy, other: Policy, when: str) -> None:
    there = other.weights.tensors
    wrong = [name for name, tensor in policy.weights.tensors.items() if one_rank.bits_differ(tensor, there[name])]
    assert not wrong, f"{when}: {len(wrong)} tensors arrived with other bits, such as {wrong[:1]}"
