"""The training loops: sync, generate, reward, log-probabilities and advantages, update; and again."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid3d import distributed
from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.data import encode_pair
from hybrid3d.rl.objective import sft_loss
from hybrid3d.roles.colocated import Colocated
from hybrid3d.run.health import Guard
from hybrid3d.run.live_settings import Control
from hybrid3d.run.record import Record
from hybrid3d.train.policy import Policy
from hybrid3d.train.runtime import peak_memory
from hybrid3d.trainer.checkpoints import Checkpoints
from hybrid3d.trainer.learner import Learner, shares_of
from hybrid3d.trainer.metrics import Clock, StepMetrics, of_samples
from hybrid3d.trainer.models import Models


def train_rl(control: Control, record: Record, rank: int, slots: Sequence[int]) -> None:
    """Row s of the metrics tells of the policy after s steps of updates; the last policy is only measured."""
    recipe = control.recipe
    run = Colocated(recipe, rank, slots)
    run.engine.sleep()
    record.data(train=run.rollouts.train, eval=run.rollouts.held_out)
    models, guard = Models.of(recipe, run.policy, rank), Guard(recipe, record)
    learner = Learner(recipe, models, guard, run.tokenizer.pad_token_id)
    checkpoints = Checkpoints(recipe, models.trained, record)
    control.serve(models, learner, guard, checkpoints, run.engine, run.sync, record)
    with checkpoints:
        step, progress = checkpoints.resume()
        control.restore(progress)
        batch = learner.restore(progress) if progress else 0
        while step <= control.recipe.run.steps:
            recipe = control.before(step)
            clock, measured, row = Clock(), StepMetrics(), {"step": step}
            with clock("sync"):
                synced = run.sync_weights(step)
            record.corrupted(synced.corrupted, step)
            measured.add_sync(synced)
            models.offload()
            run.engine.wake("kv_cache")
            if step % recipe.run.eval_every == 0 or step == recipe.run.steps:
                with clock("eval"):
                    held_out = run.rollouts.evaluate(step)
                record.failed(held_out, step)
                row |= {"eval/accuracy": held_out.accuracy, "eval/reward": held_out.reward}
            with clock("generate"):
                drawn = run.rollouts.draw(step, batch, learner.further_batches)
                batch += drawn.batches
            record.failed(drawn, step)
            run.engine.sleep()
            with clock("train"):
                experience, samples, known = learner.experience(drawn.samples, step, measured)
                if step < recipe.run.steps:
                    row |= learner.update(experience, step, measured, run.overlap_hook(step + 1))
            row |= known | of_samples(drawn, samples, recipe.rollout) | measured.over_ranks()
            row |= clock.row(sum(len(s.prompt_ids) + len(s.tokens) for s in samples))
            record.step(row, samples)
            guard.watch(row, distributed.all_reduce_max(peak_memory()) / 1e9)
            step += 1
            checkpoints.save_where_due(step, learner.progress(batch) | control.progress)
    run.close()


def train_sft(control: Control, record: Record, rank: int) -> None:
    """Supervised: negative log-likelihood of the answers. Row s of the metrics is the loss before update s + 1."""
    recipe = control.recipe
    config, tokenizer = read_config(recipe.model.path), read_tokenizer(recipe)
    policy, guard = Policy(config, recipe, rank), Guard(recipe, record)
    checkpoints = Checkpoints(recipe, {"policy": policy}, record)
    data, held_out = read_data(recipe, config, tokenizer)
    record.data(train=data, eval=held_out)
    control.serve(policy, guard, checkpoints, record)
    with checkpoints:
        step, progress = checkpoints.resume()
        control.restore(progress)
        if progress:
            guard.restore(progress["guard"])
        while step < (recipe := control.before(step)).run.steps:
            clock, measured = Clock(), StepMetrics()
            examples = data.batch(step, recipe.sequences_per_step)
            pairs = [encode_pair(tokenizer, example, config["max_position_embeddings"]) for example in examples]
            shares = shares_of(recipe, [len(tokens) for tokens, _ in pairs])
            mine = [pairs[i] for i in shares[policy.data_parallel_rank]]
            batch = Batch.from_sequences([p[0] for p in mine], [p[1] for p in mine], pad_id=tokenizer.pad_token_id)
            with clock("train"):
                report = policy.train_step(batch, sft_loss, accepts_grad_norm=guard.accepts_grad_norm)
                policy.end_step()
            if not report.updated:
                guard.record_skip(step, report.grad_norm)
            answered = sum(len(tokens) - prompt for tokens, prompt in pairs)
            if policy.counts:
                measured.sums |= {f"train/{key}": value / answered for key, value in report.sums.items()}
            row = {"step": step, "train/grad_norm": report.grad_norm, "train/lr": report.lr} | measured.over_ranks()
            row |= clock.row(sum(len(tokens) for tokens, _ in pairs))
            record.step(row)
            guard.watch(row, distributed.all_reduce_max(peak_memory()) / 1e9)
            step += 1
            checkpoints.save_where_due(step, {"guard": guard.progress} | control.progress)
