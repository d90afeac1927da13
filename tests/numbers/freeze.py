"""Writes what the commands print today to `frozen/`, and compares: a rebuilding changes none of it unasked.

    python tests/numbers/freeze.py               # write, at the commit before a rebuilding: 40 minutes
    python tests/numbers/freeze.py --check       # run all of it again, and print each number that differs
    python tests/numbers/freeze.py --check plan  # a part: plan, bench, runs (or one run's name), tests

`plan.json` has the numbers of `hybrid3d plan --json` for each recipe, `bench.json` those of `hybrid3d bench`,
`runs.json` the metrics of short runs on four ranks with digests of their samples, and
`tests.json` how many cases each test function has. Seconds, rates and memory that a machine decides are left out. The
floats of runs are those of one kind of CPU, which `runs.json` names: on another kind, write them anew at the commit
before the rebuilding, and compare with that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).resolve().parent / "frozen"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if not path.stem.startswith("demo"))
# What may differ between two runs of a seed, by the contract of metrics.jsonl, and where a run lies
MACHINE = re.compile(r"^time/|(^|_|/)seconds$|per_second$|^path$")
MACHINE_BENCH = re.compile(r"seconds|per_second|memory|^machine$|^date$|^phases$|^ratios$|^spread$")
REWARDS = """
def parity(answer, reference, prompt):
    return float(sum(answer.encode()) % 2)


def reply(turns, reference, prompt):
    return None if len(turns) > 1 else "how many? "


def length(answer, reference, prompt):
    return float(len(answer) % 5)
"""
SHORT = (
    *("run.steps=3", "run.eval_every=3", "run.checkpoint_every=3", "algorithm.prompts_per_step=8"),
    *(
        "algorithm.samples_per_prompt=4",
        "train.micro_batch_size=8",
        "guard.initial_mismatch=ignore",
        "data.eval=few.parquet",
    ),
)
PARITY = ("reward.name=rewards:parity",)
SPLIT = ("train.tp=2", "train.pp=1", "rollout.tp=1", "roles.generation.ranks=2")
BFLOAT16 = ("model.dtype=bfloat16", "rollout.pack_weights=false")
RUNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dense": ("demo-cpu", (*SHORT, *PARITY, "model.path=base", "sync.verify=always")),
    "experts": ("demo-cpu", (*SHORT, *PARITY, "model.path=experts", "train.pp=1", "train.dp=2", "train.ep=2")),
    "split": ("demo-cpu", (*SHORT, *PARITY, *SPLIT, *BFLOAT16, "model.path=base", "sync.delta=always")),
    "ahead": (
        "demo-cpu",
        (*SHORT, *PARITY, *SPLIT, "model.path=base", "async.max_staleness=1", "algorithm.correction.kind=truncate"),
    ),
    "agents": ("demo-agent", (*SHORT, *PARITY, "model.path=calculator", "rollout.tp=2")),
    "turns": (
        "demo-cpu",
        (
            *SHORT,
            "model.path=base",
            "rollout.environment=rewards:reply",
            "rollout.max_turns=2",
            "reward.name=rewards:length",
        ),
    ),
    "partial": (
        "demo-cpu",
        (
            *SHORT,
            *PARITY,
            "model.path=base",
            "async.partial=continue",
            "async.max_staleness=2",
            "algorithm.correction.kind=truncate",
        ),
    ),
    "lora": ("demo-cpu", (*SHORT, *PARITY, "model.path=base", "lora.rank=4", "lora.alpha=8", "optimizer.lr=5e-3")),
    "merged": (
        "demo-cpu",
        (*SHORT, *PARITY, "model.path=base", "lora.rank=4", "lora.alpha=8", "optimizer.lr=5e-3", "lora.sync=merged"),
    ),
    "fp8": ("demo-cpu", (*SHORT, *PARITY, "model.path=blocks", "model.dtype=bfloat16", "rollout.quantization=fp8")),
    "ppo": (
        "demo-cpu",
        (
            *SHORT,
            "model.path=base",
            "reward.model=judge",
            "algorithm.name=ppo",
            "critic.optimizer={lr: 1.0e-3}",
            "train.packed=true",
        ),
    ),
    "greedy": (
        "demo-cpu",
        (*SHORT, *PARITY, "model.path=base", "algorithm.name=remax", "algorithm.samples_per_prompt=1"),
    ),
    "dpo": (
        "demo-preferences",
        (
            *SHORT[:4],
            "train.tp=2",
            "train.dp=2",
            "train.micro_batch_size=8",
            "optimizer.warmup_steps=1",
            "model.path=base",
        ),
    ),
    "sft": (
        "demo-warmup",
        (
            "run.steps=3",
            "model.path=base",
            "optimizer.warmup_steps=1",
            "algorithm.prompts_per_step=32",
            "data.eval=few.parquet",
        ),
    ),
}


def hybrid3d(work: Path, *arguments: str) -> str:
    """Run a command in a folder, and return what it printed."""
    path = os.pathsep.join([str(ROOT / "src"), str(work)])
    done = subprocess.run(
        [sys.executable, "-m", "hybrid3d", *arguments],
        cwd=work,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise SystemExit(f"hybrid3d {' '.join(arguments)}\n{done.stdout[-4000:]}")
    return done.stdout


def prepare(work: Path) -> None:
    """Write the models and data of the runs: the demo's untrained one, experts, blocks of 128, and a judge."""
    import pyarrow.parquet as parquet
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3MoeConfig

    for folder, more in (("build/demo", []), ("build/demo-agent", ["--calculator"])):
        subprocess.run(
            [sys.executable, ROOT / "examples/make_demo.py", work / folder, *more],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    (work / "base").symlink_to("build/demo/base")
    (work / "calculator").symlink_to("build/demo-agent/base")
    (work / "rewards.py").write_text(REWARDS)
    (work / "recipes").symlink_to(ROOT / "recipes")
    (work / "examples").symlink_to(ROOT / "examples")
    parquet.write_table(parquet.read_table(work / "build/demo/eval.parquet").slice(0, 16), work / "few.parquet")
    torch.manual_seed(0)
    base = AutoConfig.from_pretrained(work / "base")
    judge = AutoModelForSequenceClassification.from_pretrained(work / "base", num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(judge.score.weight)
    judge.save_pretrained(work / "judge")
    sizes = dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
    )
    blocks = AutoConfig.from_pretrained(work / "base", **sizes, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(blocks, dtype=torch.bfloat16).save_pretrained(work / "blocks")
    experts = Qwen3MoeConfig(
        **{
            key: getattr(base, key)
            for key in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        },
        **(sizes | dict(hidden_size=64, intermediate_size=128)),
        **dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
        initializer_range=0.06,
    )
    AutoModelForCausalLM.from_config(experts).save_pretrained(work / "experts")
    for name in ("judge", "blocks", "experts"):
        for file in (work / "base").glob("*token*"):
            shutil.copy(file, work / name)


def of_machine(value: Any, pattern: re.Pattern[str] = MACHINE) -> Any:
    """Return JSON without the keys that the machine decides."""
    if isinstance(value, dict):
        return {key: of_machine(item, pattern) for key, item in value.items() if not pattern.search(key)}
    return [of_machine(item, pattern) for item in value] if isinstance(value, list) else value


def plan() -> Iterator[tuple[str, Any]]:
    """Yield the numbers of each recipe's plan; those of seconds are predictions and stay."""
    for recipe in RECIPES:
        printed = hybrid3d(ROOT, "plan", f"recipes/{recipe}.yaml", "--json")
        yield recipe, json.loads(printed[printed.index("{") :])


def bench() -> Iterator[tuple[str, Any]]:
    """Yield the bytes of each method of `bench` on four ranks, dense and with experts, and that every bit arrives."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        for name in ("dense", "experts"):
            layout = [
                setting for setting in RUNS[name][1] if setting.startswith(("model.", "train.p", "train.d", "train.e"))
            ]
            printed = hybrid3d(work, "bench", "recipes/demo-cpu.yaml", *layout, "--repeats", "1", "--json")
            yield name, of_machine(json.loads(printed[printed.index("{") :]), MACHINE_BENCH)


def runs(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of each step of short runs, with digests of their samples, as each run ends."""
    yield "cpu", cpu()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        for name in names:
            recipe, settings = RUNS[name]
            hybrid3d(work, "train", f"recipes/{recipe}.yaml", f"name={name}", *settings)
            rows = [json.loads(line) for line in (work / "runs" / name / "metrics.jsonl").read_text().splitlines()]
            metrics = [of_machine(row) for row in rows]
            yield name, {"metrics": metrics, "samples": samples(work / "runs" / name / "samples.jsonl")}


def samples(file: Path) -> str | None:
    if not file.exists():
        return None
    lines = [json.dumps(of_machine(json.loads(line)), sort_keys=True) for line in file.read_text().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tests() -> Iterator[tuple[str, Any]]:
    """Yield how many cases each test function has, by its name alone: files may move."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    names = re.findall(r"^tests/\S+?::(\w+(?:::\w+)?)(?:\[.*\])?$", done.stdout, re.MULTILINE)
    yield from sorted(Counter(names).items())


def cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each number of `before` that is another now."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from differences(before.get(key, "nothing"), now.get(key, "nothing"), f"{where}/{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{where}/{place}")
    elif before != now:
        yield f"{where}: {before} before, {now} now"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="parts, or names of runs")
    parser.add_argument("--check", action="store_true", help="compare with what is there, and write nothing")
    arguments = parser.parse_args()
    FROZEN.mkdir(exist_ok=True)
    named = [name for name in RUNS if name in arguments.parts]
    chosen = {part: one for part, one in PARTS.items() if part in arguments.parts} or {"runs": runs}
    differ = 0
    for part, numbers in chosen.items():
        file = FROZEN / f"{part}.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        seen = set()
        for name, made in numbers(named or list(RUNS)) if part == "runs" else numbers():
            seen.add(name)
            now = json.loads(json.dumps(made))
            found = list(differences(before.get(name, "nothing"), now, f"{part}/{name}"))
            if arguments.check:
                print("\n".join(found) or f"{part}/{name}: as before", flush=True)
                differ += len(found)
            else:
                before[name] = now
                file.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n")
        gone = [] if named else [name for name in before if name not in seen]
        print(*(f"{part}/{name}: gone" for name in gone), sep="\n", end="\n" if gone else "")
        if arguments.check:
            differ += len(gone)
        elif gone:
            kept = {name: made for name, made in before.items() if name in seen}
            file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 1 if differ else 0


PARTS: Mapping[str, Callable[..., Iterator[tuple[str, Any]]]] = {
    "runs": runs,
    "bench": bench,
    "plan": plan,
    "tests": tests,
}


if __name__ == "__main__":
    sys.exit(main())
