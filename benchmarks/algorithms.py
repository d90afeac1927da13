"""Train the demo's task with every algorithm from the same checkpoint, and print the results as Markdown.

    make demo                                                        # makes the task and the checkpoint
    python benchmarks/algorithms.py > benchmarks/results/algorithms-cpu.md

Runs that exist already (in `runs/algorithms/`) are not repeated. Arguments are the names of the cases to run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

RECIPE = "recipes/demo-cpu.yaml"
RUNS = Path("runs/algorithms")
TARGET = 0.9  # held-out accuracy
IN_REWARD = "algorithm.kl={where: reward, estimator: k1, coef: 0.001}"
PPO = ["algorithm.name=ppo", IN_REWARD, "algorithm.minibatches=2", "algorithm.lam=0.95"]
PPO += ["train.micro_batch_size=32", "critic.optimizer={lr: 5.0e-4}"]
APART = ["train.pp=1", "rollout.tp=1", "roles.generation.ranks=2"]  # two ranks train, the other two generate
STALE = ["algorithm.correction.kind=truncate", "async.max_staleness={}"]
CASES: dict[str, list[str]] = {
    **{f"grpo, seed {seed}": [f"run.seed={seed}"] for seed in (1, 2, 3)},
    **{f"ppo, seed {seed}": [*PPO, f"run.seed={seed}"] for seed in (1, 2, 3)},
    "dr_grpo": ["algorithm.name=dr_grpo"],
    "dapo": ["algorithm.name=dapo", "reward.overlong_buffer=2"],
    "gspo": ["algorithm.name=gspo"],
    "rloo": ["algorithm.name=rloo"],
    "reinforce_pp": ["algorithm.name=reinforce_pp", IN_REWARD],
    "reinforce_pp_baseline": [
        "algorithm.name=reinforce_pp_baseline",
        "algorithm.kl={where: loss, estimator: k2, coef: 0.001}",
    ],
    "grpo, apart": APART,
    **{f"grpo, apart, staleness {k}": [*APART, *(s.format(k) for s in STALE)] for k in (1, 2, 4)},
    **{
        f"grpo, partial {partial}": [*(s.format(2) for s in STALE), f"async.partial={partial}"]
        for partial in ("continue", "restart")
    },
    "grpo, apart, partial continue": [*APART, *(s.format(4) for s in STALE), "async.partial=continue"],
}


def rows_of(case: str) -> list[dict[str, float]]:
    """Return the metrics of a case, after running it if there is no finished run."""
    name = case.replace(", ", "-").replace(" ", "-")
    run = RUNS / name
    if not (run / "curves.png").exists():
        overrides = [f"name={name}", f"run.dir={RUNS}", "run.checkpoint_every=0", *CASES[case]]
        subprocess.run([sys.executable, "-m", "hybrid3d", "train", RECIPE, *overrides], stdout=sys.stderr, check=True)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def line_of(case: str) -> str:
    """Return the row of a case in the table."""
    rows = rows_of(case)
    accuracies = {int(row["step"]): row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    reached = next((str(step) for step, accuracy in accuracies.items() if accuracy >= TARGET), "never")
    seconds = sorted(row["time/step"] for row in rows)[len(rows) // 2]
    overrides = " ".join(override.replace("algorithm.", "") for override in CASES[case])
    first, last = accuracies[0], accuracies[max(accuracies)]
    return f"| {case} | {first:.3f} | {reached} | {last:.3f} | {seconds:.1f} | `{overrides}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help=f"one of {'; '.join(CASES)}; all by default")
    cases = parser.parse_args().case
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; known: {'; '.join(CASES)}")
    print("# Every algorithm on the demo's task\n")
    print(f"Four ranks on CPU, {datetime.now(UTC):%Y-%m-%d}; held-out accuracy is measured every 5 of 40 steps.\n")
    print(f"| algorithm | accuracy before | step with {TARGET} | after | seconds per step | changes to `{RECIPE}` |")
    print("|---|---|---|---|---|---|")
    for case in cases or CASES:
        print(line_of(case), flush=True)


if __name__ == "__main__":
    main()
