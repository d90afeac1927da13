"""Records of steps: what is written is read, damage is found, and the first difference is the first cause."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hybrid3d import cli
from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.config.schema import is_due
from hybrid3d.generation.engine import NO_CHOICES, ExpertChoices
from hybrid3d.generation.samples import Sample
from hybrid3d.replay.comparison import compare_runs, first_difference
from hybrid3d.replay.plan import NotRecorded, find_start, training_recipe
from hybrid3d.replay.step_record import (
    BrokenRecord,
    StepRecord,
    WeightRecord,
    metrics_of_training,
    read_step,
    write_step,
)
from hybrid3d.run.folder import RunFolder, recorded_folder, recorded_steps
from hybrid3d.storage.manifest import BrokenCheckpoint
from run_ranks import ROOT

RECIPE = load_recipe(ROOT / "recipes/demo-cpu.yaml", ["run.record=always"])
THIRD = 1 / 3  # which float32 does not hold


def sample(*tokens: int, reward: float = THIRD) -> Sample:
    mask = (True, *[False] * (len(tokens) > 1), *[True] * (len(tokens) - 2))
    logprobs = tuple(-THIRD * token for token, own in zip(tokens, mask, strict=True) if own)
    return Sample("", (1, 2, len(tokens)), tokens, mask, logprobs, "", reward, tuple(range(len(tokens))))


def weights(**changes: Any) -> WeightRecord:
    """Of two ranks: both have `a`, and each has boxes of `b`."""
    return replace(
        WeightRecord(
            tensors=("a", "b"),
            rank=np.array([0, 0, 1, 1], np.int32),
            tensor=np.array([0, 1, 0, 1], np.int32),
            before=np.array([1, 2, 1, 3], np.uint64),
            after=np.array([4, 5, 4, 2**64 - 1], np.uint64),
            whole_before=np.array([1, 5], np.uint64),
            whole_after=np.array([4, 4], np.uint64),
        ),
        **changes,
    )


@pytest.fixture
def record() -> StepRecord:
    return StepRecord(
        step=3,
        settings=RECIPE,
        progress={"kl": {"coef": 0.1, "target": None}, "guard": {"norms": {}, "interventions": 0}},
        environment={"torch": "2", "threads": 1},
        samples=[sample(5, 6, 7), sample(8), sample(9, 10, reward=-1.0)],
        rewards=np.array([THIRD, THIRD, -1.0]),
        computed_by=np.array([0, 1, 0], np.int32),
        token_values={key: np.arange(4, dtype=np.float32) for key in ("logprobs", "advantages")},
        metrics={"train/grad_norm": THIRD, "train/loss": None},
        weights={"policy": weights()},
    )


def test_experts_of_the_rollout_are_recorded(record: StepRecord, tmp_path: Path) -> None:
    """Also where some samples have none, and with more experts than a byte can tell apart."""
    for dtype in (np.uint8, np.uint16):
        chosen = [ExpertChoices.of(np.arange(6 * n, dtype=dtype).reshape(n, 3, 2)) for n in (4, 0, 2)]
        samples = [replace(s, experts=e) for s, e in zip(record.samples, chosen, strict=True)]
        samples[1] = replace(samples[1], experts=NO_CHOICES)
        write_step(tmp_path / "one", replace(record, samples=samples))
        read = read_step(tmp_path / "one")
        assert read.samples == samples
        assert read.samples[0].experts.dtype == dtype.__name__
        samples[2] = replace(samples[2], experts=ExpertChoices.of(chosen[2].array[::-1]))
        difference = first_difference(read, replace(record, samples=samples))
        assert "the experts of the rollout of sample 2 at position 0: [[0, 1]" in str(difference)
    arrays = load_file(tmp_path / "one/samples.safetensors")
    assert arrays["experts"].shape == (6, 3, 2)
    assert arrays["expert_lengths"].tolist() == [4, 0, 2]


def test_step_record_is_read_bit_for_bit_as_written(record: StepRecord, tmp_path: Path) -> None:
    folder = tmp_path / "record/step-000003"
    write_step(folder, record)
    read = read_step(folder)
    assert read.samples == record.samples
    assert (read.settings, read.metrics, read.progress) == (record.settings, record.metrics, record.progress)
    assert first_difference(record, read) is None
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-000003"]
    assert not [path for path in folder.iterdir() if path.suffix not in (".json", ".yaml", ".safetensors")]


def test_damage_is_found(record: StepRecord, tmp_path: Path) -> None:
    folder = tmp_path / "step-000003"
    write_step(folder, record)
    path = folder / "samples.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BrokenCheckpoint, match=r"samples\.safetensors has CRC-32"):
        read_step(folder)


def test_step_record_of_another_format_is_refused(
    record: StepRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid3d.replay.step_record.FORMAT", 2)
    write_step(tmp_path / "step-000003", record)
    monkeypatch.undo()
    with pytest.raises(BrokenRecord, match="is of format 2, and this version reads format 1"):
        read_step(tmp_path / "step-000003")


Change = Callable[[StepRecord], StepRecord]


def of_sample(number: int, **changes: Any) -> Change:
    def change(record: StepRecord) -> StepRecord:
        samples = [replace(s, **changes) if i == number else s for i, s in enumerate(record.samples)]
        return replace(record, samples=samples)

    return change


def of_setting(setting: str) -> Change:
    return lambda record: replace(record, settings=load_recipe(ROOT / "recipes/demo-cpu.yaml", [setting]))


def of_tokens(name: str) -> Change:
    values = np.array([0, 1, np.nextafter(np.float32(2), np.float32(3)), 3], np.float32)
    return lambda record: replace(record, token_values={**record.token_values, name: values})


def of_weights(**changes: Any) -> Change:
    return lambda record: replace(record, weights={"policy": replace(record.weights["policy"], **changes)})


def of_metric(name: str) -> Change:
    return lambda record: replace(record, metrics={**record.metrics, name: math.pi})


CAUSES: list[tuple[Change, str, str, int | None]] = [  # in the order of cause and effect
    (of_setting("optimizer.lr=0.5"), "settings", "optimizer.lr", None),
    (of_weights(before=np.array([1, 2, 1, 4], np.uint64)), "weights before the step", "of b of the policy", 1),
    (lambda record: replace(record, progress={}), "progress", "the KL coefficient", None),
    (of_sample(2, prompt_ids=(1, 2, 3)), "samples", "the tokens of the prompt of sample 2 at position 2", None),
    (of_sample(0, tokens=(5, 6, 8)), "samples", "the tokens of the answer of sample 0 at position 2", None),
    (of_sample(0, versions=(0, 1)), "samples", "the weight versions of sample 0", None),
    (of_sample(1, logprobs=(-8.0,)), "samples", "the log-probabilities of the rollout of sample 1", None),
    (of_sample(1, truncated=True), "samples", "the mark of a cut answer of sample 1", None),
    (of_sample(2, branch=1), "samples", "the number of the branch of sample 2", None),
    (of_sample(1, last=False), "samples", "the mark of the last branch of sample 1", None),
    (of_sample(1, scored=True), "samples", "the mark of a known reward of sample 1", None),
    (of_sample(0, baseline_tokens=7), "samples", "the length of the greedy answer of sample 0", None),
    (of_sample(1, reward=0.5), "rewards", "sample 1", None),
    (lambda record: replace(record, rewards=np.zeros(3)), "rewards", "sample 0", None),
    (of_tokens("logprobs"), "log-probabilities of the policy", "sample 1, its token 0", 1),
    (of_tokens("advantages"), "advantages", "sample 1, its token 0", 1),
    (of_metric("train/grad_norm"), "train/grad_norm", "the metric", None),
    (of_weights(after=np.array([4, 6, 7, 5], np.uint64)), "updated weights", "of b of the policy", 0),
    (of_metric("train/loss"), "train/loss", "the metric", None),
]


@pytest.mark.parametrize("number", range(len(CAUSES)))
def test_difference_of_records_names_the_first_cause(record: StepRecord, number: int) -> None:
    changed, (_, what, where, rank) = record, CAUSES[number]
    for change, *_ in CAUSES[number:]:  # with all of its effects
        changed = change(changed)
    found = first_difference(record, changed)
    assert found is not None
    assert (found.step, found.what, found.rank) == (3, what, rank)
    assert where in found.where
    assert found.tensor == ("policy/b" if "weights" in what else None)


@pytest.mark.parametrize(
    ("given", "cause", "values"),
    [
        (("lora.alpha=4", "lora.alpha=8"), "lora.alpha", ("4.0", "8.0")),
        (("lora.rank=2", "lora.rank=4"), "lora.rank", ("2", "4")),
        (("lora.target_modules=[q_proj]", "lora.target_modules=[k_proj]"), "lora.target_modules", ("q_proj", "k_proj")),
        (("guard.spike=2", "guard.spike=3"), "guard.spike", ("2.0", "3.0")),
        (("guard.kl_explosion=2", "guard.kl_explosion=3"), "guard.kl_explosion", ("2.0", "3.0")),
    ],
)
def test_setting_that_changes_an_update_is_the_cause(
    record: StepRecord, given: tuple[str, str], cause: str, values: tuple[str, str]
) -> None:
    adaptive = ["algorithm.kl.where=reward", "algorithm.kl.coef=0.1", "algorithm.kl.target=0.1"]
    recipes = [load_recipe(ROOT / "recipes/demo-cpu.yaml", [*adaptive, setting]) for setting in given]
    one, other = (replace(record, settings=recipe) for recipe in recipes)
    found = first_difference(one, of_metric("train/grad_norm")(other))
    assert found is not None
    assert (found.what, found.where, found.others) == ("settings", cause, "")
    assert all(value in text for value, text in zip(values, found.values, strict=True))


def test_layouts_are_compared_by_whole_tensors(record: StepRecord) -> None:
    one_rank = {"rank": np.zeros(2, np.int32), "tensor": np.arange(2, dtype=np.int32)}
    ends = {"before": np.array([1, 5], np.uint64), "after": np.array([4, 4], np.uint64)}
    assert first_difference(record, of_weights(**one_rank, **ends)(record)) is None
    changed = of_weights(**one_rank, **ends, whole_after=np.array([4, 3], np.uint64))(record)
    found = first_difference(record, changed)
    assert found is not None
    assert (found.what, found.rank, found.tensor) == ("updated weights", None, "policy/b")


def test_settings_that_are_no_cause_are_notes(record: StepRecord, tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / name) for name in ("one", "two")]
    settings = load_recipe(ROOT / "recipes/demo-cpu.yaml", ["sync.bucket_mib=1", "name=other"])
    write_step(recorded_folder(folders[0], 3), record)
    write_step(recorded_folder(folders[1], 3), replace(record, settings=settings, environment={"threads": 2}))
    write_step(recorded_folder(folders[1], 4), replace(record, step=4))
    found = compare_runs(*folders)
    assert (found.difference, found.steps) == (None, [3])
    assert "sync.bucket_mib is 64.0 and 1.0" in found.notes
    assert "environment: threads is 1 and 2" in found.notes
    assert found.notes[-1].endswith("has recorded: 1, the first is 4")
    with pytest.raises(NotRecorded, match="no step that both runs have recorded"):
        compare_runs(folders[0], RunFolder(tmp_path / "three"))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run with checkpoints after 2 and 4 updates, and steps 0, 1, 2, 4 and 6 recorded."""
    folder = RunFolder(tmp_path / "run")
    folder.create(RECIPE)
    for updates in (2, 4):
        (folder.checkpoints / f"step-{updates:06d}").mkdir(parents=True)
    for step in (0, 1, 2, 4, 6):
        recorded_folder(folder, step).mkdir(parents=True)
    (folder.step_records / "step-000007.partial").mkdir()
    return folder


def test_replay_begins_at_the_nearest_checkpoint(folder: RunFolder) -> None:
    assert [find_start(folder, step) for step in (0, 1, 2, 4)] == [0, 0, 2, 4]


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (
            6,
            "a replay begins with the checkpoint after 4 updates and needs every step from 4 on, but step 5 is",
        ),
        (5, "step 5 cannot be replayed: step 5 is not recorded. Recorded steps: 0, 1, 2, 4, 6; checkpoints after 2, 4"),
        (-1, "step -1 is not recorded"),
        (10**12, "step 1000000000000 is not recorded"),
    ],
)
def test_find_start_says_what_is_missing(
    folder: RunFolder, step: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotRecorded) as caught:
        find_start(folder, step)
    assert problem in str(caught.value)
    assert "run.record=always" in str(caught.value)
    assert cli.main(["replay", str(folder.path), "--step", str(step)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_resumed_run_records_again(folder: RunFolder) -> None:
    folder.truncate_records(2)
    assert recorded_steps(folder) == [0, 1]
    assert sorted(path.name for path in folder.step_records.iterdir()) == ["step-000000", "step-000001"]


def test_training_recipe_lets_only_the_layout_differ() -> None:
    assert training_recipe(RECIPE, ["train.tp=1", "train.dp=2"]).train_ranks == 4
    with pytest.raises(RecipeError, match=r"optimizer\.lr=1: only settings of train can differ in a replay"):
        training_recipe(RECIPE, ["train.tp=1", "optimizer.lr=1"])
    with pytest.raises(RecipeError, match=r"train\.ttp: unknown key"):
        training_recipe(RECIPE, ["train.ttp=1"])


def test_replay_has_no_ranks_that_generate() -> None:
    settings = ["roles.generation.ranks=4", "async.max_staleness=1", "algorithm.correction.kind=mask"]
    settings += ["rollout.temperature=0.5", "roles.generation.max_restarts=3"]
    recipe = training_recipe(load_recipe(ROOT / "recipes/demo-cpu.yaml", settings), ["train.pp=1"])
    assert recipe.rollout is not None
    assert (recipe.world_size, recipe.rollout.temperature, recipe.rollout.max_new_tokens) == (2, 0.5, 8)


def test_interval() -> None:
    due = {interval: [n for n in range(7) if is_due(interval, n)] for interval in ("never", "always", "every-3")}
    assert due == {"never": [], "always": [*range(7)], "every-3": [0, 3, 6]}


def test_metrics_of_training() -> None:
    row = {"train/loss": math.nan, "critic/lr": 1.0, "time/train": 2.0, "reward/mean": 3.0, "sync/seconds": 4.0}
    assert json.dumps(metrics_of_training(row)) == '{"critic/lr": 1.0, "train/loss": null}'


@pytest.mark.engines
@pytest.mark.parametrize(
    ("was", "now", "bound"), [("none", "none", 0.15), ("none", "mxfp8", 0.6), ("mxfp8", "none", 0.6)]
)
def test_bound_is_of_the_least_precise_training(was: str, now: str, bound: float, record: StepRecord) -> None:
    """The rollout's quantization is not in it: a replay has no rollout."""
    from hybrid3d.trainer.replay import _report

    model, rollout = replace(RECIPE.model, dtype="bfloat16"), replace(RECIPE.rollout, quantization="fp8")
    recipes = [
        replace(RECIPE, model=model, rollout=rollout, train=replace(RECIPE.train, fp8=fp8)) for fp8 in (was, now)
    ]
    recorded, replayed = (replace(record, settings=recipe) for recipe in recipes)
    assert _report(0, recorded, replayed, False, False, None).bound == bound
