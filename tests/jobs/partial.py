"""Interrupts answers of a real vLLM between two tokens and goes on with them; uninterrupted ones are the truth.

    torchrun --nproc-per-node 4 partial.py FOLDER OUT_FOLDER

Four ranks are two replicas with TP2.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid3d import distributed, launch_environment
from hybrid3d.config import Algorithm, Async, Data, Model, Optimizer, Recipe, Rollout, Run, Train
from hybrid3d.generation.engine import Completion, GenerationRequest, Sampling, StaleWeights, complete
from hybrid3d.inputs.models import read_config
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.sync import policy_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy

STEPS = 5  # between interruptions


def pieces(engine: RolloutEngine, requests: dict[int, GenerationRequest]) -> tuple[dict[int, Completion], int]:
    """The completions of requests that are interrupted after every few tokens, and how often one was."""
    found = {number: Completion((), (), 0) for number in requests}
    going_on, interrupted = dict(requests), 0
    while going_on:
        engine.submit(going_on, 3)
        ended: set[int] = set()
        for _ in range(STEPS):
            for number, completion in engine.step().items():
                found[number] = joined(found[number], completion)
                ended.add(number)
        for number, completion in engine.interrupt().items():
            found[number] = joined(found[number], completion)
            interrupted += 1
        going_on = {
            number: replace(
                request,
                prompt_ids=[*request.prompt_ids, *found[number].tokens],
                max_new_tokens=request.max_new_tokens - len(found[number].tokens),
            )
            for number, request in requests.items()
            if number in going_on.keys() - ended
        }
        engine.reset_cache()  # as a sync does, which needs an engine without requests
    return found, interrupted


def paused_pieces(engine: RolloutEngine, requests: dict[int, GenerationRequest]) -> tuple[dict[int, Completion], int]:
    """The same of requests that are paused, which vLLM goes on with by itself."""
    found = {number: Completion((), (), 0) for number in requests}
    engine.submit(requests, 3)
    going_on, interrupted = set(requests), 0
    while going_on:
        completions: list[tuple[int, Completion]] = []
        for _ in range(STEPS):
            ended = engine.step()
            completions += ended.items()
            going_on -= ended.keys()
        ended, paused = engine.pause()
        going_on -= ended.keys()
        for number, completion in (*completions, *ended.items(), *paused.items()):
            found[number] = joined(found[number], completion)
        assert paused.keys() == going_on
        interrupted += len(paused)
        engine.reset_cache()  # as a sync does; nothing is in it
    return found, interrupted


def sleep_and_wake(engine: RolloutEngine) -> None:
    """Let vLLM's scheduler be paused and resumed as it is around training; the weights are those of before."""
    version = engine.weight_version
    engine.sleep()
    engine.wake("weights")
    engine.weight_version = version  # as if they had been synced
    engine.wake("kv_cache")


def joined(one: Completion, other: Completion) -> Completion:
    return Completion(one.tokens + other.tokens, one.logprobs + other.logprobs, other.weight_version)


def main(folder: str, out: Path) -> None:
    group = distributed.start()
    recipe = Recipe(
        name="partial",
        model=Model(path=folder),
        train=Train(tp=2, dp=2),
        rollout=Rollout(tp=2, max_model_len=128, max_new_tokens=64, kv_cache_gib=1 / 16),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=4, samples_per_prompt=2),
        async_=Async(max_staleness=1, partial="continue_with_cache"),
        optimizer=Optimizer(lr=1e-3),
        run=Run(steps=1),
    )
    rank = group.rank()
    runtime.initialize(recipe.train, seed=1)
    policy = Policy(read_config(folder), recipe, rank, trainable=False)
    engine = RolloutEngine(recipe, rank, launch_environment.run_id(), range(4))
    said: dict = {}
    try:
        engine.submit({}, 0)
    except StaleWeights as error:
        said["stale"] = str(error)
    policy_sync(recipe, group, policy, engine).run(3)
    engine._sleeps = True  # vLLM's own account of it is kept on a CPU, too; only its worker frees nothing there
    lengths = [1, 30, 17, 5, 23, 4, 6, 30]
    prompts = [[5, 7, 11, 13 + engine.replica, 17 + n] for n in range(len(lengths))]
    for kind in ("greedy", "sampled", "paused"):
        engine.discards_weights = kind == "sampled"
        sleep_and_wake(engine)
        requests = {
            10 * n: GenerationRequest(prompt, length, [3], None if kind == "greedy" else n, Sampling(0.7))
            for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        }
        state = torch.get_rng_state()
        found, interrupted = (paused_pieces if kind == "paused" else pieces)(engine, requests)
        assert torch.get_rng_state().equal(state)
        expected = dict(zip(requests, complete(engine, list(requests.values()), 3), strict=True))
        said[kind] = {
            "interrupted": interrupted,
            "pairs": [
                [list(a.tokens), list(b.tokens), list(a.logprobs), list(b.logprobs)]
                for a, b in ((found[n], expected[n]) for n in requests)
            ],
        }
    many = [GenerationRequest([5 + n % 90] * 100, 2, [3], n) for n in range(200)]  # more than vLLM computes in a step
    said["many"] = [len(completion.tokens) for completion in complete(engine, many, 3)]
    said["broadcast"] = engine.broadcast(f"of rank {rank}" if engine.leads else None)
    (out / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier(group)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
