"""The memory model against what PyTorch keeps and what Megatron's optimizer allocates."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import checkpoints
from hybrid3d.config import OFFLOADS, Train, load_recipe
from hybrid3d.config.model_shape import ModelShape
from hybrid3d.families import FAMILIES, family_of
from hybrid3d.planning.fitting import MemoryEstimator
from hybrid3d.planning.hardware import COMMUNICATOR, Reserve, count_rollout_groups, hardware_of, reserve_of
from hybrid3d.planning.memory import (
    MemoryEstimate,
    ParameterCounts,
    StageMemory,
    activation_elements_per_token,
    count_parameters,
    estimate_stages,
    stage_activations,
)
from hybrid3d.train.megatron.build import build_model
from hybrid3d.train.megatron.probe import expected_shapes, holdings_of_all, mtp_holdings, representative_layer_counts
from hybrid3d.train.megatron.runtime import as_rank, on_device
from test_full_scale import RECIPES, config_of, recipe_of

pytestmark = pytest.mark.engines

TOKENS = 64


def config_for(family: str) -> dict[str, Any]:
    config = checkpoints.make_config(family).to_dict()
    architecture = next(name for name in FAMILIES if name.lower().startswith(family.replace("_", "") + "for"))
    return config | {"architectures": [architecture]}


def kept(config: dict[str, Any], layers: int, train: Train) -> int:
    """Bytes that one forward pass of a model of so many layers keeps besides parameters and buffers."""
    found: dict[int, torch.UntypedStorage] = {}
    with as_rank(0, train, 1):
        (model,) = build_model({**config, "num_hidden_layers": layers}, train, torch.float32)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config.bias_activation_fusion = True  # as on CUDA
        named = [*model.parameters(), *model.buffers()]
        own = {tensor.untyped_storage().data_ptr() for tensor in named}
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        tokens = torch.randint(config["vocab_size"], (1, TOKENS))
        with on_device(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, torch.arange(TOKENS)[None], None)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_layer_activations_of_a_token_match_what_is_measured(family: str) -> None:
    """Within a tenth or so: rotation tables, statistics of norms and router logits are in no formula."""
    config = config_for(family)
    shape = ModelShape.of(config)
    sparse = shape.experts is not None
    dense_layers = config.get("first_k_dense_replace", 0) if sparse else 0
    measured = kept(config, dense_layers + 2, Train()) - kept(config, dense_layers + 1, Train())
    assert activation_elements_per_token(shape, Train(), sparse) * 4 * TOKENS == pytest.approx(measured, rel=0.12)


def test_under_full_recompute_a_layer_keeps_its_input() -> None:
    config = config_for("qwen2")
    measured = kept(config, 3, Train(recompute="full")) - kept(config, 2, Train(recompute="full"))
    assert measured == config["hidden_size"] * 4 * TOKENS


def test_stage_ranks_hold_what_the_layout_makes_of_parameters() -> None:
    """671B: experts over EP x PP, by their number; all ranks together hold every parameter once per replica."""
    recipe = recipe_of("deepseek-v3-671b")
    config, train = config_of(recipe), recipe.train
    standing = representative_layer_counts(config, train)
    holdings = holdings_of_all(config, recipe, standing, first_only=True)
    stage_ranks = recipe.world_size // train.pp

    def times(name: str) -> int:
        from hybrid3d.reshard.plan.classes import layer_of

        return standing.get(layer_of(name), 1)

    held = [count_parameters(holdings[stage * stage_ranks].pieces, times) for stage in range(train.pp)]
    experts = sum(s[0] * s[1] for name, s in expected_shapes(config).items() if ".experts." in name)
    assert sum(its.experts for its in held) * train.ep == experts
    assert held[5] == ParameterCounts(dense=held[6].dense, experts=held[6].experts)


def test_mtp_layer_is_trained_on_the_last_stage() -> None:
    """DeepSeek-V3's README_WEIGHTS.md: about 11.5B parameters, without the embedding and the head that it shares."""
    recipe = recipe_of("deepseek-v3-671b", "train.mtp_loss_coef=0.3")
    config, train = config_of(recipe), recipe.train
    shapes = expected_shapes(config, with_mtp=True)
    layer = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.61.")}
    assert shapes.keys() - layer.keys() == expected_shapes(config).keys()
    assert sum(map(math.prod, layer.values())) == pytest.approx(11.5e9, rel=0.01)
    counts = count_parameters(mtp_holdings(config, recipe).pieces, lambda name: 1)
    experts = sum(math.prod(shape) for name, shape in layer.items() if ".experts." in name)
    assert counts.experts == experts // (train.ep * train.etp)
    held = [ParameterCounts(dense=10**9, experts=10**9)] * train.pp
    with_layer = [*held[:-1], replace(held[-1], mtp=counts)]
    *others, plain = estimate_stages(recipe, config, held, 0, 0)
    *same, found = estimate_stages(recipe, config, with_layer, 0, 0)
    assert same == others
    assert found.weights - plain.weights == 2 * counts.total
    assert found.gradients - plain.gradients == 4 * counts.total
    assert found.optimizer > plain.optimizer
    assert found.reference == plain.reference


def test_pipeline_stages_keep_as_many_micro_batches_as_wait_there() -> None:
    """1F1B: the first of 16 stages has 16 in flight, the last one; interleaved more (arXiv 2104.04473, figure 4)."""
    recipe = recipe_of("deepseek-v3-671b", "train.recompute=full", "train.ep=8")
    config = config_of(recipe)
    shape = ModelShape.of(config)
    stages = [[range(stage * 4, stage * 4 + 4)] for stage in range(15)] + [[range(60, 61)]]
    found = stage_activations(recipe, shape, stages)
    tokens, inputs = 8192, 7168 * 2 // 8
    one_layer = {sparse: activation_elements_per_token(shape, recipe.train, sparse) * 2 for sparse in (True, False)}
    assert found[1] == tokens * (15 * 4 * inputs + one_layer[True])
    assert found[14] == tokens * (2 * 4 * inputs + one_layer[True])
    assert found[15] > tokens * (inputs + one_layer[True])  # and the logits
    budget = recipe_of(
        "deepseek-v3-671b", "train.recompute=full", "train.ep=8", "train.max_tokens_per_micro_batch=16384"
    )
    assert stage_activations(budget, shape, stages) == [2 * nbytes for nbytes in found]


def test_pipeline_keeps_no_more_micro_batches_than_an_update_has() -> None:
    recipe = recipe_of("deepseek-v3-671b", "train.recompute=full", "train.ep=8")
    micro_batches = recipe.sequences_per_step // (recipe.train.dp * recipe.train.micro_batch_size)
    assert micro_batches > recipe.train.pp == 16
    recipe = replace(recipe, algorithm=replace(recipe.algorithm, minibatches=micro_batches // 2))
    config = config_of(recipe)
    shape = ModelShape.of(config)
    found = stage_activations(recipe, shape, [[range(stage * 3, stage * 3 + 3)] for stage in range(16)])
    one_layer = activation_elements_per_token(shape, recipe.train, True) * 2
    assert found[1:15] == [8192 * (2 * 3 * 7168 * 2 // 8 + one_layer)] * 14


def test_layouts_that_the_rules_refuse_are_not_suggested() -> None:
    recipe = load_recipe(RECIPES / "glm-4.5-air.yaml", ["train.mtp_loss_coef=0.1"])
    is_valid = MemoryEstimator(config_of(recipe)).is_valid
    train = recipe.train
    assert is_valid(recipe)
    assert not is_valid(replace(recipe, train=replace(train, dp=train.dp // 2, cp=2)))


@pytest.mark.parametrize("name", ["qwen2.5-7b", "deepseek-v3-671b"])
def test_context_parallel_ranks_have_their_part_of_a_sequence(name: str) -> None:
    """And, of one layer at a time, the keys and values of all of it, with their gradients."""
    path = RECIPES / f"{name}.yaml"
    recipes = [load_recipe(path, ["rollout.max_model_len=32768", f"train.cp={cp}"]) for cp in (1, 4)]
    config = config_of(recipes[0])
    its = family_of(config)
    shape = ModelShape.of(config)
    stages = [[range(shape.num_layers)]] * recipes[0].train.pp
    whole, shared = (stage_activations(recipe, shape, stages) for recipe in recipes)
    tokens, tp = recipes[0].train.micro_batch_size * 32768, recipes[0].train.tp
    keys_and_values = 128 * (192 + 128) if its.latents(config) else 2 * 4 * 128
    extra = tokens * 2 * 2 * keys_and_values // tp
    assert shared == [nbytes // 4 + extra for nbytes in whole]


def memory(**changes: Any) -> MemoryEstimate:
    stage = dict(
        weights=10, gradients=20, optimizer=15, reference=10, activations=20, rollout_weights=10, staging=1
    ) | {key: value for key, value in changes.items() if key in StageMemory.__dataclass_fields__}
    return MemoryEstimate(
        stages=(StageMemory(**{key: value * 10**9 for key, value in stage.items()}),),
        capacity=80 * 10**9,
        fraction=changes.get("percent", 30) / 100,
        work_space=2 * 10**9,
        kv_bytes_per_token=100_000,
        max_model_len=changes.get("max_model_len", 4096),
        sleeps=changes.get("sleeps", True),
        keeps_weights=False,
        offloads=changes.get("offloads", ()),
        split=changes.get("split", False),
        reserve=changes.get("reserve", Reserve()),
    )


def test_phases_add_up_and_each_is_refused_by_its_numbers() -> None:
    fits = memory()
    assert [fits.train, fits.sync, fits.generate] == [75 * 10**9, 66 * 10**9, 79 * 10**9]
    assert (fits.kv_cache, fits.kv_tokens) == (12 * 10**9, 120_000)
    assert fits.problems() == []
    awake = memory(sleeps=False)  # all that vLLM may take, 24 GB, stays beside the others
    assert [awake.train, awake.sync, awake.generate] == [99 * 10**9, 80 * 10**9, 79 * 10**9]
    for kinds, least in (((), 79), (("optimizer",), 64), (("optimizer", "gradients"), 44), (OFFLOADS, 24)):
        assert memory(offloads=kinds).generate == least * 10**9
    assert memory(offloads=OFFLOADS).train == fits.train
    assert memory(activations=26).problems() == ["the train phase needs 81.0 GB of a GPU's 80.0 GB"]
    assert memory(rollout_weights=22).problems()[0].startswith("vLLM's share of 24.0 GB leaves its KV cache")
    assert memory(percent=35).problems() == ["the generate phase needs 83.0 GB of a GPU's 80.0 GB"]
    assert memory(rollout_weights=30).problems()[0] == "the sync phase needs 86.0 GB of a GPU's 80.0 GB"


def test_reserve_is_beside_the_others_but_vllms_within_its_fraction() -> None:
    reserve = Reserve(contexts=2 * 10**9, training_communicators=3 * 10**9, rollout_communicators=10**9, graphs=10**9)
    without, found = memory(), memory(reserve=reserve)
    assert found.train - without.train == 7 * 10**9  # graphs and communicators do not sleep
    assert found.sync - without.sync == 7 * 10**9
    assert found.generate - without.generate == 5 * 10**9
    assert without.kv_cache - found.kv_cache == 2 * 10**9
    assert found.problems()[0] == "the train phase needs 82.0 GB of a GPU's 80.0 GB"
    awake = memory(reserve=reserve, sleeps=False)  # its fraction has its part already
    assert awake.train - memory(sleeps=False).train == 5 * 10**9
    apart, parts = memory(split=True), memory(split=True, reserve=reserve)
    assert [parts.train - apart.train, parts.generate - apart.generate] == [5 * 10**9, 2 * 10**9]


def test_reserve_counts_each_communicator_and_the_graphs_of_a_recipe() -> None:
    """Llama-3.1-70B: TP8, PP, the ends of the pipeline, DP, all ranks, and weights; vLLM's TP8."""
    llama = load_recipe(RECIPES / "llama-3.1-70b.yaml")
    found = reserve_of(llama, has_experts=False)
    assert min(llama.train.tp, llama.train.pp, llama.train.dp, llama.rollout.tp) > 1
    assert found.training_communicators == 6 * COMMUNICATOR
    assert found.rollout_communicators == COMMUNICATOR
    assert found.graphs > 0
    wide = load_recipe(RECIPES / "deepseek-v3-671b-wide-ep.yaml")
    assert count_rollout_groups(wide) == 3  # TP, DP and experts
    dense, sparse = (reserve_of(wide, has_experts=experts).training_communicators for experts in (False, True))
    assert sparse > dense


def test_vllm_takes_its_fraction_of_what_a_gpu_really_has() -> None:
    """An H100 of 80 GiB has 85 GB, as torch reports on one."""
    measured = json.loads((RECIPES.parent / "benchmarks/results/gpu-check-h100.json").read_text())
    (gpu,) = measured["machine"]["gpus"]
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    recipe = load_recipe(RECIPES / "llama-3.1-70b.yaml")
    assert hardware_of(recipe.machine).memory_bytes == pytest.approx(gpu["bytes"], rel=1e-3)
