"""One rank of the checks with both engines."""

from __future__ import annotations

from typing import Any, Literal

import torch

from gpu.engines import ANSWER, recipe_of_rank
from gpu.models import CONFIGS
from hybrid3d import distributed, launch_environment
from hybrid3d.config import Train
from hybrid3d.generation.engine import GenerationRequest, Sampling, complete
from hybrid3d.reshard.files import load_files
from hybrid3d.rl.batch import Batch
from hybrid3d.rollout.engine import RolloutEngine, engine_settings
from hybrid3d.sync import policy_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy

TOP_K = 20
PROMPTS = [[5, 7, 11, 13, 17, 19, 23], [3, 4, 5, 6], [100, 101, 102, 103, 104, 105, 106, 107, 108]]


def sync_and_generate(
    family: str,
    folders: list[str],
    dtype: str,
    tp: int,
    slots: list[int],
    quantization: Literal["fp8"] | None,
    keeps: bool,
) -> dict[str, Any]:
    """Load each checkpoint into Megatron, sync it to vLLM, generate, and compare the answers' log-probabilities.

    Returns:
        By version, the mean and the largest difference between the engines on any rank, and how much the new weights
        changed the log-probabilities of the last answers; bytes of the last sync.
    """
    group = distributed.start()
    ranks, rank = group.size(), group.rank()
    runtime.initialize(Train(tp=ranks), seed=1)
    recipe = recipe_of_rank(folders[0], dtype, tp, ranks, quantization, keeps)
    policy = Policy(CONFIGS[family], recipe, rank, trainable=False)
    engine = RolloutEngine(recipe, rank, launch_environment.run_id(), slots)
    sync = policy_sync(recipe, group, policy, engine)
    means, largest, change = [], [], []
    batch: Batch | None = None
    for version, folder in enumerate(folders):
        engine.sleep()
        before = None if batch is None else policy.logprobs(batch, recipe)
        load_files(folder, policy.weights.demand, policy.weights.tensors, rank)
        after = None if batch is None else policy.logprobs(batch, recipe)
        if before is not None and after is not None:
            change.append(float((after - before).abs().mean()))
        engine.wake("weights")
        report = sync.run(version, verify=True)
        engine.wake("kv_cache")
        assert not report.corrupted, f"version {version}: {report.corrupted} arrived corrupted"
        batch, differences = _answers(engine, policy, recipe, version)
        both = distributed.gather_objects((float(differences.mean()), float(differences.max())), group)
        means.append(max(mean for mean, _ in both))
        largest.append(max(most for _, most in both))
    return {
        "mean_difference": means,
        "largest_difference": largest,
        "change": change,
        "received_bytes": report.received_bytes,
        "lower_bound_bytes": report.lower_bound_bytes,
        "finalize_bytes": report.finalize_bytes,
        "graphs": not engine_settings(recipe)["enforce_eager"],
    }


def _answers(engine: RolloutEngine, policy: Policy, recipe: Any, version: int) -> tuple[Batch, torch.Tensor]:
    """Return prompts with sampled answers, and the differences of their tokens' log-probabilities.

    All but the first are sampled from a part of the tokens.
    """
    whole, *others = PROMPTS
    part = Sampling(top_k=TOP_K)
    requests = [GenerationRequest(prompt, ANSWER, [], seed=version, sampling=part) for prompt in others]
    answers = complete(engine, [GenerationRequest(whole, ANSWER, [], seed=version), *requests], version)
    kept = [probability for answer in answers[1:] for probability in answer.kept]
    is_told = len(kept) == sum(len(answer.tokens) for answer in answers[1:]) and min(kept) < 1
    assert is_told, f"top_k={TOP_K} kept the probabilities {kept}"
    sequences = [[*prompt, *answer.tokens] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    batch = Batch.from_sequences(sequences, [len(prompt) for prompt in PROMPTS], pad_id=0)
    said = policy.logprobs(batch, recipe)
    assert said is not None, "every rank has the output layer"
    theirs = batch.align([answer.logprobs for answer in answers])
    mask = batch.response_mask.bool()
    return batch, (said.cpu() - theirs)[mask].abs()
