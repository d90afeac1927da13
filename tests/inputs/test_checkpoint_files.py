"""Which files of a checkpoint's folder are read and copied, and what transformers makes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mistral_common
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid3d.config import load_recipe
from hybrid3d.inputs.export import copy_config_and_tokenizer
from hybrid3d.inputs.models import read_config, read_tokenizer
from hybrid3d.inputs.tokenizer_checks import check_tokenizer_files, tokenizer_assumptions
from hybrid3d.reshard.file_index import INDEX_FILE, SINGLE_FILE, CheckpointError, read_index
from run_ranks import ROOT

KNOWN = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *(
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "LICENSE",
        "README.md",
        "additional_chat_templates/tools.jinja",
    ),
)
OLD = (
    *("model.gguf", "flax_model.msgpack", "tf_model.h5", "model.onnx", "pytorch_model.bin", "model.safetensors"),
    *("consolidated.00.pth", "rust_model.ot", "model.ckpt.index", "pytorch_model.bin.index.json", "params.json"),
    *("adapter_config.json", "adapter_model.safetensors", "hf_quant_config.json", "training_args.bin", "modeling_x.py"),
)


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder with links to a small checkpoint's files, as the hub's cache has them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_checkpoint("qwen2").iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def test_export_has_what_is_known_and_transformers_reads_it(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in (*KNOWN, *OLD):
        (model / name).parent.mkdir(exist_ok=True)
        if not (model / name).exists():
            (model / name).write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "gone"}))
    copy_config_and_tokenizer(model, out)
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == sorted(KNOWN)
    save_file(load_file(model / SINGLE_FILE), out / SINGLE_FILE, {"format": "pt"})
    for name in KNOWN[2:]:
        (out / name).unlink()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.model.norm.weight, load_file(model / SINGLE_FILE)["model.norm.weight"])


def test_code_is_copied_where_a_config_names_it(model: Path, tmp_path: Path) -> None:
    (model / "modeling_x.py").write_text("")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "modeling_x.Config"}}))
    copy_config_and_tokenizer(model, tmp_path)
    assert (tmp_path / "modeling_x.py").exists()


def test_export_of_a_read_only_checkpoint_can_be_written(tmp_path: Path) -> None:
    """Not as root, who may write everything."""
    source, out = tmp_path / "model", tmp_path / "out"
    for folder in (source, out):
        folder.mkdir()
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "quantization_config": quantization}))
    (source / "tokenizer.json").write_text("{}")
    for path in source.iterdir():
        path.chmod(0o444)
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(0o755)
    source.chmod(0o555)
    out.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            copy_config_and_tokenizer(source, out)
            os._exit(0)
        except BaseException as error:
            (out / "error").write_text(repr(error))
        finally:  # whatever happens, the tests go on in the parent alone
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, (out / "error").read_text()
    assert json.loads((out / "config.json").read_text()) == {"model_type": "deepseek_v3"}
    assert all(path.stat().st_mode & 0o200 for path in out.iterdir())


def sharded(folder: Path, *shards: dict[str, torch.Tensor]) -> None:
    """Put shards and their index into the folder, in place of its single file."""
    (folder / SINGLE_FILE).unlink()
    weight_map = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= {tensor: name for tensor in tensors if tensor not in weight_map}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_index_beside_a_single_file_is_refused(model: Path) -> None:
    tensors = load_file(model / SINGLE_FILE)
    sharded(model, dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:]))
    assert read_index(model).keys() == tensors.keys()
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / SINGLE_FILE, {"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(model).model.norm.weight
    assert torch.equal(read, tensors["model.norm.weight"] + 1)
    with pytest.raises(CheckpointError, match=r"of 2 files, and model\.safetensors, which transformers reads instead"):
        read_index(model)
    for shard in model.glob("model-*"):
        shard.unlink()
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE_FILE)}))
    assert read_index(model).keys() == tensors.keys()


def test_tensor_in_two_files_is_refused(model: Path) -> None:
    tensors = load_file(model / SINGLE_FILE)
    norm = "model.norm.weight"
    others = {name: tensor for name, tensor in tensors.items() if "layers.0" in name}
    first = {name: tensor for name, tensor in tensors.items() if name not in others}
    sharded(model, first, others | {norm: tensors[norm] + 1})
    assert torch.equal(AutoModelForCausalLM.from_pretrained(model).model.norm.weight, tensors[norm] + 1)
    with pytest.raises(CheckpointError, match=r"1 tensors are in several files, model.norm.weight in model-00001"):
        read_index(model)


def test_files_that_only_transformers_would_read_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(CheckpointError, match=r"transformers_weights='other\.safetensors'"):
        read_config(model)


@pytest.mark.parametrize("stored", ["no scales", "no FP8", "scales alone"])
def test_fp8_checkpoint_without_any_scales_or_tensors_is_refused(tmp_path: Path, stored: str) -> None:
    weights = {f"{name}.weight": torch.ones(4, 4).to(torch.float8_e4m3fn) for name in ("a", "b")}
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in weights}
    plain = {name: torch.ones(4, 4) for name in weights}
    quantization = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(weights | scales, tmp_path / SINGLE_FILE)
    assert {entry.dtype for entry in read_index(tmp_path).values()} == {"bfloat16"}
    kept = {"no scales": weights, "no FP8": plain, "scales alone": plain | scales}[stored]
    save_file(kept, tmp_path / SINGLE_FILE)
    said = {
        "no scales": "2 FP8 tensors lack their _scale_inv",
        "no FP8": "quant_method fp8, and no tensor is in FP8",
        "scales alone": "2 _scale_inv belong to no FP8 tensor",
    }[stored]
    with pytest.raises(CheckpointError, match=said):
        read_index(tmp_path)


def test_index_that_names_nothing(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="it names no tensor"):
        read_index(tmp_path)


BYTES = {chr(c): number for number, c in enumerate((*range(33, 127), 0x120, 0x10A))}


def byte_tokenizer(folder: Path, model_type: str = "qwen2", **config: Any) -> None:
    """Write a tokenizer of single bytes, with an end token, and the config of a model that ends with it."""
    vocabulary = {**BYTES, "<end>": len(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": len(BYTES)}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def read(folder: Path) -> Any:
    """Return the tokenizer as a run reads it."""
    return read_tokenizer(load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.path={folder}"]))


def test_special_token_that_transformers_invents_is_refused(tmp_path: Path) -> None:
    """Without tokenizer_config.json it gives Qwen2's tokenizers an end token that this one does not have."""
    byte_tokenizer(tmp_path / "bare")
    assert AutoTokenizer.from_pretrained(tmp_path / "bare").eos_token_id == len(BYTES) + 1
    with pytest.raises(CheckpointError, match=r"takes '<\|endoftext\|>' for the eos_token, which is in none of"):
        read(tmp_path / "bare")
    byte_tokenizer(tmp_path / "named", eos_token="<end>", tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = read(tmp_path / "named")
    assert tokenizer.eos_token_id == len(BYTES)
    said = list(tokenizer_assumptions(tmp_path / "named", tokenizer))
    assert len(said) == 1
    assert said[0].startswith("no file of the tokenizer names unk_token '<|endoftext|>', pad_token '<|endoftext|>'")


def test_end_token_that_is_guessed_must_be_the_models(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, tokenizer_class="Qwen2Tokenizer", unk_token="<end>", pad_token="<end>")
    own = json.loads((tmp_path / "tokenizer.json").read_text())
    own["model"]["vocab"]["<|endoftext|>"] = len(BYTES) + 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(
        CheckpointError, match=rf"\({len(BYTES) + 1}\) for the eos_token.* eos_token_id \[{len(BYTES)}\]"
    ):
        read(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [len(BYTES), len(BYTES) + 1]}))
    tokenizer = read(tmp_path)
    assert "names eos_token '<|endoftext|>': assumed from its class" in "\n".join(
        tokenizer_assumptions(tmp_path, tokenizer)
    )


def test_sentencepiece_model_whose_class_nobody_names(tmp_path: Path) -> None:
    """Transformers drops the blank before the first word then; SentencePiece itself is the reference."""
    path = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    (tmp_path / "tokenizer.model").write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    with pytest.raises(
        CheckpointError, match=r"makes \['a', '▁b'\] of 'a b', and tokenizer.model itself \['▁a', '▁b'\]"
    ):
        read(tmp_path)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    said = "\n".join(tokenizer_assumptions(tmp_path, read(tmp_path)))
    assert "unk_token '<unk>': assumed from its class, LlamaTokenizer" in said
    assert "of ' b' transformers makes" in said


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_class_that_splits_otherwise_than_the_file_has_its_cure(tmp_path: Path, model_type: str) -> None:
    """The form of R1-Distill-Llama: transformers takes these bytes for SentencePiece's."""
    byte_tokenizer(tmp_path, model_type, eos_token="<end>", bos_token="<end>", tokenizer_class="LlamaTokenizerFast")
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path)
    cure = ': set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, which has '
    assert str(refused.value).endswith(cure + "'LlamaTokenizerFast'")
    byte_tokenizer(
        tmp_path, model_type, eos_token="<end>", bos_token="<end>", tokenizer_class="PreTrainedTokenizerFast"
    )
    text = "def f(x):\n    return x"
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert read(tmp_path).encode(text, add_special_tokens=False) == own


def test_files_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, eos_token="<end>", tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = read(tmp_path)
    own = json.loads((tmp_path / "tokenizer.json").read_text())
    own["model"]["vocab"] |= {"a": BYTES["b"], "b": BYTES["a"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(CheckpointError, match=r"is .* in the tokenizer's files, and transformers reads"):
        check_tokenizer_files(tmp_path, tokenizer)
