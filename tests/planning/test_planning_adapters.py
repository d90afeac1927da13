"""What `hybrid3d plan` says of syncs of adapters alone, against PEFT's own matrices and the engines' whole models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from commands import ROOT
from hybrid3d.config import Recipe, RecipeError, load_recipe
from hybrid3d.inputs.adapters import adapted_shapes
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.estimates import predict_adapter_sync, query_adapters
from hybrid3d.planning.hardware import hardware_of
from hybrid3d.planning.page import format_page
from hybrid3d.planning.report import make_report
from hybrid3d.reshard.plan.layout import Holdings
from hybrid3d.rollout.probe import adapter_demands, trace_adapter_demand
from hybrid3d.train.megatron.probe import adapter_holdings_of, adapter_holdings_of_all, expected_shapes

pytestmark = pytest.mark.engines

QWEN = ROOT / "recipes/qwen2.5-7b.yaml"
ATTENTION = "lora.target_modules=[q_a_proj,q_b_proj,o_proj]"


def bytes_by_sharding(folder: Path, rank: int) -> dict[bool, int]:
    """The bytes in bfloat16 of PEFT's matrices for a whole model, by whether tensor parallelism shards them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        adapted = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    found = {True: 0, False: 0}
    for name, matrix in adapted.named_parameters():
        if ".lora_" in name:
            by_columns = ".o_proj." in name or ".down_proj." in name
            found[by_columns == (".lora_A." in name)] += matrix.numel() * 2
    return found


@pytest.mark.parametrize(
    ("layout", "missing"),
    [
        pytest.param(["train.tp=1", "train.pp=2", "train.dp=4"], {True: 1 / 2, False: 1 / 2}, id="PP2"),
        pytest.param(["train.tp=2", "train.pp=1", "train.dp=4"], {True: 1 / 2, False: 0}, id="TP2"),
        pytest.param(["train.tp=4", "train.pp=2", "train.dp=1"], {True: 7 / 8, False: 1 / 2}, id="TP4 x PP2"),
    ],
)
def test_bytes_are_those_of_the_matrices_that_peft_makes(layout: list[str], missing: dict[bool, float]) -> None:
    """Each of eight ranks generates with all matrices.

    Args:
        missing: the part of them that a rank does not train, of those that tensor parallelism shards and of the others.
    """
    settings = ["lora.rank=16", "lora.alpha=32", "rollout.tp=1", "machine.gpus_per_node=4", *layout]
    recipe = load_recipe(QWEN, settings)
    matrices = bytes_by_sharding(ROOT / recipe.model.path, rank=16)
    found = predict_adapter_sync(
        recipe, read_config(recipe.model.path), range(8), hardware_of(recipe.machine), lambda what: None
    )
    assert found.received_bytes == found.lower_bound_bytes == 8 * sum(missing[key] * matrices[key] for key in matrices)
    # With two stages, ranks 0 to 3 and the others are nodes, and each node needs the other's half once
    assert found.network_bytes == (sum(matrices.values()) if recipe.train.pp == 2 else 0)
    assert found.time.seconds > 0


def adapted(folder: Path, *overrides: str) -> tuple[Recipe, dict[str, Any]]:
    lengths = ["rollout.max_model_len=128", "rollout.max_new_tokens=8", "lora.rank=4", "lora.alpha=8"]
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.path={folder}", *lengths, *overrides])
    return recipe, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", ["train.tp=2", "train.pp=2", "train.vpp=2"]),
        ("deepseek_v3", ["train.tp=2", "train.pp=2", "train.ep=2", "train.dp=2", ATTENTION]),
    ],
)
def test_layers_of_a_kind_are_those_of_whole_models(
    family: str, settings: list[str], tiny_checkpoint: Callable[..., Path]
) -> None:
    recipe, config = adapted(tiny_checkpoint(family), "rollout.tp=2", *settings)
    shapes = expected_shapes(config)
    assert recipe.lora is not None
    matrices = adapted_shapes(recipe.lora, shapes)
    for rank, held in adapter_holdings_of_all(config, recipe, shapes).items():
        whole = adapter_holdings_of(config, recipe.train, rank, torch.float32, recipe.lora, shapes)
        assert without_local(held) == without_local(whole), f"rank {rank}"
    for slot, found in enumerate(adapter_demands(config, recipe, shapes, matrices)):
        assert set(found.demand.pieces) == set(trace_adapter_demand(recipe, shapes, matrices, slot).pieces)


def without_local(held: Holdings) -> list[Any]:
    return sorted((piece.name, piece.box.start, piece.box.size, piece.dtype) for piece in held.pieces)


def test_page_and_the_numbers(tiny_checkpoint: Callable[..., Path]) -> None:
    recipe, config = adapted(tiny_checkpoint("qwen2"), "train.tp=4", "train.pp=1", "rollout.tp=2")
    report = make_report(recipe, config)
    numbers, adapters = report.numbers(), report.adapters
    assert adapters is not None
    assert numbers["adapter_received_bytes"] == numbers["adapter_lower_bound_bytes"] == adapters.received_bytes > 0
    assert numbers["adapter_network_bytes"] == adapters.network_bytes == 0
    assert numbers["seconds"]["adapters"] == adapters.time.seconds < numbers["seconds"]["sync"]
    console = Console(width=200)
    with console.capture() as printed:
        console.print(format_page(report))
    assert f"adapters   {adapters.received_bytes:,} bytes received in each later sync" in printed.get()
    assert recipe.lora is not None
    for other in (None, replace(recipe.lora, sync="merged")):  # every sync of these sends weights
        without = make_report(replace(recipe, lora=other), config)
        assert set(numbers) - set(without.numbers()) == {
            "adapter_received_bytes",
            "adapter_lower_bound_bytes",
            "adapter_network_bytes",
        }
        assert without.numbers()["received_bytes"] == numbers["received_bytes"]
        assert set(numbers["seconds"]) - set(without.numbers()["seconds"]) == {"adapters"}


def test_adapters_go_to_ranks_that_only_generate(tiny_checkpoint: Callable[..., Path]) -> None:
    """Two ranks train at TP2, and each of two engines on two others wants all matrices."""
    split = ["train.tp=2", "train.pp=1", "rollout.tp=1", "roles.generation.ranks=2", "machine.gpus_per_node=2"]
    recipe, config = adapted(tiny_checkpoint("qwen2"), *split)
    matrices = query_adapters(recipe, config).shapes
    found = predict_adapter_sync(recipe, config, range(2), hardware_of(recipe.machine), lambda what: None)
    whole = 4 * sum(rows * columns for rows, columns in matrices.values())
    assert found.received_bytes == found.lower_bound_bytes == 2 * whole
    assert found.network_bytes == whole  # once for both engines of the node


def test_layers_that_vllm_has_no_slots_for_are_named(tiny_checkpoint: Callable[..., Path]) -> None:
    recipe, config = adapted(tiny_checkpoint("deepseek_v3"), "train.tp=2", "train.pp=2")
    with pytest.raises(RecipeError, match=r"adapters of down_proj, gate_proj, kv_b_proj, up_proj.* lora.sync=merged"):
        make_report(recipe, config)
