"""Count the bytes that vLLM's own weight transfers would bring to a recipe's engines, beside those of hybrid3d.

    python benchmarks/vllm_transfers.py RECIPE [key=value ...] [--layers N] [--hidden N] [--experts N]
    python benchmarks/vllm_transfers.py > benchmarks/results/vllm-transfers.md

The second prints several recipes, each by a process of its own. Nothing is transferred. vLLM's planning code is asked
about every worker (`methods/vllm_transfers.py`) and hybrid3d's about every rank, on the meta device.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace

CASES = (
    "recipes/qwen3-8b.yaml train.tp=2 train.pp=2 train.dp=1 rollout.tp=2 --layers 8 --hidden 1024",
    "recipes/mixtral-8x7b.yaml train.tp=1 train.pp=1 train.ep=4 train.dp=4 rollout.tp=4 --layers 4 --hidden 1024",
    "recipes/qwen2.5-7b.yaml",
    "recipes/qwen3-8b.yaml",
    "recipes/llama-3.1-70b.yaml",
    "recipes/mixtral-8x7b.yaml",
    "recipes/qwen3-30b-a3b.yaml",
)
PAGE = """\
# What vLLM's own weight transfers would bring

Printed by `python benchmarks/vllm_transfers.py` ({today}, no GPU). Nothing was transferred: bytes are counted from the
plans of vLLM's own code (`docs/bench.md`).
"""


def print_page() -> None:
    """Print the tables of all cases."""
    print(PAGE.format(today=datetime.date.today()))
    for case in CASES:
        command = [sys.executable, __file__, *shlex.split(case)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8")
        print(f"    python benchmarks/vllm_transfers.py {case}\n\n{done.stdout}", flush=True)


def run(options: argparse.Namespace) -> str:
    """Return the table of a recipe."""
    from methods.vllm_transfers import count_received, format_rows

    from hybrid3d.bench.scaling import Scale, scale_recipe, write_model
    from hybrid3d.config import RecipeError, load_recipe
    from hybrid3d.inputs.models import read_config
    from hybrid3d.planning.engine_queries import query_engines
    from hybrid3d.planning.traffic import compute_sync_traffic

    recipe = load_recipe(options.recipe, options.overrides)
    if recipe.rollout is not None and recipe.rollout.quantization is not None:
        raise RecipeError(recipe.name, ["these transfers send what the checkpoint has: set rollout.quantization=null"])
    scale = Scale(options.layers, options.hidden, options.experts)
    smaller, config = scale_recipe(recipe, scale)
    scaling = scale.describe(read_config(recipe.model.path))
    with tempfile.TemporaryDirectory() as folder:
        smaller = replace(smaller, model=replace(smaller.model, path=folder))
        write_model(smaller, config)
        answers = query_engines(smaller, config)
        traffic = compute_sync_traffic(smaller, answers)
        found = count_received(smaller, answers.shapes)
    rows = (
        ("hybrid3d", int(traffic.traffic.sum())),
        ("all that the engines want", int(traffic.wanted.sum())),
        ("vLLM's sharded_rdt, counted: without what its trainer gathers before", found.sharded_rdt),
        (f"vLLM's nccl_m2n, counted: {found.m2n_mapped:,} of them mapped 1:1, the others whole tensors", found.m2n),
    )
    train, rollout = smaller.train, smaller.rollout
    assert rollout is not None, "scale_recipe has checked it"
    layouts = f"TP{train.tp} PP{train.pp} EP{train.ep} DP{train.dp} -> {smaller.generation_ranks} x TP{rollout.tp}"
    head = f"{recipe.name}: {layouts} (all ranks that generate x TP); scaled: {scaling}"
    return f"{head}\n\n{format_rows(rows, int(traffic.wanted.sum()))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="a recipe's YAML file; without one, several are printed")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe's")
    for size in ("layers", "hidden", "experts"):
        parser.add_argument(f"--{size}", type=int, metavar="N", help=f"as of `hybrid3d bench --{size}`")
    options = parser.parse_intermixed_args()
    from hybrid3d.errors import UserMistake

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a recipe's paths are local
    try:
        if options.recipe is None:
            print_page()
        else:
            print(run(options))
    except UserMistake as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
