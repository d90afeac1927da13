"""Profile a sync on four CPU ranks, in this work tree or another one, and print the time of each part as Markdown.

    python benchmarks/where_time_goes.py [--tree FOLDER] BENCH-ARGUMENTS

BENCH-ARGUMENTS are those of `hybrid3d bench`. FOLDER is another work tree of this repository, from `git worktree add`:
an earlier commit is measured with the same model on the same machine. The profiler takes time itself, so compare the
shares, and the seconds of a sync without the profiler, which are printed below.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = 5
# The functions, by the names that the profiler reports, that take time outside of Python
KINDS = {
    "wait for bytes": ("wait", "poll"),
    "copy (pack, unpack, local)": ("copy_", "_foreach_copy_"),
    "post sends and receives": ("isend", "irecv"),
    "vLLM's finalization": ("process_weights_after_loading",),
}


def prepare(arguments: list[str], folder: Path) -> tuple[Path, int]:
    """Write the smaller model and its recipe; return the path of the recipe and the number of ranks."""
    from hybrid3d.bench.scaling import Scale, scale_recipe, write_model
    from hybrid3d.config import load_recipe, recipe_to_yaml

    parser = argparse.ArgumentParser()
    for size in ("layers", "hidden", "experts"):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("recipe")
    options, overrides = parser.parse_known_args(arguments)
    recipe = load_recipe(options.recipe, [*overrides, f"run.dir={folder}"])
    smaller, config = scale_recipe(recipe, Scale(options.layers, options.hidden, options.experts))
    write_model(smaller, config)
    path = folder / "recipe.yaml"
    path.write_text(recipe_to_yaml(smaller), encoding="utf-8")
    return path, smaller.world_size


def of_rank(path: str) -> None:
    """Time syncs on one rank, then profile the same number of them."""
    import torch.distributed as dist

    from hybrid3d import distributed, launch_environment
    from hybrid3d.config import load_recipe
    from hybrid3d.inputs.models import read_config
    from hybrid3d.train.megatron import runtime

    recipe = load_recipe(path)
    dist.init_process_group("gloo")
    runtime.initialize(recipe.train, recipe.run.seed)
    import torch

    from hybrid3d.reshard.ends import PlainSource
    from hybrid3d.rollout.engine import RolloutEngine
    from hybrid3d.sync import weight_sync
    from hybrid3d.train.megatron.build import build_model
    from hybrid3d.train.megatron.source import megatron_weights

    config, rank = read_config(recipe.model.path), dist.get_rank()
    trained = megatron_weights(build_model(config, recipe.train, getattr(torch, recipe.model.dtype)), config)
    engine = RolloutEngine(recipe, rank, launch_environment.run_id(), list(range(recipe.world_size)))
    source = PlainSource(trained.tensors, trained.holdings)
    sync = weight_sync(recipe, dist.group.WORLD, source, engine.sink())

    def run() -> float:
        dist.barrier()
        start = time.perf_counter()
        sync.run(0)
        return max(distributed.gather_objects(time.perf_counter() - start, dist.group.WORLD))

    run()
    seconds = [run() for _ in range(RUNS)]
    profile = cProfile.Profile()
    for _ in range(RUNS):
        dist.barrier()
        profile.enable()
        sync.run(0)
        profile.disable()
    every = distributed.gather_objects(_shares(profile), dist.group.WORLD)
    if rank == 0:
        print(f"| {'part':30} | ms, mean of ranks |\n|{'-' * 32}|{'-' * 19}|")
        for kind in every[0]:
            print(f"| {kind:30} | {1e3 * statistics.mean(shares[kind] for shares in every) / RUNS:17.1f} |")
        print(f"\nA sync without the profiler: {statistics.median(seconds):.3f} s, median of {RUNS}", flush=True)
    dist.barrier()
    engine.close()


def _shares(profile: cProfile.Profile) -> dict[str, float]:
    """Return the cumulative seconds of each kind of function that hybrid3d calls, and of the rest."""
    found: dict[str, float] = defaultdict(float)
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for kind, names in KINDS.items():
        for (file, _, name), (*_, callers) in stats.items():
            short = name.removeprefix("<method '").split("'")[0].removeprefix("<built-in method ").rstrip(">")
            if short.rpartition(".")[2] in names and "hybrid3d" not in file:
                found[kind] += sum(together for caller, (*_, together) in callers.items() if "hybrid3d" in caller[0])
    total = max(together for _, _, _, together, _ in stats.values())
    found["Python and the rest"] = total - sum(found.values())
    found["all"] = total
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", type=Path, default=ROOT)
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe, world = prepare(arguments, Path(folder))
        if options.tree != ROOT:  # an earlier commit may not have all of today's settings
            recipe.write_text(
                "".join(_without_new_settings(recipe.read_text(encoding="utf-8").splitlines(keepends=True))),
                encoding="utf-8",
            )
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__, "--rank", str(recipe)]
        more = {"PYTHONPATH": str(options.tree / "src"), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        subprocess.run(command, env=os.environ | more, check=True)


def _without_new_settings(lines: list[str]) -> list[str]:
    newer = ("overlap:", "share_storage:", "verify:", "sleep:")
    return [line for line in lines if not line.strip().startswith(newer)]


if __name__ == "__main__":
    if "--rank" in sys.argv:
        of_rank(sys.argv[-1])
    else:
        main()
