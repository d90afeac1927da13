"""Proves the pair of engines of this environment: PYTHONPATH=src:tests python -m pairs.proof FOLDER FLOOR

Each proof becomes a line of FOLDER/proofs.jsonl: its name, what was wrong (empty where it is proven) and its seconds;
those that are proven are not repeated. FLOOR is the folder of the floor's proofs, whose runs are compared with and
continued; it is FOLDER for the floor itself, which makes the demo's data and model.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import EXPERTS, ROOT, demo_folder, experts_folder, hybrid3d, is_time, python, read_rows
from hybrid3d.engines.certificates import installed_versions, line_of_error
from mtp_reference import make_mtp_checkpoint
from pairs.table import FLOOR

MODELS = sorted(path.parent for path in (ROOT / "recipes/models").glob("*/config.json"))
LIMIT = 300  # seconds of one command
RUN = "runs/demo-cpu"
RECIPE = str(ROOT / "recipes/demo-cpu.yaml")
LAYOUTS = {
    "TP2 PP2 -> TP2": ("train.tp=2 train.pp=2 rollout.tp=2", "train.tp=2 train.pp=2 rollout.tp=2"),
    "PP2 or EP2 -> TP1": ("train.pp=2 rollout.tp=1", "train.dp=2 train.ep=2 rollout.tp=1"),
}
TOLERANCE = 1e-5  # of metrics in float32 between versions
STEPS = 3
PROVEN = "proven.json"  # the versions that were run, and digests of what is used of them
RATE = 1.0e-4  # another learning rate than the recipe's


@dataclass(frozen=True)
class Proof:
    """One proof: `prove` returns what is wrong, or nothing."""

    name: str
    prove: Callable[[], str]


def proofs(folder: Path, floor: Path) -> Iterator[Proof]:
    """Yield the proofs of a pair, in order: later ones continue the runs of earlier ones."""
    yield Proof("touch points", lambda: touch_points(folder))
    for family, model, sparse in families():
        for layout, settings in LAYOUTS.items():
            chosen = settings[sparse].split()
            yield Proof(f"certify {family} {layout}", lambda m=model, c=chosen: certified(folder, m, c))
    demo = floor / "data/build/demo"
    if folder == floor:
        yield Proof("the demo's data and model", lambda: make_demo(floor / "data"))
    yield Proof("demo", lambda: demo_trains(folder, demo, floor))
    yield Proof("resume", lambda: resumed(folder / "demo", floor / "demo"))
    yield Proof("resume with another learning rate", lambda: resumed_with_another_rate(folder))
    yield Proof("resume of the floor's checkpoint", lambda: resumed_from(folder, floor))
    yield Proof("multi-token prediction", lambda: trains_mtp(folder, demo))


def names_of_proofs() -> list[str]:
    """Return the names of all proofs of a pair."""
    return [proof.name for proof in proofs(Path("pair"), Path("floor"))]


def families() -> Iterator[tuple[str, Path, bool]]:
    """Yield the first published model of each family, and whether it has experts."""
    seen = set()
    for model in MODELS:
        config = json.loads((model / "config.json").read_text())
        family = config["model_type"]
        if family not in seen:
            seen.add(family)
            yield family, model, any("expert" in key for key in config)


def touch_points(folder: Path) -> str:
    """Compare the engines' sources with what hybrid3d uses; keep digests of what it uses."""
    command = [
        sys.executable,
        "-m",
        "hybrid3d",
        "certify",
        "--touch-points",
        "--json",
    ]  # exits with 1 for missing names
    found = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT).stdout)
    touched = {one["distribution"].removesuffix("-cpu"): one["digest"] for one in found["engines"]}
    (folder / PROVEN).write_text(json.dumps({"versions": installed_versions(), "touched": touched}) + "\n")
    return ", ".join(found["missing"])


def certified(folder: Path, model: Path, settings: list[str]) -> str:
    """Certify a tiny model of a family in a layout."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    said = hybrid3d(folder, "certify", str(model), "--tiny", "--rounds", "3", "--json", *settings, timeout=LIMIT)
    found = json.loads(said[said.index("{") :])
    unproven = [f"{name}: {check['status']} {check['wrong'][:1]}" for name, check in found["checks"].items()]
    return "" if found["proven"] else "; ".join(line for line in unproven if "proven []" not in line)


def make_demo(work: Path) -> str:
    """Make the demo's data and its model, as the first stages of `make demo` do."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    python(work, str(ROOT / "examples/make_demo.py"), "build/demo", timeout=LIMIT)
    hybrid3d(work, "train", str(ROOT / "recipes/demo-warmup.yaml"), timeout=2 * LIMIT)
    hybrid3d(work, "export", "runs/demo-warmup", "build/demo/model", timeout=LIMIT)
    return ""


def demo_trains(folder: Path, demo: Path, floor: Path) -> str:
    """Train three steps of the demo, with a checkpoint after the second; compare its metrics with the floor's."""
    work = folder / "demo"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    demo_folder(work, demo)
    train(work)
    shutil.copytree(work / RUN, work / "after-three")
    return differences(work / "after-three", floor / "demo/after-three")


def train(work: Path, **changes: float) -> None:
    """Start or resume the demo's run in a folder, with changes of its settings as a user makes them."""
    if changes:
        lines = [f"{name.replace('_', '.', 1)}: {value}" for name, value in changes.items()]
        (work / RUN / "control.yaml").write_text("\n".join(lines) + "\n")
    hybrid3d(work, "train", RECIPE, f"run.steps={STEPS}", "run.checkpoint_every=2", timeout=LIMIT)


def resumed(work: Path, floor: Path) -> str:
    """Train one step more from the last checkpoint; compare with the floor's run."""
    train(work, run_steps=STEPS + 1)
    return differences(work / RUN, floor / RUN)


def resumed_with_another_rate(folder: Path) -> str:
    """Resume from a checkpoint whose learning rate is not the recipe's; its metrics say which rate was used."""
    work = copy_of(folder / "demo", folder / "other-rate")
    train(work, run_steps=STEPS + 1, optimizer_lr=RATE)
    train(work, run_steps=STEPS + 2)
    rates = [row["train/lr"] for row in read_rows(work / RUN) if row["step"] >= STEPS and "train/lr" in row]
    wrong = len(rates) != 2 or not all(math.isclose(rate, RATE) for rate in rates)
    return f"train/lr is {rates}, not {RATE} twice" if wrong else ""


def resumed_from(folder: Path, floor: Path) -> str:
    """Continue the floor's run after three steps; the next step's metrics are the floor's."""
    work = copy_of(floor / "demo", folder / "from-floor")
    train(work, run_steps=STEPS + 1)
    return differences(work / RUN, floor / "demo" / RUN)


def trains_mtp(folder: Path, demo: Path) -> str:
    """Train one step of a model with layers for multi-token prediction, and write its checkpoint."""
    work = folder / "mtp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    experts_folder(work, demo, "deepseek_v3", make=make_mtp_checkpoint)
    small = ["algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", "train.ep=2", "train.mtp_loss_coef=0.1"]
    hybrid3d(work, "train", RECIPE, *EXPERTS, "run.steps=1", *small, timeout=LIMIT)
    losses = [row["train/mtp_loss"] for row in read_rows(work / RUN) if "train/mtp_loss" in row]
    return "" if losses and all(math.isfinite(loss) for loss in losses) else f"train/mtp_loss is {losses}"


def copy_of(work: Path, place: Path) -> Path:
    """Copy the demo's folder as it was after three steps."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "runs").mkdir(parents=True)
    shutil.copytree(work / "after-three", place / RUN)
    shutil.copytree(work / "build", place / "build", symlinks=True)
    return place


def differences(run: Path, expected: Path) -> str:
    """Return the metrics, but for times and memory, that differ between two runs by more than the tolerance.

    Of another vLLM or torch, which may sample otherwise, return what no run may have: more bytes than the engines want,
    and log-probabilities in which they differ.
    """
    found, wanted = read_rows(run), read_rows(expected)
    here, floor = installed_versions(), FLOOR.versions
    if any(here[name] != floor[name] for name in ("vllm", "torch")):
        steps = [row for row in found if "train/loss" in row]
        return "; ".join(
            f"step {row['step']}: {row['sync/received_bytes']} bytes received, {row['sync/lower_bound_bytes']} needed; "
            f"the engines' log-probabilities differ by {row['mismatch/logprob_abs_mean']}"
            for row in steps
            if row["sync/received_bytes"] != row["sync/lower_bound_bytes"]
            or row["mismatch/logprob_abs_mean"] > TOLERANCE
        )
    if len(found) != len(wanted):
        return f"{len(found)} rows of metrics, the floor's run has {len(wanted)}"
    wrong = [
        f"step {row['step']} {key}: {row.get(key)} in place of {value}"
        for row, other in zip(found, wanted, strict=True)
        for key, value in other.items()
        if not is_time(key) and "memory" not in key and not _close(row.get(key), value)
    ]
    return "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")


def _close(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, int | float):
        return math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(found == wanted)


def main() -> int:
    folder, floor = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "proofs.jsonl"
    before = map(json.loads, out.read_text().splitlines() if out.exists() else ())
    done = {line["name"] for line in before if not line["wrong"]}
    for proof in proofs(folder, floor):
        if proof.name in done:
            continue
        start = time.monotonic()
        try:
            wrong = proof.prove()
        except (AssertionError, subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
            wrong = str(error).strip()[-2000:] or type(error).__name__
        line = {"name": proof.name, "wrong": wrong, "seconds": round(time.monotonic() - start, 1)}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        said = line_of_error(wrong) if wrong else "proven"
        print(f"{line['seconds']:6.1f} s  {proof.name}: {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
