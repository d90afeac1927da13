"""The training loops: sync, generate, reward, log-probabilities and advantages, update; and again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid3d.colocated import Colocated
from hybrid3d.config import Recipe
from hybrid3d.display import Display
from hybrid3d.inputs import read_config, read_data, read_tokenizer
from hybrid3d.measure import Clock, Measured, of_samples, per_token
from hybrid3d.rl.advantages import grpo_advantages
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.data import encode_pair
from hybrid3d.rl.grpo import TokenLoss, grpo_loss, mismatch, sft_loss
from hybrid3d.rollouts import Sample
from hybrid3d.run_folder import RunFolder, checkpoint_folder, steps_in
from hybrid3d.sync import SyncReport
from hybrid3d.train import checkpoint
from hybrid3d.train.policy import Policy
from hybrid3d.train.runtime import device
from hybrid3d.train.stepping import Ready

SAMPLES_KEPT = 4  # a step, in samples.jsonl


def train_grpo(recipe: Recipe, folder: RunFolder, rank: int, slots: Sequence[int], display: Display) -> None:
    """GRPO (arXiv 2402.03300). Row s of the metrics tells of the policy after s updates; the last is only measured."""
    run = Colocated(recipe, rank, slots)
    policy = run.policy
    run.engine.sleep()
    reference = Policy(run.config, recipe, rank, trainable=False) if recipe.algorithm.kl.where == "loss" else None
    for step in range(_resume(policy, folder, rank, display), recipe.run.steps + 1):
        clock, measured, row = Clock(), Measured(), {"step": step}
        with clock("sync"):
            synced = run.bring_weights(step)
        _tell_corrupted(synced, step, folder, rank, display)
        measured.add_sync(synced)
        run.engine.wake("kv_cache")
        if step % recipe.run.eval_every == 0 or step == recipe.run.steps:
            with clock("eval"):
                row["eval/accuracy"] = run.rollouts.accuracy(step)
        with clock("generate"):
            samples = run.rollouts.draw(step)
        run.engine.sleep()
        with clock("train"):
            experience = _experience(recipe, policy, reference, samples, run.tokenizer.pad_token_id, step)
            _measure_mismatch(policy, experience, measured)
            if step < recipe.run.steps:
                row |= _update(
                    policy, experience.batch, _grpo_loss(recipe, experience), measured, run.bringing(step + 1)
                )
        row |= of_samples(samples) | per_token(measured.over_ranks(), sum(len(s.tokens) for s in samples))
        row |= clock.row(sum(len(s.prompt_ids) + len(s.tokens) for s in samples))
        _record(folder, rank, display, row, samples)
        _checkpoint(recipe, policy, folder, rank, display, updates=step + 1)
    run.close()


def train_sft(recipe: Recipe, folder: RunFolder, rank: int, display: Display) -> None:
    """Supervised: negative log-likelihood of the answers. Row s of the metrics is the loss before update s + 1."""
    config, tokenizer = read_config(recipe.model.path), read_tokenizer(recipe)
    policy = Policy(config, recipe, rank)
    data, _ = read_data(recipe, config, tokenizer)
    for step in range(_resume(policy, folder, rank, display), recipe.run.steps):
        clock, measured = Clock(), Measured()
        examples = data.batch(step, recipe.sequences_per_step)
        pairs = [encode_pair(tokenizer, example, config["max_position_embeddings"]) for example in examples]
        mine = pairs[_share(recipe, policy, len(pairs))]
        batch = Batch.from_sequences([p[0] for p in mine], [p[1] for p in mine], pad_id=tokenizer.pad_token_id)
        with clock("train"):
            row = {"step": step} | _update(policy, batch, sft_loss, measured)
        row |= per_token(measured.over_ranks(), sum(len(tokens) - prompt for tokens, prompt in pairs))
        row |= clock.row(sum(len(tokens) for tokens, _ in pairs))
        _record(folder, rank, display, row, [])
        _checkpoint(recipe, policy, folder, rank, display, updates=step + 1)


@dataclass(frozen=True)
class Experience:
    """This data-parallel rank's samples, and what is known of them before the update: all [B, T] but advantages [B].

    Log-probabilities of the policy (`old`) and of the reference are there only where the output layer is.
    """

    batch: Batch
    advantages: torch.Tensor
    rollout: torch.Tensor
    old: torch.Tensor | None
    reference: torch.Tensor | None


def _experience(
    recipe: Recipe, policy: Policy, reference: Policy | None, samples: list[Sample], pad_id: int, step: int
) -> Experience:
    advantages = grpo_advantages(_rewards(recipe, samples, step), recipe.algorithm.samples_per_prompt)
    share = _share(recipe, policy, len(samples))
    mine = samples[share]
    sequences = [sample.prompt_ids + sample.tokens for sample in mine]
    batch = Batch.from_sequences(sequences, [len(sample.prompt_ids) for sample in mine], pad_id=pad_id)
    return Experience(
        batch=batch.to(device()),
        advantages=advantages[share].to(device()),
        rollout=batch.align([sample.logprobs for sample in mine]).to(device()),
        old=policy.logprobs(batch),
        reference=reference.logprobs(batch) if reference is not None else None,
    )


def _rewards(recipe: Recipe, samples: list[Sample], step: int) -> torch.Tensor:
    """[B]; with `reward.shuffle`, a control experiment, each sample gets the reward of another."""
    rewards = [sample.reward for sample in samples]
    if recipe.reward.shuffle:
        random.Random(f"{recipe.run.seed}/{step}").shuffle(rewards)
    return torch.tensor(rewards)


def _share(recipe: Recipe, policy: Policy, sequences: int) -> slice:
    """This data-parallel rank's consecutive rows."""
    each = sequences // recipe.train.dp
    return slice(policy.data_parallel_rank * each, (policy.data_parallel_rank + 1) * each)


def _measure_mismatch(policy: Policy, experience: Experience, measured: Measured) -> None:
    if policy.counts and experience.old is not None:
        largest, divergence = mismatch(experience.old, experience.rollout, experience.batch.response_mask)
        measured.maxima["mismatch/logprob_abs_max"] = largest
        measured.sums["mismatch/kl"] = divergence


def _grpo_loss(recipe: Recipe, experience: Experience) -> TokenLoss:
    return grpo_loss(
        experience.advantages,
        experience.batch.response_mask,
        experience.old,
        experience.reference,
        clip=recipe.algorithm.clip,
        kl_estimator=recipe.algorithm.kl.estimator,
        kl_coef=recipe.algorithm.kl.coef,
    )


def _update(
    policy: Policy, batch: Batch, loss: TokenLoss, measured: Measured, ready: Ready | None = None
) -> dict[str, float]:
    report = policy.train_step(batch, loss, ready)
    if policy.counts:
        measured.sums |= {f"train/{key}": value for key, value in report.sums.items()}
    return {"train/grad_norm": report.grad_norm, "train/lr": report.lr}


def _record(folder: RunFolder, rank: int, display: Display, row: dict[str, float], samples: list[Sample]) -> None:
    display.show(row)
    if rank == 0:
        folder.add_metrics(row)
        kept = samples[:: max(1, len(samples) // SAMPLES_KEPT)][:SAMPLES_KEPT]
        folder.add_samples(
            {"step": row["step"], "weights": s.weights, "prompt": s.prompt, "answer": s.answer, "reward": s.reward}
            for s in kept
        )


def _tell_corrupted(synced: SyncReport, step: int, folder: RunFolder, rank: int, display: Display) -> None:
    count = len(synced.corrupted)
    if count and rank == 0:
        display.say(f"step {step}: {count} tensors had not landed as they were sent; everything was moved once more")
        folder.add_event("sync_corrupted", step=step, count=count, tensors=synced.corrupted[:20])


def _resume(policy: Policy, folder: RunFolder, rank: int, display: Display) -> int:
    """Updates that the policy has behind it: those of the folder's last checkpoint, if there is one."""
    steps = steps_in(folder)
    if steps:
        checkpoint.load({"policy": policy}, checkpoint_folder(folder, steps[-1]))
        display.say(f"resumed from {checkpoint_folder(folder, steps[-1])}")
    updates = steps[-1] if steps else 0
    if rank == 0:
        folder.truncate(updates)
        folder.add_event("resume" if steps else "start", step=updates)
    return updates


def _checkpoint(recipe: Recipe, policy: Policy, folder: RunFolder, rank: int, display: Display, updates: int) -> None:
    every = recipe.run.checkpoint_every
    if updates == recipe.run.steps or (every and updates < recipe.run.steps and updates % every == 0):
        path = checkpoint_folder(folder, updates)
        checkpoint.save({"policy": policy}, path)
        if rank == 0:
            folder.add_event("checkpoint", step=updates, path=str(path))
