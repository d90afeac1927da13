"""Whose kernels train, and the names that weights have under Transformer Engine, which does not run here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import FAMILIES
from commands import ROOT
from hybrid3d.config import RecipeError, Train, load_recipe
from hybrid3d.inputs import checks

pytestmark = [pytest.mark.engines]

LAYOUT = Train(tp=2, dp=2, ep=2, etp=2)


def test_kernels_on_a_cpu_are_all_torch() -> None:
    from hybrid3d.train.megatron.runtime import in_use

    torch_here = re.escape(f"torch {torch.__version__.partition('+')[0]}") + r"(\+\w+)?"
    assert re.fullmatch(rf"training kernels: {torch_here} \(CPU\); optimizer: {torch_here} AdamW", in_use())


@pytest.mark.parametrize(
    ("te", "fused", "adam", "said"),
    [
        (True, True, "transformer_engine", "Transformer Engine 2; optimizer: Transformer Engine 2 FusedAdam; {fused}"),
        (True, False, "transformer_engine", "Transformer Engine 2; optimizer: Transformer Engine 2 FusedAdam"),
        (False, True, "apex", "torch 2 (CUDA); optimizer: Apex 2 FusedAdam; {fused}"),
        (False, False, "torch", "torch 2 (CUDA); optimizer: torch 2 FusedAdam"),
    ],
)
def test_kernels_on_a_gpu_are_named(
    te: bool, fused: bool, adam: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid3d.train.megatron import runtime

    optimizer = SimpleNamespace(Adam=type("FusedAdam", (), {"__module__": f"{adam}.optimizers"}))
    stated = dict(ON_CUDA=True, USE_TE=te, FUSE_GRADIENTS=fused, optimizer=optimizer)
    stated["installed_version"] = lambda name: "2"
    for name, value in stated.items():
        monkeypatch.setattr(runtime, name, value)
    assert runtime.in_use() == "training kernels: " + said.format(fused="weight gradients added up by Apex 2")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 2), 3], ids=str)
def test_cuda_means_allocates_nothing_where_megatron_names_the_gpu(device: Any) -> None:
    from hybrid3d.train.megatron.cpu import META, cuda_means

    with cuda_means(META):
        made = torch.empty(2, device=device), torch.arange(3, device=device), torch.zeros(2, device=META).to(device)
        assert {tensor.device for tensor in made} == {META}
        assert torch.empty(2, device="cpu").device.type == "cpu"


def te_layer(settings: Any, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's own spec of a layer under Transformer Engine: its modules are stand-ins here, and are told apart."""
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.models.gpt import gpt_layer_specs

    monkeypatch.setattr(provider, "is_te_min_version", lambda *version, **unused: True)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider, raising=False)
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=settings.num_moe_experts if sparse else None,
        qk_layernorm=settings.qk_layernorm,
        multi_latent_attention=settings.multi_latent_attention,
    )


def parameters(spec: Any, settings: Any, prefix: str = "") -> Iterator[str]:
    """Names of a layer's parameters, but those of routed experts.

    What Transformer Engine's modules have: `weight`, and LayerNormLinear also `layer_norm_weight`
    (transformer_engine/pytorch/module/layernorm_linear.py); which modules MLASelfAttention builds depends on whether
    queries are compressed (megatron/core/transformer/multi_latent_attention.py).
    """
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.extensions import transformer_engine_spec_provider

    from hybrid3d.train.megatron.versions import submodules_of

    norm = getattr(transformer_engine_spec_provider, "_TENormWithResidual", te.TENorm)  # since 0.18
    plain = (te.TENorm, norm, te.TELinear, te.TEColumnParallelLinear, te.TERowParallelLinear)
    compressed = getattr(settings, "q_lora_rank", None) is not None
    unbuilt = {"experts", "linear_q_proj"} if compressed else {"experts", "linear_q_down_proj", "linear_q_up_proj"}
    if not settings.moe_shared_expert_intermediate_size:
        unbuilt.add("shared_experts")
    for name, part in vars(submodules_of(spec)).items():
        if name in unbuilt:
            continue
        if submodules_of(part) is not None:
            yield from parameters(part, settings, f"{prefix}{name}.")
        elif part is te.TELayerNormColumnParallelLinear:
            yield from (f"{prefix}{name}.layer_norm_weight", f"{prefix}{name}.weight")
        elif any(part is one for one in plain):
            yield f"{prefix}{name}.weight"
        if name == "linear_qkv" and settings.add_qkv_bias:
            yield f"{prefix}{name}.bias"


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_know_every_name_under_transformer_engine(
    family: str, tiny_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid3d.families import family_of
    from hybrid3d.inputs.models import read_config
    from hybrid3d.train.megatron.build import transformer_config
    from hybrid3d.train.megatron.probe import expected_shapes

    config = read_config(tiny_checkpoint(family))
    table, settings = family_of(config), transformer_config(config, Train(), torch.float32)
    experts = table.experts(config)
    canonical = expected_shapes(config)
    for layer in set(table.representative_layers(config)):
        sparse = experts is not None and experts.sparse[layer]
        named = set()
        for name in parameters(te_layer(settings, sparse, monkeypatch), settings):
            row_ranges = table.row_ranges(f"decoder.layers.{layer}.{name}", 64, config)
            assert row_ranges is not None, name
            named |= {row_range.name for row_range in row_ranges}
        routed = re.compile(r"\.(experts\.\d+|gate)\.")  # experts: below; the router is Megatron's own in both
        assert named == {n for n in canonical if n.startswith(f"model.layers.{layer}.") and not routed.search(n)}


class GroupedLinear(torch.nn.Module):
    """Weights of a rank's experts as Transformer Engine keeps them, and as Megatron says what they are.

    `sharded_state_dict` gives what `TEGroupedLinear._sharded_state_dict_grouped` does without singleton shards
    (megatron/core/extensions/transformer_engine.py): a weight an expert, and a state of FP8 scales an expert.
    """

    def __init__(self, weights: list[torch.nn.Parameter], tp_dim: int, experts: Any):
        super().__init__()
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", weight)
        self.tp_dim, self.ep, self.tp = tp_dim, experts.ep_group, experts.tp_group

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        found, weights = {}, list(self.parameters())
        for number, weight in enumerate(weights):
            here, total = self.ep.rank() * len(weights) + number, self.ep.size() * len(weights)
            shards = make_sharded_tensors_for_checkpoint(
                {f"{number}.weight": weight, f"{number}._extra_state": torch.empty(0, dtype=torch.uint8)},
                "",
                {f"{number}.weight": self.tp_dim},
                (*sharded_offsets, (len(sharded_offsets), here, total)),
                tp_group=self.tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(shards, f"{number}.", prefix)
            found[f"{prefix}weight{number}"] = shards[f"{number}.weight"]
            found[f"{prefix}_extra_state{number or ''}"] = shards[f"{number}._extra_state"]
        return found


def group_experts(mlp: Any) -> None:
    """Let Megatron's own TEGroupedMLP hold the experts of a sparse layer, instead of a module an expert."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    sequential = mlp.experts
    mlp.experts = experts = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.config, experts.num_local_experts = sequential.config, len(sequential.local_experts)
    experts.ep_group, experts.tp_group = sequential.ep_group, sequential.tp_group
    for name, tp_dim in (("linear_fc1", 0), ("linear_fc2", 1)):
        weights = [getattr(expert, name).weight for expert in sequential.local_experts]
        setattr(experts, name, GroupedLinear(weights, tp_dim, sequential))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("rank", [0, 3])
def test_grouped_experts_are_the_same_pieces(family: str, rank: int, tiny_checkpoint: Callable[..., Any]) -> None:
    from hybrid3d.inputs.models import read_config
    from hybrid3d.train.megatron.build import build_model
    from hybrid3d.train.megatron.runtime import as_rank
    from hybrid3d.train.megatron.source import megatron_weights
    from hybrid3d.train.megatron.versions import MTP_DECODER_LAYER

    config, with_mtp = read_config(tiny_checkpoint(family)) | {"num_nextn_predict_layers": 1}, family == "deepseek_v3"
    with as_rank(rank, LAYOUT, 4):
        stages = build_model(config, LAYOUT, torch.float32, meta=True, with_mtp=with_mtp)
        alone = megatron_weights(stages, config)
        further = [getattr(layer, MTP_DECODER_LAYER) for layer in stages[0].mtp.layers] if with_mtp else []
        for layer in [*stages[0].decoder.layers, *further]:
            if hasattr(layer.mlp, "experts"):
                group_experts(layer.mlp)
        grouped = megatron_weights(stages, config)

    def where(weights: Any) -> set[Any]:
        return {(p.name, p.box, p.dtype, p.view.offset, p.view.stride) for p in weights.pieces}

    assert where(grouped) == where(alone)
    assert len(grouped.pieces) == len(alone.pieces)
    assert "stage0.decoder.layers.3.mlp.experts.linear_fc1.weight1" in grouped.tensors
    assert any(piece.name.startswith("model.layers.4.mlp.experts.") for piece in grouped.pieces) == with_mtp
    assert not any("local_experts" in name or "_extra_state" in name for name in grouped.tensors)


@pytest.mark.parametrize(
    ("megatron", "transformer_engine", "is_refused"),
    [("0.16.1", "2.12.0", False), ("0.16.1", "2.13.0", True), ("0.17.1", "2.20.2", False), ("0.16.1", None, False)],
)
def test_versions_that_leave_shards_of_experts_unmarked_are_refused(
    monkeypatch: pytest.MonkeyPatch, megatron: str, transformer_engine: str | None, is_refused: bool
) -> None:
    """Megatron 0.17 marks them itself, as its comments say, since Transformer Engine 2.13 does not any more."""

    versions = {"megatron-core": megatron, "transformer-engine": transformer_engine}
    monkeypatch.setattr(checks, "installed_version", versions.__getitem__)
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", [])
    with pytest.raises(RecipeError) if is_refused else nullcontext() as raised:
        checks._check_marks_of_experts(recipe)
    if raised is not None:
        (problem,) = raised.value.problems
        assert "megatron-core 0.16.1 with transformer-engine 2.13.0: neither marks" in problem
        assert "install megatron-core 0.17 or newer (Python 3.12 or newer), or transformer-engine <2.13" in problem
