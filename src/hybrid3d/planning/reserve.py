"""Counts the memory of a GPU that neither tensors nor vLLM's cache take: contexts, communicators and CUDA graphs.

Where the figures come from:

- contexts: in `benchmarks/results/gpu-check-h100.md` an H100 of 85.0 GB (79.2 GiB) was full after 78 GiB of tensors of
  a process in which torch and Megatron had run. What else it had is at most 1.3 GB. vLLM's kernels are assumed to add
  0.5 GB; that was not measured;
- communicators: assumed, as several ranks have not been run on GPUs: 0.25 GB for the buffers of NCCL's channels to the
  neighbours in rings and trees. What is counted is their number, which `tests/planning/test_process_groups.py` compares
  with runs;
- graphs: assumed: 1 GB for the graphs that vLLM captures. They are not freed while vLLM sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid3d.config import Recipe

TRAINING_CONTEXT, ROLLOUT_CONTEXT = 1_300_000_000, 500_000_000
COMMUNICATOR = 250_000_000
GRAPHS = 1_000_000_000


@dataclass(frozen=True)
class Reserve:
    """Bytes of a GPU that are taken all the time.

    Attributes:
        contexts: the driver's context of a process, with the code that is loaded into it.
        training_communicators: NCCL's of Megatron's groups and of syncs.
        rollout_communicators: NCCL's of vLLM, which it counts in its fraction of the memory.
        graphs: vLLM's CUDA graphs, which it counts in its fraction, too.
    """

    contexts: int = 0
    training_communicators: int = 0
    rollout_communicators: int = 0
    graphs: int = 0

    @property
    def of_rollout(self) -> int:
        """Bytes within vLLM's fraction that it has while it sleeps, too."""
        return self.rollout_communicators + self.graphs

    @property
    def of_training(self) -> int:
        """Bytes beside vLLM's fraction."""
        return self.contexts + self.training_communicators

    @property
    def total(self) -> int:
        return self.of_rollout + self.of_training


NO_RESERVE = Reserve()


def reserve_of(recipe: Recipe, has_experts: bool) -> Reserve:
    """Return what a rank that trains and generates takes; where ranks do one of both, each has less."""
    return Reserve(
        contexts=TRAINING_CONTEXT + ROLLOUT_CONTEXT,
        training_communicators=COMMUNICATOR * count_training_groups(recipe, has_experts),
        rollout_communicators=COMMUNICATOR * count_rollout_groups(recipe),
        graphs=GRAPHS,
    )


def count_training_groups(recipe: Recipe, has_experts: bool) -> int:
    """Return the number of groups of several ranks over which a rank trains and syncs (`train.runtime.use_groups`)."""
    train, ranks = recipe.train, recipe.train_ranks
    of_stage, sharing = ranks // train.pp, train.ep * train.etp
    sizes = [train.tp, train.pp, train.cp, train.dp * train.cp, train.pp, ranks]  # that of embeddings has ends of pp
    if has_experts:
        sizes += [train.ep, train.etp, sharing, of_stage // sharing]
    neighbours = 2 if train.vpp > 1 else 0  # messages apart from others have communicators of two ranks
    weights = int(recipe.sync_ranks > 1)
    return sum(size > 1 for size in sizes) + neighbours + weights


def count_rollout_groups(recipe: Recipe) -> int:
    """Return the number of groups of several ranks over which vLLM computes."""
    rollout = recipe.rollout
    assert rollout is not None, "checked when the recipe was read"
    return (rollout.tp > 1) + (rollout.dp > 1) + (rollout.expert_parallel and rollout.tp * rollout.dp > 1)
