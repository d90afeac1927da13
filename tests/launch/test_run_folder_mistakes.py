"""Tests that problems with a run's folder and with inputs and targets of `eval` and `export` are found early."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid3d import cli
from hybrid3d.inputs import export
from hybrid3d.launch import launcher
from hybrid3d.reshard.file_index import TensorEntry
from hybrid3d.reshard.files import create_files
from hybrid3d.run.folder import RunFolder
from hybrid3d.storage import manifest
from sound import RECIPE, write_inputs

Refused = Callable[..., str]


@pytest.fixture
def run(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a run with a fake checkpoint of step 3 in the current folder."""
    write_inputs(tmp_path, demo)
    monkeypatch.chdir(tmp_path)
    run = Path("runs/tried")
    checkpoint = run / "checkpoints/step-000003"
    checkpoint.mkdir(parents=True)
    for name in (*manifest.REQUIRED, "__0_0.distcp"):
        (checkpoint / name).write_bytes(b"written")
    manifest.write(
        checkpoint, {name: manifest.fsync_and_crc(checkpoint / name) for name in manifest.list_files(checkpoint)}
    )
    (run / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return run


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record launches without starting ranks."""
    launches: list[list[str]] = []
    monkeypatch.setattr(launcher, "launch", lambda arguments, *unused: launches.append(arguments) or cli.FAILED)
    return launches


@pytest.fixture
def refused(started: list[list[str]], capfd: pytest.CaptureFixture[str]) -> Refused:
    def run(*arguments: str) -> str:
        capfd.readouterr()
        assert cli.main(arguments) == cli.MISTAKE
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err + printed.out
        assert not started
        return printed.err

    return run


def test_unbroken_run_starts_eval_and_export(run: Path, started: list[list[str]]) -> None:
    assert cli.main(["eval", str(run)]) == cli.FAILED
    assert cli.main(["export", str(run), "out"]) == cli.FAILED
    assert started == [["eval", str(run)], ["export", str(run), "out"]]


# ---- what eval and export need


def test_checkpoint_that_is_not_whole(run: Path, refused: Refused) -> None:
    path = run / "checkpoints/step-000003/__0_0.distcp"
    path.write_bytes(b"writ")
    for command in (["eval", str(run)], ["export", str(run), "out"]):
        assert "step-000003: __0_0.distcp has 4 bytes, 7 were written" in refused(*command)
    path.unlink()
    for command in (["eval", str(run)], ["export", str(run), "out"]):
        assert "step-000003: __0_0.distcp is missing" in refused(*command)
    (path.parent / manifest.MANIFEST).write_text("{")
    for command in (["eval", str(run)], ["export", str(run), "out"]):
        assert "manifest.json is not a list of files" in refused(*command)
    assert not list(Path().glob("out*"))


@pytest.mark.parametrize("lost", ["eval.parquet", "train.parquet", "model/tokenizer.json", "model/model.safetensors"])
def test_eval_names_what_it_lacks(run: Path, refused: Refused, lost: str) -> None:
    Path(lost).unlink()
    assert (lost if lost.endswith(("parquet", "safetensors")) else "has no tokenizer") in refused("eval", str(run))


def change(run: Path, section: str, **settings: Any) -> None:
    (run / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {section: RECIPE.get(section, {}) | settings}))


def test_reward_and_an_environment_that_are_gone(run: Path, refused: Refused) -> None:
    change(run, "reward", name="gone_module:score")
    assert "reward.name" in refused("eval", str(run))
    change(run, "rollout", environment="gone_module:Environment")
    assert "rollout.environment" in refused("eval", str(run))


def test_weights_cut_short(run: Path, refused: Refused) -> None:
    path = Path("model/model.safetensors")
    size = path.stat().st_size
    os.truncate(path, size - 1)
    for command in (["eval", str(run)], ["export", str(run), "out"]):
        told = refused(*command)
        assert "model/model.safetensors is damaged or truncated" in told
        assert str(size) in told
        assert str(size - 1) in told


# ---- where an export goes


@pytest.mark.parametrize("out", ["train.parquet/out", "/proc/out", "/dev/null/out", "a" * 300, "link/out"])
def test_places_where_nothing_can_be_made(run: Path, refused: Refused, out: str) -> None:
    Path("link").symlink_to("train.parquet")
    assert ("OUT:" if len(out) > 255 else f"export to {out}") in refused("export", str(run), out)


@pytest.mark.parametrize("out", ["train.parquet", "model", "dangling", "fifo"])
def test_places_that_are_taken(run: Path, refused: Refused, out: str) -> None:
    Path("dangling").symlink_to("gone")
    os.mkfifo("fifo")
    assert f"export to {out}:\n  it is not an empty folder" in refused("export", str(run), out)


def test_place_where_a_file_system_is_mounted(run: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out").mkdir()
    monkeypatch.setattr(export.os.path, "ismount", lambda path: True)
    assert "choose a folder in it, such as out/model" in refused("export", str(run), "out")


def test_place_without_room(run: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "free_bytes", lambda path: 1000)
    told = refused("export", str(run), "out")
    size = Path("model/model.safetensors").stat().st_size
    needed = int(told.split("takes ")[1].split()[0])
    assert 0.9 * size < needed < size  # but for the header
    assert "1000 are free there" in told


def test_export_takes_its_room_before_anything_is_written(tmp_path: Path) -> None:
    """Its files are memory-mapped: a rank that runs out of disk space would be killed without a message."""
    create_files(tmp_path, {"a": TensorEntry("model.safetensors", (1 << 20,), "float32")})
    found = (tmp_path / "model.safetensors").stat()
    assert found.st_blocks * 512 >= found.st_size > 4 << 20
    with pytest.raises(OSError, match=r"bytes are needed: '.*model\.safetensors'"):
        create_files(tmp_path / "large", {"a": TensorEntry("model.safetensors", (1 << 55,), "float32")})


def test_export_removes_nothing_of_the_user(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("X.partial").mkdir()
    Path("X.partial/mine").write_text("mine")
    made: list[Path] = []

    def launch(*unused: object) -> int:
        made.append(Path(os.environ[export.UNFINISHED]))
        assert made[-1].is_dir()
        (made[-1] / "half").write_text("half")
        return cli.FAILED

    monkeypatch.setattr(launcher, "launch", launch)
    for _ in range(2):
        assert cli.main(["export", str(run), "X"]) == cli.FAILED
    assert len(set(made)) == 2
    assert {path.parent for path in made} == {Path.cwd()}
    assert [path.name for path in Path().glob("X*")] == ["X.partial"]
    assert Path("X.partial/mine").read_text() == "mine"
    assert export.UNFINISHED not in os.environ


# ---- the folder itself


@pytest.mark.parametrize("name", ["logs", "checkpoints", "logs/eval"])
def test_file_where_a_run_has_a_folder(run: Path, refused: Refused, name: str) -> None:
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("mine")
    told = f"{run / name} is not a folder, but a run needs a folder of this name"
    assert told in refused("eval", str(run))
    if name != "logs/eval":
        assert told in refused("export", str(run), "out")
        assert told in refused("train", "recipe.yaml")
    assert (run / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "samples.jsonl", "events.jsonl", ".lock"])
def test_folder_where_a_run_has_a_file(run: Path, refused: Refused, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    told = f"{run / name} is not a file, but a run needs a file of this name"
    assert told in refused("eval", str(run))
    assert told in refused("train", "recipe.yaml")


def test_file_where_the_run_should_be(run: Path, refused: Refused) -> None:
    shutil.rmtree(run)
    run.write_text("mine")
    for command in (["eval", str(run)], ["export", str(run), "out"], ["train", "recipe.yaml"]):
        assert f"{run} is not a folder" in refused(*command)


@pytest.mark.parametrize("content", [b"\xff", b"name: [", b"- 1", b"name: 1", b"[" * 10_000])
def test_recipe_in_the_folder_that_cannot_be_read(run: Path, refused: Refused, content: bytes) -> None:
    (run / "recipe.yaml").write_bytes(content)
    for command in (["eval", str(run)], ["export", str(run), "out"], ["train", "recipe.yaml"]):
        assert f"{run}/recipe.yaml" in refused(*command)


def test_records_that_are_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for line in ('{"step": 1', "5", "{}", '{"step": "x"}', "[" * 10**5):
        folder.metrics.write_text(f"{json.dumps({'step': 0})}\n{line}\n")
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a record of a step"):
            folder.truncate_records(1)


# ---- resuming with another recipe


def test_differing_keys_are_told_with_both_values(run: Path, refused: Refused) -> None:
    overrides = ["optimizer.lr=1", "run.seed=7", "algorithm.clip=0.3"]
    told = refused("train", "recipe.yaml", *overrides).splitlines()
    assert told[1] == f"  {run} holds a run of another recipe ({run}/recipe.yaml):"
    assert sorted(line.strip() for line in told[2:5]) == [
        "algorithm.clip is 0.3, the run started with null",
        "optimizer.lr is 1.0, the run started with 0.0001",
        "run.seed is 7, the run started with 1",
    ]
    assert "and write those that may change during a run (algorithm.clip, optimizer.lr) to" in told[5]
    assert f"{run}/control.yaml" in told[5]
    assert "choose another name" in told[5]
    assert len(told) == 6
    assert "control.yaml" not in refused("train", "recipe.yaml", "run.seed=7")  # it cannot help


def test_section_that_is_gone(run: Path, refused: Refused) -> None:
    told = refused("train", "recipe.yaml", "rollout=null", "algorithm={name: sft, prompts_per_step: 4}")
    assert "algorithm.name is sft, the run started with grpo" in told
    assert "rollout is null, the run started with a section" in told
    assert "rollout.tp" not in told


def test_long_list_of_differing_keys_is_cut_short(run: Path, refused: Refused) -> None:
    (run / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"schedule": {1: {"optimizer.lr": 1.0}}}))
    assert "schedule.1.optimizer.lr is absent, the run started with 1.0" in refused("train", "recipe.yaml")
    schedule = {step: {"optimizer.lr": 1.0} for step in range(1, 31)}
    (run / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"schedule": schedule}))
    told = refused("train", "recipe.yaml").splitlines()
    assert told[-2].strip() == "... 30 keys differ"
    assert len(told) == 24


def test_older_recipe_has_the_defaults_of_what_it_lacks(run: Path, started: list[list[str]]) -> None:
    from hybrid3d.config import load_recipe
    from hybrid3d.launch.preflight import check_folder

    assert "keep_last" not in (run / "recipe.yaml").read_text()
    check_folder(load_recipe("recipe.yaml"))
    default = load_recipe("recipe.yaml").run.keep_last
    check_folder(load_recipe("recipe.yaml", [f"run.keep_last={default}"]))
