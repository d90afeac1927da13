"""Measure samples per second with answers of very different lengths, and print Markdown.

    python benchmarks/partial_rollouts.py > benchmarks/results/partial-rollouts-cpu.md

Three ways to use the same number of ranks, in turns: every step waits for all of its answers; partial rollouts on the
ranks that train; partial rollouts on ranks of their own. An answer consists of turns, after each of which an
environment waits before it replies. Their number is log-normal, at most 16 times the median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEDIAN, SIGMA, MOST, WAIT = 2, 0.9, 32, 0.1  # turns, of their logarithm, turns, seconds
RANKS, PROMPTS, SAMPLES, STEPS, LEFT_OUT = 2, 8, 4, 24, 4  # steps at the start and at the end are left out
ENVIRONMENT = f"""
import random, string, time


def reply(turns, reference, prompt):
    drawn = random.Random(prompt + turns[0]).lognormvariate(0, {SIGMA})
    time.sleep({WAIT})
    return None if len(turns) // 2 + 1 >= min({MOST}, {MEDIAN} * drawn) else "."


reply.stops = tuple(string.ascii_lowercase + string.digits)


def reward(answer, reference, prompt):
    return float(len(answer) % 2)
"""
COMMON = (
    *("model.path=model", "data.train=train.parquet", "data.eval=eval.parquet", "guard.initial_mismatch=ignore"),
    *("train.pp=1", "train.micro_batch_size=8", "rollout.tp=1", "rollout.max_new_tokens=200"),
    *("rollout.max_model_len=256", f"rollout.max_turns={MOST}", "rollout.environment=long_tail:reply"),
    *("reward.name=long_tail:reward", f"algorithm.prompts_per_step={PROMPTS}", "run.checkpoint_every=0"),
    *(f"algorithm.samples_per_prompt={SAMPLES}", f"run.steps={STEPS}", f"run.eval_every={STEPS}"),
    *("algorithm.correction.kind=truncate", "optimizer.lr=1e-6"),
)
TOGETHER, APART = ("train.tp=2", "reward.workers=32"), ("train.tp=1", "reward.workers=64", "roles.generation.ranks=1")
PARTIAL = ("async.partial=continue", "async.max_staleness=8")
CASES = {
    "a step waits for its answers": TOGETHER,
    "partial rollouts, on the ranks that train": (*TOGETHER, *PARTIAL),
    "partial rollouts, on ranks of their own": (*APART, *PARTIAL),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    repeats = parser.parse_args().repeats
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for repeat, (name, settings) in itertools.product(range(repeats), CASES.items()):
            print(f"{name}, {repeat + 1} of {repeats}", file=sys.stderr)
            measured = train(Path(folder), f"run-{len(rates[name])}-{list(CASES).index(name)}", settings)
            rates[name].append(PROMPTS * SAMPLES * len(measured) / sum(row["time/step"] for row in measured))
            rows[name] += measured
    print("# Partial rollouts\n\n    python benchmarks/partial_rollouts.py\n")
    print(
        f"{RANKS} ranks, {PROMPTS} prompts with {SAMPLES} answers in a step, {STEPS - 2 * LEFT_OUT + 1} steps, "
        f"{repeats} runs of each in turns. Turns of an answer: log-normal, median {MEDIAN}, sigma {SIGMA}, at most "
        f"{MOST}; after each the environment waits for {WAIT:g} s. The model is that of `make demo` before training "
        f"(float32), `async.max_staleness=8`, two batches of prompts in flight; {os.cpu_count()} CPU cores "
        f"({platform.machine()}), {time.strftime('%Y-%m-%d')}. The seconds are medians of a step.\n"
    )
    print(
        "| | samples per second: mean (of each run) | x the first | a step | generate | train "
        "| turns of an answer: mean | staleness: mean, maximum | continued |\n" + "|---" * 9 + "|"
    )
    first = statistics.mean(rates[next(iter(CASES))])
    for name in CASES:
        rate, of_runs = statistics.mean(rates[name]), ", ".join(f"{r:.1f}" for r in rates[name])
        step, generate, update = (
            statistics.median(row[f"time/{key}"] for row in rows[name]) for key in ("step", "generate", "train")
        )
        turns, stale = (
            statistics.mean(row[f"rollout/{key}"] for row in rows[name]) for key in ("turns_mean", "staleness_mean")
        )
        oldest = max(row["rollout/staleness_max"] for row in rows[name])
        continued = statistics.mean(row.get("rollout/continued_fraction", 0) for row in rows[name])
        print(
            f"| {name} | {rate:.1f} ({of_runs}) | {rate / first:.2f} | {step:.2f} | {generate:.2f} | {update:.2f} "
            f"| {turns:.1f} | {stale:.2f}, {oldest:.0f} | {continued:.0%} |"
        )


def prepare(folder: Path) -> None:
    """Write the demo's model and data, of which a few held-out rows are kept, and the environment."""
    import pyarrow.parquet as pq

    run(folder, str(ROOT / "examples/make_demo.py"), "demo")
    (folder / "model").symlink_to("demo/base")
    (folder / "train.parquet").symlink_to("demo/train.parquet")
    pq.write_table(pq.read_table(folder / "demo/eval.parquet").slice(0, 2), folder / "eval.parquet")
    (folder / "long_tail.py").write_text(ENVIRONMENT, encoding="utf-8")


def train(folder: Path, name: str, settings: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train, and return the metrics of the steps in the middle."""
    run(folder, "-m", "hybrid3d", "train", str(ROOT / "recipes/demo-cpu.yaml"), *COMMON, *settings, f"name={name}")
    written = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in written.splitlines()]
    return rows[LEFT_OUT : STEPS + 1 - LEFT_OUT]


def run(folder: Path, *command: str) -> None:
    path = os.pathsep.join([str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
