"""Samples with a real vLLM, and writes what it generated beside what vLLM's own log-probabilities of prompts say.

    torchrun --nproc-per-node 2 sampling.py FOLDER OUT_FOLDER

Two ranks are one replica with TP2.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from vllm import SamplingParams, TokensPrompt

from hybrid3d import distributed, launch_environment
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Train
from hybrid3d.generation.engine import Completion, GenerationRequest, Sampling, complete
from hybrid3d.inputs.models import read_config
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.sync import policy_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy

PROMPTS, LENGTH, ALTERNATIVES = 12, 24, 20
SETTINGS = {
    "whole": Sampling(),
    "hot": Sampling(2.0),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.5),
    "min_p": Sampling(min_p=0.3),
    "all": Sampling(0.5, top_p=0.9, top_k=10, min_p=0.05),
    "top_k_1": Sampling(top_k=1),
    "min_p_1": Sampling(min_p=1.0),
    "top_p_0": Sampling(top_p=1e-6),
}


def stepwise(engine: RolloutEngine, requests: list[GenerationRequest]) -> list[Completion]:
    """Return completions as partial rollouts and agents get them."""
    engine.submit(dict(enumerate(requests)), 0)
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        found |= engine.step()
    engine.interrupt()
    return [found[i] for i in range(len(requests))]


def alternatives(
    engine: RolloutEngine, requests: list[GenerationRequest], completions: list[Completion]
) -> list[list[list[float]]]:
    """Return, for each token, its log-probability as part of a prompt, and those of the most likely tokens, sorted."""
    pairs = [(request.prompt_ids, one.tokens) for request, one in zip(requests, completions, strict=True)]
    prompts = [TokensPrompt(prompt_token_ids=[*prompt, *tokens]) for prompt, tokens in pairs]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=ALTERNATIVES, detokenize=False)
    found = []
    for output, (prompt, tokens) in zip(engine.llm.generate(prompts, params, use_tqdm=False), pairs, strict=True):
        steps = zip(output.prompt_logprobs[len(prompt) :], tokens, strict=True)
        found.append(
            [
                [step[token].logprob, *sorted((one.logprob for one in step.values()), reverse=True)[:ALTERNATIVES]]
                for step, token in steps
            ]
        )
    return found


def finish_reasons(engine: RolloutEngine, requests: list[GenerationRequest]) -> list[str]:
    """Return what vLLM itself says."""
    prompts = [TokensPrompt(prompt_token_ids=[*one.prompt_ids]) for one in requests]
    params = [
        SamplingParams(
            seed=one.seed, max_tokens=one.max_new_tokens, stop_token_ids=[*one.stop_tokens], detokenize=False
        )
        for one in requests
    ]
    return [output.outputs[0].finish_reason for output in engine.llm.generate(prompts, params, use_tqdm=False)]


def as_json(completions: list[Completion]) -> list[dict]:
    return [{key: value for key, value in vars(one).items() if key != "experts"} for one in completions]


def main(folder: str, stop: str, out: Path) -> None:
    group = distributed.start()
    recipe = Recipe(
        name="sampling",
        model=Model(path=folder),
        train=Train(tp=2),
        rollout=Rollout(tp=2, max_model_len=128, max_new_tokens=64, kv_cache_gib=1 / 16, stop=(stop,)),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=4, samples_per_prompt=2),
        optimizer=Optimizer(lr=1e-3),
        run=Run(steps=1),
    )
    runtime.initialize(recipe.train, seed=1)
    policy = Policy(read_config(folder), recipe, group.rank(), trainable=False)
    engine = RolloutEngine(recipe, group.rank(), launch_environment.run_id(), range(2))
    policy_sync(recipe, group, policy, engine).run(0)
    greedy = [GenerationRequest([30 + n, 7, 40 + 3 * n], LENGTH, [0]) for n in range(PROMPTS)]
    said: dict = {"greedy": as_json(complete(engine, greedy, 0))}
    for name, sampling in SETTINGS.items():
        requests = [replace(request, seed=n, sampling=sampling) for n, request in enumerate(greedy)]
        completions = complete(engine, requests, 0)
        said[name] = as_json(completions)
        if name in ("whole", "top_k", "top_p", "min_p"):
            said[f"{name} as prompts"] = alternatives(engine, requests, completions)
    # Greedy and sampled requests together, as with a greedy baseline; and other seeds
    mixed = [replace(greedy[0]), replace(greedy[1], seed=1, sampling=SETTINGS["top_k"])]
    said["mixed"] = as_json(complete(engine, mixed, 0))
    said["repeated"] = as_json(complete(engine, [replace(one, seed=n) for n, one in enumerate(greedy)], 0))
    said["reseeded"] = as_json(complete(engine, [replace(one, seed=99 + n) for n, one in enumerate(greedy)], 0))
    ending = [replace(one, seed=n, sampling=Sampling(stop=(stop,))) for n, one in enumerate(greedy)]
    said["stopped"] = as_json(complete(engine, ending, 0))
    said["stopped stepwise"] = as_json(stepwise(engine, ending))
    said["stopped greedily"] = as_json(complete(engine, [replace(one, seed=None) for one in ending], 0))
    whole = said["whole"]  # half of them may end with the fifth token, which is also the last that they may have
    fifth = [[0, whole[n]["tokens"][4]] if n % 2 else [0] for n in range(PROMPTS)]
    short = [replace(one, seed=n, max_new_tokens=5, stop_tokens=fifth[n]) for n, one in enumerate(greedy)]
    said["at the last token"] = as_json(complete(engine, short, 0))
    said["at the last token stepwise"] = as_json(stepwise(engine, short))
    said["finish reasons"] = finish_reasons(engine, short)
    (out / f"{group.rank()}.json").write_text(json.dumps(said))
    dist.barrier(group)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
