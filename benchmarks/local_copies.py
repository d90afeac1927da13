"""Compare the local part of a sync (packing, unpacking and local copies) with the machine's copy bandwidth.

    python benchmarks/local_copies.py recipes/qwen2.5-7b.yaml [SECTION.KEY=VALUE ...] [--layers N] [--hidden N]
        [--experts N] [--repeats N]

One process, on a GPU if there is one, allocates the buffers of the rank that copies the most bytes and executes its
part of the plan with a transport that transfers nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from hybrid3d.bench.report import describe_machine
from hybrid3d.bench.scaling import Scale, scale_recipe, write_model
from hybrid3d.config import load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.agreed_placement import compute_placement
from hybrid3d.planning.engine_queries import query_engines
from hybrid3d.reshard.executor import Executor, NamedTensors
from hybrid3d.reshard.layout import Piece
from hybrid3d.reshard.planner import RankPlan, make_plan

COPIED = 1 << 30  # bytes of the reference copy on a GPU; a quarter of that on a CPU


class NullTransport:
    """A transport that transfers nothing and never waits."""

    received_bytes = 0
    blocks_host = True

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None: ...

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None: ...

    def run(self) -> NullTransport:
        return self

    def wait(self) -> None: ...


def memory(pieces: Iterable[Piece | None], device: torch.device) -> NamedTensors:
    """Allocate the local tensors that the views of these pieces refer to."""
    extents: dict[str, int] = defaultdict(int)
    dtypes: dict[str, str] = {}
    for piece in pieces:
        if piece is not None:
            steps = zip(piece.box.size, piece.view.stride, strict=True)
            last = piece.view.offset + sum((n - 1) * step for n, step in steps)
            extents[piece.view.tensor] = max(extents[piece.view.tensor], last + 1)
            dtypes[piece.view.tensor] = piece.dtype
    return NamedTensors({t: torch.zeros(n, dtype=getattr(torch, dtypes[t]), device=device) for t, n in extents.items()})


def seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
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


def copied_bytes(plan: RankPlan) -> int:
    """Return the bytes that the executor copies on a rank: staging and local copies."""
    staged = sum(m.staging_bytes_on(plan.rank) for bucket in plan.buckets for m in bucket.messages)
    return staged + plan.local_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    for size in ("layers", "hidden", "experts"):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("recipe")
    options, overrides = parser.parse_known_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        scale = Scale(options.layers, options.hidden, options.experts)
        original = load_recipe(options.recipe, overrides)
        recipe, config = scale_recipe(replace(original, run=replace(original.run, dir=folder)), scale)
        write_model(recipe, config)
        answers = query_engines(recipe, read_config(recipe.model.path))
    wanted = [slot.demand for slot in answers.slots]
    slots = compute_placement(recipe, answers.holdings, wanted, answers.multiplicity).slots
    demand = {rank: wanted[slot % len(wanted)] for rank, slot in enumerate(slots)}
    plans = make_plan(answers.holdings, demand, recipe.sync.bucket_bytes, recipe.machine.gpus_per_node)
    plan = max(plans.values(), key=copied_bytes)
    source = memory((t.source for t in plan.transfers if t.src == plan.rank), device)
    target = memory((t.target for t in plan.transfers if t.dst == plan.rank), device)
    executor = Executor(plan, source, target, NullTransport(), device)
    first, second = (
        torch.zeros(COPIED // (1 if device.type == "cuda" else 4), dtype=torch.uint8, device=device) for _ in "ab"
    )
    best = first.nbytes / seconds(lambda: second.copy_(first), options.repeats, device)
    taken, nbytes = seconds(executor.run, options.repeats, device), copied_bytes(plan)
    print(f"{original.name}, scaled: {scale.describe(read_config(original.model.path))}; {describe_machine()}")
    print(f"rank {plan.rank} copies {nbytes / 1e6:.0f} MB in {executor.operations} operations")
    print(
        f"{nbytes / taken / 1e9:.1f} GB/s, compared with {best / 1e9:.1f} GB/s of a plain copy: "
        f"{nbytes / taken / best:.2f}"
    )


if __name__ == "__main__":
    main()
