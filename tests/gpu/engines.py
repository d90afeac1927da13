"""Both engines together: live finalization, Mixtral at TP2 with CUDA graphs, `plan` and `bench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from gpu import one_rank
from gpu.models import CONFIGS
from gpu.ranks import run_on_ranks
from gpu.record import Record
from hybrid3d.certify.tiny_models import write_checkpoint, write_config
from hybrid3d.config import Recipe, Rollout, Sync

VERSIONS = 3
LENGTH = 128
ANSWER = 16
# Of the mean difference of an answer's log-probabilities between the engines, in nats. On a CPU it is 1e-6 in float32
# and up to 0.024 in bfloat16, where single tokens that rounding routes to other experts differ by up to 0.8. Other
# weights change them by 1.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06}
# With vLLM's weights in FP8, and on a GPU its activations too
TOLERANCE_FP8 = 0.25
RANK = "gpu.engine_rank:sync_and_generate"


def live_sync(
    record: Record,
    device: str,
    family: str,
    ranks: int = 1,
    tp: int = 1,
    quantization: Literal["fp8"] | None = None,
    keeps: bool = False,
) -> None:
    """Sync three checkpoints into a vLLM that runs, verified, and compare both engines' log-probabilities after each.

    Args:
        ranks: of both engines.
        tp: of vLLM; its groups are over ranks in descending order, as placement may choose.
        quantization: of vLLM's weights.
        keeps: let vLLM keep its weights while it sleeps.
    """
    with tempfile.TemporaryDirectory() as path:
        folders = [str(write_checkpoint(Path(path) / str(n), CONFIGS[family], n)) for n in range(VERSIONS)]
        dtype = "bfloat16" if device == "cuda" or quantization else "float32"
        slots = [rank - rank % tp + tp - 1 - rank % tp for rank in range(ranks)]
        settings = dict(
            family=family,
            folders=folders,
            dtype=dtype,
            tp=tp,
            slots=slots,
            quantization=quantization,
            keeps=keeps,
        )
        found = run_on_ranks(ranks, RANK, **settings)
    record(**found)
    tolerance = TOLERANCE_FP8 if quantization else TOLERANCE[dtype]
    for version, mean in enumerate(found["mean_difference"]):
        said = f"version {version}: log-probabilities differ by {mean:.1e} on average"
        assert mean <= tolerance, f"{said}, expected at most {tolerance:.0e}"
    changed = all(change > 10 * TOLERANCE[dtype] for change in found["change"])
    assert changed, "the checkpoints do not differ: nothing was shown"
    if device == "cuda":
        assert found["graphs"], "CUDA graphs are captured"


def plan(record: Record, device: str) -> None:
    """Query both engines about eight ranks with one visible GPU, as `hybrid3d plan` does before GPUs are rented."""
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    found = _command(["plan"], {"tp": 4, "dp": 2}, {"tp": 4}, visible)
    record(**{key: found[key] for key in ("wanted_bytes", "received_bytes", "lower_bound_bytes", "coverage")})
    assert found["received_bytes"] == found["lower_bound_bytes"], "the plan moves more than the lower bound"
    assert found["coverage"] == "exact", f"coverage is {found['coverage']}"


def bench(record: Record, device: str) -> None:
    """Run `hybrid3d bench` on at most two GPUs, or two CPU ranks: each method must move every bit."""
    ranks = min(2, torch.cuda.device_count()) if device == "cuda" else 2
    found = _command(["bench", "--repeats", "3"], {"tp": ranks}, {"tp": 1}, {})
    record(ranks=ranks, seconds=found["seconds"], received_bytes=found["received_bytes"], bit_exact=found["bit_exact"])
    assert all(found["bit_exact"].values()), f"not every bit arrived: {found['bit_exact']}"
    assert found["received_bytes"] == found["lower_bound_bytes"], "the sync moved more than the lower bound"


def _command(arguments: list[str], train: dict[str, int], rollout: dict[str, int], variables: dict[str, str]) -> Any:
    """Run `hybrid3d ARGUMENTS RECIPE --json` with a tiny model with experts; return its numbers."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        recipe = {
            "name": "gpu",
            "model": {"path": str(write_config(folder / "model", CONFIGS["experts"])), "dtype": "bfloat16"},
            "train": train,
            "rollout": {**rollout, "max_model_len": LENGTH, "max_new_tokens": ANSWER, "kv_cache_gib": 1 / 16},
            "data": {"train": "train.parquet", "eval": "eval.parquet"},
            "algorithm": {"name": "grpo", "prompts_per_step": 8, "samples_per_prompt": 2},
            "optimizer": {"lr": 1.0e-4},
            "run": {"steps": 1, "dir": str(folder / "runs")},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "hybrid3d",
            arguments[0],
            str(folder / "recipe.yaml"),
            *arguments[1:],
            "--json",
        ]
        done = subprocess.run(
            command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
        )
        if done.returncode:
            for log in sorted(folder.glob("runs/*/logs/*.log")):
                print(log.name, log.read_text(encoding="utf-8")[-4000:])
        assert done.returncode == 0, f"`hybrid3d {arguments[0]}` ended with exit code {done.returncode}"
        return json.loads(done.stdout)


def recipe_of_rank(
    folder: str,
    dtype: str,
    tp: int,
    ranks: int,
    quantization: Literal["fp8"] | None = None,
    keeps: bool = False,
) -> Recipe:
    """Return the recipe of a check with both engines on each rank."""
    rollout = Rollout(
        tp=tp,
        max_model_len=LENGTH,
        max_new_tokens=ANSWER,
        kv_cache_gib=1 / 16,
        gpu_memory_utilization=0.3,
        keep_weights=keeps,
        quantization=quantization,
    )
    return one_rank.recipe_for(Path(folder), dtype, rollout, Sync(verify="always"), tp=ranks, micro_batch_size=2)
