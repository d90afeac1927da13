"""What is said of data files with other names, of quantized models, of full shared memory, and commands to copy."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from hybrid3d.cli.train import _print_results
from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.launch.launcher import check_devices
from hybrid3d.reshard.file_index import CheckpointError, read_index
from hybrid3d.rl.data_files import DataError, check_columns, read_columns
from hybrid3d.run.ends import describe_signal, find_root_cause
from hybrid3d.run.folder import RunFolder

DEMO = Path(__file__).parents[2] / "recipes/demo-cpu.yaml"
LINES = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in (("1+1?", "2"), ("2+2?", "4")))
FILES = {
    "train.json": (LINES.encode(), "rename it to train.jsonl"),
    "train.JSONL": (LINES.encode(), "rename it to train.jsonl"),
    "train": (LINES.encode(), "rename it to train.jsonl"),
    "array.json": (json.dumps([{"question": "1+1?", "answer": "2"}]).encode(), "this one is an array"),
    "train.jsonl.gz": (gzip.compress(LINES.encode()), "unpack it with gunzip"),
    "train.gz": (b"PK\x03\x04", "unpack it with unzip"),
    "train.csv": (b"question,answer\n1+1?,2\n", "convert CSV"),
    "train.txt": (b"1+1?\n", "data files are parquet, or JSON Lines named *.jsonl"),
}


@pytest.mark.parametrize("name", FILES)
def test_data_files_with_other_names(name: str, tmp_path: Path) -> None:
    content, advice = FILES[name]
    (tmp_path / name).write_bytes(content)
    for read in (check_columns, read_columns):
        with pytest.raises(DataError) as told:
            read(tmp_path / name, ("question", "answer"))
        assert str(tmp_path / name) in str(told.value)
        assert "JSON Lines named *.jsonl" in str(told.value)
        assert advice in str(told.value)


def test_folder_as_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cut short: .*; name one file in this folder: "):
        check_columns(tmp_path, ("question",))
    (tmp_path / "b.jsonl").write_text(LINES)
    with pytest.raises(DataError, match=r"name one file in this folder, such as .*/b\.jsonl"):
        check_columns(tmp_path, ("question",))


def test_parquet_file_that_is_cut_short_is_told_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"0" * 100)
    with pytest.raises(DataError, match="or one cut short") as told:
        check_columns(tmp_path / "a.parquet", ("question",))
    assert "jsonl" not in str(told.value)


METHODS = ["gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "some-new-method"]


@pytest.mark.parametrize("method", METHODS)
def test_quantized_model_is_refused_by_the_name_of_its_method(method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    save_file({"a.qweight": torch.zeros(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"(?i)is quantized by {method}, says config.json: .*not quantized"):
        read_index(tmp_path)


@pytest.mark.parametrize(("tensor", "method"), [("qweight", "GPTQ or AWQ"), ("weight_packed", "compressed-tensors")])
def test_quantized_tensors_unmentioned_in_config_are_refused(tensor: str, method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({f"a.{tensor}": torch.zeros(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"has dtype I32; .*it is quantized by {method}"):
        read_index(tmp_path)


def test_rank_that_sigbus_killed_tells_of_shared_memory(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    reason = find_root_cause(folder, {3: -signal.SIGBUS}).reason
    assert reason.startswith("killed by SIGBUS, which is what a full /dev/shm")
    assert "MiB free of" in reason
    assert "--shm-size" in reason
    assert describe_signal(signal.SIGKILL) == "SIGKILL"


def test_run_does_not_start_with_full_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(DEMO)
    usage = shutil.disk_usage
    full = SimpleNamespace(total=64 << 20, used=63 << 20, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if str(path) == "/dev/shm" else usage(path))
    with pytest.raises(RecipeError, match=r"/dev/shm has 1 MiB free, and 4 ranks need at least 32: .*--shm-size"):
        check_devices(recipe)


def test_commands_that_are_printed_can_be_copied(tmp_path: Path) -> None:
    """A path with blanks and a quotation mark."""
    folder = RunFolder(tmp_path / "it's a run; $HOME")
    (folder.checkpoints / "step-00000003").mkdir(parents=True)
    (folder.checkpoints / "step-00000003" / "manifest.json").write_text("{}")
    console = Console(record=True, width=1000)
    _print_results(load_recipe(DEMO), folder, console)
    lines = [line for line in console.export_text().splitlines() if line.startswith(("evaluate", "export"))]
    assert len(lines) == 2
    for line in lines:
        assert str(folder.path) in shlex.split(line)
