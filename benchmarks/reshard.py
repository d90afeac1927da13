"""Time the sync on four CPU ranks, the method of other trainers and plain sends, and print the tables as Markdown.

    python benchmarks/reshard.py > benchmarks/results/reshard-cpu.md

Each case is one `hybrid3d bench`, printed with its command. With arguments, this script is `hybrid3d bench`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

DENSE = "recipes/qwen3-8b.yaml train.tp=2 train.pp=2 train.dp=1 rollout.tp=2 --layers 8 --hidden 1024"
SPARSE = "recipes/mixtral-8x7b.yaml train.tp=1 train.pp=1 train.ep=4 train.dp=4 rollout.tp=4 --layers 4 --hidden 1024"
CASES = (DENSE, SPARSE, f"{SPARSE} rollout.expert_parallel=true")


def bench(case: str) -> str:
    command = [sys.executable, "-m", "hybrid3d", "bench", *shlex.split(case)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout[done.stdout.index("bench-") :]


def main() -> None:
    print("# The sync, measured\n")
    for case in CASES:
        print(f"    hybrid3d bench {case}\n\n{bench(case)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        from hybrid3d.cli import main as command

        sys.exit(command(["bench", *sys.argv[1:]]))
    main()
