"""Training in FP8: what Megatron is told, how micro batches are padded, and what is refused. It runs on GPUs only."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from commands import ROOT
from hybrid3d.config import Recipe, RecipeError, load_recipe
from run_ranks import run_ranks

BF16 = ("model.dtype=bfloat16", "train.fp8=blockwise")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "qwen2", seed=1)


def recipe_for(path: Path, *more: str) -> Recipe:
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.path={path}", *more])


@pytest.mark.engines
@pytest.mark.parametrize(("fp8", "told"), [("blockwise", "e4m3"), ("tensorwise", "hybrid")])
def test_megatron_is_told(path: Path, fp8: str, told: str) -> None:
    """Its own check accepts the settings, and weights stay in bfloat16."""
    import torch

    from hybrid3d.inputs.models import read_config
    from hybrid3d.train.megatron.build import transformer_config

    recipe = recipe_for(path, "model.dtype=bfloat16", f"train.fp8={fp8}", "train.tp=1", "train.pp=1")
    settings = transformer_config(read_config(recipe.model.path), recipe.train, torch.bfloat16)
    assert (settings.fp8, settings.fp8_recipe, settings.fp8_param) == (told, fp8, False)
    assert settings.disable_parameter_transpose_cache
    usual = transformer_config(read_config(recipe.model.path), recipe_for(path).train, torch.bfloat16)
    assert usual.fp8 is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["train.fp8=blockwise"], "train.fp8=blockwise: the matrices that are multiplied in FP8 are quantized from"),
        ([*BF16[:1], "train.fp8=float8"], "train.fp8: expected one of none, tensorwise, blockwise, got"),
    ],
)
def test_recipes_are_refused(path: Path, more: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe_for(path, *more)
    assert said in str(raised.value)


@pytest.mark.engines
def test_machines_and_models_are_refused(path: Path, tmp_path: Path) -> None:
    from hybrid3d.inputs.checks import _check_transformer_engine, check_model

    with pytest.raises(RecipeError) as raised:
        check_model(recipe_for(path, *BF16))
    refused = "train.fp8=blockwise: Transformer Engine multiplies in FP8, on GPUs only: the only valid value"
    assert refused in str(raised.value)
    check_model(recipe_for(path, *BF16), planned=True)
    with pytest.raises(RecipeError, match=r"train\.fp8=blockwise needs Transformer Engine, which is not installed"):
        _check_transformer_engine(recipe_for(path, *BF16))
    odd = make_checkpoint(tmp_path / "odd", "qwen2", seed=1, intermediate_size=264)
    with pytest.raises(
        RecipeError,
        match=r"needs multiples of 16, and intermediate_size=264, of which each rank has 132, is not one: leave",
    ):
        check_model(recipe_for(odd, *BF16), planned=True)


@pytest.mark.engines
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_queries_need_no_transformer_engine(family: str, tmp_path: Path) -> None:
    """What ranks hold is the same, so that plans are made on any machine; a model is not built without it."""
    import torch

    from hybrid3d.inputs.models import read_config
    from hybrid3d.train.megatron.build import build_model
    from hybrid3d.train.megatron.probe import holdings_of_all, layers_of_stages, representative_layer_counts

    path = make_checkpoint(tmp_path / "model", family, seed=1)
    usual, fp8 = (recipe_for(path, "train.ep=2", *more) for more in (BF16[:1], BF16))
    config = read_config(path)
    counts = representative_layer_counts(config, fp8.train)
    assert holdings_of_all(config, fp8, counts) == holdings_of_all(config, usual, counts)
    assert layers_of_stages(config, fp8.train) == layers_of_stages(config, usual.train)
    with pytest.raises(RecipeError, match=r"train\.fp8=blockwise needs Transformer Engine on a GPU; there are"):
        build_model(config, fp8.train, torch.bfloat16)


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_lengths_are_padded_on_each_rank(tmp_path: Path) -> None:
    """Each of two ranks that split a sequence has a multiple of 16 of its tokens, and padding changes nothing."""
    import torch

    model = make_checkpoint(tmp_path / "model", "qwen3_moe", seed=1)
    run_ranks(ROOT / "tests/jobs/fp8_padding.py", 2, [str(model), str(tmp_path / "found.pt")], timeout=200)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    for packed in (False, True):
        usual, padded = found[packed, "none"], found[packed, "blockwise"]
        assert any(width % 32 for width in usual["widths"])
        assert [width % 32 for width in padded["widths"]] == [0] * len(padded["widths"])
        assert (usual["logprobs"] - padded["logprobs"]).abs().max() <= 1e-4
