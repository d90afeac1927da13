"""Recorded steps are done again bit for bit, in other layouts up to rounding, and faults are found where they were."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, demo_folder, hybrid3d, read_rows
from hybrid3d import cli
from hybrid3d.replay.comparison import compare_runs
from hybrid3d.run.folder import RunFolder
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines]

JOB = Path(__file__).parents[1] / "jobs/recorded_steps.py"
STEPS, FAULTS = 3, 20
SETTINGS = [
    f"run.steps={STEPS}",
    "train.tp=2",
    "train.pp=1",
    "train.micro_batch_size=4",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=2",
    "algorithm.minibatches=2",
    "guard.initial_mismatch=ignore",
]
GRPO = ["name=grpo", "run.record=always", "run.checkpoint_every=1"]
PPO = [
    *("name=ppo", "run.record=every-2", "run.checkpoint_every=2", "algorithm.name=ppo"),
    "algorithm.kl={where: reward, estimator: k1, coef: 0.01, target: 0.001, horizon: 100}",
    *("critic.optimizer={lr: 1.0e-3}", "algorithm.epochs=2", "algorithm.correction.kind=truncate"),
    "schedule={1: {algorithm.kl.coef: 0.5}, 2: {optimizer.lr: 1.0e-3}}",
]
SELECTED = [  # tokens of the whole step, whatever the layout
    *("name=selected", "run.record=always", "run.checkpoint_every=1", "algorithm.name=kl_cov"),
    *("algorithm.loss={cov_fraction: 0.2}", "algorithm.high_entropy_fraction=0.5", "algorithm.advantage_scale=whiten"),
    *("algorithm.mask_truncated=true", "rollout.max_new_tokens=6", "reward.whiten=true"),
]


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/grpo`, 20 runs like it, each with one bit flipped once, and `runs/ppo`."""
    work, dice = demo_folder(tmp_path_factory.mktemp("replay"), demo), random.Random(5)
    faults = [{"seed": n, "from": 1, "step": dice.choice([1, 2]), "before": n % 4 == 0} for n in range(FAULTS)]
    common = [*SETTINGS, f"run.dir={work}/runs", f"model.path={work}/build/demo/base"]
    common += [f"data.{split}={work}/build/demo/{split}.parquet" for split in ("train", "eval")]
    recipe = str(ROOT / "recipes/demo-cpu.yaml")
    cases = [{"recipe": recipe, "settings": [*common, *GRPO], "faults": faults}]
    cases += [{"recipe": recipe, "settings": [*common, *of_run], "faults": []} for of_run in (PPO, SELECTED)]
    (work / "spec.json").write_text(json.dumps(cases))
    run_ranks(JOB, 2, [str(work / "spec.json")], timeout=300)
    return work


def replayed(work: Path, run: str, step: int, *layout: str, expect: int = 0) -> dict[str, Any]:
    hybrid3d(work, "replay", f"runs/{run}", "--step", str(step), *layout, expect=expect)
    found: dict[str, Any] = json.loads((work / "runs" / run / f"replay/step-{step:06d}.json").read_text())
    return found


def test_compare_runs_finds_a_flipped_bit_in_20_of_20(work: Path) -> None:
    for number in range(FAULTS):
        folder = work / f"runs/grpo-fault-{number}"
        fault = json.loads((folder / "fault.json").read_text())
        found = compare_runs(RunFolder(work / "runs/grpo"), RunFolder(folder)).difference
        assert found is not None
        assert [found.step, found.rank, found.tensor] == [fault["step"], *fault["done"]]
        assert found.what == ("weights before the step" if fault["before"] else "updated weights")
        assert found.others.startswith("1 of ")


@pytest.mark.parametrize(("run", "start"), [("grpo", 2), ("ppo", 2), ("selected", 2)])
def test_step_is_done_again_bit_for_bit(work: Path, run: str, start: int) -> None:
    found = replayed(work, run, 2)
    assert (found["equal"], found["same_layout"], found["start"]) == (True, True, start)
    row = read_rows(work / "runs" / run)[2]
    values = {key: row[key] for key in row if key.startswith(("train/", "critic/", "mismatch/"))}
    assert found["metrics"] == {key: {"recorded": value, "replayed": value} for key, value in values.items()}
    assert row["train/grad_norm"] > 0


@pytest.mark.parametrize(
    "layout", [pytest.param(["train.tp=1"], marks=pytest.mark.slow), ["train.tp=1", "train.pp=2"]], ids=str
)
def test_replay_in_another_layout_equals_the_run_up_to_rounding(work: Path, layout: list[str]) -> None:
    """Before the step the fingerprints of whole tensors are those of the run: otherwise it is not as recorded."""
    found = replayed(work, "grpo", 2, *layout)
    assert (found["as_recorded"], found["equal"], found["same_layout"]) == (True, False, False)
    assert 0 < found["largest_differences"]["logprobs"] < 1e-4
    norms = found["metrics"]["train/grad_norm"]
    assert norms["replayed"] == pytest.approx(norms["recorded"], rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["train.tp=1"], marks=pytest.mark.slow),
        ["train.tp=1", "train.dp=2", "train.micro_batch_size=2", "train.packed=true"],
    ],
    ids=str,
)
def test_replay_in_another_layout_selects_the_same_tokens(work: Path, layout: list[str]) -> None:
    """With two data-parallel ranks each has all tensors, as two tensor-parallel ranks have, but other parts of them."""
    found = replayed(work, "selected", 2, *layout)
    assert (found["as_recorded"], found["same_layout"]) == (True, False)
    assert found["largest_differences"]["correction"] == 0  # each is 1 or 0
    for name in ("train/grad_norm", "train/cov_fraction"):
        values = found["metrics"][name]
        assert 0 < values["replayed"] == pytest.approx(values["recorded"], rel=1e-4)


def test_replay_finds_what_was_changed_since(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record of a run whose weights are another's is that of a step which is not done again."""
    shutil.copytree(work / "runs/grpo", work / "runs/other")
    fault = json.loads((work / "runs/grpo-fault-1/fault.json").read_text())
    name = f"step-{fault['step']:06d}"
    shutil.rmtree(work / f"runs/other/record/{name}")
    shutil.copytree(work / f"runs/grpo-fault-1/record/{name}", work / f"runs/other/record/{name}")
    found = replayed(work, "other", fault["step"], expect=1)
    first = found["first_difference"]
    assert [first["what"], first["rank"], first["tensor"]] == ["updated weights", *fault["done"]]
    assert cli.main(["replay", str(work / "runs/grpo"), "--against", str(work / "runs/other"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_difference"]["tensor"] == fault["done"][1]
    assert cli.main(["replay", str(work / "runs/grpo"), "--against", str(work / "runs/grpo")]) == 0
    assert "are equal bit for bit" in capsys.readouterr().out
