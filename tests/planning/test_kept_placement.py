"""A placement is computed once, while ranks start, and kept in the run's folder; what is wrong there is never used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.planning import agreed_placement
from hybrid3d.planning.agreed_placement import (
    computing_placement,
    find_placement,
    keep_placement,
    placement_file,
    read_placement,
)

SLOTS = [0, 2, 1, 3]
RECIPE = ["recipes/demo-cpu.yaml", ["model.path=recipes/models/qwen3-8b", "train.tp=4", "train.pp=1", "rollout.tp=4"]]


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(*RECIPE)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that engines are asked about, in place of asking them."""
    asked: list[Recipe] = []

    def run(module: str, recipe: Recipe) -> str:
        asked.append(recipe)
        return json.dumps(SLOTS)

    monkeypatch.setattr(agreed_placement, "run_in_subprocess", run)
    return asked


def test_placement_is_computed_once(recipe: Recipe, computed: list[Recipe], tmp_path: Path) -> None:
    assert [find_placement(recipe, tmp_path / "new") for _ in range(3)] == [SLOTS] * 3
    assert len(computed) == 1
    longer = replace(recipe, run=replace(recipe.run, steps=7))  # a run that goes on
    assert find_placement(longer, tmp_path / "new") == SLOTS
    assert len(computed) == 1


@pytest.mark.parametrize("change", ["train.tp=2", "rollout.tp=2", "machine.gpus_per_node=2", "model.dtype=bfloat16"])
def test_placement_of_another_layout_is_computed_anew(
    change: str, recipe: Recipe, computed: list[Recipe], tmp_path: Path
) -> None:
    find_placement(recipe, tmp_path)
    other = load_recipe(RECIPE[0], [*RECIPE[1], change])
    find_placement(other, tmp_path)
    assert len(computed) == 2


def test_placement_file_differs_for_another_config_version_or_code(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = placement_file(tmp_path, recipe)
    assert placement_file(tmp_path, recipe) == before
    config = json.loads(Path("recipes/models/qwen3-8b/config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}), encoding="utf-8")
    found = {before, placement_file(tmp_path, replace(recipe, model=replace(recipe.model, path=str(tmp_path))))}
    monkeypatch.setattr(agreed_placement, "installed_version", lambda package: "0")
    found.add(placement_file(tmp_path, recipe))
    monkeypatch.setattr(agreed_placement, "_code_digest", lambda: "other")
    assert len({*found, placement_file(tmp_path, recipe)}) == 4


@pytest.mark.parametrize(
    "content",
    [
        *("", "[0, 2, 1", "null", "{}", '"0213"', "[0, 1, 2]", "[0, 1, 2, 2]", "[0, 1, 2, 4]", "[0.0, 1, 2, 3]"),
        *("[true, false, 2, 3]", "[-1, 0, 1, 2]", "[" * 100_000, "[0, 1, 2, 3, 4]", "\udcff"),
    ],
)
def test_kept_placement_that_is_no_permutation_is_computed_again(
    content: str, recipe: Recipe, computed: list[Recipe], tmp_path: Path
) -> None:
    file = placement_file(tmp_path, recipe)
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert find_placement(recipe, tmp_path) == SLOTS
    assert len(computed) == 1
    assert read_placement(file, 4) == SLOTS


def test_folder_that_cannot_be_written_keeps_nothing(recipe: Recipe, computed: list[Recipe], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert find_placement(recipe, tmp_path / "file") == SLOTS
    keep_placement(tmp_path / "file" / "placement.json", SLOTS)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [0, 1])
def test_ranks_wait_for_what_the_launcher_computes(
    code: int, recipe: Recipe, computed: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 asks while the process runs; where that fails, it asks the engines itself."""

    def start(module: str, recipe: Recipe, folder: Path, *output: int) -> tuple[subprocess.Popen[str], Path]:
        answer = folder / "answer.json"
        script = (
            f"import time; time.sleep(0.5); open({str(answer)!r}, 'w').write('[3, 2, 1, 0]'); raise SystemExit({code})"
        )
        return subprocess.Popen([sys.executable, "-c", script], text=True), answer

    monkeypatch.setattr(agreed_placement, "start_subprocess", start)
    with computing_placement(recipe, tmp_path):
        assert not computed
        assert find_placement(recipe, tmp_path) == ([3, 2, 1, 0] if code == 0 else SLOTS)
    assert len(computed) == code
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".placement-")]


def test_placement_is_not_computed_where_ranks_keep_their_order(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreed_placement, "start_subprocess", None)
    for change in (["debug.placement=consecutive"], ["rollout.tp=1"]):
        with computing_placement(load_recipe(RECIPE[0], [*RECIPE[1], *change]), tmp_path):
            pass
    assert os.listdir(tmp_path) == []
