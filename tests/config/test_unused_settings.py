"""Tests that settings are refused where they have no effect, and accepted where they have one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid3d.config import RecipeError, load_recipe, recipe_to_yaml
from hybrid3d.config.refusals import IN_PROCESS
from hybrid3d.scoring.environments import ENVIRONMENTS
from hybrid3d.scoring.functions import REWARDS

RL = """\
name: unused
model: {path: model}
rollout: {max_model_len: 256, max_new_tokens: 16}
data: {train: a.parquet, eval: b.parquet}
algorithm: {name: grpo, prompts_per_step: 32, samples_per_prompt: 8}
optimizer: {lr: 0.001}
run: {steps: 80}
"""
SFT = """\
name: unused
model: {path: model}
data: {train: a.parquet, eval: b.parquet}
algorithm: {name: sft, prompts_per_step: 32}
optimizer: {lr: 0.001}
run: {steps: 80}
"""
PPO = "algorithm.name=ppo"


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(text)
    try:
        recipe = load_recipe(path, overrides)
    except RecipeError as error:
        return list(error.problems)
    path.write_text(recipe_to_yaml(recipe))
    assert load_recipe(path) == recipe  # with every default written out
    return []


@pytest.mark.parametrize(
    ("given", "said", "puts_to_use"),
    [
        ("algorithm.gamma=0.9", "algorithm.gamma=0.9 has no effect: algorithm.name=grpo does not discount", [PPO]),
        ("algorithm.gamma=0.9", "algorithm.gamma=0.9", ["algorithm.name=reinforce_pp"]),
        ("algorithm.lam=0.95", "algorithm.lam=0.95 has no effect: algorithm.name=grpo estimates no values", [PPO]),
        ("optimizer.min_lr=1e-5", "optimizer.min_lr=1e-05 has no effect", ["optimizer.schedule=cosine"]),
        (
            "algorithm.correction.low=0.1",
            "algorithm.correction.low=0.1 has no effect: algorithm.correction.kind=none",
            ["algorithm.correction.kind=mask"],
        ),
        (
            "algorithm.correction.high=3",
            "algorithm.correction.high=3 has no effect",
            ["algorithm.correction.kind=truncate"],
        ),
        (
            "algorithm.correction.high=3",
            "algorithm.correction.high=3 has no effect",
            ["schedule={10: {algorithm.correction.kind: mask}}"],
        ),
        ("rollout.max_turns=3", "rollout.max_turns=3 has no effect", ["rollout.environment=calculator"]),
        ("reward.workers=4", "reward.workers=4 has no effect: reward.name=gsm8k is computed", ["reward.name=math"]),
        ("reward.workers=4", "reward.workers=4 has no effect", ["rollout.environment=mine:reply"]),
        ("reward.timeout_seconds=4", "reward.timeout_seconds=4 has no effect", ["reward.name=code"]),
        ("reward.default=1", "reward.default=1 has no effect: reward.name=gsm8k never fails", ["reward.name=math"]),
        ("evaluation.top_p=0.9", "evaluation.top_p=0.9 has no effect", ["schedule={5: {evaluation.temperature: 1}}"]),
        ("evaluation.k=[4]", "evaluation.k=[4] has no effect", ["evaluation={samples: 4, temperature: 1, k: [4]}"]),
        ("reward.max_failures=0", "reward.max_failures=0 has no effect", ["rollout.environment=calculator"]),
    ],
)
def test_unused_settings_of_reinforcement_learning_are_refused(
    tmp_path: Path, given: str, said: str, puts_to_use: list[str]
) -> None:
    (problem,) = problems(tmp_path, RL, given)
    assert problem.startswith(said), problem
    key, default = given.partition("=")[0], problem.rpartition(": leave it out, or set it to ")[2]
    assert problems(tmp_path, RL, f"{key}={default}") == []
    assert problems(tmp_path, RL, given, *puts_to_use) == []


def test_bound_that_only_masks_have(tmp_path: Path) -> None:
    for kind in ("truncate", "sequence_truncate"):
        (problem,) = problems(tmp_path, RL, f"algorithm.correction={{kind: {kind}, low: 0.1}}")
        assert problem.startswith(
            f"algorithm.correction.low=0.1 has no effect: algorithm.correction.kind={kind} bounds"
        )
    assert problems(tmp_path, RL, "algorithm.correction={kind: sequence_mask, low: 0.1}") == []


def test_unused_settings_of_kl_are_refused(tmp_path: Path) -> None:
    none = "algorithm.kl={where: none, estimator: k3, target: 1, horizon: 500}"
    assert [line.split("=")[0] for line in problems(tmp_path, RL, none)][:3] == [
        "algorithm.kl.estimator",
        "algorithm.kl.target",
        "algorithm.kl.horizon",
    ]
    (problem,) = problems(tmp_path, RL, "algorithm.kl={where: loss, coef: 0.1, horizon: 5000}")
    assert problem == (
        "algorithm.kl.horizon=5000 has no effect: without algorithm.kl.target the coefficient is fixed: "
        "leave it out, or set it to 10000"
    )
    assert problems(tmp_path, RL, "algorithm.kl={where: loss, coef: 0.1, horizon: 5000, target: 1}") == []


def test_kl_needs_a_coefficient_only_where_it_is_used(tmp_path: Path) -> None:
    assert problems(tmp_path, RL, "algorithm.kl={where: none}") == []
    assert problems(tmp_path, RL, "algorithm.kl.where=none") == []
    for where in ("loss", "reward"):
        assert problems(tmp_path, RL, f"algorithm.kl={{where: {where}}}") == [
            "algorithm.kl.coef: missing, expected a number, 0 to 1,000"
        ]
        assert problems(tmp_path, RL, f"algorithm.kl={{where: {where}, coef: 0}}") == []


def test_unused_settings_of_critic_optimizer_are_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, RL, PPO, "critic.optimizer={lr: 0.01, min_lr: 0.001}")
    assert problem.startswith("critic.optimizer.min_lr=0.001 has no effect")
    assert problems(tmp_path, RL, PPO, "critic.optimizer={lr: 0.01, min_lr: 0.001, schedule: linear}") == []


@pytest.mark.parametrize(
    "given",
    [
        "algorithm.samples_per_prompt=2",
        "algorithm.epochs=2",
        "algorithm.minibatches=2",
        "algorithm.clip=0.1",
        "algorithm.clip_high=0.3",
        "algorithm.dual_clip=3",
        "algorithm.loss_agg_mode=token",
        "algorithm.entropy_coef=0.1",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.9",
        "algorithm.dynamic_sampling=2",
        "algorithm.kl={where: loss, coef: 0.1}",
        "algorithm.correction.kind=mask",
        "run.eval_every=5",
        "evaluation.samples=4",
        "evaluation.data={more: more.parquet}",
        "reward.name=math",
        "debug.shuffle_rewards=true",
        "reward.overlong_buffer=2",
        "sync.bucket_mib=32",
        "sync.verify=always",
        "sync.shared_memory=never",
    ],
)
def test_unused_settings_of_supervised_learning_are_refused(tmp_path: Path, given: str) -> None:
    (problem,) = problems(tmp_path, SFT, given)
    assert problem.startswith(given.partition("=")[0])
    assert "has no effect: algorithm.name=sft" in problem


DPO = SFT.replace("name: sft", "name: dpo")


def test_unused_settings_of_preference_pairs_are_refused(tmp_path: Path) -> None:
    used = ["run.eval_every=5", "data.chosen=good", "data.rejected=bad"]
    used.append("algorithm.kl={where: none, reference: other}")
    smoothed = "algorithm.preference={beta: 0.5, label_smoothing: 0.1, sft_coef: 1}"
    assert problems(tmp_path, DPO, *used, smoothed) == []
    assert problems(tmp_path, DPO, "algorithm.preference={loss_type: simpo, beta: 2, simpo_gamma: 1}") == []
    for overrides, problem in (
        (
            ["data.answer=gold"],
            "data.answer=gold has no effect: algorithm.name=dpo takes the chosen answer, data.chosen,",
        ),
        (
            ["algorithm.preference.simpo_gamma=1"],
            "algorithm.preference.simpo_gamma=1 has no effect: algorithm.preference.l",
        ),
        (
            ["algorithm.preference={loss_type: ipo, label_smoothing: 0.1}"],
            "algorithm.preference.label_smoothing=0.1 has no effect: algorithm.preference.loss_type=ipo does not use",
        ),
        (
            ["algorithm.preference.loss_type=simpo", "algorithm.kl={where: none, reference: other}"],
            "algorithm.kl.reference=other has no effect: algorithm.preference.loss_type=simpo has no reference",
        ),
        (
            ["algorithm.kl={where: loss, coef: 0.1}"],
            "algorithm.kl.where=loss has no effect: algorithm.name=dpo measures",
        ),
        (["data.rejected=chosen"], "data.rejected=chosen is the column of data.chosen too: name the column of each"),
        (
            ["algorithm.minibatches=2"],
            "algorithm.minibatches=2 has no effect: algorithm.name=dpo trains on the answers",
        ),
    ):
        (said,) = problems(tmp_path, DPO, *overrides)
        assert said.startswith(problem)
    for given in ("data.chosen=good", "algorithm.preference.beta=0.2"):
        (said,) = problems(tmp_path, RL, given)
        assert "has no effect: algorithm.name=grpo" in said


def test_settings_that_a_later_evaluation_reads_are_accepted(tmp_path: Path) -> None:
    generates = ["rollout={max_model_len: 256, max_new_tokens: 16}"]
    sampled = ["evaluation={samples: 4, temperature: 1, k: [2], data: {more: c.parquet}}", "rollout.stop=[x]"]
    assert problems(tmp_path, SFT, *generates, *sampled) == []
    (problem,) = problems(tmp_path, SFT, *generates, "rollout.top_p=0.9")
    assert problem.startswith("rollout.top_p=0.9 has no effect: algorithm.name=sft does not sample")
    assert problems(tmp_path, SFT, *generates, "reward.name=math", "reward.workers=4", "sync.bucket_mib=32") == []


def test_rewards_and_environments_in_process_match_the_registries() -> None:
    rewards = {name for name, reward in REWARDS.items() if not reward.pooled}
    assert rewards | {*ENVIRONMENTS} == IN_PROCESS


def test_router_replay_is_refused_where_no_experts_can_be_replayed(tmp_path: Path) -> None:
    for replay in ("old", "rollout"):
        assert problems(tmp_path, RL, f"train.router_replay={replay}") == []  # whether it has experts is in its config
        assert problems(tmp_path, SFT, f"train.router_replay={replay}") == [
            f"train.router_replay={replay} has no effect: algorithm.name=sft has no earlier choices: leave it out, or "
            "set it to none"
        ]
    agents, replay = "rollout.agents={port: 9000}", "train.router_replay=rollout"
    assert problems(tmp_path, RL, agents, replay) == []
    partial = ["async.partial=continue", "async.max_staleness=1", "algorithm.correction.kind=truncate"]
    kept = [*partial, "async.partial=continue_with_cache", "rollout.sleep=false"]
    assert problems(tmp_path, RL, *partial, replay) == problems(tmp_path, RL, *kept) == []
    assert problems(tmp_path, RL, *kept, replay) == [
        "train.router_replay=rollout: vLLM returns experts only with its prefix cache, which "
        "async.partial=continue_with_cache turns off: set async.partial=continue, or train.router_replay=old"
    ]


def test_date_without_a_template_is_refused(tmp_path: Path) -> None:
    day = "data.date='2031-01-02'"
    assert problems(tmp_path, RL, day, "data.chat_template=true") == []
    assert problems(tmp_path, RL, day, "rollout.agents={port: 9000}") == []
    for recipe in (RL, SFT):
        (problem,) = problems(tmp_path, recipe, day)
        assert problem.startswith("data.date=2031-01-02 has no effect: without data.chat_template no template writes")
