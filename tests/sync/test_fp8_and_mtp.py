"""Checkpoints as DeepSeek-V3 publishes them: FP8 with block scales, and layers that predict further tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import EXPERTS, ROOT, experts_folder, hybrid3d, read_rows
from hybrid3d.families import family_of
from hybrid3d.families.shared_experts import COUNTS
from hybrid3d.inputs.export import copy_config_and_tokenizer, export_entries
from hybrid3d.reshard.file_index import CheckpointError, read_index
from hybrid3d.reshard.files import CheckpointReader, copy_tensors, create_files, file_pieces, load_files
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Demand, Piece, View

BLOCK = (4, 8)
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    **dict.fromkeys(COUNTS, 1),
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": None},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)},
}


def quantized(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in FP8 and its scales, block by block."""
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    scales, out = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for r in range(rows):
        for c in range(columns):
            part = (slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1]))
            scales[r, c] = weight[part].abs().max() / 448
            out[part] = (weight[part] / scales[r, c]).to(torch.float8_e4m3fn)
    return out, scales


def as_bf16(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """What the weight means: each element times the scale of its block."""
    row, column = (torch.arange(n) // b for n, b in zip(weight.shape, block, strict=True))
    return (weight.float() * scales[row][:, column]).to(torch.bfloat16)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    random = torch.Generator().manual_seed(1)
    folder, tensors = tmp_path / "fp8", {"model.norm.weight": torch.randn(22, generator=random).bfloat16()}
    for layer in (0, 2):  # layer 2 predicts further tokens
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        tensors[name], tensors[f"{name}_scale_inv"] = quantized(torch.randn(10, 22, generator=random))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def truth(folder: Path, block: tuple[int, int] = BLOCK) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors in BF16 form."""
    stored = load_file(folder / "model.safetensors")
    return {
        name: as_bf16(tensor, stored[f"{name}_scale_inv"], block) if f"{name}_scale_inv" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }


def test_fp8_slices_are_dequantized_with_their_own_scales(checkpoint: Path) -> None:
    name, entries = "model.layers.0.self_attn.o_proj.weight", read_index(checkpoint)
    assert entries.keys() == truth(checkpoint).keys()
    assert entries[name].dtype == "bfloat16"
    (whole,) = file_pieces({name: entries[name]})
    with CheckpointReader(checkpoint, entries) as reader:
        for top in range(10):
            for left in range(0, 22, 3):
                box = Box((top, left), (10 - top, 22 - left) if left % 2 else (1, 2 if left < 21 else 1))
                found = reader.read(whole.restrict(box))
                rows, columns = (slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
                assert torch.equal(found, truth(checkpoint)[name][rows, columns])


def test_rank_loads_it_into_float32(checkpoint: Path) -> None:
    name, wanted = "model.layers.0.self_attn.o_proj.weight", Box((3, 5), (6, 9))
    tensors = {"local": torch.zeros(6, 9)}
    load_files(checkpoint, Demand((Piece(name, wanted, View("local", 0, (9, 1)), "float32"),)), tensors, rank=0)
    assert torch.equal(tensors["local"], truth(checkpoint)[name][3:9, 5:14].float())


def test_layers_that_predict_further_tokens_are_carried_unchanged(checkpoint: Path, tmp_path: Path) -> None:
    entries = export_entries(checkpoint, CONFIG)
    carried = [name for name in entries if family_of(CONFIG).is_mtp(name, CONFIG)]
    assert carried == ["model.layers.2.self_attn.o_proj.weight"]
    out = tmp_path / "out"
    create_files(out, entries)
    copy_config_and_tokenizer(checkpoint, out)
    copy_tensors(checkpoint, out, entries, carried)
    assert torch.equal(load_file(out / "model.safetensors")[carried[0]], truth(checkpoint)[carried[0]])
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert file_pieces(read_index(out))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda stored, config: stored.pop("model.layers.2.self_attn.o_proj.weight_scale_inv"), "1 FP8 tensors lack"),
        (lambda stored, config: config.pop("quantization_config"), "no quantization_config.weight_block_size"),
        (
            lambda stored, config: config["quantization_config"].update(weight_block_size=[128, 128]),
            r"has shape \[3, 3\], but a tensor of shape \[10, 22\] in blocks of \[128, 128\] needs \[1, 1\]",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(checkpoint: Path, spoil, message: str) -> None:
    stored, config = load_file(checkpoint / "model.safetensors"), json.loads(json.dumps(CONFIG))
    spoil(stored, config)
    save_file(stored, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_index(checkpoint)


def as_published(folder: Path, block: tuple[int, int] | None) -> None:
    """A tiny model in the form of the large one: linears in FP8 blocks, the rest in BF16, a layer that predicts more.

    GLM-4.5 is published in BF16, without blocks.
    """
    stored, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"]
    predictor = {n.replace("layers.1.", f"layers.{last}."): t.flip(0) for n, t in stored.items() if "layers.1." in n}
    predictor[f"model.layers.{last}.eh_proj.weight"] = torch.randn(128, 256)
    predictor[f"model.layers.{last}.enorm.weight"] = torch.randn(128)
    published: dict[str, torch.Tensor] = {}
    for name, tensor in (stored | predictor).items():
        if block and name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in name:
            published[name], published[f"{name}_scale_inv"] = quantized(tensor, block)
        else:
            published[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
    save_file(published, folder / "model.safetensors")
    if block:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


@pytest.mark.engines
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("family", "block"), [("deepseek_v3", (48, 80)), ("kimi_k2", (48, 80)), ("glm4_moe", None)])
def test_published_checkpoint_loads_in_both_engines_and_exports_as_bf16(
    family: str, block: tuple[int, int] | None, demo: Path, tmp_path: Path
) -> None:
    """Four real ranks; the learning rate is 0, so that an export must be what was loaded."""
    model = experts_folder(tmp_path, demo, family)
    as_published(model, block)
    settings = [*EXPERTS, "run.steps=1", "optimizer.lr=0", "train.ep=2"]
    settings += ["algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4"]
    hybrid3d(tmp_path, "train", str(ROOT / "recipes/demo-cpu.yaml"), *settings)
    rows = read_rows(tmp_path / "runs/demo-cpu")
    assert len(rows) == 2
    for row in rows:
        assert row["sync/received_bytes"] == row["sync/lower_bound_bytes"] > 0
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-3
    said = hybrid3d(tmp_path, "export", "runs/demo-cpu", "out")
    assert "are untrained" in said
    exported = {n: t for file in sorted((tmp_path / "out").glob("*.safetensors")) for n, t in load_file(file).items()}
    published = truth(model, block or BLOCK)
    assert exported.keys() == published.keys()
    assert any("layers.4." in name for name in exported)
    for name, tensor in published.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
