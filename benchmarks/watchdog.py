"""Measure what the watchdog of a rank adds to a step, and print it as Markdown.

    python benchmarks/watchdog.py > benchmarks/results/watchdog-cpu.md

One process computes steps of supervised training in pairs, one step with the watchdog and one without, in random order.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ANSWERS, TOKENS, WARMUP = 2, 64, 5
SIZES = dict(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


def make_step(model: str) -> Callable[[], None]:
    """Return a function that does a step of training, as the supervised loop does."""
    import torch
    import torch.distributed as dist

    from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Run, Train
    from hybrid3d.inputs.models import read_config
    from hybrid3d.reshard.move.device import synchronize
    from hybrid3d.rl.batch import Batch
    from hybrid3d.rl.objective import sft_loss
    from hybrid3d.run.metrics import PhaseTimer
    from hybrid3d.train.megatron import runtime
    from hybrid3d.train.megatron.policy import Policy
    from hybrid3d.watch.work_meter import record

    recipe = Recipe(
        name="watchdog",
        model=Model(path=model, dtype="float32"),
        train=Train(micro_batch_size=1),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="sft", prompts_per_step=ANSWERS),
        optimizer=Optimizer(lr=1e-5),
        run=Run(steps=100),
    )
    runtime.initialize(recipe.train, seed=1)
    policy = Policy(read_config(model), recipe, 0)
    tokens = torch.randint(SIZES["vocab_size"], (ANSWERS, TOKENS)).tolist()
    batch = Batch.from_sequences(tokens, [TOKENS // 2] * ANSWERS, pad_id=0)
    record.trains(recipe, 0)
    steps = iter(range(10**9))

    def step() -> None:
        record.begin_step(next(steps))
        with PhaseTimer()("train"):
            policy.train_step(batch, sft_loss, recipe)
            policy.end_step()
            synchronize()

    assert dist.is_initialized()
    return step


def measure(step: Callable[[], None], pairs: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of each pair's step without the watchdog and with it, and its CPU seconds a second."""
    import torch.distributed as dist

    from hybrid3d.watch.watchdog import Watchdog

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    on_cpu, dice = 0.0, random.Random(1)
    for pair in range(WARMUP + pairs):
        for watched in dice.sample((False, True), 2):
            watchdog = Watchdog(store, 0, 1, lambda *told: None) if watched else None
            start = time.perf_counter()
            step()
            taken = time.perf_counter() - start
            if pair >= WARMUP:
                seconds[watched].append(taken)
                on_cpu += _cpu_seconds(watchdog._thread.native_id) if watchdog is not None else 0.0
            if watchdog is not None:
                watchdog.stop()
    return seconds[False], seconds[True], on_cpu / sum(seconds[True])


def _cpu_seconds(thread: int | None) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="utf-8").split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=250)
    pairs = parser.parse_args().pairs
    import torch
    import torch.distributed as dist
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from hybrid3d import distributed

    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    distributed.start(dist.HashStore())
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)).save_pretrained(folder)
        without, watched, on_cpu = measure(make_step(folder), pairs)
    shares = [100 * (b - a) / a for a, b in zip(without, watched, strict=True)]
    dice = random.Random(2)
    medians = sorted(statistics.median(dice.choices(shares, k=len(shares))) for _ in range(2000))
    print("# The watchdog\n\n    python benchmarks/watchdog.py\n")
    print(
        f"Supervised steps of {ANSWERS} sequences of {TOKENS} tokens, Qwen2 of {SIZES['num_hidden_layers']} layers; "
        f"{pairs} pairs of a step with the watchdog and one without, one rank with one thread; {os.cpu_count()} CPU "
        f"cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}.\n"
    )
    print("| median s of a step | % more with the watchdog, median of pairs | 95 % interval | its thread's CPU, % |")
    print("|---|---|---|---|")
    interval = f"{medians[50]:.2f} to {medians[-50]:.2f}"
    median = statistics.median(shares)
    print(f"| {statistics.median(without):.3f} | {median:.2f} | {interval} | {100 * on_cpu:.3f} |")


if __name__ == "__main__":
    main()
