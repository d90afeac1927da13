"""A recipe, a model and data with which nothing is wrong, for tests that make something of them wrong."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

RECIPE: dict[str, Any] = {
    "name": "tried",
    "model": {"path": "model"},
    "train": {"tp": 2, "pp": 2, "micro_batch_size": 4},
    "rollout": {"tp": 2, "max_model_len": 128, "max_new_tokens": 8},
    "data": {"train": "train.parquet", "eval": "eval.parquet"},
    "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 2},
    "optimizer": {"lr": 1.0e-4},
    "run": {"steps": 2},
}


def write_inputs(folder: Path, demo: Path, recipe: Mapping[str, Any] = RECIPE) -> Path:
    """Write `recipe.yaml`, `model/` and two parquet files of the demo task into the folder; returns it."""
    shutil.copytree(demo / "base", folder / "model")
    for name in ("train", "eval"):
        pq.write_table(pq.read_table(demo / f"{name}.parquet").slice(0, 20), folder / f"{name}.parquet")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)))
    return folder
