"""The tiny models and the layouts that the audit asks about. Run as a script, it writes the models' configs and shapes.

Latent attention has DeepSeek's own head sizes: with those of `checkpoints.py` vLLM has no backend for it on Hopper.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from checkpoints import FAMILIES, IN_BLOCKS, LATENT, SPARSE, make_config
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Sync, Train

HOPPER_HEADS = dict(qk_nope_head_dim=128, v_head_dim=128)  # beside 64 rotated dims, as in checkpoints.py
BLOCKS = "in-blocks"  # the folder of models whose shards at TP1 and TP2 are whole blocks of 128 x 128

ROLLOUT: list[dict[str, Any]] = [dict(tp=1), dict(tp=2), dict(tp=4)]
EXPERT_PARALLEL: list[dict[str, Any]] = [
    dict(tp=2, expert_parallel=True),
    dict(tp=2, dp=2, expert_parallel=True),
    dict(tp=4, expert_parallel=True),
    dict(tp=1, dp=4, expert_parallel=True),
]
TRAIN: list[dict[str, int]] = [dict(dp=4), dict(tp=2, dp=2), dict(tp=4), dict(tp=2, pp=2)]
EXPERT_TRAIN: list[dict[str, int]] = [
    dict(dp=4, ep=4),
    dict(tp=2, dp=2, ep=2),
    dict(tp=2, dp=2, ep=2, etp=2),
    dict(tp=2, pp=2, ep=2),
]


def rollouts(family: str) -> list[dict[str, Any]]:
    return ROLLOUT + (EXPERT_PARALLEL if family in SPARSE else [])


def trains(family: str) -> list[dict[str, int]]:
    return TRAIN + (EXPERT_TRAIN if family in SPARSE else [])


def rollout_cases(
    models: Path, families: Iterable[str], quantized: bool = False
) -> Iterator[tuple[str, str, Recipe, int]]:
    """Yield (family, what it is called, recipe, rank within the engine) of every rank of every rollout layout.

    Args:
        quantized: with weights in FP8, of the models in whole blocks and the layouts that leave them whole.
    """
    settings: dict[str, Any] = dict(quantization="fp8") if quantized else {}
    folder = models / BLOCKS if quantized else models
    for family in families:
        for layout in rollouts(family):
            if quantized and layout["tp"] > 2:
                continue
            for rank in range(layout["tp"] * layout.get("dp", 1)):
                recipe = recipe_of(folder, family, **layout, **settings)
                yield family, f"{family} {said(layout)} rank {rank}", recipe, rank


def said(layout: dict[str, Any]) -> str:
    """Return a layout in words, such as `tp2 dp2 expert_parallel`."""
    return " ".join(key if value is True else f"{key}{value}" for key, value in layout.items())


def recipe_of(models: Path, family: str, **rollout: Any) -> Recipe:
    return Recipe(
        name="audit",
        model=Model(path=str(models / family), dtype="bfloat16"),
        train=Train(dp=4),
        rollout=Rollout(max_model_len=128, max_new_tokens=8, kv_cache_gib=1 / 16, **rollout),
        sync=Sync(),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=4, samples_per_prompt=2),
        optimizer=Optimizer(lr=1e-3),
        run=Run(steps=1),
    )


def shapes_of(model: Path) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every canonical tensor of a model, as Megatron's CPU model has it."""
    shapes = json.loads((model / "shapes.json").read_text())
    return {name: tuple(shape) for name, shape in shapes.items()}


def write_models(models: Path) -> None:
    """Write `config.json` and `shapes.json` of each family; no weights."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from hybrid3d.inputs.models import read_config
    from hybrid3d.train.megatron.probe import expected_shapes

    for family in FAMILIES:
        for folder, sizes in ((models / family, {}), (models / BLOCKS / family, IN_BLOCKS[family])):
            config = make_config(family)
            config.update(sizes | (HOPPER_HEADS if family in LATENT else {}))
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
            config.save_pretrained(folder)
            (folder / "shapes.json").write_text(json.dumps(expected_shapes(read_config(str(folder)))))


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
