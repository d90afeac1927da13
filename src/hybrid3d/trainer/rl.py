"""The RL training loop: sync, evaluate, generate and score, make experience, update."""

from __future__ import annotations

from dataclasses import replace

from hybrid3d.run.live_settings import LiveSettings
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.trainer.checkpoints import Checkpoints
from hybrid3d.trainer.step_log import StepLog
from hybrid3d.trainer.trainer import Trainer


def train_rl(trainer: Trainer, live: LiveSettings, checkpoints: Checkpoints, log: StepLog) -> None:
    """Train from the last checkpoint in the run's folder, or from the start, to the recipe's last step.

    Row s of the metrics belongs to policy version s; the last version is only evaluated.
    """
    with checkpoints:
        step, progress = checkpoints.resume()
        live.restore(progress.control)
        batch = progress.batch
        if step:
            trainer.restore(progress, live.recipe)
        while step <= live.recipe.run.steps:
            recipe, updates = live.settings_for_step(step), StepMetrics()
            log.begin(step, recipe)
            with log.phase("sync"):
                synced = trainer.sync(step, recipe)
            log.synced(synced)
            if step % recipe.run.eval_every == 0 or step == recipe.run.steps:
                with log.phase("eval"):
                    held_out = trainer.evaluate(step, recipe)
                log.evaluated(held_out)
            with log.phase("generate"):
                generated = trainer.generate_batch(step, batch, recipe)
            log.generated(generated)
            with log.phase("train"):
                experience = trainer.make_experience(generated, step, recipe)
            generated, experience = log.made(generated, experience)
            if step < recipe.run.steps:
                with log.phase("train"):
                    updates = trainer.update(experience, step, recipe)
            log.finish(generated, experience, updates)
            step, batch = step + 1, batch + generated.batches
            unfinished = tuple(generated.unfinished or ())
            progress = replace(trainer.progress, batch=batch, unfinished=unfinished, control=live.control)
            checkpoints.save_if_due(step, progress, recipe.run)
            del generated, experience  # whose tensors would take memory that the next answers' KV cache needs
    log.close()
    trainer.close(live.recipe)
