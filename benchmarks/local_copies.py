"""The local part of a sync (packing, unpacking, copies that stay on the rank) against the machine's copy bandwidth.

    python benchmarks/local_copies.py recipes/qwen2.5-7b.yaml [SECTION.KEY=VALUE ...] [--layers N] [--hidden N]
        [--experts N] [--repeats N]

One process, on a GPU where there is one: the buffers of the rank that copies most, bound to the plan that both engines'
own code gives, with a transport that moves nothing.
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

COPIED = 1 << 30  # bytes of the copy that says what the machine can do; of a CPU's, a quarter


class Nowhere:
    """A transport whose messages never arrive, and are never waited for."""

    received_bytes = 0
    blocks_host = True

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None: ...

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None: ...

    def run(self) -> Nowhere:
        return self

    def wait(self) -> None: ...


def memory(pieces: Iterable[Piece | None], device: torch.device) -> NamedTensors:
    """Memory in which these pieces lie where they say."""
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
    """Of the median run."""
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
    """Bytes that the executor copies on the rank: staged ones, and those that stay."""
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
    wanted = [one.demand for one in answers.slots]
    slots = compute_placement(recipe, answers.holdings, wanted, answers.multiplicity).slots
    demand = {rank: wanted[slot % len(wanted)] for rank, slot in enumerate(slots)}
    plans = make_plan(answers.holdings, demand, recipe.sync.bucket_bytes, recipe.machine.gpus_per_node)
    plan = max(plans.values(), key=copied_bytes)
    held = memory((t.source for t in plan.transfers if t.src == plan.rank), device)
    lies = memory((t.target for t in plan.transfers if t.dst == plan.rank), device)
    executor = Executor(plan, held, lies, Nowhere(), device)
    one, other = (
        torch.zeros(COPIED // (1 if device.type == "cuda" else 4), dtype=torch.uint8, device=device) for _ in "ab"
    )
    best = one.nbytes / seconds(lambda: other.copy_(one), options.repeats, device)
    taken, nbytes = seconds(executor.run, options.repeats, device), copied_bytes(plan)
    print(f"{original.name}, scaled: {scale.describe(read_config(original.model.path))}; {describe_machine()}")
    print(f"rank {plan.rank} copies {nbytes / 1e6:.0f} MB in {executor.operations} operations")
    print(
        f"{nbytes / taken / 1e9:.1f} GB/s of {best / 1e9:.1f} GB/s that a plain copy does: {nbytes / taken / best:.2f}"
    )


if __name__ == "__main__":
    main()
