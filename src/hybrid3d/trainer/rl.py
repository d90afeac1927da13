"""The RL training loop: sync, evaluate, generate and score, make experience, update."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.run.health import Guard
from hybrid3d.run.live_settings import LiveSettings
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.metrics import PhaseTimer
from hybrid3d.trainer.activity import gather_activity
from hybrid3d.trainer.checkpoints import Checkpoints
from hybrid3d.trainer.protocols import Roles
from hybrid3d.trainer.step_experience import Experience
from hybrid3d.trainer.step_recorder import StepRecorder
from hybrid3d.watch.work_meter import record as work_record


def train_rl(
    roles: Roles,
    live: LiveSettings,
    guard: Guard,
    checkpoints: Checkpoints,
    recorder: StepRecorder,
    record: RunLogger,
    group: dist.ProcessGroup,
) -> None:
    """Train from the last checkpoint in the run's folder, or from the start, to the recipe's last step.

    Row s of the metrics belongs to policy version s; the last version is only evaluated.
    """
    with checkpoints:
        step, progress = checkpoints.resume()
        live.restore(progress.control)
        batch = progress.batch
        if step:
            roles.restore(progress, live.recipe)
        while step <= live.recipe.run.steps:
            recipe = live.settings_for_step(step)
            rollout = recipe.rollout
            assert rollout is not None, "checked when the recipe was read"
            work_record.begin_step(step)
            timer, row = PhaseTimer(roles.activities), dict[str, float](step=step)
            with timer("sync"):
                synced = roles.sync(step, recipe)
            record.corrupted_sync(synced.corrupted, step)
            record.dense_sync(synced.dense_reason, step)
            record.sync_choice(synced.choice, step)
            record.truncated_sampling(rollout, step)
            record.sampling_temperature(recipe, step)
            if step % recipe.run.eval_every == 0 or step == recipe.run.steps:
                with timer("eval"):
                    held_out = roles.evaluate(step, recipe)
                record.scoring_failures(held_out, step)
                row |= held_out.metrics
            with timer("generate"):
                generated = roles.generate_batch(step, batch, recipe)
            batch += generated.batches
            record.scoring_failures(generated, step)
            with timer("train"):
                experience = roles.make_experience(generated, step, recipe)
                row |= generated.metrics(experience.samples, rollout, step)
                tokens = sum(len(sample.prompt_ids) + len(sample.tokens) for sample in experience.samples)
            recorder.begin(step, recipe, roles.progress, timer)
            if group.rank() and not recorder.is_recording:
                generated, experience = _without_samples(generated, experience)
            with timer("train"):
                metrics = experience.metrics
                metrics.update(synced.metrics())
                if step < recipe.run.steps:
                    metrics.update(roles.update(experience, step, recipe))
            with timer("wait"):  # for the slowest rank
                row |= metrics.reduce(group)
            recorder.finish(step, recipe, generated, experience, row, timer)
            row |= timer.row(tokens)
            record.step(row, recipe.run.steps, experience.samples)
            activity = gather_activity(timer, group, roles)
            record.memory(step, activity.peaks)
            if step < recipe.run.steps:
                record.timeline(step, recipe.role_ranks, activity.spans, activity.peaks)
            guard.check_bounds(row, activity.peak_gb, recipe)
            step += 1
            unfinished = tuple(generated.unfinished or ())
            progress = replace(roles.progress, batch=batch, unfinished=unfinished, control=live.control)
            checkpoints.save_if_due(step, progress, recipe.run)
    record.draw_timeline()
    roles.close(live.recipe)


def _without_samples(generated: RolloutBatch, experience: Experience) -> tuple[RolloutBatch, Experience]:
    """Return the same without what samples hold: the experience's tensors have the rows that this rank trains on."""
    samples = [sample.emptied() for sample in experience.samples]
    return replace(generated, samples=[], greedy=[]), replace(experience, samples=samples)
