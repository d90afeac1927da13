"""What an update learns from a step's samples: fillings, answers that were cut, greedy answers, and a single update.

The policy is a table of log-probabilities, so that the gradient of each token can be worked out from the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.generation.samples import RolloutBatch, Sample
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.losses import Aggregation, masked_sum
from hybrid3d.rl.objective import PolicyObjective, TokenScores
from hybrid3d.run.health import Guard
from hybrid3d.train.trained_model import StepReport
from hybrid3d.trainer import experience as experience_maker
from hybrid3d.trainer.learner import Learner
from hybrid3d.trainer.step_experience import Experience

pytestmark = pytest.mark.engines

ROOT = Path(__file__).resolve().parents[2]
WORDS = 64
LONGEST = 8


class Policy:
    """The log-probability of a token is that of the table, whatever stands before it; its entropy is its square."""

    data_parallel_rank, is_reporting_rank, has_output, has_experts, router_replay = 0, True, True, False, None

    def __init__(self, table: Tensor):
        self.table = table.clone().requires_grad_()
        self.passes = 0
        self.gradients: list[Tensor] = []

    def logprobs(self, batch: Batch, recipe: Recipe) -> Tensor:
        self.passes += 1
        return self.table[batch.tokens].detach()

    def logprobs_and_entropies(self, batch: Batch, recipe: Recipe) -> tuple[Tensor, Tensor]:
        found = self.logprobs(batch, recipe)
        return found, found.square()

    def train_step(self, batch: Batch, loss: PolicyObjective, recipe: Recipe, *_: Any) -> StepReport:
        scores, sums, total = self.table[batch.tokens], dict[str, float](), torch.zeros(())
        for rows in torch.arange(len(batch)).split(recipe.train.micro_batch_size):
            of_rows = scores[rows]
            losses, report = loss(TokenScores(of_rows, lambda of_rows=of_rows: of_rows.detach().square()), rows)
            total = total + masked_sum(losses, batch.response_mask[rows])
            for key, value in report.items():
                sums[key] = sums.get(key, 0.0) + float(value)
        (gradient,) = torch.autograd.grad(total / batch.response_mask.sum(), self.table)
        self.gradients.append(gradient)
        return StepReport(sums, grad_norm=1.0, lr=0.1, updated=True)

    def end_step(self) -> None:
        pass


TABLE = -torch.rand(WORDS, generator=torch.Generator().manual_seed(3)) - 0.1


def recipe_of(*settings: str) -> Recipe:
    ours = ["train={tp: 1, pp: 1, dp: 1}", "rollout.tp=1", "algorithm.kl={where: none}", "train.micro_batch_size=2"]
    ours += [f"rollout.max_new_tokens={LONGEST}", "algorithm.samples_per_prompt=2", "algorithm.prompts_per_step=4"]
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", [*ours, *settings])


def sample(tokens: Sequence[int], reward: float, **fields: Any) -> Sample:
    """An answer whose rollout log-probabilities are 10 % off those of the table."""
    logprobs = tuple(float(TABLE[token]) * 1.1 for token in tokens)
    versions, mask = (1,) * len(tokens), (True,) * len(tokens)
    return Sample("", (1,), tuple(tokens), mask, logprobs, "", reward, versions, **fields)


def trained(
    samples: list[Sample], recipe: Recipe, group: dist.ProcessGroup, step: int = 1
) -> tuple[Policy, Experience, dict[str, float]]:
    """Make experience of the samples, and update with it; the metrics are of both."""
    policy = Policy(TABLE)
    reference = Policy(TABLE * 0.7) if recipe.algorithm.uses_reference else None
    of_run: Any = SimpleNamespace(policy=policy, reference=reference, critic=None, reward_model=None)
    of_run.trained = {"policy": policy}
    guard: Any = Guard(None)  # type: ignore[arg-type]
    guard._engines_compared = True
    learner = Learner(recipe, of_run, guard, 0, group)
    experience = learner.make_experience(RolloutBatch(samples), step, recipe)
    metrics = experience.metrics
    metrics.update(learner.update(experience, step, recipe))
    row = metrics.reduce(group)
    assert learner.progress.kl["coef"] != 0.1 or recipe.algorithm.kl.target is None  # the adaptive one is adapted
    return policy, experience, row | {"the next KL coefficient": learner.progress.kl["coef"]}


def branched(rewards: Sequence[float]) -> list[Sample]:
    """Answers of 2 to 4 tokens, each with words of its own; the first has another branch, of one token."""
    found = [sample(range(4 * i + 2, 4 * i + 4 + i % 3), reward) for i, reward in enumerate(rewards)]
    return [found[0], sample([60], rewards[0], branch=1), *found[1:]]


def mean_by_hand(samples: list[Sample], mode: Aggregation) -> list[float]:
    """The weight of each token of each sample in the mean of the paper that `loss_agg_mode` names."""
    answers = [i for i, one in enumerate(samples) if not one.branch]
    of = [max(i for i in answers if i <= row) for row in range(len(samples))]
    lengths = {i: sum(len(one.tokens) for row, one in enumerate(samples) if of[row] == i) for i in answers}
    return [
        {
            "token": 1 / sum(lengths.values()),
            "sequence": 1 / lengths[of[row]] / len(answers),
            "sequence_sum": 1 / len(answers),
            "constant": 1 / len(answers) / LONGEST,
        }[mode]
        for row in range(len(samples))
    ]


@pytest.mark.parametrize("mode", get_args(Aggregation))
@pytest.mark.parametrize("rewards", [(1.0, 0.0), (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)])
def test_rows_that_fill_a_batch_are_no_answers(
    mode: Aggregation, rewards: Sequence[float], alone: dist.ProcessGroup
) -> None:
    """9 sequences in micro batches of 8 are 16 rows: the gradient of `-A log p` is the mean over the 8 answers."""
    samples = branched(rewards)
    settings = [f"algorithm.loss_agg_mode={mode}", "algorithm.policy_loss=reinforce", "algorithm.name=grpo"]
    settings += ["algorithm.advantage_scale=none", "train.micro_batch_size=8"]
    recipe = recipe_of(*settings, f"algorithm.prompts_per_step={len(rewards) // 2}")
    policy, experience, _ = trained(samples, recipe, alone)
    assert len(experience.batch) == 8 * -(-len(samples) // 8) > len(samples)
    wanted = torch.zeros(WORDS)
    for one, weight in zip(samples, mean_by_hand(samples, mode), strict=True):
        wanted[[*one.tokens]] = -weight * (one.reward - 0.5)
    torch.testing.assert_close(policy.gradients[0], wanted)


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_minibatch_is_a_mean_over_its_answers(mode: Aggregation, alone: dist.ProcessGroup) -> None:
    samples = branched((1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0))
    settings = [f"algorithm.loss_agg_mode={mode}", "algorithm.policy_loss=reinforce", "algorithm.name=grpo"]
    settings += ["algorithm.advantage_scale=none", "algorithm.minibatches=2", "train.micro_batch_size=4"]
    policy, _, _ = trained(samples, recipe_of(*settings), alone)
    for gradient, part in zip(policy.gradients, (samples[:4], samples[4:]), strict=True):
        wanted = torch.zeros(WORDS)
        for one, weight in zip(part, mean_by_hand(part, mode), strict=True):
            wanted[[*one.tokens]] = -weight * (one.reward - 0.5)
        torch.testing.assert_close(gradient, wanted)


STATISTICS = {
    **{f"mean: {mode}": [f"algorithm.loss_agg_mode={mode}"] for mode in get_args(Aggregation)},
    "entropies": ["algorithm.high_entropy_fraction=0.5"],
    "clip_cov": ["algorithm.name=clip_cov", "algorithm.loss={cov_fraction: 0.3, cov_low: 0.0, cov_high: 9.0}"],
    "kl_cov": ["algorithm.name=kl_cov", "algorithm.loss={cov_fraction: 0.3}"],
    "whitened": ["algorithm.name=reinforce_pp"],
    "whitened, of groups": ["algorithm.name=reinforce_pp_baseline"],
    "normalized weights": ["algorithm.correction={kind: truncate, high: 9.0, normalize: true}"],
    "entropies, weights": ["algorithm.high_entropy_fraction=0.5", "algorithm.correction={kind: mask, normalize: true}"],
}


@pytest.mark.parametrize("settings", STATISTICS.values(), ids=STATISTICS)
def test_tokens_that_are_not_trained_count_in_no_statistic(settings: list[str], alone: dist.ProcessGroup) -> None:
    """However many tokens an answer has that is not trained, and whatever their probabilities: the update is the same.

    Its reward is still one of its group.
    """
    recipe = recipe_of("algorithm.name=grpo", "algorithm.mask_truncated=true", *settings)
    found = []
    for cut in ((50,), (50, 51, 52, 53, 54, 55)):
        answers = branched((1.0, 0.0, 0.25, 1.0, 0.0, 1.0, 0.75, 0.0))
        answers[4] = sample(cut, answers[4].reward, truncated=True)
        policy, _, metrics = trained(answers, recipe, alone)
        assert not policy.gradients[0][50:56].any()
        of_policy = {key: value for key, value in metrics.items() if key.startswith("train/") or "weight" in key}
        found.append((policy.gradients[0], of_policy))
    assert found[0][0].any()
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)


def test_step_without_an_answer_to_train(alone: dist.ProcessGroup) -> None:
    answers = [replace(one, truncated=True) for one in branched((1.0, 0.0))]
    for settings in STATISTICS.values():
        recipe = recipe_of(
            "algorithm.name=grpo", *settings, "algorithm.mask_truncated=true", "algorithm.prompts_per_step=1"
        )
        experience = trained(answers, recipe, alone)[1]
        assert not experience.mask.any()


def shaped_by_hand(reward: float, tokens: int) -> float:
    """`reward={min: -0.5, max: 0.5, overlong_buffer: 4}` with at most 8 tokens: -1/4 for each beyond 4."""
    return min(0.5, max(-0.5, reward - max(0, tokens - 4) / 4))


@pytest.mark.parametrize("whitens", [False, True])
def test_greedy_answer_is_shaped_like_the_others(whitens: bool, alone: dist.ProcessGroup) -> None:
    """An answer that is as good and as long as the greedy one has no advantage, whatever `reward` does to both."""
    rewards, baselines = (1.0, 0.75, 0.0, 1.0), (1.0, 1.0, 0.25, 0.0)
    lengths, greedy = (6, 6, 3, 5), (6, 5, 3, 2)
    samples = [
        sample(range(8 * i + 2, 8 * i + 2 + n), r, baseline=b, baseline_tokens=m)
        for i, (r, b, n, m) in enumerate(zip(rewards, baselines, lengths, greedy, strict=True))
    ]
    reward = f"reward={{name: gsm8k, min: -0.5, max: 0.5, overlong_buffer: 4, whiten: {str(whitens).lower()}}}"
    recipe = recipe_of("algorithm.name=remax", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=1", reward)
    _, experience, metrics = trained(samples, recipe, alone)
    shaped = [*map(shaped_by_hand, rewards, lengths)], [*map(shaped_by_hand, baselines, greedy)]
    wanted = torch.tensor(shaped[0]) - torch.tensor(shaped[1])
    if whitens:
        wanted = wanted / torch.tensor([*shaped[0], *shaped[1]]).std()
    assert experience.advantages is not None
    found = experience.advantages.masked_fill(~experience.batch.response_mask.bool(), 0).sum(1)
    torch.testing.assert_close(found / torch.tensor(lengths), wanted, rtol=1e-6, atol=1e-6)
    assert wanted[0] == wanted[2].abs() - 0.25 / (torch.tensor([*shaped[0], *shaped[1]]).std() if whitens else 1) == 0
    assert metrics["reward/greedy_mean"] == 0.5625


SCALES = [
    ["algorithm.name=grpo"],
    ["algorithm.name=rloo"],
    ["algorithm.name=opo"],
    ["algorithm.name=grpo_passk"],
    ["algorithm.name=reinforce_pp"],
    ["algorithm.name=reinforce_pp_baseline"],
    ["algorithm.name=grpo", "algorithm.advantage_scale=batch_std"],
    ["algorithm.name=grpo", "algorithm.advantage_scale=none", "reward={name: gsm8k, whiten: true}"],
]


@pytest.mark.parametrize("settings", SCALES, ids=" ".join)
def test_large_rewards_have_the_advantages_of_small_ones(settings: list[str], alone: dist.ProcessGroup) -> None:
    """A constant that is added to all rewards changes no advantage, here 10,000, of which float32 keeps 1e-3."""
    rewards = (0.0003, 0.0007, 0.0001, 0.0002, 0.0011, 0.0005, 0.0013, 0.0002)
    found = []
    for constant in (0.0, 10_000.0):
        samples = [sample((2 + i, 3 + i), constant + reward) for i, reward in enumerate(rewards)]
        advantages = trained(samples, recipe_of("algorithm.name=grpo", *settings), alone)[1].advantages
        assert advantages is not None
        assert advantages.dtype == torch.float32
        found.append(advantages)
    assert found[0].abs().max() > 1e-4
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-8)


ONE_UPDATE = {
    "plain": [],
    "sequences": ["algorithm.name=gspo"],
    "corrected tokens": ["algorithm.correction={kind: truncate, high: 1.05}"],
    "corrected answers": ["algorithm.correction={kind: sequence_mask, low: 0.5, high: 1.2}"],
    "bypassed": ["algorithm.correction={kind: sequence_mean_mask, low: 0.9, high: 1.1, bypass: true}"],
    "KL in the loss": ["algorithm.kl={where: loss, coef: 0.1, target: 2.0, horizon: 10}"],
    "whitened": ["algorithm.name=reinforce_pp_baseline"],
    "masked": ["algorithm.mask_truncated=true"],
    "entropy": ["algorithm.entropy_coef=0.1"],
}


@pytest.mark.parametrize("settings", ONE_UPDATE.values(), ids=ONE_UPDATE)
def test_single_update_needs_no_pass_before_it(
    settings: list[str], alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what it is with a pass: the gradient, the metrics, and what a record keeps of the step."""
    recipe = recipe_of("algorithm.name=grpo", *settings)
    samples = branched((1.0, 0.0, 0.25, 1.0, 0.0, 1.0, 0.75, 0.0))
    samples[4] = replace(samples[4], truncated=True)
    policy, experience, metrics = trained(samples, recipe, alone)
    assert policy.passes == 0
    monkeypatch.setattr(experience_maker, "come_from_update", lambda step, recipe: False)
    with_pass = trained(samples, recipe, alone)
    assert with_pass[0].passes == 1
    assert torch.equal(policy.gradients[0], with_pass[0].gradients[0])
    assert policy.gradients[0].any()
    assert metrics == with_pass[2]
    tokens = sum(len(one.tokens) for one in samples if not (recipe.algorithm.mask_truncated and one.truncated))
    if not recipe.algorithm.correction.bypass:
        assert metrics["train/ratio"] == pytest.approx(tokens / tokens, abs=0)
        assert metrics["train/approx_kl"] == 0
    for name in ("old", "correction", "advantages"):
        values, wanted = getattr(experience, name), getattr(with_pass[1], name)
        assert (values is None) == (wanted is None)
        if values is not None:
            mask = experience.batch.response_mask.bool()
            assert torch.equal(values[mask], wanted[mask])


EARLIER = {
    "two minibatches": ["algorithm.minibatches=2", "train.micro_batch_size=2"],
    "two epochs": ["algorithm.epochs=2"],
    "entropies": ["algorithm.high_entropy_fraction=0.5"],
    "covariances": ["algorithm.name=kl_cov"],
    "normalized weights": ["algorithm.correction={kind: truncate, normalize: true}"],
    "KL in the reward": ["algorithm.kl={where: reward, coef: 0.1}"],
    "the last step": ["run.steps=1"],
}


@pytest.mark.parametrize("settings", EARLIER.values(), ids=EARLIER)
def test_values_needed_before_an_update_take_a_pass(settings: list[str], alone: dist.ProcessGroup) -> None:
    samples = branched((1.0, 0.0, 0.25, 1.0, 0.0, 1.0, 0.75, 0.0))
    policy, experience, _ = trained(samples, recipe_of("algorithm.name=grpo", *settings), alone)
    assert policy.passes == 1
    assert not experience.old_from_update


def test_initial_mismatch_is_measured_before_the_first_update(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of the engines takes a pass, and the update all the same computes what it is relative to."""
    compared: list[float] = []
    monkeypatch.setattr(Guard, "must_compare_engines", lambda self, recipe: not compared)
    monkeypatch.setattr(
        Guard, "compare_engines", lambda self, step, row, *_: compared.append(row["mismatch/logprob_abs_mean"])
    )
    samples = branched((1.0, 0.0, 0.25, 1.0, 0.0, 1.0, 0.75, 0.0))
    policy, experience, metrics = trained(samples, recipe_of("algorithm.name=grpo"), alone)
    assert (policy.passes, experience.old_from_update) == (1, True)
    assert compared == [metrics["mismatch/logprob_abs_mean"]]
    tokens = [token for one in samples for token in one.tokens]
    assert compared[0] == pytest.approx(float(TABLE[tokens].abs().mean()) * 0.1, rel=1e-5)


def test_critic_without_update_leaves_old_log_probabilities_to_a_pass(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's update is skipped then, and what the step measures is measured all the same."""
    policy, skipped = Policy(TABLE), list[str]()
    refuses = StepReport({}, grad_norm=float("nan"), lr=0.1, updated=False)
    critic = SimpleNamespace(
        values=lambda batch, recipe: torch.zeros_like(batch.response_mask),
        train_step=lambda *arguments, **options: refuses,
        end_step=lambda: None,
    )
    models: Any = SimpleNamespace(policy=policy, reference=None, critic=critic, reward_model=None)
    models.trained = {"policy": policy, "critic": critic}
    monkeypatch.setattr(Guard, "must_compare_engines", lambda self, recipe: False)
    monkeypatch.setattr(Guard, "record_skip", lambda self, step, norm, recipe, model: skipped.append(model))
    settings = ["algorithm.name=ppo", "algorithm.correction={kind: truncate, high: 1.05}"]
    recipe, samples = recipe_of(*settings), branched((1.0, 0.0, 0.25, 1.0, 0.0, 1.0, 0.75, 0.0))
    learner = Learner(recipe, models, Guard(None), 0, alone)  # type: ignore[arg-type]
    experience = learner.make_experience(RolloutBatch(samples), 1, recipe)
    assert (policy.passes, experience.old_from_update) == (0, True)
    row = learner.update(experience, 1, recipe).reduce(alone)
    assert (policy.passes, policy.gradients, skipped) == (1, [], ["critic"])
    assert experience.old is not None
    assert experience.correction is not None
    mask = experience.mask.bool()
    assert torch.equal(experience.old[mask], TABLE[experience.batch.tokens][mask])
    ratios = (experience.old - experience.rollout)[mask].exp()
    torch.testing.assert_close(experience.correction[mask], ratios.clamp(max=1.05))
    assert row["mismatch/weight"] == pytest.approx(float(ratios.clamp(max=1.05).mean()))
