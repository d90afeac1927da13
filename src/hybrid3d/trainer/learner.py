"""The learner: makes experience from a step's samples, and updates the models with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.rl.kl import KlController
from hybrid3d.rl.losses import answer_weights
from hybrid3d.rl.objective import KlSettings, LossSettings, PolicyObjective, ValueObjective
from hybrid3d.run.health import Guard
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.run.progress import Progress
from hybrid3d.train.trained_model import BucketHook, StepReport
from hybrid3d.trainer.experience import ExperienceMaker
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.step_experience import Experience, FillOldLogprobs


class _Updates:
    """The reports of a model's updates within one step."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._norms: list[float] = []
        self._tokens = 0
        self._lr = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._norms)

    def add(self, report: StepReport, tokens: int) -> None:
        """Add an update on this many tokens of all ranks."""
        self._sums.update(report.sums)
        self._norms.append(report.grad_norm)
        self._tokens += tokens
        self._lr = report.lr

    def metrics(self, group: str, reports: bool) -> StepMetrics:
        """Return the metrics `<group>/*`; means over tokens on a rank that reports."""
        found, norms = StepMetrics(), self._norms
        if norms:
            found.replicated = {f"{group}/lr": self._lr, f"{group}/grad_norm": sum(norms) / len(norms)}
        if reports:
            found.sums = {f"{group}/{key}": value / max(self._tokens, 1) for key, value in self._sums.items()}
        return found


class Learner:
    """Makes experience from samples, and updates the models with it. All ranks of the group call every method together.

    Each method takes the recipe with the settings of its step.
    """

    def __init__(self, recipe: Recipe, models: Models, guard: Guard, pad_id: int, group: dist.ProcessGroup):
        self._policy, self._critic, self._trained = models.policy, models.critic, models.trained.values()
        self._guard, self._experience = guard, ExperienceMaker(models, guard, pad_id, group)
        kl = recipe.algorithm.kl
        self._kl = KlController(kl.coef, kl.target, kl.horizon)

    @property
    def progress(self) -> Progress:
        """The state besides models that a checkpoint saves, as far as it is the learner's."""
        return Progress(kl=self._kl.state, guard=self._guard.progress)

    def restore(self, progress: Progress, recipe: Recipe) -> None:
        """Restore the state from a checkpoint's progress; `recipe` has the settings with which it was saved."""
        self._kl.restore(progress.kl, recipe.algorithm.kl.coef, recipe.algorithm.kl.target)
        self._guard.restore(progress.guard)

    def make_experience(self, batch: RolloutBatch, step: int, recipe: Recipe) -> Experience:
        """Compute log-probabilities, values, advantages and corrections of this rank's share of a step's samples.

        Raises:
            EngineMismatch: at the first step, training and vLLM do not compute the same model.
        """
        return self._experience.make(batch, step, recipe, self._kl.coef_under(recipe.algorithm.kl.coef))

    def update(
        self, experience: Experience, step: int, recipe: Recipe, bucket_hook: BucketHook | None = None
    ) -> StepMetrics:
        """Update the policy, and the critic where there is one, `epochs` x `minibatches` times.

        An adaptive KL coefficient is adjusted here, for the next step's experience.

        Args:
            bucket_hook: called with each optimizer bucket of the policy's last update.

        Raises:
            TooManyInterventions: a gradient was not accepted or the KL exploded more often than `max_interventions`.
        """
        algorithm = recipe.algorithm
        updates = algorithm.epochs * algorithm.minibatches
        trains_policy = self._trains_policy(step, recipe)
        if not experience.old_from_update:
            self._update_kl_coef(experience, step, recipe, trains_policy)
        done = {"critic": _Updates(), "train": _Updates()}
        for number in range(updates):
            rows = _minibatch(experience, number % algorithm.minibatches, algorithm.minibatches)
            batch = replace(experience.batch, response_mask=experience.mask)[rows]
            tokens = int(experience.trained_lengths[:, rows].sum())
            if self._critic is not None:
                accepts = partial(self._guard.accepts_grad_norm, recipe=recipe, model="critic")
                of_values = _value_objective(experience, rows, recipe)
                report = self._critic.train_step(batch, of_values, recipe, accepts_grad_norm=accepts)
                done["critic"].add(report, tokens)
                if not report.updated:
                    self._guard.record_skip(step, report.grad_norm, recipe, model="critic")
                    break
            if trains_policy:
                hook = bucket_hook if number == updates - 1 else None
                accepts = partial(self._guard.accepts_grad_norm, recipe=recipe)
                objective = self._policy_objective(experience, rows, recipe)
                report = self._policy.train_step(batch, objective, recipe, hook, accepts)
                done["train"].add(report, tokens)
                if not report.updated:
                    self._guard.record_skip(step, report.grad_norm, recipe)
                    break
        for model in self._trained:
            if trains_policy or model is not self._policy:
                model.end_step()
        metrics = StepMetrics()
        for group, group_updates in done.items():
            metrics.update(group_updates.metrics(group, self._policy.is_reporting_rank))
        if experience.old_from_update:
            if not done["train"].count:  # as the critic's gradient was not accepted
                self._fill_by_pass(experience, recipe)
            experience = self._experience.measure_update(experience, recipe)
            self._update_kl_coef(experience, step, recipe, trains_policy)
            metrics.update(experience.metrics)
        return metrics

    def _fill_by_pass(self, experience: Experience, recipe: Recipe) -> None:
        """Fill in what the update should have, with a policy that it has not changed."""
        logprobs = self._policy.logprobs(experience.batch, recipe)
        if logprobs is not None:
            FillOldLogprobs(experience, recipe)(logprobs, slice(None))

    def _update_kl_coef(self, experience: Experience, step: int, recipe: Recipe, trains_policy: bool) -> None:
        kl = recipe.algorithm.kl
        self._kl.configure(kl.coef, kl.target)
        if experience.answer_kl is not None:
            if trains_policy:
                self._kl.observe(experience.answer_kl, sum(not sample.branch for sample in experience.samples))
            self._guard.freeze_kl_coef(step, experience.answer_kl, self._kl, recipe)

    def _trains_policy(self, step: int, recipe: Recipe) -> bool:
        return self._critic is None or step >= recipe.critic.warmup_steps

    def _policy_objective(self, experience: Experience, rows: slice, recipe: Recipe) -> PolicyObjective | None:
        algorithm, mask = recipe.algorithm, experience.mask
        if experience.old is None or experience.advantages is None:
            return None
        assert recipe.rollout is not None, "checked when the recipe was read"
        lengths = experience.trained_lengths[:, rows]
        weights = answer_weights(
            algorithm.combination.loss_agg_mode,
            lengths.flatten(),
            recipe.rollout.max_new_tokens,
            experience.answers[:, rows].flatten(),
            None if bool(experience.trained.all()) else experience.trained[:, rows].flatten(),
        ).reshape(lengths.shape)[self._policy.data_parallel_rank]
        old = experience.rollout if algorithm.correction.bypass else experience.old
        assert old is not None, "each rank has what vLLM computed"
        reference = experience.reference if algorithm.kl.where == "loss" else None
        return PolicyObjective(
            advantages=experience.advantages[rows],
            mask=mask[rows],
            old_logprobs=old[rows],
            answer_weights=weights.to(mask.device),
            loss=_loss_settings(recipe),
            selected=None if experience.selected is None else experience.selected[rows],
            weights=None if experience.correction is None else experience.correction[rows],
            ref_logprobs=None if reference is None else reference[rows],
            kl=_kl_settings(recipe, experience.kl_coef),
            entropy_coef=algorithm.entropy_coef,
            fill=FillOldLogprobs(experience, recipe) if experience.old_from_update else None,
        )


def _loss_settings(recipe: Recipe) -> LossSettings:
    combined, loss = recipe.algorithm.combination, recipe.algorithm.loss
    return LossSettings(
        kind=combined.policy_loss,
        ratio=combined.ratio,
        clip=combined.clip,
        clip_high=combined.clip_high,
        dual_clip=recipe.algorithm.dual_clip,
        tau_positive=loss.tau_positive,
        tau_negative=loss.tau_negative,
        cov_kl_coef=loss.cov_kl_coef,
        max_ratio=loss.max_ratio,
    )


def _kl_settings(recipe: Recipe, coef: float) -> KlSettings:
    kl = recipe.algorithm.kl
    return KlSettings(coef, kl.effective_estimator, kl.effective_clamp, kl.ratio_weighted)


def _minibatch(experience: Experience, number: int, minibatches: int) -> slice:
    """Return this rank's rows of a minibatch; `shares_of` orders a rank's samples by minibatch."""
    each = len(experience.batch) // minibatches
    return slice(number * each, (number + 1) * each)


def _value_objective(experience: Experience, rows: slice, recipe: Recipe) -> ValueObjective | None:
    if experience.returns is None or experience.values is None:
        return None
    return ValueObjective(experience.values[rows], experience.returns[rows], experience.mask[rows], recipe.critic.clip)
