"""Rules of ranks that have one role: those that generate, and those that compute rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid3d.config.refusals import Refusal, arithmetic, definition

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe


def check_split(recipe: Recipe) -> Iterator[Refusal]:
    """Yield settings that make no sense where ranks either train or generate."""
    ranks, train = recipe.roles.generation.ranks, recipe.train
    if ranks is None:
        return
    if not recipe.algorithm.generates:
        yield definition(
            f"roles.generation.ranks={ranks}: algorithm.name={recipe.algorithm.name} never generates: leave it out"
        )
    apart = "no rank has both engines"
    yield from _check_whole_engines(recipe)
    yield from _check_nodes_of_late_ranks(recipe)
    if recipe.rollout is not None:
        yield from _check_nodes(recipe, "generation", "rollout.tp", recipe.rollout.tp)
    if recipe.rollout is not None and recipe.rollout.keep_weights:
        yield definition(f"rollout.keep_weights: {apart}, so that vLLM never sleeps: leave it out")
    for kind in train.offloads:
        yield definition(f"train.offload_{kind}: {apart}, so that Megatron never makes room: leave it out")


def _check_whole_engines(recipe: Recipe) -> Iterator[Refusal]:
    """Yield which of the settings that are a part of the ranks that generate are no number of whole engines."""
    role, rollout = recipe.roles.generation, recipe.rollout
    if rollout is None:
        return
    size = rollout.tp * rollout.dp
    for setting, number in (("active_ranks", role.active_ranks), ("ranks_at_start", role.ranks_at_start)):
        if number is not None and (number > recipe.generation_ranks or number % size):
            yield arithmetic(
                f"roles.generation.{setting}={number}: expected a multiple of rollout.tp x rollout.dp = {size}, up to "
                f"roles.generation.ranks={recipe.generation_ranks}"
            )


def _check_nodes_of_late_ranks(recipe: Recipe) -> Iterator[Refusal]:
    """Yield why ranks that may come late would share a node with ranks that a run waits for."""
    late, per_node = recipe.late_ranks, recipe.machine.gpus_per_node
    borders = [late.start, *([late.stop] if late.stop < recipe.engine_ranks else [])] if late else []
    number = next((border for border in borders if border % per_node), None)
    if number is not None:
        yield arithmetic(
            f"roles.generation.ranks_at_start={recipe.roles.generation.ranks_at_start}: ranks {late.start} to "
            f"{late.stop - 1}, which may come later, would share a node of machine.gpus_per_node={per_node} ranks with "
            f"others: let the first {number} ranks fill whole nodes"
        )


def check_reward_ranks(recipe: Recipe) -> Iterator[Refusal]:
    """Yield why these ranks cannot compute rewards."""
    role, size = recipe.roles.reward, recipe.worker_group_size("reward")
    if role.ranks is None:
        return
    if not recipe.algorithm.generates:
        yield definition(
            f"roles.reward.ranks={role.ranks}: algorithm.name={recipe.algorithm.name} has no rewards: leave it out"
        )
    if role.ranks % size:
        yield arithmetic(
            f"roles.reward.ranks={role.ranks}: expected a multiple of roles.reward.tp x roles.reward.pp = {size}"
        )
    if role.tp % role.ep:
        yield arithmetic(
            f"roles.reward.ep={role.ep} does not divide roles.reward.tp={role.tp}, whose ranks it regroups"
        )
    yield from _check_nodes(recipe, "reward", "roles.reward.tp", role.tp)


def _check_nodes(recipe: Recipe, role: str, setting: str, tp: int) -> Iterator[Refusal]:
    """Yield the first TP group of the ranks of a role that would fit into a node, but would be on two.

    Args:
        setting: the name of `tp`.
    """
    ranks, per_node = recipe.role_ranks[role], recipe.machine.gpus_per_node
    for first in ranks[::tp] if tp <= per_node else ():
        if first % per_node + tp > per_node:
            yield arithmetic(
                f"{setting}={tp}: the TP group of ranks {first} to {first + tp - 1} would be on two nodes of "
                f"machine.gpus_per_node={per_node} ranks: let the {ranks.start} ranks before it fill whole nodes, or "
                f"choose a {setting} that divides both numbers"
            )
            return
