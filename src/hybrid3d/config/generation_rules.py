"""Rules of generation: ahead of training, in parts, by agents, on held-out problems, and with experts returned.

And of ranks that have one role: those that generate, and those that compute rewards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid3d.config.refusals import VLLM, Refusal, arithmetic, by_engine, definition, not_built
from hybrid3d.config.schema import MAX_PORT

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe
    from hybrid3d.config.sections.engines import Async, Rollout


RESERVED_NAMES = ("train", "eval", "accuracy", "reward")  # of files with held-out problems


def check_async(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what generation ahead of training, and partial rollouts, cannot do."""
    ahead, rollout = recipe.async_, recipe.rollout
    staleness = f"async.max_staleness={ahead.max_staleness}"
    if not ahead.max_staleness and ahead.partial is not None:
        yield definition(
            f"async.partial={ahead.partial}: {staleness} lets no answer take longer than its step: set it to the "
            "number of steps that an answer may go on for"
        )
    if not ahead.max_staleness or not recipe.algorithm.generates:
        return
    if not recipe.is_split and ahead.partial is None:
        yield definition(
            f"{staleness}: the ranks that train also generate: set roles.generation.ranks or async.partial"
        )
    if recipe.algorithm.correction.kind == "none" and not recipe.algorithm.correction.bypass:
        yield arithmetic(  # the gradient would be that of another distribution of samples
            f"{staleness}: older weights than those that are trained generate the samples, and "
            "algorithm.correction.kind=none does not correct for it: set truncate, mask, "
            "sequence_truncate, sequence_mask or sequence_mean_mask, or bypass: true"
        )
    if ahead.partial is not None and rollout is not None:
        yield from _check_partial(recipe, ahead, rollout)


def _check_partial(recipe: Recipe, ahead: Async, rollout: Rollout) -> Iterator[Refusal]:
    if ahead.keeps_cache and rollout.sleep and not recipe.is_split:
        yield not_built(
            "weights can be kept in a vLLM that sleeps, and a cache could",
            f"async.partial={ahead.partial}: vLLM frees its KV cache while it sleeps: set rollout.sleep=false",
        )
    if ahead.keeps_cache and rollout.dp > 1:
        yield not_built(
            "the engines would have to agree on the step in which all of them pause",
            f"async.partial={ahead.partial}: with rollout.dp={rollout.dp} engines that share experts must end their "
            "requests together before a sync: set async.partial=continue",
        )
    if ahead.batches_in_flight > ahead.max_staleness + 1:
        yield arithmetic(
            f"async.batches_in_flight={ahead.batches_in_flight}: more than async.max_staleness + 1 = "
            f"{ahead.max_staleness + 1}, so that prompts would be too old when they are trained: at most that"
        )
    if rollout.environment is not None and rollout.dp > 1:
        yield not_built(
            "an engine whose answers wait would have to step along without a request",
            f"async.partial={ahead.partial}: engines that share experts (rollout.dp={rollout.dp}) step together, and "
            f"cannot wait for rollout.environment={rollout.environment} apart: set rollout.dp=1, or leave "
            "async.partial out",
        )


def check_evaluation(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what cannot be measured on held-out problems, and files or names that stand there twice."""
    evaluation, samples = recipe.evaluation, f"evaluation.samples={recipe.evaluation.samples}"
    if recipe.rollout is None:
        return
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield definition(
            f"{samples}: with evaluation.temperature=0 all answers to a problem are the same: set a temperature, such "
            "as 1, or samples: 1"
        )
    for k in evaluation.k if evaluation.samples > 1 else ():
        if k > evaluation.samples:
            yield arithmetic(
                f"evaluation.k: pass@{k} needs at least {k} answers per problem, and {samples}: raise it, or lower k"
            )
    files = {recipe.data.eval: "data.eval"}
    for name, path in evaluation.data.items():
        setting = f"evaluation.data.{name}"
        if name in RESERVED_NAMES:
            yield definition(f"{setting}: {name} is a name that metrics have: choose another")
        if path in files:
            yield definition(f"{setting}={path} is the file of {files[path]} too: leave one of them out")
        files.setdefault(path, setting)


def check_agents(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what cannot be combined with agents."""
    rollout, reward = recipe.rollout, recipe.reward
    if rollout is None or rollout.agents is None:
        return
    agents, last_port = "rollout.agents", rollout.agents.port + recipe.world_size - 1
    if last_port > MAX_PORT:
        yield arithmetic(
            f"{agents}.port={rollout.agents.port}: the last of {recipe.world_size} ranks would listen at {last_port}: "
            f"at most {MAX_PORT - recipe.world_size + 1}"
        )
    if rollout.environment is not None:
        yield definition(f"{agents}: agents take turns themselves: leave rollout.environment={rollout.environment} out")
    if rollout.dp > 1:
        yield not_built(
            "an engine whose answers wait would have to step along without a request",
            f"{agents}: engines that share experts (rollout.dp={rollout.dp}) step together, and cannot wait for agents "
            "apart: set rollout.dp=1",
        )
    if reward.overlong_buffer:
        yield not_built(
            "the branch of the last reply, which is scored, has a length",
            f"{agents}: the length of an agent's answer is not that of one sequence: leave "
            f"reward.overlong_buffer={reward.overlong_buffer} out",
        )


def check_router_replay(recipe: Recipe) -> Iterator[Refusal]:
    """Yield where vLLM does not return the experts that it chose."""
    if recipe.train.router_replay == "rollout" and recipe.rollout is not None and recipe.async_.keeps_cache:
        yield by_engine(
            VLLM,
            "train.router_replay=rollout: vLLM returns experts only with its prefix cache, which "
            f"async.partial={recipe.async_.partial} turns off: set async.partial=continue, or train.router_replay=old",
        )


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
    """Yield the first TP group of the ranks of a role that would fit into a node, but would be on two."""
    ranks, per_node = recipe.role_ranks[role], recipe.machine.gpus_per_node
    for first in ranks[::tp] if tp <= per_node else ():
        if first % per_node + tp > per_node:
            yield arithmetic(
                f"{setting}={tp}: the TP group of ranks {first} to {first + tp - 1} would be on two nodes of "
                f"machine.gpus_per_node={per_node} ranks: let the {ranks.start} ranks before it fill whole nodes, or "
                f"choose a {setting} that divides both numbers"
            )
            return
