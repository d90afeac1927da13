"""Tests settings that change during a run, refused changes, their state after a resume, and out-of-memory recovery."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from hybrid3d.config import OFFLOADS, Optimizer, Recipe, RecipeError, load_recipe, recipe_to_yaml
from hybrid3d.launch.rank import _is_lost_peer
from hybrid3d.rl.kl import KlController
from hybrid3d.run import live_settings
from hybrid3d.run.ends import Ended, find_root_cause
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.health import Guard
from hybrid3d.run.live_settings import MUTABLE_SETTINGS, LiveSettings, apply_settings, check_schedule, settings_of
from hybrid3d.run.oom_recovery import OomRecovery, OutOfMemoryRestart, find_out_of_memory, reduced_settings
from run_ranks import ROOT

DEMO = ROOT / "recipes" / "demo-cpu.yaml"


@pytest.fixture
def recipe(tiny_checkpoint: Callable[..., Path]) -> Recipe:
    return load_recipe(DEMO, [f"model.path={tiny_checkpoint('qwen2')}"])


class Said:
    """A fake `RunLogger` that stores events."""

    def __init__(self, folder: Path):
        self.folder = RunFolder(folder)
        self.events: list[dict[str, Any]] = []

    def event(self, event: str, said: str = "", **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def take(self) -> list[dict[str, Any]]:
        taken, self.events = self.events, []
        return taken


Begin = Callable[..., tuple[LiveSettings, Said]]


@pytest.fixture
def begin(alone: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    monkeypatch.setattr(live_settings, "STABLE_SECONDS", 0)

    def made(recipe: Recipe, **held: Any) -> tuple[LiveSettings, Said]:
        said, settings = Said(tmp_path), {f"train.{key}": value for key, value in held.items()}
        return LiveSettings(recipe, said, settings, alone), said  # type: ignore[arg-type]

    return made


# ---- which settings may change


def test_table_names_settings_that_there_are(recipe: Recipe) -> None:
    both = replace(recipe, critic=replace(recipe.critic, optimizer=recipe.optimizer))
    known = settings_of(both)
    for pattern in MUTABLE_SETTINGS:
        section = pattern.removesuffix("*")
        assert pattern in known or (pattern != section and any(key.startswith(section) for key in known)), pattern


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train.tp": 4}, "train.tp: cannot change during a run; these can: algorithm.clip, "),
        ({"model": None}, "model: cannot change during a run"),
        ({"critic.optimizer.lr": 1e-5}, "critic.optimizer.lr: the recipe has no section critic.optimizer"),
        ({"rollout.temperature": 0.009}, "rollout.temperature: expected a number, 0.01 to 100, because vLLM ra"),
        ({"optimizer.lr": -1}, "optimizer.lr: expected a number, 0 to 100, got -1"),
        ({"optimizer.lr": {}}, "optimizer.lr: expected a number"),
        ({"guard.max": 1}, "guard.max: unknown key"),
        ({"algorithm.kl.coef": 0, "algorithm.kl.target": 1}, "algorithm.kl.target=1.0 is approached by multiplying"),
        (
            {"algorithm.correction.kind": "mask", "algorithm.correction.low": 3},
            "algorithm.correction.low=3.0 is not below algorithm.correction.high=2.0",
        ),
        ({"run.steps": 7}, "run.steps=7: the next step is 7: at least 8"),
        ({"train.max_tokens_per_micro_batch": 500}, "train.max_tokens_per_micro_batch=500: it was None, and can only"),
        ({"train.micro_batch_size": 100}, "algorithm.prompts_per_step=32 of 8 samples each is 256 sequences"),
    ],
)
def test_refused(recipe: Recipe, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        apply_settings(recipe, settings, step=7)
    assert [line[: len(problem)] for line in caught.value.problems] == [problem]


def test_rows_that_were_checked_fit_later_budgets(demo: Path) -> None:
    """No answer has a bound: a budget below that of the start may have no room for the data's longest row."""
    more = [
        "algorithm.kl={where: none, coef: 0}",
        f"model.path={demo / 'base'}",
        "train.max_tokens_per_micro_batch=500",
    ]
    recipe = load_recipe(DEMO, [*SFT, *more])
    with pytest.raises(
        RecipeError, match="=499: the data's rows may have as many tokens as now, 500: at least as many"
    ):
        apply_settings(recipe, {"train.max_tokens_per_micro_batch": 499}, step=2)
    assert apply_settings(recipe, {"train.max_tokens_per_micro_batch": 501}, step=2).train.max_tokens_per_micro_batch


def test_changed_is_the_recipe_with_these_settings_and_no_others(recipe: Recipe) -> None:
    new = apply_settings(
        recipe, {"optimizer.lr": "1e-6", "run.steps": 8, "rollout.temperature": 2, "guard.spike": 5}, step=7
    )
    assert recipe.rollout is not None
    assert new == replace(
        recipe,
        optimizer=replace(recipe.optimizer, lr=1e-6),
        run=replace(recipe.run, steps=8),
        rollout=replace(recipe.rollout, temperature=2.0),
        guard=replace(recipe.guard, spike=5.0),
    )


# ---- by schedule


def scheduled(recipe: Recipe, schedule: dict[int, dict[str, Any]]) -> Recipe:
    return replace(recipe, schedule=schedule)


def test_temperature_stays_where_samples_of_later_steps_are_generated_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_settings, "check_model", lambda recipe: None)
    split = ["roles.generation.ranks=2", "algorithm.correction.kind=truncate"]
    ahead, together = (load_recipe(DEMO, [*split, f"async.max_staleness={bound}"]) for bound in (2, 0))
    assert apply_settings(together, {"rollout.temperature": 0.5}, step=1).rollout.temperature == 0.5  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match=r"rollout.temperature=0.5: with async.max_staleness=2 samples of later"):
        apply_settings(ahead, {"rollout.temperature": 0.5}, step=1)
    with pytest.raises(RecipeError, match=r"rollout.top_k=5: with async.max_staleness=2 samples of later"):
        apply_settings(ahead, {"rollout.top_k": 5}, step=1)


def test_evaluation_sampling_may_change_during_a_run(recipe: Recipe) -> None:
    new = apply_settings(recipe, {"evaluation.samples": 8, "evaluation.temperature": 1, "evaluation.k": [1, 8]}, step=1)
    assert (new.evaluation.samples, new.evaluation.temperature, new.evaluation.k) == (8, 1.0, (1, 8))
    with pytest.raises(RecipeError, match=r"evaluation.samples=8: with evaluation.temperature=0 all answers"):
        apply_settings(recipe, {"evaluation.samples": 8}, step=1)
    with pytest.raises(RecipeError, match=r"evaluation.data.more: cannot change during a run"):
        apply_settings(recipe, {"evaluation.data.more": "more.parquet"}, step=1)


def test_schedule_nested_or_dotted_is_read_in_order_and_back(tmp_path: Path) -> None:
    schedule = "schedule={200: {algorithm.entropy_coef: 0}, 30: {optimizer: {lr: 1.0e-6}, algorithm: {kl: {coef: 1}}}}"
    recipe = load_recipe(DEMO, [schedule, "schedule.31.sync.verify=always"])
    assert list(recipe.schedule.items()) == [
        (30, {"optimizer.lr": 1e-6, "algorithm.kl.coef": 1}),
        (31, {"sync.verify": "always"}),
        (200, {"algorithm.entropy_coef": 0}),
    ]
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe
    more = load_recipe(tmp_path / "again.yaml", ["schedule.31.sync.bucket_mib=1"])
    assert more.schedule == recipe.schedule | {31: {"sync.verify": "always", "sync.bucket_mib": 1}}
    other = load_recipe(tmp_path / "again.yaml", ["schedule.30.optimizer.lr=2.0e-6", "schedule.31={run.eval_every: 3}"])
    assert other.schedule == recipe.schedule | {
        30: {"optimizer.lr": 2e-6, "algorithm.kl.coef": 1},
        31: {"run.eval_every": 3},
    }
    assert load_recipe(DEMO).schedule == {}


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("3", "schedule: expected steps with settings, got 3 (an integer)"),
        ("{0: {optimizer.lr: 1}}", "schedule.0: expected a step, 1 to 999,999,999, got 0 (an integer)"),
        ("{soon: {optimizer.lr: 1}}", "schedule.soon: expected a step, 1 to 999,999,999, got 'soon' (a string)"),
        ("{3: 4}", "schedule.3: expected sections with keys, got 4 (an integer)"),
        ("{3: {optimizer.lr: 1, optimizer: {lr: 2}}}", "schedule.3: optimizer.lr is given twice"),
    ],
)
def test_schedule_that_cannot_be_read(schedule: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(DEMO, [f"schedule={schedule}"])
    assert list(caught.value.problems) == [problem]


def test_schedule_is_checked_before_anything_starts(recipe: Recipe) -> None:
    check_schedule(scheduled(recipe, {39: {"run.steps": 60}, 50: {"optimizer.lr": 1e-6}}))  # the first makes room
    wrong = {
        3: {"train.tp": 1},
        5: {"algorithm.kl.coef": 0},
        7: {"algorithm.kl.target": 1},
        40: {"guard.max_interventions": 1},
    }
    wrong = {2: {"rollout.temperature": 0.009}, **wrong}
    with pytest.raises(RecipeError) as caught:
        check_schedule(scheduled(recipe, wrong))
    *first, last = caught.value.problems
    assert [" ".join(problem.split()[:2]) for problem in first] == [
        "schedule.2: rollout.temperature:",
        "schedule.3: train.tp:",
        "schedule.7: algorithm.kl.target=1.0",
    ]
    assert last == "schedule.40: the run ends before, at run.steps=40: leave it out"


# ---- while a run goes on


def test_live_changes_are_applied_at_their_step_and_recorded(recipe: Recipe, begin: Begin) -> None:
    live, said = begin(scheduled(recipe, {2: {"optimizer.lr": 1e-5}}))
    first = live.recipe
    assert all(live.settings_for_step(step) is first for step in (0, 1))
    said.folder.control.write_text("algorithm:\n  kl: {coef: 0.5}\nrun.eval_every: 5\n")  # eval_every is 5 already
    now = live.settings_for_step(2)
    assert (now.optimizer.lr, now.algorithm.kl.coef) == (1e-5, 0.5)
    assert live.recipe is now
    assert said.take() == [
        {"event": "setting_changed", "step": 2, "key": "optimizer.lr", "old": 2e-4, "new": 1e-5, "by": "schedule"},
        {"event": "setting_changed", "step": 2}
        | {"key": "algorithm.kl.coef", "old": 0.001, "new": 0.5, "by": "control.yaml"},
    ]
    assert live.settings_for_step(3) is now
    assert said.take() == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("optimizer.lr: [1", "not valid YAML: line 1, column 17: "),
        ("just words", "expected sections with keys, got 'just words' (a string)"),
        ("optimizer.lr: 1\noptimizer: {lr: 2}", "optimizer.lr is given twice"),
        ("optimizer.lr: 1\noptimizer.lr: 2", "not valid YAML: line 2, column 1: 'optimizer.lr' occurs twice"),
        ("optimizer.lr: \udcff", "'utf-8' codec can't decode byte 0xff"),
        ("run.steps: 4\noptimizer.lr: 1", "run.steps=4: the next step is 5: at least 6"),
        ("seed: 4\noptimizer.lr: 1", "seed: cannot change during a run"),
    ],
)
def test_refused_file_changes_nothing_and_is_told_once(recipe: Recipe, begin: Begin, text: str, why: str) -> None:
    live, said = begin(recipe)
    said.folder.control.write_bytes(text.encode("utf-8", "surrogateescape"))
    first = live.recipe
    assert first == recipe
    assert all(live.settings_for_step(step) is first for step in (5, 6))
    [event] = said.take()
    assert (event["event"], event["step"], event["by"]) == ("control_refused", 5, "control.yaml")
    assert event["why"].startswith(why)
    said.folder.control.write_text("optimizer.lr: 1")  # mended: what was refused with the rest is applied
    assert live.settings_for_step(7).optimizer.lr == 1


def test_file_that_cannot_be_read_is_told_once(recipe: Recipe, begin: Begin) -> None:
    live, said = begin(recipe)
    said.folder.control.mkdir()
    live.settings_for_step(1)
    live.settings_for_step(2)
    assert [(e["step"], e["why"]) for e in said.take()] == [
        (1, "cannot be read: it is a directory, and a regular file is expected")
    ]


def test_file_that_is_being_written_is_not_believed(
    recipe: Recipe, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partially written number would also be a valid number."""
    live, said = begin(recipe)
    drafts = ["optimizer.lr: 1", "optimizer.lr: 1.0e-", "optimizer.lr: 1.0e-6"]
    said.folder.control.write_text("")
    monkeypatch.setattr(live_settings.time, "sleep", lambda _: drafts and said.folder.control.write_text(drafts.pop(0)))
    assert live.settings_for_step(1).optimizer.lr == 1e-6
    assert [event["new"] for event in said.take()] == [1e-6]
    monkeypatch.setattr(live_settings.time, "sleep", lambda _: pytest.fail("it has been read"))
    assert live.settings_for_step(2).optimizer.lr == 1e-6


def test_unchanged_control_line_does_not_come_back(recipe: Recipe, begin: Begin) -> None:
    """An unchanged line does not override a later schedule until it is edited."""
    live, said = begin(scheduled(recipe, {2: {"optimizer.lr": 1e-5}}))
    said.folder.control.write_text("optimizer.lr: 0.5\n# nothing else\n")
    assert live.settings_for_step(1).optimizer.lr == 0.5
    assert live.settings_for_step(2).optimizer.lr == 1e-5
    said.folder.control.write_text("optimizer.lr: 0.5\nsync.verify: always\n")
    now = live.settings_for_step(3)
    assert (now.optimizer.lr, now.sync.verify) == (1e-5, "always")
    said.folder.control.unlink()
    assert live.settings_for_step(4) is now
    said.folder.control.write_text("# empty")
    assert live.settings_for_step(5) is now
    said.folder.control.write_text("optimizer.lr: 0.5")
    assert live.settings_for_step(6).optimizer.lr == 0.5


def test_resumed_run_goes_on_with_the_same_settings(recipe: Recipe, begin: Begin) -> None:
    schedule = {2: {"optimizer.lr": 1e-5}, 4: {"algorithm.entropy_coef": 0.1}}
    live, said = begin(scheduled(recipe, schedule))
    said.folder.control.write_text("optimizer.lr: 0.5\nguard.spike: 9\n")
    for step in range(4):
        live.settings_for_step(step)
    saved = json.loads(json.dumps(live.control))
    again, said = begin(scheduled(recipe, schedule))
    again.restore(saved)
    assert again.recipe == live.recipe
    assert (again.recipe.optimizer.lr, again.recipe.guard.spike) == (1e-5, 9.0)
    assert again.settings_for_step(4) == live.settings_for_step(4)
    assert [event["key"] for event in said.take()] == ["algorithm.entropy_coef"]


def test_schedule_may_fall_out_with_what_was_edited(recipe: Recipe, begin: Begin) -> None:
    live, said = begin(scheduled(recipe, {2: {"algorithm.kl.target": 1.0}}))
    said.folder.control.write_text("algorithm.kl.coef: 0")
    now = live.settings_for_step(1)
    assert live.settings_for_step(2) is now
    assert [(e["event"], e.get("by")) for e in said.take()][1:] == [("control_refused", "schedule")]


def test_settings_reduced_for_memory_are_held(recipe: Recipe, begin: Begin) -> None:
    schedule = {1: {"train.micro_batch_size": 64, "optimizer.lr": 1e-5}}
    live, said = begin(scheduled(recipe, schedule), micro_batch_size=16, offload_optimizer=True)
    said.folder.control.write_text("train.micro_batch_size: 128\nsync.verify: always")
    for step in (0, 1):
        now = live.settings_for_step(step)
    assert (now.train.micro_batch_size, now.train.offloads) == (16, ("optimizer",))
    assert (now.sync.verify, now.optimizer.lr) == ("always", 1e-5)
    refused = [(e["step"], e["why"]) for e in said.take() if e["event"] == "control_refused"]
    why = "train.micro_batch_size: pinned to 16 since the run ran out of memory"
    assert refused == [(step, why) for step in (0, 1)]
    assert live.control["settings"].keys() == {"sync.verify", "optimizer.lr"}


def test_held_setting_must_be_valid_too(recipe: Recipe, begin: Begin) -> None:
    """Otherwise the checkpoint, which stores the file's settings as JSON, could not be written."""
    live, said = begin(recipe, micro_batch_size=16)
    said.folder.control.write_text("train.micro_batch_size: 2024-01-01\nsync.verify: always")
    assert live.settings_for_step(0).sync.verify == "never"
    (refused,) = (e["why"] for e in said.take())
    assert refused.startswith("train.micro_batch_size: expected an integer")
    json.dumps(live.control)


def test_coefficient_of_an_adaptive_kl_stays_where_it_is(recipe: Recipe) -> None:
    """Only a changed setting replaces the adaptive coefficient."""
    kl = KlController(0.001, target=1.0)
    kl.coef = 0.7
    assert kl.coef_under(0.001) == 0.7
    new = apply_settings(recipe, {"algorithm.entropy_coef": 0.1, "algorithm.kl.target": 2}, 1).algorithm.kl
    kl.configure(new.coef, new.target)
    assert (kl.coef, kl.target) == (0.7, 2.0)
    new = apply_settings(recipe, {"algorithm.kl.coef": 0.2}, 1).algorithm.kl
    assert kl.coef_under(new.coef) == 0.2
    assert kl.coef == 0.7, "asking moves nothing"
    kl.configure(new.coef, new.target)
    assert (kl.coef, kl.target) == (0.2, None)
    resumed = KlController(0.001, target=1.0)
    resumed.restore(json.loads(json.dumps(kl.state)) | {"coef": 0.9}, 0.2, None)
    resumed.configure(0.2, None)
    assert (resumed.coef, resumed.target) == (0.9, None), "settings that were in force are not applied again"


@pytest.mark.engines
def test_learner_keeps_the_coefficient_of_an_adaptive_kl(recipe: Recipe) -> None:
    """Only a setting that changes for a step replaces the adaptive coefficient."""
    from hybrid3d.trainer.learner import Learner
    from hybrid3d.trainer.models import Models

    models = Models(None, None, None, None)  # type: ignore[arg-type]
    learner = Learner(recipe, models, Guard(None), 0, None)  # type: ignore[arg-type]
    learner.restore(replace(learner.progress, kl={"coef": 0.7, "target": None}), recipe)
    experience: Any = SimpleNamespace(answer_kl=None)
    new = apply_settings(recipe, {"algorithm.entropy_coef": 0.1, "algorithm.kl.target": 2}, 1)
    learner._update_kl_coef(experience, 1, new, True)
    assert learner.progress.kl == {"coef": 0.7, "target": 2.0}
    learner._update_kl_coef(experience, 2, apply_settings(recipe, {"algorithm.kl.coef": 0.2}, 1), True)
    assert learner.progress.kl == {"coef": 0.2, "target": None}


@pytest.mark.engines
def test_rate_that_is_set_follows_the_schedule_that_there_was() -> None:
    """Four steps of warmup, then half a cosine down to `min_lr` at step 12."""
    from hybrid3d.train.megatron.model import _scheduler, _set_learning_rate

    before = Optimizer(lr=0.1, warmup_steps=4, schedule="cosine", min_lr=0.01)
    group: dict[str, Any] = {"params": [], "max_lr": 0.1, "min_lr": 0.01}
    scheduler = _scheduler(SimpleNamespace(param_groups=[group]), before, steps=12)

    def expected(lr: float, step: int) -> float:
        if step <= 4:
            return lr / 5 + (lr - lr / 5) * step / 4
        return 0.01 + (lr - 0.01) * (1 + math.cos(math.pi * (step - 4) / 8)) / 2

    for step in range(12):
        lr = 0.1 if step < 3 else 0.4 if step < 7 else 0.02
        if step in (3, 7):
            _set_learning_rate(scheduler, replace(before, lr=lr))
        assert group["lr"] == pytest.approx(expected(lr, step), rel=1e-12)
        scheduler.step(increment=1)


@pytest.mark.engines
def test_resume_in_warmup_has_the_rate_that_was_set() -> None:
    """The resumed schedule is built with the recipe's rate, and loads the other from the checkpoint."""
    from hybrid3d.train.megatron.model import _scheduler, _set_learning_rate

    before = Optimizer(lr=1e-6, warmup_steps=10)
    after = replace(before, lr=1e-5)

    def schedule() -> tuple[Any, dict[str, Any]]:
        group: dict[str, Any] = {"params": [], "max_lr": before.lr, "min_lr": before.min_lr}
        return _scheduler(SimpleNamespace(param_groups=[group]), before, steps=20), group

    def rates(scheduler: Any, group: dict[str, Any], steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            _set_learning_rate(scheduler, after)
            found.append(group["lr"])
            scheduler.step(increment=1)
        return found

    scheduler, group = schedule()
    rates(scheduler, group, 3)
    resumed, resumed_group = schedule()
    resumed_group.update(group)  # the optimizer is loaded first
    resumed.load_state_dict(scheduler.state_dict())
    went_on = rates(scheduler, group, 10)
    assert went_on == pytest.approx([1e-5 * (1 + min(step, 10)) / 11 for step in range(3, 13)], rel=1e-12)
    assert rates(resumed, resumed_group, 10) == went_on


# ---- less memory

ALL_AWAY = {f"offload_{kind}": True for kind in OFFLOADS}
AWAY = [f"train.{key}=true" for key in ALL_AWAY]


SFT = ["algorithm.name=sft", "algorithm.samples_per_prompt=1", "run.eval_every=10"]


@pytest.mark.parametrize(
    ("settings", "less"),
    [
        (["train.micro_batch_size=64"], {"micro_batch_size": 32, **ALL_AWAY}),
        (["train.micro_batch_size=64", "roles.generation.ranks=2"], {"micro_batch_size": 32}),
        (["train.micro_batch_size=9"], {"micro_batch_size": 3, **ALL_AWAY}),
        (["train.micro_batch_size=5", *AWAY], {"micro_batch_size": 1}),
        (["train.micro_batch_size=1", *AWAY[:2]], {"offload_optimizer": True}),
        (["train.micro_batch_size=1", *AWAY], {}),
        (["train.max_tokens_per_micro_batch=1000", *AWAY], {"max_tokens_per_micro_batch": 500}),
        (["train.max_tokens_per_micro_batch=200", *AWAY], {"max_tokens_per_micro_batch": 128}),
        (["train.max_tokens_per_micro_batch=128"], ALL_AWAY),
        ([*SFT, "algorithm.kl=null", "train.micro_batch_size=2"], {"micro_batch_size": 1}),
    ],
)
def test_reduced_settings_take_less_memory(settings: list[str], less: dict[str, Any]) -> None:
    settings = [s if s != "algorithm.kl=null" else "algorithm.kl={where: none, coef: 0}" for s in settings]
    assert reduced_settings(load_recipe(DEMO, settings)) == {f"train.{key}": value for key, value in less.items()}


def test_rows_may_be_longer_than_answers_of_an_evaluation(demo: Path) -> None:
    """`sft` has a rollout for `hybrid3d eval` alone: its rows are as long as the model's positions."""
    more = [
        "algorithm.kl={where: none, coef: 0}",
        f"model.path={demo / 'base'}",
        "train.max_tokens_per_micro_batch=4096",
    ]
    recipe = load_recipe(DEMO, [*SFT, *more])
    assert recipe.rollout is not None
    longest = json.loads((demo / "base/config.json").read_text())["max_position_embeddings"]
    assert recipe.rollout.max_model_len < longest
    reduced = reduced_settings(recipe).get("train.max_tokens_per_micro_batch", 4096)
    assert reduced == min(4096, max(2048, longest))


OUT = find_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.\nsomething else"))
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with "
NCCL += "NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
            "CUDA out of memory. Tried to al",
        ),
        (torch.OutOfMemoryError(), "OutOfMemoryError"),
        (
            RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163"),
            "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163",
        ),
        (dist.DistBackendError(f"{NCCL}Last error:\nCuda failure 2 'out of memory'"), "Cuda failure 2 'out of memory'"),
        (dist.DistBackendError(f"{NCCL}Last error:\nCuda failure 'out of memory'"), "Cuda failure 'out of memory'"),
        (dist.DistBackendError(f"{NCCL}Last error:\nFailed to CUDA calloc 6291456 bytes"), "Failed to CUDA calloc 6"),
        (
            dist.DistBackendError(f"{NCCL}Last error:\nFailed to CUDA calloc async 608 bytes"),
            "Failed to CUDA calloc as",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "CUDA error: CUBLAS",
        ),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            "CUDA error: out of mem",
        ),
    ],
)
def test_memory_that_ran_out_whoever_asked_for_it(error: BaseException, said: str) -> None:
    """As torch 2.13, vLLM 0.32 and NCCL 2.18 and 2.28 write it."""
    found = find_out_of_memory(error)
    assert found is not None
    assert found.startswith(said)
    assert not _is_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:170"),
        dist.DistBackendError(f"{NCCL}Last error:\nCuda failure 999 'unknown error'"),
        dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"),
        RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed."),
        MemoryError("out of memory"),
        OutOfMemoryRestart("CUDA out of memory.: after a restart"),
    ],
)
def test_errors_that_are_not_about_memory_of_the_gpu(error: BaseException) -> None:
    assert find_out_of_memory(error) is None


def test_memory_runs_out_again_and_again(recipe: Recipe, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for size, offloads in ((32, ()), (16, OFFLOADS), (8, OFFLOADS)):
        relief = OomRecovery.from_folder(folder)
        now = live_settings.override_settings(recipe, relief.settings)
        assert (now.train.micro_batch_size, now.train.offloads) == (2 * size, offloads)
        for rank in (2, 3):  # two ranks run out together: once is enough
            error = relief.prepare_restart(OUT, now, folder, rank)
            assert isinstance(error, OutOfMemoryRestart)
            assert f"train.micro_batch_size={size} instead of {2 * size}" in str(error)
    relief = OomRecovery.from_folder(folder)
    held = {"train.micro_batch_size": 8} | {f"train.{key}": True for key in ALL_AWAY}
    assert (relief.count, relief.settings) == (3, held)
    last = relief.prepare_restart(OUT, live_settings.override_settings(recipe, relief.settings), folder, 2)
    assert not isinstance(last, OutOfMemoryRestart)
    assert str(last).startswith(
        "CUDA out of memory.: memory has run out 4 times, guard.max_interventions=3 allows 3: raise train.tp"
    )
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [(e["event"], e["rank"], e["count"], e["new"]["train.micro_batch_size"]) for e in events] == [
        ("out_of_memory", 2, count, size) for count, size in ((1, 32), (2, 16), (3, 8))
    ]
    assert sorted(path.name for path in tmp_path.glob("out*")) == [f"out-of-memory-{n}.json" for n in (1, 2, 3)]


@pytest.mark.parametrize("exists", [False, True])
def test_oom_recovery_needs_no_hard_links(
    exists: bool, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    if exists:
        OomRecovery().prepare_restart(OUT, recipe, folder, 1)

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert isinstance(OomRecovery().prepare_restart(OUT, recipe, folder, 0), OutOfMemoryRestart)
    assert OomRecovery.from_folder(folder).count == 1
    (event,) = folder.events.read_text().splitlines()
    assert json.loads(event)["rank"] == int(exists)
    assert not list(tmp_path.glob("*.tmp"))


def test_oom_recovery_that_cannot_be_written_says_so(recipe: Recipe, tmp_path: Path) -> None:
    error = OomRecovery().prepare_restart(OUT, recipe, RunFolder(tmp_path / "none"), 0)
    assert not isinstance(error, OutOfMemoryRestart)
    assert str(error).startswith(f"{OUT}: there is no restart with other settings, as {tmp_path}/none/out-of-memory-1")


def test_oom_recovery_says_when_nothing_is_left_to_give_up(recipe: Recipe, tmp_path: Path) -> None:
    least = replace(recipe, train=replace(recipe.train, micro_batch_size=1, **ALL_AWAY))
    error = OomRecovery().prepare_restart(OUT, least, RunFolder(tmp_path), 0)
    assert not isinstance(error, OutOfMemoryRestart)
    assert "micro batches cannot be made smaller: raise train.tp or train.pp" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_launcher_sees_who_ran_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    ran_out = Ended(2, "OutOfMemoryRestart: 2 GiB", time=2.0, kind="out_of_memory")
    for end in (Ended(0, "lost", time=1.0, peer=True), ran_out):
        assert end.write(folder)
    cause = find_root_cause(folder, {})
    assert cause == ran_out
    assert cause.message(folder) == f"rank 2 failed: OutOfMemoryRestart: 2 GiB\nits log: {folder.log_path(2)}"


def test_settings_as_yaml_writes_them_are_known(recipe: Recipe) -> None:
    """`settings_of` has the same keys as the recipe's YAML."""
    written = yaml.safe_load(recipe_to_yaml(recipe))
    for key, value in settings_of(recipe).items():
        here = written
        for name in key.split("."):
            here = here[name]
        assert here == value
