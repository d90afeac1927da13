"""Damaged checkpoints: whichever file is flipped, cut, lost or replaced, every reader names it before it reads on."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from commands import ROOT, hybrid3d, read_events
from hybrid3d.storage import manifest
from hybrid3d.storage.manifest import BrokenCheckpoint
from run_ranks import run_ranks

CONTENT = {name: name.encode() * 9 for name in (*manifest.REQUIRED, "__0_0.distcp", "__1_0.distcp")}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    manifest.write(folder, {name: manifest.fsync_and_crc(folder / name) for name in CONTENT})
    manifest.check_sizes(folder)
    manifest.check(folder)
    return folder


def problem_of(folder: Path, check: Callable[[Path], None] = manifest.check_sizes) -> str:
    with pytest.raises(BrokenCheckpoint) as caught:
        check(folder)
    told = str(caught.value)
    assert str(folder) in told
    assert len(told) < 500
    assert told.isprintable()
    return told


def check_all(folder: Path) -> None:
    manifest.check_sizes(folder)
    manifest.check(folder)


def test_manifest_with_any_flipped_bit_is_refused(saved: Path) -> None:
    path = saved / manifest.MANIFEST
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(BrokenCheckpoint):
            check_all(saved)


@pytest.mark.parametrize("name", CONTENT)
def test_damaged_file_is_named(saved: Path, name: str) -> None:
    path, content = saved / name, CONTENT[name]
    for bit in (0, 4 * len(content), 8 * len(content) - 1):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert re.search(rf": {re.escape(name)} has CRC-32 \w{{8}}, written was", problem_of(saved, manifest.check))
    path.write_bytes(content[:-1])
    assert f": {name} has {len(content) - 1} bytes, {len(content)} were written" in problem_of(saved)
    path.write_bytes(b"")
    assert f": {name} has 0 bytes" in problem_of(saved)
    path.unlink()
    assert f": {name} is missing" in problem_of(saved)
    path.mkdir()
    assert f": {name} is a folder, and a file of {len(content)} bytes was written" in problem_of(saved)
    path.rmdir()
    os.mkfifo(path)  # which nobody writes: opening it would wait
    for check in (manifest.check_sizes, manifest.check):
        assert f": {name} is a pipe" in problem_of(saved, check)
    path.unlink()
    (saved.parent / "outside").write_bytes(content)
    path.symlink_to(saved.parent / "outside")
    for check in (manifest.check_sizes, manifest.check):
        assert f": {name} is a symbolic link to " in problem_of(saved, check)


def relist(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's list of files."""
    path = folder / manifest.MANIFEST
    read = json.loads(path.read_text())
    change(read["files"])
    path.write_text(json.dumps(read))


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/hostname", "..", ".", "", "a/../../outside", "./common.pt", "a//b", "a/", "a\nb", "\x1b[31m",
     manifest.MANIFEST],
)  # fmt: skip
def test_names_that_lead_elsewhere(saved: Path, name: str) -> None:
    (saved.parent / "outside").write_bytes(b"outside")
    relist(
        saved,
        lambda files: files.update({name: {"bytes": 7, "crc32": manifest.fsync_and_crc(saved.parent / "outside")}}),
    )
    for check in (manifest.check_sizes, manifest.check):
        assert "which is not the name of a file in the folder" in problem_of(saved, check)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "x/" * 3000 + "x"])
def test_names_that_no_file_has(saved: Path, name: str) -> None:
    relist(saved, lambda files: files.update({name: {"bytes": 7, "crc32": 1}}))
    with pytest.raises(BrokenCheckpoint, match=str(saved)):
        manifest.check_sizes(saved)


def test_folder_of_the_list_that_is_a_link(saved: Path) -> None:
    outside = saved.parent / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"7")
    (saved / "deep").symlink_to(outside)
    relist(saved, lambda files: files.update({"deep/a": {"bytes": 1, "crc32": manifest.fsync_and_crc(outside / "a")}}))
    assert ": deep/a is a symbolic link to " in problem_of(saved)


@pytest.mark.parametrize(
    "entry",
    [None, 5, [], {}, {"bytes": 9}, {"bytes": "9", "crc32": 1}, {"bytes": -1, "crc32": 1}, {"bytes": 9.0, "crc32": 1},
     {"bytes": True, "crc32": 1}, {"bytes": 9, "crc32": 2**32}, {"bytes": 9, "crc32": -1}, {"bytes": 9, "crc32": "1"}],
)  # fmt: skip
def test_sizes_and_sums_of_wrong_types(saved: Path, entry: Any) -> None:
    relist(saved, lambda files: files.update({"common.pt": entry}))
    told = problem_of(saved)
    assert "manifest.json has " in told
    assert "for 'common.pt', expected" in told


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b"null", b'{"files": []}', b'{"files": null}', b'{"file": {}}', b"\xff\xfe", b"[" * 10**5,
     b'{"files": {"a": {"bytes": 1' + b"0" * 5000 + b', "crc32": 1}}}', b'{"files": {"a": {"bytes": 1e999}}}',
     b'{"files": {"a": 1, "a": 2}}', b" " * (64 * 2**20 + 1)],
    ids=range(14),
)  # fmt: skip
def test_lists_that_are_none(saved: Path, content: bytes) -> None:
    (saved / manifest.MANIFEST).write_bytes(content)
    for check in (manifest.check_sizes, manifest.check):
        assert "has no list of its files that can be read" in problem_of(saved, check)


def test_list_that_is_no_file(saved: Path) -> None:
    path = saved / manifest.MANIFEST
    path.rename(saved.parent / "outside")
    assert "No such file" in problem_of(saved)
    path.symlink_to(saved.parent / "outside")
    assert "is a symbolic link" in problem_of(saved)
    path.unlink()
    path.mkdir()
    assert "a directory" in problem_of(saved)
    path.rmdir()
    os.mkfifo(path)
    assert "a named pipe" in problem_of(saved)
    shutil.rmtree(saved)
    saved.write_text("no folder")
    assert "Not a directory" in problem_of(saved)


@pytest.mark.parametrize("name", manifest.REQUIRED)
def test_manifest_must_list_what_every_checkpoint_has(saved: Path, name: str) -> None:
    """Otherwise Megatron would unpickle a file that nobody has checked."""
    relist(saved, lambda files: files.pop(name))
    assert f"manifest.json does not list {name}" in problem_of(saved)


@pytest.mark.parametrize("name", ["__9_0.distcp", "extra.pt", "deep/shard_0_1.pt"])
def test_files_that_the_list_lacks(saved: Path, name: str) -> None:
    (saved / name).parent.mkdir(exist_ok=True)
    (saved / name).write_bytes(b"")
    assert f"manifest.json does not list '{name}'" in problem_of(saved)
    (saved / name).rename(saved / ".nfs0001")  # what file systems leave is nobody's
    manifest.check_sizes(saved)


# ---- a real checkpoint, and ranks


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `damaged`, its checkpoint of step 1, and what every reader said of damaged copies."""
    work = tmp_path_factory.mktemp("damage")
    recipe = yaml.safe_load((ROOT / "recipes/demo-cpu.yaml").read_text())
    recipe["name"] = "damaged"
    recipe["model"]["path"] = str(demo / "base")
    recipe["data"] |= {"train": str(demo / "train.parquet"), "eval": str(demo / "eval.parquet")}
    recipe["train"] |= {"tp": 2, "pp": 1}
    recipe["rollout"]["tp"] = 2
    (work / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_ranks(Path(__file__).parents[1] / "jobs/damage.py", 2, [str(work / "recipe.yaml"), str(work)], timeout=300)
    return work


def told_by(work: Path, rank: int) -> dict[str, Any]:
    return json.loads((work / f"rank-{rank}.json").read_text())


@pytest.mark.engines
@pytest.mark.timeout(400)
def test_readers_each_name_every_damage_and_read_no_further(work: Path) -> None:
    by_rank = [told_by(work, rank)["damaged"] for rank in range(2)]
    assert by_rank[0] == by_rank[1]
    files = set(manifest.list_files(work / "damaged/checkpoints/step-000001")) | {manifest.MANIFEST}
    assert files > {*manifest.REQUIRED, "__0_0.distcp", "__1_0.distcp"}
    assert {(case["file"], case["how"]) for case in by_rank[0]} == {
        (file, how) for file in files for how in {case["how"] for case in by_rank[0]}
    }
    assert len(by_rank[0]) == 8 * len(files)
    resumed = []
    for case in by_rank[0]:
        assert case["unchanged"], case
        # a link shows no damage: its owner can mend it, so that resuming must not set the checkpoint aside
        raised = "UnusableCheckpoint" if case["how"] == "a link" else "BrokenCheckpoint"
        for reader in ("load", "load_weights"):
            assert (case[reader]["raised"], case[reader]["raised_on_all_ranks"]) == (raised, True), case
            assert "step-000002" in case[reader]["said"]
            # a flipped bit of the list may be one of a file's name or sum: then that file is not as it says
            if not (case["file"] == manifest.MANIFEST and case["how"].startswith("flipped")):
                assert case["file"] in case[reader]["said"]
        if "resume" in case:
            assert case["resume"]["step"] == 1
            resumed.append(case["load"]["said"])
    events = read_events(work / "damaged")
    assert [event["why"] for event in events if event["event"] == "checkpoint_broken"] == resumed
    assert len(resumed) == 2 * len(files)


@pytest.mark.engines
def test_checkpoint_that_is_as_listed_and_cannot_be_loaded(work: Path) -> None:
    """PyTorch's error of it is no `Exception`, and names no file."""
    for rank in range(2):
        told = told_by(work, rank)["unloadable"]
        assert told["raised"] == "CheckpointUnloadable"
        assert "checkpoints/step-000002 cannot be loaded: " in told["said"]
        assert "Traceback" not in told["said"]


@pytest.fixture
def flipped(work: Path) -> Path:
    """A run whose only checkpoint has a flipped bit in a file of weights: sizes tell nothing."""
    run = work / "flipped"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(work / "damaged", run, ignore=shutil.ignore_patterns("*.broken", "logs"))
    path = run / "checkpoints/step-000001/__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return run


SAID = r"\w*stopped: flipped/checkpoints/step-000001: __1_0\.distcp has CRC-32 \w{8}, written was \w{8}\n*"


@pytest.mark.engines
def test_export_of_flipped_bits(work: Path, flipped: Path) -> None:
    assert re.fullmatch(SAID, hybrid3d(work, "export", "flipped", "out", expect=1))
    assert not list(work.glob("out*"))


@pytest.mark.engines
@pytest.mark.slow
def test_eval_of_flipped_bits(work: Path, flipped: Path) -> None:
    """Before vLLM starts."""
    assert re.fullmatch(SAID, hybrid3d(work, "eval", "flipped", expect=1))


@pytest.mark.engines
@pytest.mark.slow  # what it adds to tests/whole_runs/test_train.py is that there is no checkpoint left
def test_train_from_flipped_bits(work: Path, flipped: Path) -> None:
    arguments = ["recipe.yaml", "name=flipped", "run.dir=."]
    (flipped / "recipe.yaml").unlink()
    said = hybrid3d(work, "train", *arguments, expect=1)
    assert "__1_0.distcp has CRC-32 " in said
    assert "renamed to step-000001.broken; there is no earlier checkpoint" in said
    assert "stopped: none of the 1 checkpoints in flipped/checkpoints is intact" in said
