"""Tests users' mistakes on the command line: exit code 2, one clear message, and no rank started."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid3d import cli, families
from hybrid3d.cli import checkpoint
from hybrid3d.config import load_recipe
from hybrid3d.config.rules import validate_recipe
from hybrid3d.families import Config
from hybrid3d.families.family import RowMap, RowRange, SameTensor
from hybrid3d.launch.preflight import check_run
from hybrid3d.reshard.file_index import CheckpointError
from run_ranks import ROOT, environment
from sound import RECIPE, write_inputs

SFT = ["rollout=null", "algorithm.name=sft", "algorithm.samples_per_prompt=1"]


@pytest.fixture
def work(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a valid recipe, model and data in the current folder."""
    write_inputs(tmp_path, demo)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record launches without starting ranks."""
    from hybrid3d.launch import launcher

    launches: list[list[str]] = []
    monkeypatch.setattr(launcher, "launch", lambda arguments, *unused: launches.append(arguments) or cli.FAILED)
    monkeypatch.delenv("HYBRID3D_CHECKED", raising=False)
    yield launches
    monkeypatch.delenv("HYBRID3D_CHECKED", raising=False)


Refused = Callable[..., str]


@pytest.fixture
def refused(work: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must be refused, and return its message."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert cli.main(arguments) == 2
        out, message = capsys.readouterr()
        assert not started
        assert out == ""
        check_message(message)
        assert not list(work.glob("runs/*/logs"))
        return message

    return run


def check_message(message: str) -> None:
    """Check that a message is one line, or a heading with a line per problem."""
    first, *more = message.splitlines()
    assert first.strip()
    assert all(line.startswith("  ") for line in more)
    assert "Traceback" not in message


def refused_process(work: Path, *arguments: str) -> str:
    """Run `refused` in a new process, including everything that libraries print."""
    command = [sys.executable, "-m", "hybrid3d", *arguments]
    done = subprocess.run(command, cwd=work, env=environment("cli"), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    check_message(done.stderr)
    assert not (work / "runs").exists()
    return done.stderr


def edit_config(work: Path, **changes: Any) -> None:
    path = work / "model" / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.lrr=1"], ["optimizer.lrr", "did you mean lr?"]),
        (["trian.tp=2"], ["trian", "did you mean train?"]),
        (["train.tp=3"], ["train.tp=3", "num_attention_heads=4", "2, 4"]),
        (["train.pp=3"], ["train.pp=3", "num_hidden_layers=4", "2, 4"]),
        (["rollout.tp=3"], ["rollout.tp=3", "num_attention_heads=4", "2, 4"]),
        (["train.tp=two"], ["train.tp", "'two'", "integer"]),
        (["model.path=nowhere"], ["nowhere/config.json"]),
        (["model.path=train.parquet"], ["train.parquet/config.json"]),
        (["train.tp=3", "train.pp=3"], ["train.tp=3", "train.pp=3"]),
    ],
)
def test_recipe_that_does_not_fit(refused: Refused, command: str, overrides: list[str], said: list[str]) -> None:
    message = refused(command, "recipe.yaml", *overrides)
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.train=nowhere.parquet"], ["nowhere.parquet", "no such file"]),
        (["data.eval=model"], ["model", "not a readable parquet file"]),
        (["data.prompt=problem"], ["train.parquet", "'problem'", "question, answer"]),
        (["reward.name=gsm9k"], ["reward.name", "'gsm9k'", "gsm8k"]),
        (["reward.name=code"], ["train.parquet: reward.name=code cannot use 20 of 20 references", "row 0"]),
        (["rollout.environment=abacus"], ["rollout.environment", "'abacus'", "calculator"]),
        (["rollout.max_model_len=20"], ["train.parquet", "row 0", "at most 12 fit"]),
        (["data.chat_template=true"], ["data.chat_template"]),
    ],
)
def test_data_and_reward(refused: Refused, overrides: list[str], said: list[str]) -> None:
    message = refused("train", "recipe.yaml", *overrides)
    assert all(words in message for words in said), message


def test_recipe_files(work: Path, refused: Refused) -> None:
    assert "nowhere.yaml" in refused("train", "nowhere.yaml")
    (work / "list.yaml").write_text("- name\n")
    assert "list.yaml" in refused("plan", "list.yaml")
    (work / "broken.yaml").write_text("name: [\n")
    assert "broken.yaml" in refused("train", "broken.yaml")


def test_truncated_data_file(work: Path, refused: Refused) -> None:
    data = (work / "eval.parquet").read_bytes()
    (work / "eval.parquet").write_bytes(data[: len(data) // 2])
    assert "eval.parquet" in refused("train", "recipe.yaml")


def test_models_that_are_not_known(work: Path, refused: Refused) -> None:
    edit_config(work, architectures=["GPT2LMHeadModel"])
    for command in ("train", "plan"):
        message = refused(command, "recipe.yaml")
        assert "'GPT2LMHeadModel'" in message
        assert "Qwen2ForCausalLM" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), ("[]", "no JSON object"), ('{"architectures": ["Qwen2ForCausalLM"]}', "config.json")],
)
def test_config_that_is_none(work: Path, refused: Refused, text: str, said: str) -> None:
    (work / "model" / "config.json").write_text(text)
    assert said in refused("train", "recipe.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_config_that_cannot_be_computed(work: Path, refused: Refused, changes: dict[str, Any], said: str) -> None:
    edit_config(work, **changes)
    assert said in refused("train", "recipe.yaml")


def test_model_without_tokenizer_is_refused(work: Path, refused: Refused) -> None:
    for path in (work / "model").glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused("train", "recipe.yaml")


def test_tokens_that_the_model_does_not_have(work: Path, refused: Refused) -> None:
    edit_config(work, vocab_size=64)
    message = refused("train", "recipe.yaml")
    assert "64" in message
    assert "tokenizer" in message


def test_answers_that_are_too_long(work: Path, refused: Refused) -> None:
    edit_config(work, max_position_embeddings=20)  # the prompts alone fit
    assert "20" in refused("train", "recipe.yaml", *SFT)


def finished_run(work: Path, **changes: Any) -> Path:
    """Create a run's folder with a fake checkpoint of step 3."""
    run = work / "runs" / "tried"
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | changes))
    return run


def test_run_folders(work: Path, refused: Refused) -> None:
    assert "model" in refused("eval", "model")
    assert "nowhere" in refused("export", "nowhere", "out")
    run = finished_run(work)
    assert "another recipe" in refused("train", "recipe.yaml", "optimizer.lr=1")
    assert "step 7; existing checkpoints: 3" in refused("eval", str(run), "--step", "7")
    assert "not an empty folder" in refused("export", str(run), "model")
    assert "train.parquet" in refused("export", str(run), "train.parquet")
    (run / "recipe.yaml").write_text("name: 1\n")
    assert "recipe.yaml" in refused("eval", str(run))


@pytest.mark.engines
def test_variables_that_select_other_code_of_vllm(
    work: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, started: list[list[str]]
) -> None:
    run = finished_run(work)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    for command in (["train", "recipe.yaml", "name=new"], ["eval", str(run)], ["bench", "recipe.yaml"]):
        assert "VLLM_USE_V2_MODEL_RUNNER=0" in refused(*command)
    assert cli.main(["train", "recipe.yaml", "name=supervised", *SFT]) == cli.FAILED  # it needs no vLLM
    assert started


def test_runs_without_rollout(work: Path, refused: Refused) -> None:
    assert "rollout" in refused("plan", "recipe.yaml", *SFT)
    algorithm = {"name": "sft", "prompts_per_step": 4}
    assert "rollout" in refused("eval", str(finished_run(work, rollout=None, algorithm=algorithm)))


def test_evaluation_has_neither_reward_model_nor_its_layout() -> None:
    """So that its ranks call functions one by one, and no setting is without effect."""
    settings = ["reward.model=model", "roles.reward.ranks=4", "roles.reward.tp=2", "roles.reward.max_restarts=3"]
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", settings)
    assert recipe.worker_group_size("reward") == 2
    evaluated = checkpoint._without_reward_model(recipe)
    assert [refusal.message for refusal in validate_recipe(evaluated)] == []
    assert evaluated.worker_group_size("reward") == 1
    assert (evaluated.roles.reward.ranks, evaluated.roles.reward.max_restarts) == (4, 3)


@pytest.mark.parametrize("fraction", ["0", "-0.1", "1.5", "nan"])
def test_fraction_of_changed_elements(refused: Callable[..., str], fraction: str) -> None:
    message = refused("plan", "recipe.yaml", f"--changed={fraction}")
    assert "expected a fraction above 0 and up to 1" in message


def test_adapters_have_no_changed_elements(refused: Callable[..., str]) -> None:
    message = refused("plan", "recipe.yaml", "--changed=0.1", "lora.rank=4")
    assert "--changed 0.1: with adapters (lora) syncs of changed elements are not predicted: leave one out" in message


def test_run_whose_model_is_gone(work: Path, refused: Refused) -> None:
    run = finished_run(work)
    (work / "model").rename(work / "moved")
    assert "model/config.json" in refused("eval", str(run))
    assert "model/config.json" in refused("export", str(run), "out")
    assert not (work / "out").exists()


def rewrite(work: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = work / "model" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.engines
def test_unbroken_inputs_start_a_run(work: Path, started: list[list[str]]) -> None:
    assert cli.main(["train", "recipe.yaml", "run.seed=2"]) == cli.FAILED
    assert started == [["train", "recipe.yaml", "run.seed=2"]]


@pytest.mark.engines
def test_checkpoint_that_does_not_fit_its_config(work: Path, refused: Refused) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    rewrite(work, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
    message = refused("train", "recipe.yaml")
    assert f"{name}: shape [128, 255], config.json requires [128, 256]" in message
    rewrite(work, lambda tensors: tensors.pop(name))
    assert f"{name}: missing, expected shape [128, 256]" in refused("train", "recipe.yaml")
    rewrite(work, lambda tensors: tensors.update({"extra.weight": tensors["model.norm.weight"].clone()}))
    message = refused("train", "recipe.yaml")
    assert "extra.weight" in message
    assert name in message


@pytest.mark.engines
def test_misfit_checkpoint_shows_missing_and_unknown_tensors(work: Path, refused: Refused) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers." in name]:
            tensors[name.replace("layers", "blocks")] = tensors.pop(name)

    rewrite(work, rename)
    lines = refused("train", "recipe.yaml").splitlines()
    assert len(lines) == 43
    assert lines[21] == "  ... 48 tensors are missing"  # 12 of each of 4 layers
    assert lines[42] == "  ... 48 tensors are unknown"
    assert all("missing, expected shape" in line for line in lines[1:21])
    assert all("not a tensor of Qwen2ForCausalLM" in line for line in lines[22:42])


@pytest.mark.engines
def test_tied_head_that_is_another_than_the_embedding(work: Path, refused: Refused) -> None:
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    rewrite(work, lambda tensors: tensors.update({head: tensors[embedding].clone()}))
    assert cli.main(["train", "recipe.yaml"]) == cli.FAILED  # started: launches only look as if they had happened
    rewrite(work, lambda tensors: tensors[head][-1, -1].add_(1))
    with pytest.raises(CheckpointError, match=f"ties {head} to {embedding}, but the files have a different"):
        check_run(load_recipe("recipe.yaml"))


def with_table(monkeypatch: pytest.MonkeyPatch, final_norm: RowMap | None) -> None:
    """Return Qwen2's table with other rows for Megatron's final norm; None removes it."""
    family = families.FAMILIES["Qwen2ForCausalLM"]
    tensors = {**family.tensors, "decoder.final_layernorm.weight": final_norm}
    kept = {name: rows for name, rows in tensors.items() if rows is not None}
    monkeypatch.setitem(families.FAMILIES, family.architecture, dataclasses.replace(family, tensors=kept))


class Padding:
    """Rows that are not in a checkpoint."""

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        return [RowRange(0, rows, None)]


@pytest.mark.engines
def test_tensors_that_one_engine_alone_knows_are_named(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(monkeypatch, None)
    message = refused("plan", "recipe.yaml")
    assert "1 tensors of Megatron are not in the table of Qwen2ForCausalLM: decoder.final_layernorm.weight" in message
    with_table(monkeypatch, Padding())
    message = refused("plan", "recipe.yaml")
    assert "1 tensors of vLLM would not be written exactly once by the tensors that Megatron holds" in message
    assert "model.norm.weight: of 128 elements 128 are left unwritten" in message
    with_table(monkeypatch, SameTensor("model.nrom.weight"))
    assert "vLLM's loader of Qwen2ForCausalLM fails on model.nrom.weight" in refused("plan", "recipe.yaml")


@pytest.mark.engines
def test_index_that_names_what_is_not_there(work: Path, refused: Refused) -> None:
    index = work / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    assert "model-00001-of-00002.safetensors" in refused("train", "recipe.yaml")
    index.write_text(json.dumps({"weight_map": {"no.such.weight": "model.safetensors"}}))
    assert "no.such.weight" in refused("train", "recipe.yaml")
    index.write_text("{")
    assert "index.json" in refused("train", "recipe.yaml")


@pytest.mark.engines
def test_truncated_checkpoint_as_a_user_sees_it(work: Path) -> None:
    path = work / "model" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    message = refused_process(work, "train", "recipe.yaml")
    assert "model.safetensors" in message
    assert str(len(data) // 2) in message


def test_typo_as_a_user_sees_it(work: Path) -> None:
    message = refused_process(work, "plan", "recipe.yaml", "rollout.temprature=0.5")
    assert "rollout.temprature" in message
    assert "did you mean temperature?" in message


def test_settings_may_stand_behind_options() -> None:
    options = cli._parse(
        ["plan", "recipe.yaml", "train.tp=2", "--json", "train.pp=4", "--picture", "out.png", "name=a"]
    )
    assert options.overrides == ["train.tp=2", "train.pp=4", "name=a"]
    assert (options.json, options.picture) == (True, "out.png")


@pytest.mark.parametrize(
    "arguments", [["plan", "a.yaml", "--jsn"], ["export", "run", "out", "name=a"], ["plan", "a.yaml", "--b=c"]]
)
def test_arguments_that_are_no_settings_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli._parse(arguments)
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
