"""Compare the local part of a sync (packing, unpacking and local copies) with the machine's copy bandwidth.

    python benchmarks/local_copies.py recipes/qwen2.5-7b.yaml [SECTION.KEY=VALUE ...] [--layers N] [--hidden N]
        [--experts N] [--repeats N]

One process, on a GPU if there is one, allocates the buffers of the rank that copies the most bytes and executes its
part of the plan with a transport that transfers nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace

import torch
from copy_rates import copied_bytes, measure

from hybrid3d.bench.report import describe_machine
from hybrid3d.bench.scaling import Scale, scale_recipe, write_model
from hybrid3d.config import load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.engine_queries import compute_placement, query_engines
from hybrid3d.reshard.plan.planner import make_plan


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
    slots = compute_placement(recipe, answers).slots
    demand = {rank: wanted[slot % len(wanted)] for rank, slot in enumerate(slots)}
    plans = make_plan(answers.holdings, demand, recipe.sync.bucket_bytes, recipe.machine.gpus_per_node)
    plan = max(plans.values(), key=copied_bytes)
    found = measure(plan, device, options.repeats)
    print(f"{original.name}, scaled: {scale.describe(read_config(original.model.path))}; {describe_machine()}")
    print(f"rank {plan.rank} copies {found.nbytes / 1e6:.0f} MB in {found.operations} operations")
    rate, plain = found.nbytes / found.seconds / 1e9, found.plain_rate / 1e9
    print(f"{rate:.1f} GB/s, compared with {plain:.1f} GB/s of a plain copy: {rate / plain:.2f}")


if __name__ == "__main__":
    main()
