"""Generates with a real vLLM that returns experts, and replays them in a real Megatron, in several layouts.

    torchrun --nproc-per-node N router_replay.py SPEC.json OUT

`SPEC.json` has `folder` (a checkpoint), `dtype`, `rollout_tp`, `noise` and `layouts`, by name. `noise` is added to the
weights of training's routers, as it is and times their standard deviation. OUT gets `rank<n>.pt`; what is measured is
judged by tests/train/test_router_replay.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d import distributed, launch_environment
from hybrid3d.config import Algorithm, Async, Data, Model, Optimizer, Recipe, Rollout, Run, Train
from hybrid3d.families import family_of
from hybrid3d.generation.engine import GenerationRequest, complete
from hybrid3d.generation.samples import AnswerTokens, Sample
from hybrid3d.inputs.models import read_config
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.data import Example
from hybrid3d.rl.objective import sft_loss
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.sync import policy_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.trainer.step_experience import expert_metrics, with_expert_choices

BIAS_RATE = 0.1
TOKENS = 16  # of an answer, at most
LENGTHS = (5, 9, 60, 17, 150, 150, 33, 80)  # of prompts; more than a block of vLLM's KV cache in two of them
NOISES = {"noise": False, "relative noise": True}
SAMPLES = 2  # for each prompt, so that the second finds the first's prompt in vLLM's cache


def recipe_for(spec: dict[str, Any], train: dict[str, Any], replay: str) -> Recipe:
    return Recipe(
        name="router-replay",
        model=Model(path=spec["folder"], dtype=spec["dtype"]),
        train=Train(**{"micro_batch_size": 2, **train}, router_replay=replay, expert_bias_update_rate=BIAS_RATE),
        rollout=Rollout(tp=spec["rollout_tp"], max_model_len=192, max_new_tokens=TOKENS, kv_cache_gib=1 / 256),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=8, samples_per_prompt=2),
        optimizer=Optimizer(lr=1e-3),
        async_=Async(max_staleness=1, partial="continue"),  # parts of answers are asked for
        run=Run(steps=1),
    )


def generate(engine: RolloutEngine) -> list[Sample]:
    """Samples of all replicas, which share the prompts. Every other one is interrupted several times."""
    dice = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 320, (n,), generator=dice).tolist() for n in LENGTHS]
    prompts[5] = [*prompts[4][:140], *prompts[5][140:]]
    work = [(prompt, 10 * i + n) for i, prompt in enumerate(prompts) for n in range(SAMPLES)]
    work = work[engine.replica :: engine.replicas]
    requests = {n: GenerationRequest(p, TOKENS, [2], seed) for n, (p, seed) in enumerate(work)}
    answers = {n: AnswerTokens() for n in requests}
    whole = [n for n in requests if n % 4 < 2]
    for n, completion in zip(whole, complete(engine, [requests[n] for n in whole], 1), strict=True):
        answers[n].append_generated(completion)
    generate_in_pieces(engine, {n: request for n, request in requests.items() if n not in whole}, answers)
    samples = [answers[n].sample(Example(0, "", "", ()), prompt, "") for n, (prompt, _) in enumerate(work)]
    gathered = distributed.gather_objects(samples if engine.leads else [], dist.group.WORLD)
    return [sample for share in gathered for sample in share]


def generate_in_pieces(
    engine: RolloutEngine, requests: dict[int, GenerationRequest], answers: dict[int, AnswerTokens]
) -> None:
    while requests:
        engine.submit(requests, 1)
        ended: set[int] = set()
        for _ in range(9):
            found = engine.step()
            ended |= found.keys()
            for n, completion in found.items():
                answers[n].append_generated(completion)
        for n, completion in engine.interrupt().items():
            if completion.tokens:
                answers[n].append_generated(completion)
                context = [*requests[n].prompt_ids, *completion.tokens]
                left = requests[n].max_new_tokens - len(completion.tokens)
                requests[n] = replace(requests[n], prompt_ids=context, max_new_tokens=left)
        requests = {n: request for n, request in requests.items() if n not in ended}
        engine.reset_cache()  # as a sync does


def count_preemptions(engine: RolloutEngine) -> list[Any]:
    """Requests that the engine preempts from now on: its cache has room for a few of them only."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, found = scheduler._preempt_request, []

    def counted(request: Any, *args: Any, **options: Any) -> None:
        found.append(request.request_id)
        preempt(request, *args, **options)

    scheduler._preempt_request = counted
    return found


def local_batch(policy: Policy, samples: list[Sample], dp: int) -> tuple[Batch, list[Sample]]:
    each = len(samples) // dp
    mine = samples[policy.data_parallel_rank * each :][:each]
    sequences, prompts = [s.sequence for s in mine], [len(s.prompt_ids) for s in mine]
    return Batch.from_sequences(sequences, prompts, pad_id=0), mine


def scrambled(samples: list[Sample], count: int) -> list[Sample]:
    """The samples with other experts than any router would choose, of all of their tokens."""
    found = []
    for sample in samples:
        old = sample.experts.array
        dice = torch.Generator().manual_seed(int(sample.prompt_ids.sum()) * 1000 + int(sample.tokens.sum()))
        tokens = len(sample.prompt_ids) + len(sample.tokens)
        chosen = torch.rand(tokens, old.shape[1], count, generator=dice).argsort(-1)[:, :, : old.shape[2]]
        array = chosen.to(torch.uint8).numpy()
        found.append(replace(sample, experts=type(sample.experts).of(array)))
    return found


@contextmanager
def disturbed(policy: Policy, noise: float, *, relative: bool) -> Iterator[None]:
    """Add noise to the routers' weights for the time of the block, the same in all layouts."""
    routers = [m for stage in policy.stages for m in stage.modules() if type(m).__name__ == "TopKRouter"]
    before = [router.weight.data.clone() for router in routers]
    for router in routers:
        dice = torch.Generator().manual_seed(router.layer_number)
        added = torch.randn(router.weight.shape, generator=dice) * noise
        router.weight.data += (added * router.weight.data.std() if relative else added).to(router.weight.dtype)
    yield
    for router, weight in zip(routers, before, strict=True):
        router.weight.data.copy_(weight)


def biases(policy: Policy) -> dict[int, torch.Tensor]:
    """The biases of this rank's routers by number of the layer, where they have any."""
    routers = [m for stage in policy.stages for m in stage.modules() if type(m).__name__ == "TopKRouter"]
    return {router.layer_number: router.expert_bias.clone() for router in routers if router.expert_bias is not None}


def gaps(policy: Policy, batch: Batch, mine: list[Sample], recipe: Recipe) -> torch.Tensor | None:
    """The absolute differences of this rank's and vLLM's log-probabilities of the answers' tokens."""
    logprobs = policy.logprobs(batch, recipe)
    if logprobs is None:
        return None
    theirs = torch.tensor([value for sample in mine for value in sample.logprobs])
    return (logprobs[batch.response_mask.bool()] - theirs).abs()


def measure(spec: dict[str, Any], train: dict[str, Any], samples: list[Sample]) -> dict[str, Any]:
    """All of one layout: the policies have the weights that vLLM generated with, then noise in their routers."""
    config, found = read_config(spec["folder"]), dict[str, Any]()
    recipe = recipe_for(spec, train, "old")
    policy = Policy(config, recipe, dist.get_rank())
    batch, mine = local_batch(policy, samples, recipe.train.dp)
    found |= {"dp": policy.data_parallel_rank, "reports": policy.is_reporting_rank}
    found["none gaps"] = gaps(policy, batch, mine, recipe)
    found["recorded"] = policy.router_replay.recorded
    given = replace(batch, experts=found["recorded"])
    for name, relative in NOISES.items():
        with disturbed(policy, spec["noise"], relative=relative):
            found[f"none gaps with {name}"] = gaps(policy, batch, mine, recipe)
            found[f"old gaps with {name}"] = gaps(policy, given, mine, recipe)

    recipe = recipe_for(spec, train, "rollout")
    policy = Policy(config, recipe, dist.get_rank())
    given = with_expert_choices(batch, mine, policy, recipe)
    found["rollout gaps"] = gaps(policy, given, mine, recipe)
    found["metrics"] = StepMetrics(expert_metrics(samples, policy, recipe)).reduce(dist.group.WORLD)
    for name, relative in NOISES.items():
        with disturbed(policy, spec["noise"], relative=relative):
            found[f"rollout gaps with {name}"] = gaps(policy, given, mine, recipe)
            found[f"metrics with {name}"] = StepMetrics(expert_metrics(samples, policy, recipe)).reduce(
                dist.group.WORLD
            )

    other = with_expert_choices(batch, scrambled(mine, family_of(config).experts(config).count), policy, recipe)
    real, before = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None], biases(policy)
    for key, experts in (("own", given), ("scrambled", other)):
        logprobs = policy.logprobs(experts, recipe)
        found[key] = None if logprobs is None else logprobs[real]
    report = policy.train_step(other, sft_loss, recipe)
    found["trained"] = {"sums": report.sums, "grad_norm": report.grad_norm}
    found["bias steps"] = {layer: bias - before[layer] for layer, bias in biases(policy).items()}
    return found


def main(path: str, out: Path) -> None:
    spec = json.loads(Path(path).read_text())
    group = distributed.start()
    rank, ranks = group.rank(), group.size()
    recipe = recipe_for(spec, {"dp": ranks}, "rollout")
    runtime.initialize(recipe.train, seed=1)
    engine = RolloutEngine(recipe, rank, launch_environment.run_id(), range(ranks))
    preempted = count_preemptions(engine)
    policy = Policy(read_config(spec["folder"]), recipe, rank, trainable=False)
    policy_sync(recipe, group, policy, engine).run(1)
    samples = generate(engine)
    runtime.shutdown()
    found: dict[str, Any] = {"samples": samples, "scrambled": scrambled(samples, 8), "preempted": len(preempted)}
    for name, train in spec["layouts"].items():
        runtime.initialize(Train(**train), seed=1)
        found[name] = measure(spec, train, samples)
        runtime.shutdown()
    torch.save(found, out / f"rank{rank}.pt")
    dist.barrier(group)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
