"""Time methods by which other trainers move weights beside `hybrid3d bench`, with the same engines, and print a table.

    torchrun --nproc-per-node 4 benchmarks/other_trainers.py RECIPE [key=value ...] [--layers N] [--hidden N] ...

The methods are a packed broadcast, a gather on the ranks that train and, with `--changed`, a gathered delta
(`benchmarks/methods`), and hybrid3d's own plan over NIXL, where that is installed. Arguments, measurements and the
table are those of `hybrid3d bench`, with a row for each method and a line that compares it with the sync. Start as many
ranks as the recipe has.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid3d.bench.task import Bench
    from hybrid3d.config import Recipe
    from hybrid3d.families import Config
    from hybrid3d.ledger import RankStart
    from hybrid3d.run.folder import RunFolder

NAMES = {
    "packed_broadcast": "packed broadcast through one rank, experts from shard to shard",
    "trainer_gather": "gather on the ranks that train (TP and EP), from there peer to peer",
    "over_nixl": "hybrid3d over NIXL",
    "gathered_delta": "gathered delta: changed elements to one rank, from there to all",
}
REFERENCES = {"gathered_delta": "delta"}  # what a method is compared with, other than a sync of all elements


def add_methods(bench: Bench, recipe: Recipe) -> None:
    """Add the methods to those of the benchmark."""
    from methods.gathered_delta import GatheredDelta
    from methods.over_nixl import OverNixl, is_installed
    from methods.packed_broadcast import PackedBroadcast
    from methods.trainer_gather import TrainerGather

    from hybrid3d.reshard.move.device import device

    (peers, *ends), sync, transport, on = bench.ends, bench.sync, bench.sync.transport, device()
    bench.compare("packed_broadcast", PackedBroadcast(peers, sync.plan, *ends, transport, on))
    sizes = recipe.sync.bucket_bytes, recipe.machine.gpus_per_node
    bench.compare("trainer_gather", TrainerGather(peers, sync.plan, *ends, *sizes, transport, bench.group, on))
    if is_installed(bench.group):
        over_nixl = OverNixl(sync.plan, sync.source, ends[1][1], sizes[1], bench.group, on)
        bench.compare("over_nixl", over_nixl)
    if bench.changes is not None:
        gathered = GatheredDelta(peers, sync.sparse, bench.changes.bits, *ends, transport, on)
        bench.compare("gathered_delta", gathered, of_changes=True)


def add_ratios(found: dict[str, Any]) -> None:
    """Add each method's bytes and seconds, as multiples of the sync's, and what its bitmaps take."""
    for name in NAMES.keys() & found["seconds"].keys():
        reference = REFERENCES.get(name, "hybrid3d")
        sent = found["received_bytes" if reference == "hybrid3d" else f"{reference}_bytes"]
        found["ratios"][f"bytes_{name}"] = found[f"{name}_bytes"] / sent if sent else None
        found["ratios"][f"seconds_{name}"] = found["seconds"][name] / found["seconds"][reference]
    if "gathered_delta" in found["memory"]:
        found["memory"]["gathered_delta"] += found["max_bitmap_bytes"]


def format_page(found: dict[str, Any]) -> str:
    """Return the table of `hybrid3d bench` with the methods' rows, and their ratios."""
    from hybrid3d.bench.report import METHODS, format_table

    lines = [format_table(found, METHODS | NAMES)]
    for name in NAMES:
        if name in found["seconds"]:
            times = found["ratios"][f"bytes_{name}"]
            lines.append(
                f"{name} / {REFERENCES.get(name, 'hybrid3d')}: {'all' if times is None else f'{times:.2f}'} of bytes, "
                f"{found['ratios'][f'seconds_{name}']:.2f} of seconds."
            )
    return "\n".join(lines)


def of_rank(
    recipe: Recipe,
    config: Config,
    scaling: str,
    folder: RunFolder,
    options: argparse.Namespace,
    start: RankStart,
) -> None:
    """Measure all methods on one rank; rank 0 prints them."""
    from hybrid3d.bench.report import summarize
    from hybrid3d.bench.start import build_bench

    bench = build_bench(recipe, config, folder, options.changed, start, lambda message: None)
    add_methods(bench, recipe)
    measured = bench.measure(options.repeats)
    if start.console is not None:
        found = summarize(recipe, scaling, measured, options.changed)
        add_ratios(found)
        text = json.dumps(found, indent=2) if options.json else format_page(found)
        start.console.print(text, highlight=False, markup=False, soft_wrap=True)


def run(options: argparse.Namespace) -> int:
    """Run as one of the ranks, and return its exit code."""
    from hybrid3d.bench.scaling import Scale, scale_recipe
    from hybrid3d.bench.start import check_benchmark_memory
    from hybrid3d.cli.starting import run_as_rank, set_device_connections
    from hybrid3d.config import RecipeError, load_recipe
    from hybrid3d.inputs.models import read_config
    from hybrid3d.run.folder import RunFolder

    recipe = load_recipe(options.recipe, options.overrides)
    if recipe.is_split:
        raise RecipeError(recipe.name, ["the methods need ranks that train and generate: leave out roles.generation"])
    if recipe.rollout is not None and recipe.rollout.quantization is not None:
        raise RecipeError(recipe.name, ["the bits of weights in FP8 are not known: set rollout.quantization=null"])
    set_device_connections(recipe)
    scale = Scale(options.layers, options.hidden, options.experts)
    smaller, config = scale_recipe(recipe, scale, options.changed)
    check_benchmark_memory(smaller, config, options.changed)
    folder, scaling = RunFolder.for_recipe(smaller), scale.describe(read_config(recipe.model.path))
    return run_as_rank(smaller, folder, functools.partial(of_rank, smaller, config, scaling, folder, options))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe's")
    for size in ("layers", "hidden", "experts"):
        parser.add_argument(f"--{size}", type=int, metavar="N", help=f"as of `hybrid3d bench --{size}`")
    parser.add_argument("--changed", type=float, metavar="P", help="also time syncs of this fraction of all elements")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each method (default: 15)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_intermixed_args()
    from hybrid3d import launch_environment
    from hybrid3d.errors import UserMistake

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a recipe's paths are local
    try:
        launch_environment.validate()
        if not launch_environment.under_launcher():
            parser.error("start the recipe's ranks with torchrun")
        return run(options)
    except UserMistake as error:
        if launch_environment.rank() == 0:  # the others say the same
            print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
