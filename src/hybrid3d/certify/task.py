"""The body of `hybrid3d certify`: the task of a rank, the recipe that it runs, and the config of a tiny model.

A tiny model is of the same family as a real one, and has the same kinds of layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid3d.bench.start import start_groups
from hybrid3d.certify.findings import format_page, summarize
from hybrid3d.certify.tiny_models import write_checkpoint
from hybrid3d.config import Recipe
from hybrid3d.distributed import wait_for_all
from hybrid3d.families import Config, family_of
from hybrid3d.ledger import RankStart
from hybrid3d.planning.agreed_placement import choose_placement
from hybrid3d.run.folder import RunFolder
from hybrid3d.watch.heartbeat import enter_phase

RESULT, PAGE = "certify.json", "certify.md"  # in the folder of the certification


@dataclass(frozen=True)
class Subject:
    """What is certified.

    Attributes:
        model: as the user named it.
        tiny: the config of the tiny checkpoint that stands for it; None where its own weights are used.
    """

    model: str
    tiny: Config | None


def certify(
    recipe: Recipe,
    folder: RunFolder,
    subject: Subject,
    rounds: int,
    as_json: bool,
    start: RankStart,
) -> bool:
    """Run the rounds as one of the ranks, write the certificate and print it.

    Returns:
        Whether everything is proven, on every rank.
    """
    rank, store, console = start.rank, start.store, start.console
    if rank == 0:
        if subject.tiny is not None:
            write_checkpoint(Path(recipe.model.path), subject.tiny)
        store.set("model", "written")
    store.wait(["model"])
    slots = choose_placement(recipe, store, folder.path, start.progress.restart_count)
    groups = start_groups(recipe, store)
    from hybrid3d.certify.rounds import Certification

    enter_phase("certify")
    print_status: Callable[[str], object] = (lambda message: None) if console is None or as_json else console.print
    print_status("building both engines")
    certification = Certification(recipe, folder.path, groups.everyone, slots)
    certification.run(rounds, print_status)
    found = summarize(recipe, subject.model, subject.tiny is not None, rounds, certification.result())
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


def with_model(recipe: Recipe, path: Path) -> Recipe:
    """Return the recipe with another checkpoint."""
    return replace(recipe, model=replace(recipe.model, path=str(path)))


HEAD_DIM = 64  # kernels for GPUs support it
MAX_GROUPS = 4  # of query heads; as many ranks of TP can share them
# The most of each size that a tiny model has; what is larger is lowered, and all else is as in the real model.
MAX_SIZES = {
    "vocab_size": 512,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 128,
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
PER_LAYER = ("layer_types",)


def shrunk(config: Config, layers: int) -> dict[str, Any]:
    """Return the config of a tiny model with at least so many layers, some of each kind that the real model has."""
    family = family_of(config)
    kinds = family.representative_layers(config)
    count = min(config["num_hidden_layers"], max(layers, 2, max(kinds) + 1))
    found = {**config, "num_hidden_layers": count}
    found |= {key: min(config[key], most) for key, most in MAX_SIZES.items() if isinstance(config.get(key), int)}
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if family.latents(config) is None:
        small = min(groups, MAX_GROUPS)
        heads = heads // groups * small
        found |= {"num_attention_heads": heads, "num_key_value_heads": small}
        found["hidden_size"] = min(config["hidden_size"], heads * HEAD_DIM)
        if config.get("head_dim") is not None:  # the heads then need not fill the hidden size
            found["head_dim"] = min(config["head_dim"], HEAD_DIM)
            found["hidden_size"] = min(found["hidden_size"], MAX_GROUPS * HEAD_DIM)
    else:  # the sizes of its latents are those that kernels have
        found |= {"num_attention_heads": min(heads, MAX_GROUPS), "num_key_value_heads": min(groups, MAX_GROUPS)}
        found["hidden_size"] = min(config["hidden_size"], MAX_GROUPS * HEAD_DIM)
    found["intermediate_size"] = min(config["intermediate_size"], 2 * found["hidden_size"])
    for key in PER_LAYER:
        if isinstance(config.get(key), list):
            found[key] = config[key][:count]
    if config.get("max_window_layers") is not None:
        found["max_window_layers"] = min(config["max_window_layers"], count)
    if config.get("mlp_only_layers"):
        found["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < count]
    if config.get("num_nextn_predict_layers"):
        found["num_nextn_predict_layers"] = 0
    for key in TOKENS:
        if config.get(key) is not None:
            found[key] = 0
    found.pop("quantization_config", None)
    return found
