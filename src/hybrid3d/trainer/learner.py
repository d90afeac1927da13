"""The learner: makes experience from a step's samples, and updates the models with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from hybrid3d.train.trained_model import BucketHook, StepReport
from hybrid3d.trainer.checkpoints import Progress
from hybrid3d.trainer.experience import ExperienceMaker
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.step_experience import Experience, fill_old_logprobs


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
        """Compute this rank's share of a step's experience; raises as `ExperienceMaker.make`."""
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
        trains_policy = self._critic is None or step >= recipe.critic.warmup_steps
        if not experience.old_from_update:
            self._update_kl_coef(experience, step, recipe, trains_policy)
        done: dict[str, list[tuple[StepReport, int]]] = {"critic": [], "train": []}
        size = len(experience.batch) // algorithm.minibatches  # `shares_of` orders a rank's samples by minibatch
        for number in range(updates):
            first = size * (number % algorithm.minibatches)
            rows = slice(first, first + size)
            batch = replace(experience.batch, response_mask=experience.mask)[rows]
            tokens = int(experience.trained_lengths[:, rows].sum())
            if self._critic is not None:
                accepts = partial(self._guard.accepts_grad_norm, recipe=recipe, model="critic")
                of_values = _value_objective(experience, rows, recipe)
                report = self._critic.train_step(batch, of_values, recipe, accepts_grad_norm=accepts)
                done["critic"].append((report, tokens))
                if not report.updated:
                    self._guard.record_skip(step, report.grad_norm, recipe, model="critic")
                    break
            if trains_policy:
                hook = bucket_hook if number == updates - 1 else None
                accepts = partial(self._guard.accepts_grad_norm, recipe=recipe)
                objective = self._policy_objective(experience, rows, recipe)
                report = self._policy.train_step(batch, objective, recipe, hook, accepts)
                done["train"].append((report, tokens))
                if not report.updated:
                    self._guard.record_skip(step, report.grad_norm, recipe)
                    break
        for model in self._trained:
            if trains_policy or model is not self._policy:
                model.end_step()
        metrics = StepMetrics()
        for group, group_updates in done.items():
            metrics.update(_metrics_of(group, group_updates, self._policy.is_reporting_rank))
        if experience.old_from_update:
            if not done["train"]:  # as the critic's gradient was not accepted: the policy is unchanged
                logprobs = self._policy.logprobs(experience.batch, recipe)
                if logprobs is not None:
                    fill_old_logprobs(logprobs, slice(None), experience, recipe)
            experience = self._experience.measure_update(experience, recipe)
            self._update_kl_coef(experience, step, recipe, trains_policy)
            metrics.update(experience.metrics)
        return metrics

    def _update_kl_coef(self, experience: Experience, step: int, recipe: Recipe, trains_policy: bool) -> None:
        kl = recipe.algorithm.kl
        self._kl.configure(kl.coef, kl.target)
        if experience.answer_kl is not None:
            if trains_policy:
                self._kl.observe(experience.answer_kl, sum(not sample.branch for sample in experience.samples))
            self._guard.freeze_kl_coef(step, experience.answer_kl, self._kl, recipe)

    def _policy_objective(self, experience: Experience, rows: slice, recipe: Recipe) -> PolicyObjective | None:
        algorithm, kl, mask = recipe.algorithm, recipe.algorithm.kl, experience.mask
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
        reference = experience.reference if kl.where == "loss" else None
        fill = partial(fill_old_logprobs, experience=experience, recipe=recipe)
        return PolicyObjective(
            advantages=experience.advantages[rows],
            mask=mask[rows],
            old_logprobs=old[rows],
            answer_weights=weights.to(mask.device),
            loss=_loss_settings(recipe),
            selected=None if experience.selected is None else experience.selected[rows],
            weights=None if experience.correction is None else experience.correction[rows],
            ref_logprobs=None if reference is None else reference[rows],
            kl=KlSettings(experience.kl_coef, kl.effective_estimator, kl.effective_clamp, kl.ratio_weighted),
            entropy_coef=algorithm.entropy_coef,
            fill=fill if experience.old_from_update else None,
        )


def _metrics_of(group: str, updates: Sequence[tuple[StepReport, int]], reports: bool) -> StepMetrics:
    """Return the metrics `<group>/*` of updates, each with its tokens; means over tokens on a rank that reports."""
    found, sums = StepMetrics(), Counter[str]()
    if updates:
        norms = [report.grad_norm for report, _ in updates]
        found.replicated = {f"{group}/lr": updates[-1][0].lr, f"{group}/grad_norm": sum(norms) / len(norms)}
    if reports:
        for report, _ in updates:
            sums.update(report.sums)
        tokens = max(sum(tokens for _, tokens in updates), 1)
        found.sums = {f"{group}/{key}": value / tokens for key, value in sums.items()}
    return found


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


def _value_objective(experience: Experience, rows: slice, recipe: Recipe) -> ValueObjective | None:
    if experience.returns is None or experience.values is None:
        return None
    return ValueObjective(experience.values[rows], experience.returns[rows], experience.mask[rows], recipe.critic.clip)
