"""Tests a recipe against a model: layouts that fit, and the exact message for each that does not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid3d.config import ModelShape, Recipe, RecipeError, check_layout, load_recipe
from hybrid3d.config.layout_rules import Device
from hybrid3d.families import Experts, Latents

# TP2 x PP2 trains, TP2 x DP2 generates: the layouts of the demo.
GRPO = """\
name: demo-cpu
model: {path: build/demo/model}
train: {tp: 2, pp: 2}
rollout: {tp: 2, max_model_len: 256, max_new_tokens: 16}
data: {train: a.parquet, eval: b.parquet}
algorithm: {name: grpo, prompts_per_step: 32, samples_per_prompt: 8}
optimizer: {lr: 0.001}
run: {steps: 80}
"""

SFT = """\
name: warm-up
model: {path: build/demo/base}
train: {micro_batch_size: 64}
data: {train: a.parquet, eval: b.parquet}
algorithm: {name: sft, prompts_per_step: 64}
optimizer: {lr: 0.001}
run: {steps: 200}
"""

# A 4-layer Qwen2-type model: 4 query heads, 2 key-value heads.
SHAPE = ModelShape(
    num_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    hidden_size=128,
    intermediate_size=256,
    vocab_size=500,
    max_position_embeddings=512,
)

CONFIG: dict[str, object] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "model_type": "qwen2",
}


def test_shape_from_config() -> None:
    assert ModelShape.from_config(CONFIG) == SHAPE
    assert ModelShape.from_config({**CONFIG, "head_dim": None}) == SHAPE
    assert ModelShape.from_config({**CONFIG, "head_dim": 64}) == replace(SHAPE, head_dim=64)
    without_groups = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert ModelShape.from_config(without_groups) == replace(SHAPE, num_key_value_heads=4)


def test_shape_from_a_broken_config() -> None:
    broken = {**CONFIG, "num_attention_heads": 3, "vocab_size": "many", "num_key_value_heads": 0}
    del broken["num_hidden_layers"]
    with pytest.raises(RecipeError) as caught:
        ModelShape.from_config(broken)
    assert list(caught.value.problems) == [
        "head_dim: missing, and num_attention_heads=3 does not divide hidden_size=128",
        "num_hidden_layers: missing",
        "num_key_value_heads: expected an integer, 1 or more, got 0 (an integer)",
        "vocab_size: expected an integer, 1 or more, got 'many' (a string)",
    ]


EXPERTS = "shards experts, but this model has none"

FindProblems = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Recipe]:
    def load_text(*overrides: str, text: str = GRPO) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)

    return load_text


@pytest.fixture
def find_problems(load: Callable[..., Recipe]) -> FindProblems:
    """Return the problems that `check_layout` finds."""

    def find(*overrides: str, shape: ModelShape = SHAPE, device: Device | None = "cpu", text: str = GRPO) -> list[str]:
        try:
            check_layout(load(*overrides, text=text), shape, device=device)
        except RecipeError as error:
            return list(error.problems)
        return []

    return find


def test_demo_fits(find_problems: FindProblems) -> None:
    assert find_problems() == []
    assert find_problems(text=SFT) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.tp=4", "train.pp=1"],  # more ranks than key-value heads, which vLLM and Megatron replicate
        ["train.tp=4", "train.pp=1", "rollout.tp=4"],
        ["train.tp=1", "train.pp=4", "rollout.tp=1"],
        ["train.tp=1", "train.dp=4", "train.pp=1"],
        ["train.vpp=2"],
        ["rollout.max_new_tokens=255"],
        ["rollout.max_model_len=512"],
        ["algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=4"],
    ],
)
def test_layouts_that_fit(find_problems: FindProblems, overrides: list[str]) -> None:
    assert find_problems(*overrides) == []


BLOCKS = replace(SHAPE, head_dim=128, hidden_size=256, intermediate_size=512)
IN_FP8 = ["model.dtype=bfloat16", "rollout.quantization=fp8"]


def test_quantized_shards_are_whole_blocks(find_problems: FindProblems) -> None:
    blocks = "rollout.quantization=fp8 has blocks of 128, and"
    assert find_problems(*IN_FP8, shape=BLOCKS) == []
    assert find_problems(*IN_FP8, "train.tp=4", "rollout.tp=4", shape=BLOCKS) == []
    assert find_problems(*IN_FP8, shape=replace(BLOCKS, hidden_size=320)) == [
        f"{blocks} hidden_size=320 is not a multiple of it: leave rollout.quantization out"
    ]
    assert find_problems(*IN_FP8, "train.tp=4", "rollout.tp=4", shape=replace(BLOCKS, intermediate_size=768)) == [
        f"rollout.tp=4: {blocks} intermediate_size=768 gives each rank 192, which is not a multiple of it: "
        "nearest valid value of rollout.tp is 2"
    ]
    assert find_problems(*IN_FP8, shape=replace(BLOCKS, num_key_value_heads=2, head_dim=64)) == [
        f"rollout.tp=2: {blocks} num_key_value_heads*head_dim=128 gives each rank 64, which is not a multiple of it: "
        "nearest valid value of rollout.tp is 1"
    ]


def test_quantized_experts_are_whole_blocks(find_problems: FindProblems) -> None:
    experts = Experts(count=8, per_token=2, width=128, sparse=(True,) * 4)
    shape, blocks = replace(BLOCKS, experts=experts), "rollout.quantization=fp8 has blocks of 128, and"
    assert find_problems(*IN_FP8, shape=shape, device=None) == [
        f"rollout.tp=2: {blocks} an expert's width=128 gives each rank 64, which is not a multiple of it: nearest "
        "valid value of rollout.tp is 1"
    ]
    assert find_problems(*IN_FP8, "rollout.expert_parallel=true", shape=shape, device=None) == []
    latents = Latents(q_rank=96, kv_rank=512, nope=64, rope=64, value=64)
    assert find_problems(*IN_FP8, shape=replace(BLOCKS, latents=latents), device=None) == [
        f"{blocks} q_lora_rank=96 is not a multiple of it: leave rollout.quantization out"
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["train.tp=3", "rollout.tp=1"],
            [
                "train.tp=3 does not divide num_attention_heads=4: nearest valid values of train.tp are 2, 4",
                "train.tp=3 and num_key_value_heads=2: one must divide the other: "
                "nearest valid values of train.tp are 2, 4",
                "train.tp=3 does not divide intermediate_size=256: nearest valid values of train.tp are 2, 4",
            ],
        ),
        (
            ["train.pp=3", "rollout.tp=4"],  # 4 does not divide the 6 ranks, but how many there are is not settled
            ["train.pp=3 does not divide num_hidden_layers=4: nearest valid values of train.pp are 2, 4"],
        ),
        (
            ["train.pp=8"],
            ["train.pp=8 does not divide num_hidden_layers=4: nearest valid value of train.pp is 4"],
        ),
        (
            ["train.vpp=3", "algorithm.prompts_per_step=64"],
            [
                "train.vpp=3 does not divide num_hidden_layers/train.pp=4/2=2: nearest valid value of train.vpp is 2",
            ],
        ),
        (
            ["train.pp=1", "train.vpp=2"],
            ["train.vpp=2 interleaves pipeline stages, but train.pp=1 has one: set train.vpp=1, or train.pp=2"],
        ),
        (
            ["train.ep=2", "train.etp=3", "train.cp=3"],
            [
                f"train.ep=2 {EXPERTS}: the only valid value is 1",
                f"train.etp=3 {EXPERTS}: the only valid value is 1",
                "train.cp=3 divides sequences into 2*3=6 chunks, and rollout.max_model_len=256 is not a multiple of 6: "
                "nearest valid values of train.cp are 2, 4; nearest valid values of rollout.max_model_len are 252, 258",
            ],
        ),
        (
            ["rollout.expert_parallel=true"],
            [f"rollout.expert_parallel=true {EXPERTS}: the only valid value is false"],
        ),
        (
            ["train.pp=1", "rollout.tp=4"],
            ["rollout.tp=4 does not divide the train.tp*pp*cp*dp=2 ranks: nearest valid value of rollout.tp is 2"],
        ),
        (
            ["rollout.max_new_tokens=256"],
            ["rollout.max_new_tokens=256 leaves no room for a prompt in rollout.max_model_len=256: at most 255"],
        ),
        (
            ["rollout.max_model_len=513"],
            ["rollout.max_model_len=513 is more than max_position_embeddings=512: at most 512"],
        ),
        (
            ["algorithm.samples_per_prompt=1"],
            ["algorithm.samples_per_prompt=1: grpo compares samples of one prompt, so it needs 2 or more"],
        ),
        (
            ["algorithm.prompts_per_step=33"],
            [
                "algorithm.prompts_per_step=33 is not a multiple of the rollout replicas, ranks/rollout.tp=4/2=2: "
                "nearest valid values of algorithm.prompts_per_step are 32, 34",
            ],
        ),
        (
            # 32 * 8 = 256 is no multiple of 24: 3 prompts are, and 2 replicas need an even number of them.
            ["train.micro_batch_size=24"],
            [
                "algorithm.prompts_per_step=32 of 8 samples each is 256 sequences, not a multiple of "
                "train.dp*train.micro_batch_size=1*24=24: "
                "nearest valid values of algorithm.prompts_per_step are 30, 36",
            ],
        ),
        (
            # Interleaved stages want micro batches in rounds of pp=2, and 34 * 8 = 272 sequences make 17 of 16 each.
            ["train.vpp=2", "train.micro_batch_size=16", "algorithm.prompts_per_step=34"],
            [
                "algorithm.prompts_per_step=34 of 8 samples each is 272 sequences, not a multiple of "
                "train.dp*train.micro_batch_size*train.pp=1*16*2=32: "
                "nearest valid values of algorithm.prompts_per_step are 32, 36",
            ],
        ),
        (
            ["train.dp=2", "train.micro_batch_size=1024"],
            [
                "algorithm.prompts_per_step=32 of 8 samples each is 256 sequences, not a multiple of "
                "train.dp*train.micro_batch_size=2*1024=2048: "
                "nearest valid value of algorithm.prompts_per_step is 256",
            ],
        ),
    ],
)
def test_layouts_that_do_not_fit(find_problems: FindProblems, overrides: list[str], expected: list[str]) -> None:
    assert find_problems(*overrides) == expected


def test_suggested_values_satisfy_all_rules_of_their_key(find_problems: FindProblems) -> None:
    """6 and 12 divide the 12 heads but not the intermediate size, so they are not suggested."""
    shape = replace(SHAPE, num_attention_heads=12, num_key_value_heads=4)
    assert find_problems("train.tp=5", "train.pp=1", "rollout.tp=1", shape=shape) == [
        "train.tp=5 does not divide num_attention_heads=12: nearest valid value of train.tp is 4",
        "train.tp=5 and num_key_value_heads=4: one must divide the other: nearest valid value of train.tp is 4",
        "train.tp=5 does not divide intermediate_size=256: nearest valid value of train.tp is 4",
    ]


def test_vocabulary_as_vllm_pads_it(find_problems: FindProblems) -> None:
    """500 is padded to 512, which 3 does not divide; 570 is padded to 576 = 3 x 192."""
    shape = replace(SHAPE, num_attention_heads=6, num_key_value_heads=3, intermediate_size=192, hidden_size=192)
    overrides = ["train.tp=3", "train.pp=1", "rollout.tp=3"]
    assert find_problems(*overrides, shape=shape) == [
        "rollout.tp=3 does not divide vocab_size=500, which vLLM pads to 512: nearest valid value of rollout.tp is 1"
    ]
    assert find_problems(*overrides, shape=replace(shape, vocab_size=570)) == []


@pytest.mark.parametrize("head_dim", [16, 40, 120])
def test_head_dims_that_vllm_refuses_on_cpu(find_problems: FindProblems, head_dim: int) -> None:
    shape = replace(SHAPE, head_dim=head_dim)
    near = {16: "value of head_dim is 32", 40: "values of head_dim are 32, 64", 120: "values of head_dim are 112, 128"}
    assert find_problems(shape=shape) == [
        f"head_dim={head_dim} is not supported by vLLM's attention on CPU: nearest valid {near[head_dim]}"
    ]
    assert find_problems(shape=shape, device="cuda") == []
    assert find_problems(shape=shape, text=SFT) == []


def test_sft_asks_nothing_of_replicas_or_samples(find_problems: FindProblems) -> None:
    overrides = ["algorithm.name=sft", "algorithm.samples_per_prompt=1", "train.micro_batch_size=3"]
    assert find_problems(*overrides, "algorithm.prompts_per_step=33") == []
    assert find_problems(*overrides) == [
        "algorithm.prompts_per_step=32 is not a multiple of train.dp*train.micro_batch_size=1*3=3: "
        "nearest valid values of algorithm.prompts_per_step are 30, 33"
    ]


def test_dpo_divides_pairs_over_ranks_and_sequences_into_micro_batches(find_problems: FindProblems) -> None:
    overrides = ["algorithm.name=dpo", "algorithm.samples_per_prompt=1", "train.dp=2", "train.tp=1", "train.pp=1"]
    overrides += ["rollout.tp=2", "train.micro_batch_size=3"]
    assert find_problems(*overrides, "algorithm.prompts_per_step=6") == []
    assert find_problems(*overrides, "algorithm.prompts_per_step=3") == [
        "algorithm.prompts_per_step=3 pairs is not a multiple of train.dp=2: nearest valid value of "
        "algorithm.prompts_per_step is 6"
    ]
    assert find_problems(*overrides, "algorithm.prompts_per_step=8") == [
        "algorithm.prompts_per_step=8 of 2 answers each is 16 sequences, not a multiple of "
        "train.dp*train.micro_batch_size=2*3=6: nearest valid values of algorithm.prompts_per_step are 6, 12"
    ]


def test_budget_of_tokens_takes_any_number_of_sequences(find_problems: FindProblems) -> None:
    overrides = ["train.micro_batch_size=24", "train.dp=2", "train.max_tokens_per_micro_batch=512"]
    assert find_problems(*overrides[1:]) == find_problems(*overrides) == []
    assert len(find_problems(*overrides[:2])) == 1
    interleaved = ["train.vpp=2", "train.packed=true", "algorithm.prompts_per_step=12"]
    assert find_problems(*overrides[1:], *interleaved, "algorithm.samples_per_prompt=5") == []
    assert find_problems(*overrides[2:], *interleaved[:2], "algorithm.prompts_per_step=2", "rollout.tp=4") == []


def test_check_layout_reports_every_misfit_in_one_message(load: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError) as caught:
        check_layout(load("train.ep=2", "train.pp=3", "rollout.max_model_len=600"), SHAPE, device="cpu")
    assert str(caught.value).splitlines()[0] == "recipe demo-cpu does not fit its model:"
    assert [line.split("=")[0] for line in caught.value.problems] == ["train.ep", "train.pp", "rollout.max_model_len"]


# 8 experts of 64 rows, 2 shared ones, the first layer dense; and attention with DeepSeek's latents.
SPARSE = replace(SHAPE, experts=Experts(8, 2, 64, (False, True, True, True), shared_width=128))
LATENT = replace(SPARSE, latents=Latents(q_rank=64, kv_rank=512, nope=32, rope=64, value=48))


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.ep=2"],
        ["train.ep=2", "train.etp=1", "train.dp=2"],
        ["train.ep=1", "train.etp=2"],
        ["train.ep=4", "train.dp=2"],
        ["train.first_stage_layers=1"],
        ["train.last_stage_layers=3", "train.dp=2"],
        ["rollout.tp=4"],
    ],
)
@pytest.mark.parametrize("shape", [SPARSE, LATENT], ids=["sparse", "latent"])
def test_layouts_of_experts_that_fit(find_problems: FindProblems, overrides: list[str], shape: ModelShape) -> None:
    assert find_problems(*overrides, shape=shape) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.ep=3", "train.dp=3", "algorithm.prompts_per_step=36"], "the number of experts 8: nearest valid"),
        (["train.ep=4"], "train.ep*etp=4*1=4 does not divide the train.tp*cp*dp=2 ranks of a pipeline stage"),
        (
            ["train.etp=3", "train.dp=3", "algorithm.prompts_per_step=36"],
            "train.etp=3 does not divide an expert's width 64",
        ),
        (["train.first_stage_layers=4"], "train.first_stage_layers=4 leave 0 of num_hidden_layers=4 to 1 other stages"),
        (["train.first_stage_layers=1", "train.pp=1"], "needs several stages, but train.pp=1 has one"),
        (["train.first_stage_layers=1", "train.vpp=2"], "does not divide the layers of each stage"),
        (["train.first_stage_layers=2", "train.last_stage_layers=2", "train.vpp=2"], "set train.vpp=1"),
        (["rollout.expert_parallel=true"], "vLLM does not support expert parallelism on CPU"),
        (["rollout.dp=2"], "rollout.dp=2 joins engines that share experts, but rollout.expert_parallel=false"),
    ],
)
def test_layouts_of_experts_that_do_not_fit(find_problems: FindProblems, overrides: list[str], expected: str) -> None:
    (problem,) = find_problems(*overrides, shape=SPARSE)
    assert expected in problem


def test_planned_layout_may_exceed_what_this_machine_runs(find_problems: FindProblems) -> None:
    wide = ["rollout.expert_parallel=true", "rollout.dp=2", "train.cp=2", "train.dp=2", "train.ep=8"]
    assert find_problems(*wide, shape=SPARSE, device=None) == []
    assert len(find_problems(*wide, shape=SPARSE)) == 1


def test_engine_has_an_expert_for_each_of_its_ranks(find_problems: FindProblems) -> None:
    wide = ["rollout.expert_parallel=true", "train.dp=8", "algorithm.prompts_per_step=32"]
    assert find_problems(*wide, "rollout.dp=4", shape=SPARSE, device=None) == []
    (problem,) = find_problems(*wide, "rollout.dp=8", shape=SPARSE, device=None)
    assert problem == (
        "rollout.dp=8: rollout.tp*dp=2*8=16 ranks of an engine are more than the 8 experts that they share: "
        "nearest valid value of rollout.dp is 4; nearest valid value of rollout.tp is 1"
    )


def test_latents_on_a_cpu(find_problems: FindProblems) -> None:
    narrow = replace(LATENT, latents=Latents(q_rank=0, kv_rank=256, nope=32, rope=64, value=48))
    assert find_problems(shape=narrow, device="cuda") == []
    (problem,) = find_problems(shape=narrow)
    assert problem == ("kv_lora_rank+qk_rope_head_dim=256+64=320: vLLM's latent attention on CPU supports only 576")
