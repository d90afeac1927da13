"""Time the sync on four CPU ranks, a gather on every rank and plain sends, and print the tables as Markdown.

    python benchmarks/reshard.py > benchmarks/results/reshard-cpu.md

Each case is one `hybrid3d bench`, printed with its command. With arguments, this script is `hybrid3d bench`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

DENSE = "recipes/qwen3-8b.yaml train.tp=2 train.pp=2 train.dp=1 rollout.tp=2 --layers 8 --hidden 1024"
SPARSE = "recipes/mixtral-8x7b.yaml train.tp=1 train.pp=1 train.ep=4 train.dp=4 rollout.tp=4 --layers 4 --hidden 1024"
SMALL = (
    "recipes/qwen3-30b-a3b.yaml train.tp=2 train.pp=1 train.ep=2 train.etp=2 train.dp=2 rollout.tp=4 rollout.dp=1 "
    "rollout.expert_parallel=false --layers 16 --hidden 512 --experts 32"
)
LATENT = (
    "recipes/deepseek-v3-671b.yaml train.tp=1 train.pp=2 train.ep=2 train.dp=2 train.first_stage_layers=null "
    "train.last_stage_layers=null rollout.tp=2 --layers 6 --hidden 896 --experts 16"
)
NOTE = """\
On CPU, hybrid3d's rows read messages in the memory of the other ranks of a node (`sync.shared_memory`). The wire,
gather and the changed elements use sockets."""
CHANGED = "--changed 0.02"  # of the elements
CASES = (
    f"{DENSE} {CHANGED}",
    f"{SPARSE} {CHANGED}",
    f"{SPARSE} rollout.expert_parallel=true",
    f"{DENSE.replace('train.tp=2 train.pp=2', 'train.tp=4 train.pp=1')} {CHANGED}",
    f"{DENSE.replace('train.tp=2 train.pp=2', 'train.tp=1 train.pp=4')} {CHANGED}",
    f"{SMALL} {CHANGED}",
    f"{LATENT} {CHANGED}",
)


def bench(case: str) -> str:
    command = [sys.executable, "-m", "hybrid3d", "bench", *shlex.split(case)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8", errors="replace")
    return done.stdout[done.stdout.index("bench-") :]


def main() -> None:
    print(f"# The sync, measured\n\n{NOTE}\n")
    for case in CASES:
        print(f"    hybrid3d bench {case}\n\n{bench(case)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        from hybrid3d.cli import main as command

        sys.exit(command(["bench", *sys.argv[1:]]))
    main()
