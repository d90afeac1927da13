"""Smaller models of the recipes, in the same layouts; a scale that cannot be is refused with the smallest that can."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hybrid3d.bench import start
from hybrid3d.bench.scaling import Scale, scale_recipe
from hybrid3d.config import Recipe, RecipeError, load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.planning import hardware

pytestmark = pytest.mark.engines

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)


def recipe(name: str, *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))


def dense(*overrides: str) -> Recipe:
    return recipe("qwen3-8b", "train.tp=2", "train.pp=2", "train.dp=1", "rollout.tp=2", *overrides)


def sparse(*overrides: str) -> Recipe:
    return recipe("mixtral-8x7b", "train.tp=1", "train.pp=1", "train.ep=4", "train.dp=4", "rollout.tp=4", *overrides)


def test_scale_recipe_keeps_what_is_not_scaled() -> None:
    one = dense()
    smaller, config = scale_recipe(one, Scale())
    assert config == read_config(one.model.path)
    assert smaller.name == "bench-qwen3-8b"
    assert smaller.train == one.train


def test_widths_shrink_together() -> None:
    """Of Qwen3-8B: hidden 4096, 32 heads of 128, 8 of them keys, 12288 in the MLP, 151936 tokens."""
    _, config = scale_recipe(dense(), Scale(layers=4, hidden=1024))
    found = {key: config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim")}
    assert found == {"num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128}
    assert (config["num_key_value_heads"], config["intermediate_size"], config["vocab_size"]) == (2, 3072, 38016)


def test_scale_recipe_shrinks_experts_and_caps_experts_per_token() -> None:
    _, config = scale_recipe(
        recipe("qwen3-30b-a3b", *"train.ep=2 train.tp=1 train.pp=1 train.dp=2 rollout.tp=2 rollout.dp=1".split()),
        Scale(experts=4),
    )
    assert (config["num_experts"], config["num_experts_per_tok"]) == (4, 4)


@pytest.mark.parametrize(
    ("one", "scale", "problem"),
    [
        (dense(), Scale(layers=3), "--layers 3: .*3.*: --layers 2 is the smallest that works"),
        (dense(), Scale(hidden=1000), r"intermediate_size would be 3000|num_attention_heads would be 7\.81"),
        (dense(), Scale(hidden=1000), "--hidden 512 is the smallest that works"),
        (sparse(), Scale(experts=6), "--experts 6: .*6.*: --experts 4 is the smallest that works"),
    ],
)
def test_impossible_scale_is_refused_with_smallest_possible_one(one: Recipe, scale: Scale, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        scale_recipe(one, scale)


def test_scale_description_names_what_was_scaled() -> None:
    config = read_config(sparse().model.path)
    said = Scale(layers=4, hidden=1024).describe(config)
    assert said == "layers 32 -> 4, hidden size 4096 -> 1024"
    assert Scale().describe(config) == "nothing"


def test_container_s_limit_counts_and_its_caches_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    for name, content in (
        ("max", "1000\n"),
        ("current", "700\n"),
        ("stat", "anon 500\nactive_file 150\ninactive_file 50\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(content)
    assert hardware.available_memory() == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.available_memory() > 1000


def test_process_that_starts_the_ranks_has_no_cuda_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one, which queries the engines, says how much is free."""
    smaller, config = scale_recipe(dense(f"run.dir={tmp_path}"), Scale())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    answer = [[[2_000_000_000, 0], [0, 0]], 1_000_000_000]
    monkeypatch.setattr(start, "run_in_subprocess", lambda module, recipe: json.dumps(answer))
    with pytest.raises(RecipeError, match=r"takes 2\.0 GB of memory, and 1\.0 GB are free"):
        start.check_benchmark_memory(smaller, config)


@pytest.mark.parametrize("layers", [2, 4, 8])
def test_config_values_of_single_layers_are_scaled_with_them(tmp_path: Path, layers: int) -> None:
    """As `AutoConfig` checks it: it refuses a list of another length."""
    config = read_config(dense().model.path) | {"layer_types": ["full_attention"] * 36, "max_window_layers": 36}
    config["num_hidden_layers"] = 36
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, found = scale_recipe(dense(f"model.path={tmp_path}"), Scale(layers=layers))
    assert found["layer_types"] == ["full_attention"] * layers
    assert found["max_window_layers"] == layers
    (tmp_path / "config.json").write_text(json.dumps(found))
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == layers


def test_layers_without_experts_are_those_that_are_left(tmp_path: Path) -> None:
    layout = "train.ep=2 train.tp=1 train.pp=1 train.dp=2 rollout.tp=2 rollout.dp=1".split()
    config = read_config(recipe("qwen3-30b-a3b").model.path) | {"mlp_only_layers": [0, 3, 40]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, found = scale_recipe(recipe("qwen3-30b-a3b", f"model.path={tmp_path}", *layout), Scale(layers=8))
    assert found["mlp_only_layers"] == [0, 3]


def test_bench_of_changes_keeps_weights_as_they_are_loaded() -> None:
    smaller, _ = scale_recipe(dense(), Scale(), changed=0.02)
    assert smaller.rollout is not None
    assert (smaller.rollout.pack_weights, smaller.rollout.sleep) == (False, False)


@pytest.mark.parametrize(
    ("override", "changed", "problem"),
    [
        ("model.dtype=float32", 0.02, "--changed 0.02: model.dtype is float32: set model.dtype=bfloat16"),
        ("sync.delta=never", 0.02, "--changed 0.02: sync.delta is never: leave it out"),
        ("name=x", 0.0, "--changed 0.0: expected a fraction above 0 and up to 1"),
        ("name=x", 1.5, "--changed 1.5: expected a fraction above 0 and up to 1"),
        ("name=x", float("nan"), "--changed nan: expected a fraction above 0 and up to 1"),
    ],
)
def test_changes_that_cannot_be_measured_are_refused(override: str, changed: float, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        scale_recipe(dense(override), Scale(), changed)


def test_sizes_that_fit_only_together_are_taken() -> None:
    """61 layers cannot be divided among two stages, 6 can."""
    settings = "train.tp=1 train.pp=2 train.ep=2 train.dp=2 train.first_stage_layers=null train.last_stage_layers=null"
    deepseek = recipe("deepseek-v3-671b", *settings.split(), "rollout.tp=2")
    _, config = scale_recipe(deepseek, Scale(layers=6, hidden=896, experts=16))
    assert (config["num_hidden_layers"], config["hidden_size"], config["n_routed_experts"]) == (6, 896, 16)
    with pytest.raises(RecipeError, match=r"--hidden 896: .*no --hidden works with these layouts"):
        scale_recipe(deepseek, Scale(hidden=896))
