"""The body of `hybrid3d certify`: the task of a rank, and the recipe that it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid3d.bench.start import start_groups
from hybrid3d.certify.findings import format_page, summarize
from hybrid3d.certify.tiny_models import write_checkpoint
from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.ledger import RankStart, share, wait_for_all
from hybrid3d.planning.agreed_placement import choose_placement
from hybrid3d.run.folder import RunFolder
from hybrid3d.watch.heartbeat import enter_phase

RESULT, PAGE = "certify.json", "certify.md"  # in the folder of the certification


def certify(
    recipe: Recipe, folder: RunFolder, model: str, tiny: Config | None, rounds: int, as_json: bool, start: RankStart
) -> bool:
    """Run the rounds as one of the ranks, write the certificate and print it; return whether everything is proven.

    Args:
        model: as the user named it.
        tiny: the config of the tiny checkpoint that stands for it; None where its own weights are used.
    """
    rank, store, console = start.rank, start.store, start.console

    def write() -> None:
        if tiny is not None:
            write_checkpoint(Path(recipe.model.path), tiny)

    share(store, rank, "model", write)
    slots = choose_placement(recipe, store, folder.path, start.progress.restart_count)
    groups = start_groups(recipe, store)
    from hybrid3d.certify.rounds import Certification

    enter_phase("certify")
    print_status: Callable[[str], object] = (lambda message: None) if console is None or as_json else console.print
    print_status("building both engines")
    certification = Certification(recipe, folder.path, groups.everyone, slots)
    certification.run(rounds, print_status)
    found = summarize(recipe, model, tiny is not None, rounds, certification.result())
    if rank == 0:
        (folder.path / RESULT).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        page = format_page(found)
        (folder.path / PAGE).write_text(page + "\n", encoding="utf-8")
        if console is not None:
            text = json.dumps(found, indent=2) if as_json else page
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    ranks = groups.everyone.size()
    certification.close()
    wait_for_all(groups.store, rank, ranks)
    return bool(found["proven"])


def raw_recipe(name: str, path: str, max_model_len: int) -> dict[str, Any]:
    """Return the settings of a certification, as a recipe's YAML has them; a user's settings override them."""
    return {
        "name": name,
        "model": {"path": path, "dtype": "bfloat16"},
        "train": {"micro_batch_size": 1},
        "rollout": {
            "max_model_len": max_model_len,
            "max_new_tokens": 8,
            "kv_cache_gib": 0.0625,
            "keep_weights": True,
        },
        "sync": {"verify": "always", "delta": "always"},
        "data": {"train": "-", "eval": "-"},
        "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 2},
        "optimizer": {"lr": 1e-3},
        "run": {"steps": 1},
    }
