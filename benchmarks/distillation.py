"""Distill the demo's trained policy into the checkpoint that it was trained from, and print the result as Markdown.

    make demo && .venv/bin/hybrid3d export runs/demo-cpu build/demo/trained
    python benchmarks/distillation.py > benchmarks/results/distillation-cpu.md

The student samples answers; each of their tokens has the advantage log teacher - log student (`docs/algorithms.md`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RECIPE, TEACHER, RUN, LAST = "recipes/demo-cpu.yaml", "build/demo/trained", Path("runs/distillation"), 5
SETTINGS = [
    *("train.tp=1", "train.pp=1", "rollout.tp=1", "run.steps=40", "run.checkpoint_every=0"),
    *("algorithm.name=reinforce_pp", "algorithm.advantage_scale=none", "algorithm.gamma=0", "reward.coef=0"),
    f"algorithm.kl={{where: reward, estimator: k1, coef: 1, reference: {TEACHER}}}",
]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    command = [sys.executable, "-m", "hybrid3d", "train", RECIPE, f"name={RUN.name}", *SETTINGS]
    subprocess.run(command, stdout=sys.stderr, check=True)
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kls = [row["train/answer_kl"] for row in rows]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    print("# On-policy distillation on the demo\n")
    print(f"One rank, {os.cpu_count()} CPU cores, {time.strftime('%Y-%m-%d')}. KL of an answer to the teacher, nats.\n")
    print(f"| step | KL at the start | KL, mean of the last {LAST} | accuracy at the start | at the end |")
    print("|---|---|---|---|---|")
    last = statistics.mean(kls[-LAST:])
    print(f"| {len(kls) - 1} | {kls[0]:.3f} | {last:.3f} | {accuracies[0]:.3f} | {accuracies[-1]:.3f} |")


if __name__ == "__main__":
    main()
