"""Measure which fraction of the bfloat16 weights each update changes, by learning rate and kind of tensor, beside what
`benchmarks/predicted_changes.py` predicts; print it as Markdown and draw it.

    python examples/make_demo_llm.py build/demo-llm                   # makes the checkpoint and the data
    python benchmarks/changed_fractions.py > benchmarks/results/changed-fractions-cpu.md

Each learning rate is a GRPO run of `recipes/demo-llm.yaml` on one rank: sampled by vLLM, scored, trained by Megatron,
synced. Results that exist already (in `runs/changed-fractions/`) are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure_changed_fractions import ALL, KINDS, RECIPE, RUNS, STRIDE, UPDATES

MEASURE = Path(__file__).with_name("measure_changed_fractions.py")
PICTURE = Path("benchmarks/results/changed-fractions-cpu.png")
LEARNING_RATES = ("1e-7", "1e-6", "1e-5", "1e-4")
SHOWN = (1, 2, 4, 8, 16)  # updates in the tables by kind
EARLY = 5  # updates up to this one are reported on their own: nearly all weights have moved by the same distance
STEPS_SHOWN = (1, 4, 15)  # updates whose mean step size is printed

INTRODUCTION = """\
GRPO on SmolLM2-135M-Instruct in BF16, on one rank, {updates} updates at each learning rate (constant): vLLM samples 12
prompts x 8 answers, the reward scores them, Megatron makes one update, the weights are synced. Other settings are
those of `{recipe}`: Adam with betas {beta1} and {beta2}, eps {eps}, gradients clipped to norm {clip_grad}, no
weight decay. All runs begin with the same weights and prompts. Changed elements are counted in the bits of
`train/megatron/stepping.py`; after each update the script has found them equal to a comparison with a copy of the
weights from before it. The tied embedding counts once (a run at PP2 holds it twice).

A prediction (`benchmarks/predicted_changes.py`) is made before the update: for update 1 from the weights and lr alone,
later from the weights, lr, Adam's state after the previous update, and the number of updates. It is the mean over every
{stride}th element of each matrix.

arXiv 2602.03839 reports that about 99 % of the updates of weights in RL are invisible in BF16, on other models. Two
things belong to this checkpoint and task. {zeros:.2f} % of all weights ({embedding_zeros:.2f} % of the embedding) are
exactly 0, because the checkpoint was quantized, and zeros change in nearly every update: at 1e-7 hardly anything else
does. And the embeddings of words that do not occur have gradients below Adam's eps at first, so that they move by less
than lr: for update 1 the prediction, which knows lr only, is too high for them.

At the first updates nearly all weights move by the same distance. The spacing of BF16 is the same for all weights of
one exponent, so many of them change at the same update, and few at the next one: what is measured goes up and down
where the prediction, which takes distances to be spread evenly, does not. That distances are uniform up to twice n
steps was chosen among similar assumptions on the first 12 updates at 1e-6 and the first 9 at 1e-4; the rates 1e-7 and
1e-5 were measured afterwards.

{cores} CPU cores ({machine}), {date}.
"""

ACCURACY = """
## How good the predictions are

Predicted / measured, of all weights at update 1 (from lr alone); then the smallest and the largest such ratio of
updates 2 to {early}, and of later ones, of all weights and of each kind but norms, of which few elements change at low
rates. The last columns, in percent: the prediction for the limit of a run of very many updates, with steps of the size
of update {last}, and with steps of the size of lr.
"""

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]


def results_of(lr: str) -> dict[str, Any]:
    """Return the results of a learning rate: the rows with percentages by kind; measures them if they do not exist."""
    out = RUNS / f"{lr}.json"
    if not out.exists():
        RUNS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "127.0.0.1:0", str(MEASURE), lr, str(out)]
        with open(RUNS / f"{lr}.log", "w", encoding="utf-8") as log:
            done = subprocess.run(command, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}, stdout=log, stderr=log)
        if done.returncode:
            sys.exit(f"the run at {lr} failed: see {RUNS / lr}.log")
    found = json.loads(out.read_text(encoding="utf-8"))
    for row in found["rows"]:
        for key in ("changed", "predicted", "long_run"):
            row[key] = {kind: 100 * value / found["elements"][kind] for kind, value in row[key].items()}
        row["step_over_lr"] = row["step_over_lr"][ALL] / found["elements"][ALL]
    return found


def print_introduction() -> None:
    """Print what was done, with the recipe's settings and the zeros in its checkpoint."""
    import torch
    from safetensors.torch import load_file

    from hybrid3d.config import load_recipe

    recipe = load_recipe(RECIPE)
    counts = [  # of each tensor: whether it is the embedding, zeros, elements
        ("embed" in name, int((tensor.to(torch.bfloat16) == 0).sum()), tensor.numel())
        for file in Path(recipe.model.path).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    ]
    embedding = next(count for count in counts if count[0])
    zeros = 100 * sum(count[1] for count in counts) / sum(count[2] for count in counts)
    values = {"recipe": RECIPE, "updates": UPDATES, "stride": STRIDE, **vars(recipe.optimizer)}
    values |= {"zeros": zeros, "embedding_zeros": 100 * embedding[1] / embedding[2]}
    values |= {"cores": os.cpu_count(), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    print(INTRODUCTION.format(**values))


def print_runs(results: Results) -> None:
    """Print what the runs were like."""
    print(f"\n## The runs\n\n| lr | mean reward, updates 1 to 4 | updates {UPDATES - 3} to {UPDATES} |", end="")
    print(" gradient norm, median |" + "".join(f" mean step / lr, update {n} |" for n in STEPS_SHOWN))
    print("|---|---|---|---|" + "---|" * len(STEPS_SHOWN))
    for lr, found in results.items():
        rows = found["rows"]
        first, last = (statistics.mean(row["reward"] for row in part) for part in (rows[:4], rows[-4:]))
        norm = statistics.median(row["grad_norm"] for row in rows)
        # The prediction of an update has used the size of the step before it
        sizes = "".join(f" {rows[n]['step_over_lr']:.2f} |" for n in STEPS_SHOWN)
        print(f"| {lr} | {first:.2f} | {last:.2f} | {norm:.1f} |{sizes}")


def print_by_update(results: Results) -> None:
    """Print the table of all weights: a row for each update."""
    print("\n## All weights, percent\n")
    print("| update |" + "".join(f" {lr}: measured | predicted |" for lr in results))
    print("|---|" + "---|---|" * len(results))
    for rows in zip(*(found["rows"] for found in results.values()), strict=True):
        cells = (f" {percent(row['changed'][ALL])} | {percent(row['predicted'][ALL])} |" for row in rows)
        print(f"| {rows[0]['update']} |" + "".join(cells))


def print_by_kind(results: Results) -> None:
    """Print a table for each learning rate: kinds of tensors, at some updates."""
    print("\n## Kinds of tensors, percent: measured (predicted)")
    for lr, found in results.items():
        rows = [row for row in found["rows"] if row["update"] in SHOWN]
        print(f"\n| {lr} | elements |" + "".join(f" update {row['update']} |" for row in rows))
        print("|---|---|" + "---|" * len(rows))
        for kind in (*KINDS, ALL):
            cells = (f" {percent(row['changed'][kind])} ({percent(row['predicted'][kind])}) |" for row in rows)
            print(f"| {kind} | {found['elements'][kind]:,.0f} |" + "".join(cells))


def print_accuracy(results: Results) -> None:
    """Print how far the predictions are from what was measured, and the limits for long runs."""
    print(ACCURACY.format(early=EARLY, last=UPDATES - 1))
    spans = f"2 to {EARLY} | by kind | {EARLY + 1} to {UPDATES} | by kind"
    print(f"| lr | update 1 | {spans} | long run | long run, steps of lr |\n|---|---|---|---|---|---|---|---|")
    for lr, found in results.items():
        first, early, late = found["rows"][:1], found["rows"][1:EARLY], found["rows"][EARLY:]
        kinds = [kind for kind in KINDS if kind != "norms"]
        cells = [ratios(rows, of) for rows, of in ((first, [ALL]), (early, [ALL]), (early, kinds))]
        cells += [ratios(late, [ALL]), ratios(late, kinds)]
        cells += [percent(row["long_run"][ALL]) for row in (late[-1], first[0])]
        print(f"| {lr} | {' | '.join(cells)} |")


def ratios(rows: Sequence[Row], kinds: Sequence[str]) -> str:
    """Return the smallest and the largest of predicted / measured."""
    found = [row["predicted"][kind] / row["changed"][kind] for row in rows for kind in kinds]
    smallest, largest = (f"{value:.2f}" for value in (min(found), max(found)))
    return smallest if len(found) == 1 else f"{smallest} to {largest}"


def percent(value: float) -> str:
    return f"{value:#.3g}"


def draw(results: Results, path: Path) -> None:
    """Draw the fraction by update for each learning rate, and by kind of tensor at the last update."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_update, by_lr) = pyplot.subplots(1, 2, figsize=(11, 4.4))
    for lr, found in results.items():
        rows = found["rows"]
        numbers = [row["update"] for row in rows]
        (line,) = by_update.plot(numbers, [row["changed"][ALL] for row in rows], "o-", label=lr, markersize=4)
        by_update.plot(numbers, [row["predicted"][ALL] for row in rows], "--", color=line.get_color())
    for kind in KINDS:
        last = [found["rows"][-1] for found in results.values()]
        rates = [float(lr) for lr in results]
        (line,) = by_lr.plot(rates, [row["changed"][kind] or None for row in last], "o-", label=kind, markersize=4)
        by_lr.plot(rates, [row["predicted"][kind] for row in last], "--", color=line.get_color())
    by_update.set(title="all weights, by learning rate", xlabel="update", ylabel="changed elements, percent")
    by_lr.set(title=f"kinds of tensors at update {UPDATES}", xlabel="learning rate", xscale="log")
    for axis in (by_update, by_lr):
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    by_update.set_ylim(top=60)
    by_update.legend(fontsize=8, ncols=len(results), loc="upper right")
    by_lr.legend(fontsize=8)
    figure.suptitle("BF16 weights that one update changes: measured (solid) and predicted (dashed)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lr", nargs="*", help=f"only these of {', '.join(LEARNING_RATES)}; the picture needs all")
    options = parser.parse_args()
    if unknown := [lr for lr in options.lr if lr not in LEARNING_RATES]:
        parser.error(f"unknown learning rate {unknown[0]!r}; known: {', '.join(LEARNING_RATES)}")
    results = {lr: results_of(lr) for lr in options.lr or LEARNING_RATES}
    print("# Which fraction of BF16 weights an update changes\n\n    python benchmarks/changed_fractions.py\n")
    print_introduction()
    if not options.lr:
        draw(results, PICTURE)
        print(f"![the same numbers over updates and learning rates]({PICTURE.name})")
    print_runs(results)
    print_by_update(results)
    print_by_kind(results)
    print_accuracy(results)


if __name__ == "__main__":
    main()
