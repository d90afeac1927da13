"""Train the demo's task with every algorithm from the same checkpoint, and print the results as Markdown.

    make demo                                                        # makes the task and the checkpoint
    python benchmarks/algorithms.py > benchmarks/results/algorithms-cpu.md

Runs that exist already (in `runs/algorithms/`) are not repeated. Arguments are the names of the cases to run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

RECIPE = "recipes/demo-cpu.yaml"
RUNS = Path("runs/algorithms")
TARGET = 0.9  # held-out accuracy
ONE_RANK = ["train.tp=1", "train.pp=1", "rollout.tp=1", "run.steps=20"]
IN_REWARD = "algorithm.kl={where: reward, estimator: k1, coef: 0.001}"
PPO = ["algorithm.name=ppo", IN_REWARD, "algorithm.minibatches=2", "algorithm.lam=0.95"]
PPO += ["train.micro_batch_size=32", "critic.optimizer={lr: 5.0e-4}"]
APART = ["train.pp=1", "rollout.tp=1", "roles.generation.ranks=2"]  # two ranks train, the other two generate
STALE = ["algorithm.correction.kind=truncate", "async.max_staleness={}"]


def combined(*settings: str) -> list[str]:
    """Return the overrides of a case on one rank, given settings of the section `algorithm`."""
    return [*ONE_RANK, *(f"algorithm.{setting}" for setting in settings)]


NAMES: dict[str, list[str]] = {
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
    **{name: combined(f"name={name}", "minibatches=2") for name in ("opo", "cispo", "sapo", "gmpo")},
    **{name: combined(f"name={name}") for name in ("remax", "gpg")},
    # Learns from a prompt only if one answer is better than all others, which is rare in large groups
    "grpo_passk": combined("name=grpo_passk", "minibatches=2", "samples_per_prompt=2", "prompts_per_step=128"),
    "clip_cov": combined("name=clip_cov", "minibatches=2", "loss={cov_fraction: 0.01, cov_low: 0.1, cov_high: 5}"),
    "kl_cov": combined("name=kl_cov", "minibatches=2", "loss.cov_fraction=0.01"),
    "dppo": combined("name=dppo", "minibatches=2", "correction.bypass=true"),
}
COMBINATIONS: dict[str, list[str]] = {
    "left out, by the group's deviation, cispo, mean of means": combined(
        *("name=rloo", "advantage_scale=group_std", "policy_loss=cispo", "clip_high=4", "loss_agg_mode=sequence"),
        "minibatches=2",
    ),
    "by the batch's deviation, mean of sums": combined(
        *("advantage_scale=batch_std", "loss_agg_mode=sequence_sum", "minibatches=2")
    ),
    "whitened, sapo, token mean": combined("advantage_scale=whiten", "policy_loss=sapo", "minibatches=2"),
    "straight-through ratio, masked tokens": combined(
        *("name=gspo", "ratio=sequence_straight_through", "clip=0.01", "correction.kind=mask", "minibatches=2")
    ),
    "one ratio, masked answers, length-weighted": combined(
        *("name=opo", "ratio=sequence", "clip=0.01", "correction.kind=sequence_mean_mask", "minibatches=2")
    ),
    "gae, cispo": [*ONE_RANK, *PPO, "algorithm.policy_loss=cispo", "algorithm.clip_high=4"],
    "discounted returns, reinforce": combined("name=reinforce_pp", "policy_loss=reinforce", "gamma=0.99"),
    "highest half of entropies": combined("high_entropy_fraction=0.5", "minibatches=2"),
    "truncated answers masked, dual clip": combined("name=dapo", "mask_truncated=true", "dual_clip=3", "minibatches=2"),
    "straight-through k1, clamped": combined(
        "kl={where: loss, estimator: k1+, coef: 0.001, clamp: 5}", "minibatches=2"
    ),
    "k3 weighted by the ratio": combined(
        "kl={where: loss, estimator: k3, coef: 0.001, ratio_weighted: true}", "minibatches=2", "epochs=2"
    ),
    "dppo by KL, bypass, by the group's deviation": combined(
        *("name=dppo", "policy_loss=dppo_kl", "clip=0.05", "advantage_scale=group_std", "correction.bypass=true"),
        "minibatches=2",
    ),
    "left out, gmpo, normalized weights": combined(
        *("name=gmpo", "advantage=leave_one_out", "correction={kind: sequence_truncate, normalize: true}"),
        "minibatches=2",
    ),
    "greedy baseline, ppo, bounded and whitened rewards": [
        *combined("name=remax", "policy_loss=ppo", "loss_agg_mode=token", "minibatches=2"),
        *("reward.min=0", "reward.max=1", "reward.whiten=true"),
    ],
}
ROLES: dict[str, list[str]] = {
    "grpo, apart": APART,
    **{f"grpo, apart, staleness {k}": [*APART, *(s.format(k) for s in STALE)] for k in (1, 2, 4)},
    **{
        f"grpo, partial {partial}": [*(s.format(2) for s in STALE), f"async.partial={partial}"]
        for partial in ("continue", "restart")
    },
    "grpo, apart, partial continue": [*APART, *(s.format(4) for s in STALE), "async.partial=continue"],
}
CASES = NAMES | COMBINATIONS | ROLES


def rows_of(case: str) -> list[dict[str, float]]:
    """Return the metrics of a case, after running it if there is no finished run."""
    name = re.sub("[^a-z0-9_-]+", "-", case)
    run = RUNS / name
    if not (run / "curves.png").exists():
        overrides = [f"name={name}", f"run.dir={RUNS}", "run.checkpoint_every=0", *CASES[case]]
        with tempfile.NamedTemporaryFile() as output:
            command = [sys.executable, "-m", "hybrid3d", "train", RECIPE, *overrides]
            done = subprocess.run(command, stdout=output, stderr=output)
            if done.returncode:
                raise SystemExit(
                    f"{case}: exit code {done.returncode}: {Path(output.name).read_text(encoding='utf-8')[-2000:]}"
                )
        print(f"{case}: done", file=sys.stderr)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


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
    parser.add_argument("--jobs", type=int, default=1, help="how many runs of one rank are made at a time")
    arguments = parser.parse_args()
    cases = arguments.case
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; known: {'; '.join(CASES)}")
    print("# Every algorithm on the demo's task\n")
    layouts = "One rank on CPU and 20 steps where the changes say so; otherwise four ranks and 40 steps."
    print(f"{layouts} {datetime.now(UTC):%Y-%m-%d}; held-out accuracy is measured every 5 steps.\n")
    print(f"| algorithm | accuracy before | step with {TARGET} | after | seconds per step | changes to `{RECIPE}` |")
    print("|---|---|---|---|---|---|")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        of_one_rank = {case: pool.submit(line_of, case) for case in cases or CASES if ONE_RANK[0] in CASES[case]}
        for case in of_one_rank:
            print(of_one_rank[case].result(), flush=True)
    for case in cases or CASES:
        if case not in of_one_rank:
            print(line_of(case), flush=True)


if __name__ == "__main__":
    main()
