"""The bounds that `guard` sets on metrics."""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """A bound that the section `guard` has a setting for, and what a user can do when the metric violates it."""

    setting: str
    metric: str
    advice: str


BOUNDS = (
    Bound("max_kl", "train/answer_kl", "raise algorithm.kl.coef, or lower optimizer.lr"),
    Bound("max_clip_fraction", "train/clip_fraction", "lower optimizer.lr, or algorithm.epochs x minibatches"),
    Bound("max_grad_norm", "train/grad_norm", "lower optimizer.lr or optimizer.clip_grad"),
    Bound("min_entropy", "train/entropy", "raise algorithm.entropy_coef or algorithm.clip_high"),
    Bound("max_mismatch_kl", "mismatch/kl", "set algorithm.correction.kind, or a model.dtype of higher precision"),
    Bound("max_sync_share", "sync share", "raise sync.bucket_mib, set sync.overlap=true, or sync.verify=never"),
    Bound("max_memory_gb", "memory", "set train.recompute=full, or lower train.micro_batch_size"),
    Bound("min_tokens_per_second", "tokens_per_second", "look at time/* for the phase that has grown"),
)
