"""What a checkpoint says of itself: exchanged folders, and those of other runs, are refused with both values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from checkpoints import make_config
from hybrid3d import cli
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.report.run_data import read_run
from hybrid3d.run import identity
from hybrid3d.run.folder import RunFolder, checkpoint_folder, served_folder
from hybrid3d.run.identity import RunIdentity, check_last, check_step, derived_key, input_digests
from hybrid3d.storage import manifest
from hybrid3d.storage.manifest import PART, WHOLE, BrokenCheckpoint, ForeignCheckpoint, file_digest
from run_ranks import ROOT

FILES = {".metadata": b"m", "metadata.json": b"{}", "common.pt": b"c", "progress.json": b"{}", "__0_0.distcp": b"shard"}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "model").mkdir()
    config = make_config("qwen2").to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for name in ("train.parquet", "eval.parquet"):
        (tmp_path / name).write_bytes(name.encode())
    settings = [
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/train.parquet",
        f"data.eval={tmp_path}/eval.parquet",
        f"run.dir={tmp_path}/runs",
    ]
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", settings)


def begun(recipe: Recipe) -> tuple[RunFolder, RunIdentity]:
    folder = RunFolder.for_recipe(recipe)
    folder.create(recipe)
    identity.begin(folder)
    return folder, RunIdentity.of_run(folder, recipe)


def write_checkpoint(folder: RunFolder, step: int, of: RunIdentity | None, shard: bytes = b"shard") -> Path:
    path = checkpoint_folder(folder, step)
    path.mkdir(parents=True)
    for name, content in {**FILES, "__0_0.distcp": shard}.items():
        (path / name).write_bytes(content)
    crcs = {name: manifest.fsync_and_crc(path / name) for name in manifest.list_files(path)}
    manifest.write(path, crcs, of.of_step(path, step) if of is not None else None)
    return path


def test_runs_own_checkpoint_is_accepted_and_its_id_stays(recipe: Recipe) -> None:
    folder, of = begun(recipe)
    path = write_checkpoint(folder, 4, of)
    identity.begin(folder)
    again = RunIdentity.of_run(folder, recipe)
    assert again.run == of.run
    assert again.check(folder, path) == ""
    check_last(folder, recipe)
    assert check_step(folder, 4) == ""
    manifest.check_sizes(path)


@pytest.mark.parametrize("command", ["eval", "export", "serve"])
def test_exchanged_step_folders_are_refused_by_every_reader(
    recipe: Recipe, command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, of = begun(recipe)
    first, second = write_checkpoint(folder, 4, of), write_checkpoint(folder, 8, of)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    expected = r"step-000008.* says step-000004, expected step-000008|its folder is step-000004, expected step-000008"
    for read in (manifest.check_sizes, manifest.check, manifest.read_manifest):
        with pytest.raises(ForeignCheckpoint, match=expected):
            read(second)
    for check in (lambda: check_last(folder, recipe), lambda: check_step(folder, 8), lambda: of.check(folder, second)):
        with pytest.raises(ForeignCheckpoint, match=expected):
            check()
    out = [str(tmp_path / "out")] if command == "export" else []
    assert cli.main([command, str(folder.path), *out, *(["--port", "8123"] if command == "serve" else [])]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "its folder is step-000004, expected step-000008" in told


def test_checkpoint_of_another_run_is_refused(recipe: Recipe) -> None:
    folder, of = begun(recipe)
    _, of_other = begun(replace(recipe, name="other"))
    assert of.run != of_other.run
    path = write_checkpoint(folder, 8, of_other)
    for check in (lambda: check_last(folder, recipe), lambda: check_step(folder, 8), lambda: of.check(folder, path)):
        with pytest.raises(ForeignCheckpoint, match=f"its run is {of_other.run.run}, expected {of.run.run}"):
            check()
    folder.id.unlink()
    with pytest.raises(ForeignCheckpoint, match=r"expected none; .*run.json is missing"):
        check_last(folder, recipe)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("run.seed", "2", "run.seed is 2, the checkpoint was written with 1"),
        ("optimizer.lr", "0.5", "optimizer.lr is 0.5, the checkpoint was written with 0.0002"),
        ("rollout.tp", "1", "rollout.tp is 1, the checkpoint was written with 2"),
        ("run.max_restarts", "3", ""),
        ("tracking", "[tensorboard]", ""),
    ],
)
def test_settings_that_a_resume_may_change_and_others(recipe: Recipe, key: str, value: str, said: str) -> None:
    """Also where the file `recipe.yaml` was edited to agree."""
    folder, of = begun(recipe)
    path = write_checkpoint(folder, 8, of)
    (folder.path / "new.yaml").write_text(folder.recipe.read_text())
    changed = load_recipe(folder.path / "new.yaml", [f"{key}={value}"])
    folder.create(changed)
    now = RunIdentity.of_run(folder, changed)
    if not said:
        assert now.check(folder, path) == ""
        assert identity.recipe_digest(changed) == identity.recipe_digest(recipe)
        return
    assert identity.recipe_digest(changed) != identity.recipe_digest(recipe)
    with pytest.raises(ForeignCheckpoint) as caught:
        now.check(folder, path)
    assert said in str(caught.value)
    assert len([line for line in str(caught.value).splitlines() if line.startswith("  ")]) == 1


def test_setting_unknown_to_the_checkpoint_s_version_counts_as_default(recipe: Recipe) -> None:
    folder, of = begun(recipe)
    path = write_checkpoint(folder, 8, of)
    content = json.loads((path / manifest.MANIFEST).read_text())
    raw = yaml.safe_load(content["identity"]["recipe"])
    del raw["run"]["async_checkpoints"]
    content["identity"] |= {"recipe": yaml.safe_dump(raw), "recipe_digest": "of another version"}
    (path / manifest.MANIFEST).write_text(json.dumps(content))
    assert of.check(folder, path) == ""


@pytest.mark.parametrize("changed", ["train.parquet", "eval.parquet", "model/config.json"])
def test_checkpoint_is_refused_with_other_files_at_same_paths(recipe: Recipe, changed: str, tmp_path: Path) -> None:
    folder, of = begun(recipe)
    path = write_checkpoint(folder, 8, of)
    before = file_digest(tmp_path / changed)
    (tmp_path / changed).write_text("{ }")
    with pytest.raises(ForeignCheckpoint) as caught:
        RunIdentity.of_run(folder, recipe).check(folder, path)
    assert f"{file_digest(tmp_path / changed)}, the checkpoint was written with {before}" in str(caught.value)


def test_large_file_is_recognized_by_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with open(path, "wb") as file:
        file.truncate(WHOLE + 5 * PART)
    digests = {file_digest(path)}
    for position in (0, WHOLE // 2 + 3, WHOLE + 5 * PART - 1):  # the parts of 1 MiB are at most 3.2 MiB apart
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(b"x" * min(4 * PART, WHOLE + 5 * PART - position))
        digests.add(file_digest(path))
    assert len(digests) == 4


def test_checkpoints_of_an_older_version(recipe: Recipe) -> None:
    """Those that were there before are taken with a warning, later ones must say what they are."""
    folder = RunFolder.for_recipe(recipe)
    path = write_checkpoint(folder, 4, None)
    check_last(folder, recipe)
    _, of = begun(recipe)
    assert "did not note run and step" in of.check(folder, path)
    later = write_checkpoint(folder, 6, None)
    with pytest.raises(ForeignCheckpoint, match=f"does not say which run it is of, expected {of.run.run}"):
        of.check(folder, later)


@pytest.mark.parametrize("value", [None, [], {"run": "a"}, {"run": 1, "folder": "step-000004"}])
def test_identity_that_is_damaged(recipe: Recipe, value: object) -> None:
    folder, of = begun(recipe)
    path = write_checkpoint(folder, 4, of)
    content = json.loads((path / manifest.MANIFEST).read_text())
    (path / manifest.MANIFEST).write_text(json.dumps(content | {"identity": value}))
    with pytest.raises(BrokenCheckpoint, match="as identity, expected run, folder, updates"):
        manifest.check_sizes(path)


def test_derived_folder_is_found_by_the_checkpoint_s_content(recipe: Recipe, tmp_path: Path) -> None:
    folder, of = begun(recipe)
    first = derived_key(folder, 4, recipe) if write_checkpoint(folder, 4, of) else ""
    shutil.rmtree(checkpoint_folder(folder, 4))
    write_checkpoint(folder, 4, of, b"other")
    second = derived_key(folder, 4, recipe)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    third = derived_key(folder, 4, recipe)
    assert len({served_folder(folder, 4, key) for key in (first, second, third)}) == 3
    shutil.rmtree(checkpoint_folder(folder, 4))
    write_checkpoint(folder, 4, of)
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert derived_key(folder, 4, recipe) == first


def test_inputs_are_noted_by_setting(recipe: Recipe) -> None:
    assert sorted(input_digests(recipe)) == ["data.eval", "data.train", "model.path/config.json"]


@pytest.fixture
def resumed(tmp_path: Path) -> Callable[[int], RunFolder]:
    folder = RunFolder(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: run\n")
    for step in (3, 4):
        folder.write_replay(step, {})
    folder.write_timeline({"traceEvents": [], "otherData": {"step": 4}})
    folder.timeline_picture.write_bytes(b"")

    def resume(step: int) -> RunFolder:
        folder.truncate_records(step)
        return folder

    return resume


def test_resume_removes_what_was_derived_from_steps_done_again(resumed: Callable[[int], RunFolder]) -> None:
    folder = resumed(5)
    assert len(list(folder.replays.iterdir())) == 2
    assert folder.timeline.exists()
    folder = resumed(4)
    assert [path.name for path in folder.replays.iterdir()] == ["step-000003.json"]
    assert not folder.timeline.exists()
    assert not folder.timeline_picture.exists()


def test_report_leaves_out_events_of_abandoned_steps(resumed: Callable[[int], RunFolder]) -> None:
    folder = resumed(4)
    changed = {"key": "run.steps", "old": 8, "new": 90}
    for event, fields in (
        ("start", {"step": 0}),
        ("setting_changed", {"step": 2, **changed, "new": 12}),
        ("checkpoint", {"step": 4}),
        ("setting_changed", {"step": 4, **changed}),
        ("batch_skipped", {"step": 6}),
        ("resume", {"step": 4}),
    ):
        folder.add_event(event, **fields)
    run = read_run(folder.path)
    assert [e["event"] for e in run.current_events] == ["start", "setting_changed", "checkpoint", "resume"]
    assert len(run.events) == 6
    assert run.steps == 12
