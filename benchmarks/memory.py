"""Measure the memory that recompute and each offload save and the time that they cost, and print it as Markdown.

    python benchmarks/memory.py > benchmarks/results/memory-cpu.md

One process measures its GPU's memory or, without a GPU, its own. In the latter case offloading moves data within host
memory, so only its size and the time are meaningful.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEQUENCES, TOKENS, STEPS = 4, 512, 3
SIZES = dict(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=TOKENS,
)
CASES = {
    "nothing": {},
    "recompute=full": dict(recompute="full"),
    "offload_parameters=true": dict(offload_parameters=True),
    "offload_gradients=true": dict(offload_gradients=True),
    "offload_optimizer=true": dict(offload_optimizer=True),
}
MB = 10**6


def measure(model: str, case: str) -> dict[str, float]:
    """Return, for one case, the MB that a step adds, the offloaded MB, and the seconds of step, offload and onload."""
    import torch
    import torch.distributed as dist

    from hybrid3d import distributed
    from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Run, Train
    from hybrid3d.inputs.models import read_config
    from hybrid3d.reshard.move.device import synchronize
    from hybrid3d.rl.batch import Batch
    from hybrid3d.rl.objective import sft_loss
    from hybrid3d.train.megatron import runtime
    from hybrid3d.train.megatron.policy import Policy

    torch.set_num_threads(1)
    distributed.start(dist.HashStore())
    recipe = Recipe(
        name="memory",
        model=Model(path=model),
        train=Train(micro_batch_size=SEQUENCES, **CASES[case]),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="sft", prompts_per_step=SEQUENCES),
        optimizer=Optimizer(lr=1e-5),
        run=Run(steps=100),
    )
    runtime.initialize(recipe.train, seed=1)
    policy = Policy(read_config(model), recipe, 0)
    tokens = torch.randint(SIZES["vocab_size"], (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = Batch.from_sequences(tokens.tolist(), [1] * SEQUENCES, pad_id=0)

    seconds: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        synchronize()
        start = time.perf_counter()
        result = act()
        synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    taken = []
    for _ in range(STEPS + 1):
        before = memory_now(peak=False)
        timed("step", lambda: policy.train_step(batch, sft_loss, recipe))
        taken.append((memory_now(peak=True) - before) / MB)
        offloaded = timed("offload", lambda: policy.offload(recipe.train)) / MB
        timed("onload", policy.onload)
    values_by_key = {"taken": taken, **seconds}  # the first value of each is warmup
    return {key: statistics.median(values[1:]) for key, values in values_by_key.items()} | {"offloaded": offloaded}


def memory_now(peak: bool) -> int:
    """Return the bytes in use or, with `peak`, the maximum since the last call without it."""
    import torch

    if torch.cuda.is_available():
        if peak:
            return torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not peak:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM, see proc(5)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    print("# Recompute and offload\n\n    python benchmarks/memory.py\n")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
        model.save_pretrained(folder)
        for case in CASES:
            # With this malloc threshold freed memory returns to the system, so that it is not counted
            settings = {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
            command = [sys.executable, __file__, "--case", folder, case]
            done = subprocess.run(
                command,
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                encoding="utf-8",
                errors="replace",
            )
            rows.append((case, json.loads(done.stdout.splitlines()[-1])))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    machine = f"{gpu} ({platform.machine()}), {time.strftime('%Y-%m-%d')}"
    print(
        f"A step is one update on {SEQUENCES} sequences of {TOKENS} tokens in one micro batch; Qwen2 of "
        f"{model.num_parameters() / MB:.1f} million parameters, {SIZES['num_hidden_layers']} layers, float32; "
        f"medians of {STEPS}, one thread; {machine}.\n"
    )
    print("| train. | MB added within a step | seconds per step | MB offloaded outside of it | s offload | s onload |")
    print("|---|---|---|---|---|---|")
    for case, row in rows:
        offload = (
            f"{row['offloaded']:.0f} | {row['offload']:.3f} | {row['onload']:.3f}" if row["offloaded"] else "0 | |"
        )
        print(f"| {case} | {row['taken']:.0f} | {row['step']:.2f} | {offload} |")


if __name__ == "__main__":
    if "--case" in sys.argv:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        main()
