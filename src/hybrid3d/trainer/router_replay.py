"""Router replay in a step: which choices of experts the policy's passes over a batch replay, and what is measured.

The choices stay with the rank that has got a sample from vLLM (`ExpertChoices.held_by`) until it is known which ranks
train the sample: these get them, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hybrid3d.config import Recipe
from hybrid3d.generation.samples import Sample
from hybrid3d.rl.batch import Batch
from hybrid3d.train.trained_model import PolicyModel


def with_expert_choices(batch: Batch, samples: Sequence[Sample], policy: PolicyModel, recipe: Recipe) -> Batch:
    """Return the batch with vLLM's choices, if they are to be replayed. Where there are none, routers choose.

    Args:
        samples: those of the batch.
    """
    if recipe.train.router_replay != "rollout" or policy.router_replay is None:
        return batch
    experts = torch.full((*batch.tokens.shape, *policy.router_replay.shape), -1, dtype=torch.int16)
    for row, sample in enumerate(samples):
        chosen = torch.from_numpy(sample.experts.array.astype("int16"))
        if len(chosen):
            experts[row, : len(chosen)] = chosen
    return replace(batch, experts=experts)


def replaying_updates(batch: Batch, policy: PolicyModel, recipe: Recipe) -> Batch:
    """Return the batch for the policy's updates, after the pass that computed the old log-probabilities."""
    if recipe.train.router_replay != "old" or policy.router_replay is None:
        return batch
    return replace(batch, experts=policy.router_replay.recorded)


def expert_metrics(samples: Sequence[Sample], policy: PolicyModel, recipe: Recipe) -> dict[str, float]:
    """Return this rank's share of the metrics of vLLM's choices, after the pass that computed old log-probabilities.

    Args:
        samples: those of all ranks.

    Returns:
        `mismatch/expert_agreement`: the fraction of choices that the policy's routers would have made too, with the
            same choices in the layers before.
        `mismatch/missing_expert_choices`: the fraction of tokens without choices. Nothing depends on those of a
            sequence's last token, which is not counted.
    """
    replay = policy.router_replay
    if recipe.train.router_replay != "rollout" or replay is None:
        return {}
    layers, per_token = replay.shape
    given = sum(len(sample.experts) for sample in samples)
    needed = [len(sample.prompt_ids) + len(sample.tokens) - 1 for sample in samples]
    missing = sum(max(0, n - len(sample.experts)) for n, sample in zip(needed, samples, strict=True))
    found = {"mismatch/expert_agreement": replay.equal_choices() / max(1, given * layers * per_token)}
    if policy.is_reporting_rank and policy.data_parallel_rank == 0:
        found["mismatch/missing_expert_choices"] = missing / sum(needed)
    return found
