"""Time training steps with padded and packed sequences, on one CPU process and on four, and print Markdown.

    python benchmarks/packing.py > benchmarks/results/packing-cpu.md

A step is one update of the policy (negative log-likelihood of all tokens) after one pass for log-probabilities, as in
GRPO. The lengths of prompts and answers are like GSM8K's, assumed to be log-normal: median 180 tokens, sigma 0.5, at
least 16 and at most 1024. Padding is not counted as tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from random import Random

SEQUENCES, MICRO_BATCH = 32, 4
MEDIAN, SIGMA, MIN_LENGTH, MAX_LENGTH = 180, 0.5, 16, 1024
STEPS = 3
SIZES = dict(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_LENGTH,
)
CASES = {
    "padded": {},
    "padded, within 1024 tokens": dict(max_tokens_per_micro_batch=1024),
    "packed": dict(packed=True),
    "packed, within 1024 tokens": dict(packed=True, max_tokens_per_micro_batch=1024),
}
LAYOUTS = {"one process": {}, "TP2 x PP2": dict(tp=2, pp=2), "DP4": dict(dp=4)}


def lengths() -> list[int]:
    random = Random(1)
    sampled = (int(MEDIAN * math.exp(random.gauss(0, SIGMA))) for _ in range(SEQUENCES))
    return [min(max(n, MIN_LENGTH), MAX_LENGTH) for n in sampled]


def of_rank(model: str, layouts: list[str]) -> None:
    """Time every case in every layout on one rank; rank 0 prints the tokens per second."""
    import torch
    import torch.distributed as dist

    from hybrid3d import distributed
    from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Run, Train
    from hybrid3d.inputs.models import read_config
    from hybrid3d.rl.balance import balanced_shares
    from hybrid3d.rl.batch import Batch
    from hybrid3d.rl.objective import sft_loss
    from hybrid3d.train.megatron import runtime
    from hybrid3d.train.megatron.policy import Policy

    torch.set_num_threads(1)
    distributed.start()
    random, sizes = Random(2), lengths()
    sequences = [[random.randrange(SIZES["vocab_size"]) for _ in range(n)] for n in sizes]
    base = Recipe(
        name="packing",
        model=Model(path=model),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="sft", prompts_per_step=SEQUENCES),
        optimizer=Optimizer(lr=1e-5),
        run=Run(steps=100),
    )
    for layout in layouts:
        first = None
        for case, settings in CASES.items():
            recipe = dataclasses.replace(base, train=Train(micro_batch_size=MICRO_BATCH, **LAYOUTS[layout], **settings))
            runtime.initialize(recipe.train, seed=1)
            policy = Policy(read_config(model), recipe, dist.get_rank())
            local = balanced_shares(sizes, recipe.train.dp)[policy.data_parallel_rank]
            batch = Batch.from_sequences([sequences[i] for i in local], [1] * len(local), pad_id=0)
            seconds = []
            for _ in range(STEPS + 1):  # the first is warmup
                dist.barrier()
                start = time.perf_counter()
                policy.logprobs(batch, recipe)
                policy.train_step(batch, sft_loss, recipe)
                seconds.append(max(distributed.gather_objects(time.perf_counter() - start, dist.group.WORLD)))
            rate = sum(sizes) / statistics.median(seconds[1:])
            first = first or rate
            if dist.get_rank() == 0:
                print(f"| {layout:11} | {case:26} | {rate:15.0f} | {rate / first:8.2f} |", flush=True)
            runtime.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = lengths()
    print("# Padded and packed\n\n    python benchmarks/packing.py\n")
    print(
        f"{SEQUENCES} sequences of {min(sizes)} to {max(sizes)} tokens, {statistics.mean(sizes):.0f} on average "
        f"(log-normal, median {MEDIAN}, sigma {SIGMA}), {MICRO_BATCH} per micro batch without a token budget; "
        f"Qwen2 of {SIZES['num_hidden_layers']} layers, hidden size {SIZES['hidden_size']}, float32. Log-probabilities "
        f"and an update, median of {STEPS}; one thread per process; "
        f"{os.cpu_count()} CPU cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}.\n"
    )
    print("| layout      | micro batches              | tokens per second | x padded |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)).save_pretrained(folder)
        run(1, folder, ["one process"])
        run(4, folder, ["TP2 x PP2", "DP4"])


def run(world: int, model: str, layouts: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__, "--rank", model, *layouts]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=log)
        if done.returncode:
            log.seek(0)
            sys.exit(log.read())


if __name__ == "__main__":
    if "--rank" in sys.argv:
        at = sys.argv.index("--rank")
        of_rank(sys.argv[at + 1], sys.argv[at + 2 :])
    else:
        main()
