"""The supervised training loop, with the negative log-likelihood of the answers; imports no rollout engine."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from hybrid3d.inputs.models import read_data, read_tokenizer
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.data import encode_pair
from hybrid3d.rl.objective import sft_loss
from hybrid3d.roles.shares import shares_of
from hybrid3d.run.health import Guard
from hybrid3d.run.live_settings import LiveSettings
from hybrid3d.run.metrics import PhaseTimer, StepMetrics
from hybrid3d.run.record import Record
from hybrid3d.run.slow_ranks import record as work_record
from hybrid3d.train.policy import Policy
from hybrid3d.trainer.activity import gather_activity
from hybrid3d.trainer.checkpoints import Checkpoints


def train_sft(
    policy: Policy, live: LiveSettings, guard: Guard, checkpoints: Checkpoints, record: Record, group: dist.ProcessGroup
) -> None:
    """Train from the last checkpoint in the run's folder, or from the start, to the recipe's last step.

    Row s of the metrics has the loss of policy version s, computed before update s + 1.
    """
    config, tokenizer = policy.config, read_tokenizer(live.recipe)
    data, held_out = read_data(live.recipe, config, tokenizer)
    record.data({"train": data, **held_out})
    work_record.trains(live.recipe, group.rank())
    with checkpoints:
        step, progress = checkpoints.resume()
        live.restore(progress)
        if progress:
            guard.restore(progress["guard"])
        while step < (recipe := live.settings_for_step(step)).run.steps:
            work_record.begin_step(step)
            timer, metrics = PhaseTimer(), StepMetrics()
            examples = data.batch(step, recipe.sequences_per_step)
            pairs = [encode_pair(tokenizer, example, config["max_position_embeddings"]) for example in examples]
            shares = shares_of(recipe, [len(tokens) for tokens, _ in pairs])
            local = [pairs[i] for i in shares[policy.data_parallel_rank]]
            batch = Batch.from_sequences([p[0] for p in local], [p[1] for p in local], pad_id=tokenizer.pad_token_id)
            with timer("train"):
                accepts = partial(guard.accepts_grad_norm, recipe=recipe)
                report = policy.train_step(batch, sft_loss, recipe, accepts_grad_norm=accepts)
                policy.end_step()
            if not report.updated:
                guard.record_skip(step, report.grad_norm, recipe)
            num_answer_tokens = sum(len(tokens) - prompt for tokens, prompt in pairs)
            if policy.is_reporting_rank:
                metrics.sums = {f"train/{key}": value / num_answer_tokens for key, value in report.sums.items()}
            row = {"step": step, "train/grad_norm": report.grad_norm, "train/lr": report.lr} | metrics.reduce(group)
            row |= timer.row(sum(len(tokens) for tokens, _ in pairs))
            record.step(row, recipe.run.steps)
            activity = gather_activity(timer, group)
            record.memory(step, activity.peaks)
            guard.check_bounds(row, activity.peak_gb, recipe)
            step += 1
            checkpoints.save_if_due(step, {"guard": guard.progress} | live.progress, recipe.run)
