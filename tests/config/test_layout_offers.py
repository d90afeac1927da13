"""A refused layout offers values: there is something on offer for every refusal, and what is offered is accepted."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hybrid3d.config import ModelShape, Recipe, RecipeError, check_layout
from hybrid3d.config import read_recipe as read
from hybrid3d.config.layout_rules import Device
from hybrid3d.families import Experts, Latents

RAW: dict[str, Any] = {
    "name": "offers",
    "model": {"path": "model"},
    "data": {"train": "a.parquet", "eval": "b.parquet"},
    "algorithm": {"name": "grpo", "prompts_per_step": 32, "samples_per_prompt": 8},
    "optimizer": {"lr": 0.001},
    "run": {"steps": 80},
    "rollout": {"max_model_len": 256, "max_new_tokens": 16},
}
DENSE = ModelShape(
    num_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=32,
    hidden_size=384,
    intermediate_size=768,
    vocab_size=500,
    max_position_embeddings=512,
)
SPARSE = replace(DENSE, experts=Experts(8, 2, 64, (False, *[True] * 11), shared_width=128))
LATENT = replace(SPARSE, num_layers=7, latents=Latents(q_rank=64, kv_rank=512, nope=32, rope=64, value=48))
VALUES: dict[str, list[Any]] = {
    "train.tp": [1, 1, 2, 3, 4, 5, 8, 13],
    "train.pp": [1, 1, 2, 3, 4, 5, 12, 13],
    "train.vpp": [1, 1, 1, 2, 3, 7],
    "train.dp": [1, 1, 2, 3, 4, 100],
    "train.cp": [1, 1, 1, 2, 3, 5],
    "train.ep": [1, 1, 2, 3, 8, 9],
    "train.etp": [1, 1, 2, 3, 64, 100],
    "train.first_stage_layers": [None, None, None, 1, 2, 5, 12, 100],
    "train.last_stage_layers": [None, None, None, 1, 3, 6, 50],
    "train.expert_bias_update_rate": [0.0, 0.001],
    "train.router_replay": ["none", "none", "old", "rollout"],
    "train.micro_batch_size": [1, 1, 8, 24, 2**20],
    "rollout.tp": [1, 1, 2, 3, 4, 16],
    "rollout.dp": [1, 1, 2, 3, 5, 16],
    "rollout.expert_parallel": [False, True],
    "rollout.max_model_len": [256, 256, 1, 512, 513],
    "rollout.max_new_tokens": [16, 16, 255, 256, 600],
    "rollout.kv_cache_gib": [1.0, 0.001],
    "algorithm.prompts_per_step": [32, 32, 33, 1, 1_000],
    "algorithm.samples_per_prompt": [8, 8, 1, 3],
    "algorithm.minibatches": [1, 1, 3],
}


def recipe_with(settings: dict[str, Any]) -> Recipe:
    raw = {section: dict(value) if isinstance(value, dict) else value for section, value in RAW.items()}
    for key, value in settings.items():
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = value
    return read(raw, "offers", [])


def problems_of(settings: dict[str, Any], shape: ModelShape, device: Device | None) -> list[str]:
    try:
        check_layout(recipe_with(settings), shape, device=device)
    except RecipeError as error:
        return list(error.problems)
    return []


def blamed(line: str) -> str:
    found = re.match(r"[a-z]+\.[a-z_]+", line)
    assert found, line
    return found[0]


def offers_of(line: str) -> Iterator[tuple[str, Any]]:
    """Keys and values that a message offers."""
    for key, values in re.findall(r"nearest valid values? of (\S+) (?:is|are) ((?:\d+|null)(?:, \d+)*)", line):
        yield from ((key, None if value == "null" else int(value)) for value in values.split(", "))
    for value in re.findall(r"the only valid value(?: here)? is (\w+)", line):
        yield blamed(line), {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    for value in re.findall(r": at (?:most|least) ([\d.]+)$", line):
        yield blamed(line), float(value) if "." in value else int(value)
    for key, value in re.findall(r"set (\w+\.\w+)(?:=| to )(\d+)", line):
        yield key, int(value)
    if line.endswith(": set it to null"):
        yield blamed(line), None
    if line.endswith("so it needs 2 or more"):
        yield blamed(line), 2


@pytest.mark.parametrize(
    ("shape", "device"),
    [
        *(pytest.param(DENSE, "cpu", id="dense-cpu"), pytest.param(SPARSE, "cuda", id="sparse-cuda")),
        pytest.param(LATENT, None, id="latent-None"),
        *(pytest.param(DENSE, one, marks=pytest.mark.further, id=f"dense-{one}") for one in ("cuda", None)),
        *(pytest.param(SPARSE, one, marks=pytest.mark.further, id=f"sparse-{one}") for one in ("cpu", None)),
        *(pytest.param(LATENT, one, marks=pytest.mark.further, id=f"latent-{one}") for one in ("cpu", "cuda")),
    ],
)
def test_offered_layout_values_are_accepted(shape: ModelShape, device: Device | None) -> None:
    draw, refused = random.Random(1), 0
    for _ in range(40):
        settings = {key: draw.choice(values) for key, values in VALUES.items() if draw.random() < 0.4}
        for line in problems_of(settings, shape, device):
            refused += 1
            offers = list(offers_of(line))
            none_alone = "alone is valid here" in line or "no value up to 1,048,576 is" in line
            assert offers or none_alone, (line, settings)
            for key, value in offers:
                left = problems_of({**settings, key: value}, shape, device)
                assert key not in map(blamed, left), (line, key, value, left)
    assert refused > 30


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            {"rollout.expert_parallel": True, "rollout.dp": 3, "train.dp": 4},
            [
                "rollout.dp=3: rollout.tp*dp=1*3=3 does not divide the train.tp*pp*cp*dp=4 ranks into engines: "
                "nearest valid values of rollout.dp are 2, 4"
            ],
        ),
        (
            {"train.etp": 2},
            [
                "train.ep*etp=1*2=2 does not divide the train.tp*cp*dp=1 ranks of a pipeline stage, over which experts "
                "are distributed: nearest valid value of train.etp is 1"
            ],
        ),
        (
            {"train.pp": 3, "train.first_stage_layers": 5},
            [
                "train.first_stage_layers=5 leave 7 of num_hidden_layers=12 to 2 other stages, which must have the "
                "same number of layers, 1 or more: nearest valid values of train.first_stage_layers are 4, 6; "
                "nearest valid values of train.pp are 2, 8"
            ],
        ),
        (
            {"train.pp": 1, "train.first_stage_layers": 5},
            ["train.first_stage_layers=5 needs several stages, but train.pp=1 has one: set it to null"],
        ),
        (
            {"train.micro_batch_size": 2**20, "train.dp": 1_000},
            [
                "algorithm.prompts_per_step=32 of 8 samples each is 256 sequences, not a multiple of "
                "train.dp*train.micro_batch_size=1000*1048576=1048576000: no value up to 1,048,576 is: "
                "lower train.micro_batch_size, train.dp or algorithm.minibatches",
                "algorithm.prompts_per_step=32 is not a multiple of the rollout replicas, ranks/rollout.tp="
                "1000/1=1000: no value up to 1,048,576 is: "
                "lower train.micro_batch_size, train.dp or algorithm.minibatches",
            ],
        ),
    ],
)
def test_to_the_letter(settings: dict[str, Any], lines: list[str]) -> None:
    assert problems_of(settings, SPARSE, None) == lines


@pytest.mark.parametrize(
    ("dtype", "rollout_tp", "least", "bytes_needed"),
    # 3 blocks of 128 tokens, of 12 layers with keys and values of 4 heads of 32
    [("float32", 1, 0.005, 3 * 128 * 12 * 2 * 4 * 32 * 4), ("bfloat16", 2, 0.002, 3 * 128 * 12 * 2 * 2 * 32 * 2)],
)
def test_kv_cache_has_room_for_one_sequence(dtype: str, rollout_tp: int, least: float, bytes_needed: int) -> None:
    train = {"train.tp": 2, "model.dtype": dtype, "rollout.tp": rollout_tp}
    short = bytes_needed / 2**30 - 1e-6
    assert problems_of({**train, "rollout.kv_cache_gib": bytes_needed / 2**30}, DENSE, "cpu") == []
    assert problems_of({**train, "rollout.kv_cache_gib": short}, DENSE, "cpu") == [
        f"rollout.kv_cache_gib={short:g} has no room for a sequence of rollout.max_model_len=256 tokens, which takes "
        f"{bytes_needed / 2**30:.4f} GiB: at least {least:g}"
    ]
    assert problems_of({**train, "rollout.kv_cache_gib": short}, DENSE, "cuda") == []
