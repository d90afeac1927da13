"""Run a recipe with packed and with unpacked weights in vLLM, and print seconds of generation and sync as Markdown.

    python examples/make_demo_llm.py build/demo-llm                   # makes the checkpoint and the data
    python benchmarks/pack_weights.py > benchmarks/results/pack-weights-cpu.md

Runs that exist already (in `runs/pack-weights/`) are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RECIPE = "recipes/demo-llm.yaml"
RUNS = Path("runs/pack-weights")
STEPS = 5  # the first is warmup
DTYPES = {"float32": [], "bfloat16": ["model.dtype=bfloat16", "optimizer.lr=1.0e-6", "guard.initial_mismatch=warn"]}
CASES = {
    f"{dtype}-{kind}": [*overrides, f"rollout.pack_weights={packs}"]
    for dtype, overrides in DTYPES.items()
    for kind, packs in {"packed": "true", "unpacked": "false"}.items()
}
SECONDS = {
    "generation": "time/generate",
    "evaluation": "time/eval",
    "sync": "sync/seconds",
    "sync, exposed": "sync/exposed_seconds",
    "training": "time/train",
    "step": "time/step",
}
VARIES = re.compile(r"^time/|seconds$|per_second$")  # between two runs of one recipe and seed: docs/run-folder.md
INTRODUCTION = """\
`{recipe}` with `rollout.pack_weights` true and false: SmolLM2-135M-Instruct, GRPO, two ranks, Megatron at
PP2, vLLM at TP1, {steps} steps; in bfloat16 at a learning rate of 1e-6. In bfloat16 a sync sends the packed weights in
full, and of the unpacked ones what changed. The two kinds of kernels round differently: that changes vLLM's
log-probabilities, and in bfloat16 also some samples, with all that follows from them. {cores} CPU cores ({machine}),"""

Rows = list[dict[str, float]]


def rows_of(run: str) -> Rows:
    """Return the metrics of a run, after running it if there is no finished run."""
    if not (RUNS / run / "curves.png").exists():
        overrides = [f"name={run}", f"run.dir={RUNS}", f"run.steps={STEPS}", "run.eval_every=1", *CASES[run]]
        subprocess.run([sys.executable, "-m", "hybrid3d", "train", RECIPE, *overrides], stdout=sys.stderr, check=True)
    return [json.loads(line) for line in (RUNS / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def differences(packed: Rows, unpacked: Rows) -> dict[str, tuple[int, float]]:
    """Return the metrics that differ: the first step at which they do, and the largest relative difference."""
    found: dict[str, tuple[int, float]] = {}
    for one, other in zip(packed, unpacked, strict=True):
        for key in sorted(one.keys() | other.keys()):
            a, b = one.get(key), other.get(key)
            if a == b or VARIES.search(key):
                continue
            apart = 1.0 if a is None or b is None else abs(a - b) / max(abs(a), abs(b))
            first, most = found.get(key, (int(one["step"]), 0.0))
            found[key] = first, max(most, apart)
    return found


def print_pair(dtype: str) -> None:
    """Print the medians of a pair of runs, and which other metrics differ."""
    packed, unpacked = (rows_of(f"{dtype}-{kind}") for kind in ("packed", "unpacked"))
    print(f"\n## {dtype}\n\n| seconds, median (range) of steps 1 to {STEPS - 1} | packed | unpacked |\n|---|---|---|")
    for what, key in SECONDS.items():
        print(f"| {what} |" + "".join(f" {spread([row[key] for row in rows[1:-1]])} |" for rows in (packed, unpacked)))
    received = (statistics.median(row["sync/received_bytes"] for row in rows[1:-1]) for rows in (packed, unpacked))
    print("| bytes received by a sync, median |" + "".join(f" {nbytes:,.0f} |" for nbytes in received))
    apart = differences(packed, unpacked)
    if not apart:
        print("\nAll other metrics of the two runs are equal in every digit.")
        return
    equal = sorted({key for row in packed for key in row if not VARIES.search(key)} - apart.keys())
    print(f"\n{len(equal)} other metrics are equal in every digit, {len(apart)} are not:\n")
    print("| metric | first step that differs | largest relative difference |\n|---|---|---|")
    for key, (step, most) in apart.items():
        print(f"| `{key}` | {step} | {most:.2g} |")


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="*", help=f"run only this, without printing: {', '.join(CASES)}")
    runs = parser.parse_args().run
    if unknown := [run for run in runs if run not in CASES]:
        parser.error(f"unknown run {unknown[0]!r}; known: {', '.join(CASES)}")
    for run in runs:
        rows_of(run)
    if runs:
        return
    print("# vLLM's packed and unpacked weights\n\n    python benchmarks/pack_weights.py\n")
    print(INTRODUCTION.format(recipe=RECIPE, steps=STEPS, cores=os.cpu_count(), machine=platform.machine()), end="")
    print(f" {time.strftime('%Y-%m-%d')}.")
    for dtype in DTYPES:
        print_pair(dtype)


if __name__ == "__main__":
    main()
