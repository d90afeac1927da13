"""Runs hybrid3d's commands as a user would, except that processes do not import the engines again (`warm_python`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import warm_python
from checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS, HELD_OUT = 1024, 64  # of the demo in tests


def demo_folder(folder: Path, demo: Path) -> Path:
    """Prepare `folder` for the demo's recipes, with its data and its model before training; `folder` is returned."""
    (folder / "build").mkdir()
    (folder / "build" / "demo").symlink_to(demo)
    return folder


def experts_folder(folder: Path, demo: Path, family: str, make: Callable[..., Path] = make_checkpoint) -> Path:
    """Prepare `folder` for the demo recipe with a tiny model of `family`, and return the model's folder.

    Args:
        make: writes the model, as `make_checkpoint` does.
    """
    demo_folder(folder, demo)
    model = make(folder / "model", family, seed=1, vocab_size=600)  # the demo's tokenizer fits in
    for path in (demo / "base").glob("*token*"):
        shutil.copy(path, model)
    return model


def warm_checkpoint(folder: Path, demo: Path) -> Path:
    """Write `warm` in a folder: a checkpoint that was trained a little, so that answers and rewards are not all alike.

    Returns:
        The folder, in which the demo's recipes run.
    """
    demo_folder(folder, demo)
    warmup = ["run.steps=70", "optimizer.warmup_steps=10", "optimizer.schedule=constant"]
    warmup += ["train.tp=1", "train.pp=1", "train.micro_batch_size=64"]  # a third of the work of four ranks
    hybrid3d(folder, "train", str(ROOT / "recipes/demo-warmup.yaml"), *warmup)
    hybrid3d(folder, "export", "runs/demo-warmup", "warm")
    return folder


EXPERTS = ["model.path=model", "run.eval_every=100", "train.micro_batch_size=8", "rollout.kv_cache_gib=0.0625"]


def hybrid3d(folder: Path, *arguments: str, timeout: float = 600, expect: int = 0, also: Path | None = None) -> str:
    """Run `hybrid3d ARGUMENTS` in `folder` and return what it printed; it must end with the expected exit code.

    Modules in the folder `also` can be imported too. A `sitecustomize` there runs in each process before anything else.
    """
    return python(folder, "-m", "hybrid3d", *arguments, timeout=timeout, expect=expect, also=also)


def python(folder: Path, *arguments: str, timeout: float = 600, expect: int = 0, also: Path | None = None) -> str:
    path = os.pathsep.join(str(one) for one in (also, ROOT / "src") if one is not None)
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [warm_python.executable(), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == expect, f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def is_time(key: str) -> bool:
    """Return whether a metric may differ between two runs of the same seed."""
    return key.startswith("time/") or key.endswith(("seconds", "per_second"))


def without(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Return rows without times and without the given keys."""
    return [{k: v for k, v in row.items() if not is_time(k) and k not in keys} for row in rows]


def answers_of(folder: Path, engine: str, checkpoint: Path, data: Path, max_new_tokens: int) -> dict[str, Any]:
    """Return greedy answers and accuracy of a checkpoint, by `transformers` or by plain `vllm`."""
    out = folder / f"{engine}.json"
    script = str(ROOT / "tests" / "answers.py")
    python(folder, script, engine, str(checkpoint), str(data), str(max_new_tokens), str(out))
    found: dict[str, Any] = json.loads(out.read_text())
    return found
