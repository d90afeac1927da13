"""Model families against transformers' own models and Megatron's documented layout of grouped query attention."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.families import FAMILIES, Family, UnsupportedModel, family_of, head_dim
from hybrid3d.families.family import GroupedQKV, PaddedVocabulary, RowRange, StackedTensors
from hybrid3d.families.rope import Rope, rope_of
from hybrid3d.families.shared_experts import COUNTS, EXPERT_COUNTS
from hybrid3d.families.values import UNSUPPORTED
from hybrid3d.inputs.models import read_config

DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """The sizes of a `config.json`; in half of them a head is not hidden_size / heads wide, as in Qwen3."""
    groups, per_group, width = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = groups * per_group
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * width * 2,
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(1, 50)),
        "num_hidden_layers": draw(st.integers(1, 3)),
    }
    return config | draw(st.sampled_from([{}, {"head_dim": None}, {"head_dim": width * 4}]))


def rows_in_megatron(name: str, config: dict[str, Any], padding: int) -> int:
    """Rows of a global tensor of Megatron's (`GPTModel`, `SelfAttention`, `MLP`), by the end of its name."""
    width, heads, groups = head_dim(config), config["num_attention_heads"], config["num_key_value_heads"]
    for end, rows in {
        "word_embeddings.weight": config["vocab_size"] + padding,
        "output_layer.weight": config["vocab_size"] + padding,
        "q_layernorm.weight": width,
        "k_layernorm.weight": width,
        "linear_qkv.weight": (heads + 2 * groups) * width,
        "linear_qkv.bias": (heads + 2 * groups) * width,
        "linear_fc1.weight": 2 * config["intermediate_size"],
    }.items():
        if name.endswith(end):
            return rows
    return config["hidden_size"]


def all_strips(family: Family, config: dict[str, Any], padding: int) -> dict[str, tuple[int, list[RowRange]]]:
    """(rows, strips) of every global tensor that the family's table has, by its name with the layer's number."""
    found = {}
    for pattern in family.tensors:
        for layer in range(config["num_hidden_layers"]) if "{layer}" in pattern else [None]:
            name = pattern.replace("{layer}", str(layer))
            rows = rows_in_megatron(name, config, padding)
            row_ranges = family.row_ranges(name, rows, config)
            assert row_ranges is not None, name
            found[name] = rows, row_ranges
    return found


@pytest.mark.parametrize("architecture", DENSE)
@settings(max_examples=30, deadline=None)
@given(configs(), st.integers(0, 7))
def test_strips_tile_both_sides_exactly_once(architecture: str, config: dict[str, Any], padding: int) -> None:
    canonical: dict[str | None, list[tuple[int, int]]] = {}
    for rows, row_ranges in all_strips(FAMILIES[architecture], config, padding).values():
        at = 0
        for row_range in row_ranges:
            assert row_range.start == at
            assert row_range.rows > 0
            at += row_range.rows
            canonical.setdefault(row_range.name, []).append((row_range.canonical_start, row_range.rows))
        assert at == rows
    assert sum(rows for _, rows in canonical.pop(None, [])) == 2 * padding
    for ranges in canonical.values():
        at = 0
        for start, rows in sorted(ranges):
            assert start == at
            at += rows


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize("sizes", [(4, 2, 8), (4, 4, 8), (6, 1, 8), (4, 2, 16)], ids=str)
def test_family_strips_name_every_row_of_transformers_model(architecture: str, sizes: tuple[int, int, int]) -> None:
    """Names and heights are those of the state dict that transformers itself builds from the same config."""
    import transformers

    heads, groups, width = sizes
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "hidden_size": heads * 8,
        "intermediate_size": 24,
        "vocab_size": 30,
        "num_hidden_layers": 2,
    }
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        state = model_class(model_class.config_class(**config)).state_dict()
    heights: dict[str | None, int] = {}
    for _, row_ranges in all_strips(FAMILIES[architecture], config, padding=0).values():
        for row_range in row_ranges:
            heights[row_range.name] = heights.get(row_range.name, 0) + row_range.rows
    assert heights == {name: tensor.shape[0] for name, tensor in state.items()}


@settings(max_examples=40, deadline=None)
@given(configs(), st.booleans())
def test_qkv_is_interleaved_as_megatron_takes_it_apart(config: dict[str, Any], bias: bool) -> None:
    """`SelfAttention.get_query_key_value_tensors` (megatron/core/transformer/attention.py) views the rows as
    [groups, heads / groups + 2, head_dim] and splits them: a group's queries, its key, its value."""
    heads, groups, width = config["num_attention_heads"], config["num_key_value_heads"], head_dim(config)
    columns = () if bias else (3,)
    count = (heads + 2 * groups) * width
    rows = torch.arange(count * (1 if bias else 3)).view(count, *columns)
    q, k, v = (rows[a:b] for a, b in [(0, heads * width), (heads * width, -groups * width), (-groups * width, None)])
    mixed = torch.full_like(rows, -1)
    for row_range in GroupedQKV("q", "k", "v").row_ranges(count, config):
        source = {"q": q, "k": k, "v": v}[str(row_range.name)]
        mixed[row_range.start : row_range.start + row_range.rows] = source[
            row_range.canonical_start : row_range.canonical_start + row_range.rows
        ]
    apart = mixed.view(groups, heads // groups + 2, width, *columns)
    assert apart[:, :-2].reshape(q.shape).equal(q)
    assert apart[:, -2].reshape(k.shape).equal(k)
    assert apart[:, -1].reshape(v.shape).equal(v)


def test_grouped_qkv_without_groups_takes_each_head_as_one() -> None:
    """As `LlamaConfig` has it: the key is absent from configs older than grouped-query attention."""
    config = {"num_attention_heads": 3, "hidden_size": 12}
    qkv = GroupedQKV("q", "k", "v")
    assert qkv.row_ranges(36, config) == qkv.row_ranges(36, {**config, "num_key_value_heads": 3})


def test_vocabulary_is_padded_and_gate_lies_above_up() -> None:
    assert PaddedVocabulary("e").row_ranges(12, {"vocab_size": 10}) == [RowRange(0, 10, "e"), RowRange(10, 2, None)]
    assert PaddedVocabulary("e").row_ranges(10, {"vocab_size": 10}) == [RowRange(0, 10, "e")]
    assert StackedTensors(("gate", "up")).row_ranges(8, {}) == [RowRange(0, 4, "gate"), RowRange(4, 4, "up")]


# Megatron's name within a layer, transformers' names of its rows from the top, and the architectures that have it.
IN_A_LAYER = [
    ("self_attention.linear_qkv.layer_norm_weight", ["input_layernorm.weight"], ""),
    ("self_attention.linear_qkv.weight", [f"self_attn.{x}_proj.weight" for x in "qkv"], ""),
    ("self_attention.linear_qkv.bias", [f"self_attn.{x}_proj.bias" for x in "qkv"], "Qwen2"),
    ("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"], "Qwen3"),
    ("self_attention.k_layernorm.weight", ["self_attn.k_norm.weight"], "Qwen3"),
    ("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], ""),
    ("mlp.linear_fc1.layer_norm_weight", ["post_attention_layernorm.weight"], ""),
    ("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ""),  # `MLP` activates its upper half
    ("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], ""),
]


@pytest.mark.parametrize("architecture", DENSE)
def test_names_within_a_layer(architecture: str) -> None:
    family, config = FAMILIES[architecture], {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 4}
    for ours, theirs, only in IN_A_LAYER:
        row_ranges = family.row_ranges(f"decoder.layers.17.{ours}", 8, config)
        if architecture.startswith(only):
            assert [s.name for s in row_ranges] == [f"model.layers.17.{name}" for name in theirs]
        else:
            assert row_ranges is None
    for unknown in ("decoder.layers.x.mlp.linear_fc2.weight", "mtp.decoder.layers.1.mlp.linear_fc2.weight", "", "x"):
        assert family.row_ranges(unknown, 4, config) is None


@pytest.mark.parametrize("names", [["GemmaForCausalLM"], [], None])
def test_unknown_architecture_is_told_the_known_ones(names: list[str] | None) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        family_of({"architectures": names})
    assert repr(names[0] if names else "(none)") in str(caught.value)
    assert "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in str(caught.value)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_known_architecture_is_told_what_is_missing(name: str, tmp_path: Path) -> None:
    """By name, also where the config has the sizes elsewhere; the models that are named instead are supported."""
    import transformers

    found = UNSUPPORTED[name]
    assert hasattr(transformers, name)
    assert name not in FAMILIES
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "text_config": {"hidden_size": 8}}))
    for refuse in (lambda: family_of({"architectures": [name]}), lambda: read_config(tmp_path)):
        with pytest.raises(UnsupportedModel) as caught:
            refuse()
        said = str(caught.value)
        assert said.startswith(f"{found.family} ({name}) is not supported. Missing in Megatron-Core 0.16.1: ")
        assert all(what in said for what in found.missing.values())
        instead = re.findall(r"\w+ForCausalLM", said.partition("Supported: ")[2])
        assert instead
        assert set(instead) <= FAMILIES.keys()


@pytest.mark.engines
def test_megatron_lacks_what_is_said_of_linear_attention() -> None:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    with pytest.raises(ImportError, match="flash-linear-attention"):
        GatedDeltaNet(None, None)


NEEDED: dict[str, dict[str, Any]] = {  # what transformers leaves out by default
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "DeepseekV2ForCausalLM": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6},
    "Glm4MoeForCausalLM": {"head_dim": 128},
}


def default_config(architecture: str) -> dict[str, Any]:
    import transformers

    config_class = getattr(transformers, architecture).config_class
    written: dict[str, Any] = json.loads(config_class(architectures=[architecture]).to_json_string())
    return written | NEEDED.get(architecture, {})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_transformers_default_configs_are_supported(architecture: str) -> None:
    assert family_of(default_config(architecture)) is FAMILIES[architecture]


V2, V3, MOE, MIXTRAL = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"
GLM = "Glm4MoeForCausalLM"
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("architecture", "setting", "message"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        # transformers 5 writes it here, and vLLM's get_rope reads it here
        ("LlamaForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("LlamaForCausalLM", {"rope_parameters": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ("LlamaForCausalLM", {"rope_parameters": "linear"}, "rope_parameters='linear'"),
        ("Qwen2ForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("Qwen3ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("Qwen2ForCausalLM", {"num_key_value_heads": None}, "num_key_value_heads: None"),
        ("Qwen3ForCausalLM", {"head_dim": None}, "head_dim: None"),
        ("Qwen3ForCausalLM", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config={}"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window=4096"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the 8 experts"),
        (MIXTRAL, {"num_local_experts": "8"}, "num_local_experts: '8'"),
        (MIXTRAL, {"rope_parameters": {"type": "yarn", **LLAMA3}}, "rope_type='yarn'"),
        (MOE, {"attention_bias": True}, "attention_bias=True"),
        (MOE, {"is_causal": False}, "is_causal=False"),
        (MOE, {"rope_parameters": {"rope_type": "yarn", **LLAMA3}}, "rope_type='yarn'"),
        (MOE, {"mlp_only_layers": list(range(24))}, "none of num_hidden_layers=24 layers has experts"),
        (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
        (MOE, {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok=1"),
        (V2, {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=True"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        (V2, {"n_group": 2}, "n_group=2"),
        (V3, {"topk_method": None}, "topk_method=None"),
        (V3, {"scoring_func": None}, "scoring_func=None"),
        (V3, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (V3, {"norm_topk_prob": False}, "norm_topk_prob=False"),
        (V3, {"rope_interleave": False}, "rope_interleave=False"),
        (V3, {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (V3, {"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok=1"),
        (V3, {"n_group": 8, "topk_group": 2}, "their best 8//2=4 experts, this model by their best 2"),
        (V3, {"n_group": 3}, "n_group=3 and topk_group=4"),
        (V3, {"n_group": 2}, "n_group=2 and topk_group=4"),
        (V3, {"n_shared_experts": None, "n_group": 0}, "n_shared_experts: None, n_group: 0"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank: 0"),
        (V3, {"routed_scaling_factor": None}, "routed_scaling_factor=None"),
        (V3, {"rope_parameters": {"rope_type": "llama3", **LLAMA3}}, "rope_type='llama3'"),
        (V3, {"rope_parameters": {"type": "yarn", "factor": 40}}, "original_max_position_embeddings"),
        (V3, {"rope_parameters": YARN | {"factor": None}}, "lacks factor"),
        (V3, {"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor=1.0"),
        (V3, {"rope_parameters": YARN | {"truncate": False}}, "truncate=False"),
        (V3, {"rope_parameters": YARN | {"mscale": 0.7}}, "mscale=0.7, mscale_all_dim=None"),
        (V2, {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0.7}}, "mscale=0, mscale_all_dim=0.7"),
        (V3, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (GLM, {"norm_topk_prob": False}, "norm_topk_prob=False"),
        (GLM, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        (GLM, {"n_group": 4, "topk_group": 1}, "their best 8//1=8 experts, this model by their best 2"),
        (GLM, {"n_routed_experts": 128, "n_group": 3}, "n_group=3 and topk_group=1"),
        (GLM, {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        (GLM, {"first_k_dense_replace": 46}, "none of num_hidden_layers=46 layers has experts"),
        (GLM, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        (GLM, {"rope_parameters": {}, "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (GLM, {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25, but rope_parameters"),
        (GLM, {"head_dim": 20, "rope_parameters": {}, "partial_rotary_factor": 0.25}, "rotates 5 dims"),
        (GLM, {"head_dim": 10, "rope_parameters": {}, "partial_rotary_factor": 0.25}, "rotates 2.5 dims"),
    ],
)
def test_family_of_refuses_settings_it_would_not_compute_faithfully(
    architecture: str, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        family_of(default_config(architecture) | setting)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("Qwen2ForCausalLM", ("num_key_value_heads",)),
        ("Qwen3ForCausalLM", ("num_key_value_heads", "head_dim")),
        (MOE, ("num_key_value_heads", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")),
        (MIXTRAL, ("num_key_value_heads", "num_local_experts", "num_experts_per_tok")),
        *[
            (deepseek, (*COUNTS, "q_lora_rank", "first_k_dense_replace", "routed_scaling_factor"))
            for deepseek in (V2, V3)
        ],
        (GLM, (*EXPERT_COUNTS, "num_key_value_heads", "head_dim", "first_k_dense_replace", "routed_scaling_factor")),
    ],
)
def test_required_config_key_is_named_when_missing(architecture: str, keys: tuple[str, ...]) -> None:
    """Where it is silent, libraries take it for different numbers."""
    whole = default_config(architecture)
    for key in keys:
        with pytest.raises(UnsupportedModel, match=key):
            family_of({k: v for k, v in whole.items() if k != key})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_rotary_base_defaults_to_that_of_transformers(architecture: str) -> None:
    config = {k: v for k, v in default_config(architecture).items() if k != "rope_parameters"}
    assert FAMILIES[architecture].rope(config).theta == default_config(architecture)["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({}, Rope(10000.0)),
        ({"rope_theta": 1e6}, Rope(1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None}, Rope(1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(1e6)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Rope(5e5, LLAMA3)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, Rope(5e5, LLAMA3)),
        ({"partial_rotary_factor": 1.0}, Rope(10000.0)),
    ],
)
def test_rope_of_both_generations(config: dict[str, Any], rope: Rope) -> None:
    assert rope_of(config) == rope


@pytest.mark.parametrize("scaling", [None, {"rope_type": "llama3", **LLAMA3}])
def test_rope_means_what_transformers_reads_in_it(scaling: dict[str, Any] | None) -> None:
    """A config of the older generation, read by transformers and written again in the newer one."""
    from transformers import LlamaConfig

    old = {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 131072}
    new = json.loads(LlamaConfig(**old).to_json_string())
    assert "rope_theta" in new["rope_parameters"]
    assert rope_of(new) == rope_of(old) == Rope(5e5, LLAMA3 if scaling else None)


@pytest.mark.parametrize(
    ("config", "fraction"),
    [
        ({}, 0.5),
        ({"partial_rotary_factor": 0.25}, 0.25),
        ({"rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.25}, 0.25),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}, 0.25),
        ({"rope_parameters": {"rope_theta": 1e6}, "partial_rotary_factor": 1}, 1.0),
    ],
)
def test_part_of_each_head_is_rotated(config: dict[str, Any], fraction: float) -> None:
    assert FAMILIES[GLM].rope(config | {"head_dim": 128}).fraction == fraction


def test_layers_of_glm_that_predict_further_tokens_are_untrained() -> None:
    """Without the key transformers, whose config vLLM takes, has one such layer."""
    config = default_config(GLM)
    assert config["num_nextn_predict_layers"] == 1
    for further in (config, {"num_hidden_layers": 46}):
        assert FAMILIES[GLM].is_mtp("model.layers.46.hnorm.weight", further)
        assert not FAMILIES[GLM].is_mtp("model.layers.45.mlp.gate.weight", further)
    without = {"num_hidden_layers": 46, "num_nextn_predict_layers": 0}
    assert not FAMILIES[GLM].is_mtp("model.layers.46.hnorm.weight", without)
