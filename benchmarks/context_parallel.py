"""Measure what a training step of one long sequence takes on each rank, by `train.cp`, and print it as Markdown.

    python benchmarks/context_parallel.py > benchmarks/results/context-parallel-cpu.md

Each rank is a process, which measures its GPU's memory or, without a GPU, its own: what the forward pass keeps for the
backward pass (the tensors that autograd saves, without parameters), and the peak of the step above what it had before.
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

from memory import MB, memory_now

TOKENS, STEPS = 4096, 2
LONG = 32768  # tokens of the sequences that are only planned
CONTEXT_SIZES = (1, 2, 4)
SIZES = dict(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=TOKENS,
)


def of_rank(model: str, cp: int) -> None:
    """Measure one size on one rank; rank 0 prints a line of JSON with the most that any rank has."""
    import torch
    import torch.distributed as dist

    from hybrid3d import distributed
    from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Train
    from hybrid3d.config.model_shape import ModelShape
    from hybrid3d.inputs.models import read_config
    from hybrid3d.planning.memory import stage_activations
    from hybrid3d.reshard.move.device import synchronize
    from hybrid3d.rl.batch import Batch
    from hybrid3d.rl.objective import sft_loss
    from hybrid3d.train.megatron import runtime
    from hybrid3d.train.megatron.policy import Policy

    torch.set_num_threads(1)
    distributed.start()
    tokens = torch.randint(SIZES["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    batch, config = Batch.from_sequences([tokens], [1], pad_id=0), read_config(model)
    recipe = Recipe(
        name="context-parallel",
        model=Model(path=model),
        train=Train(cp=cp, micro_batch_size=1),
        rollout=Rollout(max_model_len=TOKENS, max_new_tokens=TOKENS - 1),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="sft", prompts_per_step=1),
        optimizer=Optimizer(lr=1e-5),
        run=Run(steps=100),
    )
    runtime.initialize(recipe.train, seed=1)
    policy = Policy(config, recipe, dist.get_rank())
    named = (tensor for stage in policy.stages for tensor in (*stage.parameters(), *stage.buffers()))
    own = {tensor.untyped_storage().data_ptr() for tensor in named}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = []
    for _ in range(STEPS + 1):  # the first is warmup
        saved.clear()
        dist.barrier()
        before = memory_now(peak=False)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.train_step(batch, sft_loss, recipe)
        synchronize()
        peak = memory_now(peak=True) - before
        ranks = distributed.gather_objects((sum(saved.values()), peak), dist.group.WORLD)
        rows.append([max(values) for values in zip(*ranks, strict=True)])
    if dist.get_rank() == 0:
        kept, peak = (statistics.median(values) for values in zip(*rows[1:], strict=True))
        layers = [[range(SIZES["num_hidden_layers"])]]
        (planned,) = stage_activations(recipe, ModelShape.from_config(config, None, None), layers)
        print(json.dumps(dict(cp=cp, kept=kept, peak=peak, planned=planned)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(cp: int, model: str) -> dict[str, float]:
    """Measure on so many ranks. With this malloc threshold freed memory returns to the system, and is not counted."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cp)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__, "--rank", model, str(cp)]
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        done = subprocess.run(
            command,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode:
            log.seek(0)
            sys.exit(log.read())
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def planned(cp: int) -> str:
    """Return a row of what `hybrid3d plan` says of a recipe with long answers on eight GPUs."""
    settings = [f"train.cp={cp}", f"train.dp={4 // cp}", "train.micro_batch_size=1"]
    settings += [f"rollout.max_model_len={LONG}", f"rollout.max_new_tokens={LONG - 1024}"]
    command = [sys.executable, "-m", "hybrid3d", "plan", "recipes/qwen2.5-7b.yaml", *settings, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        (problem,) = (line.strip() for line in done.stderr.splitlines() if "phase needs" in line)
        (most,) = (part for part in done.stderr.split(", ") if part.startswith("activations"))
        return f"| {cp} | {4 // cp} | {most.split()[1]} | refused: {problem} |"
    memory = json.loads(done.stdout)["memory"]
    return f"| {cp} | {4 // cp} | {memory['max_activations'] / 1e9:.1f} | {memory['train'] / 1e9:.1f} GB |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
        model.save_pretrained(folder)
        rows = [run(cp, folder) for cp in CONTEXT_SIZES]
    print("# Memory by context parallel size\n\n    python benchmarks/context_parallel.py\n")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(
        f"A step is one update on one sequence of {TOKENS} tokens; Qwen2 of {model.num_parameters() / MB:.1f} million "
        f"parameters, {SIZES['num_hidden_layers']} layers, float32; the most that a rank has, medians of {STEPS} "
        f"steps, one thread per process; {gpu} ({platform.machine()}), {time.strftime('%Y-%m-%d')}. Kept: what the "
        "forward pass keeps for the backward pass. Planned: what `hybrid3d plan` counts for activations, which is for "
        "GPUs, where the activation function is fused.\n"
    )
    print("| train.cp | MB kept | of cp 1 | MB planned | MB added within a step |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['cp']:.0f} | {row['kept'] / MB:.0f} | {row['kept'] / rows[0]['kept']:.2f} "
            f"| {row['planned'] / MB:.0f} | {row['peak'] / MB:.0f} |"
        )
    print(
        f"\n## Long answers, planned\n\nWhat `hybrid3d plan` says of `recipes/qwen2.5-7b.yaml` with sequences of "
        f"{LONG} tokens, one per micro batch, on eight GPUs of 80 GB: TP2, full recompute, CP x DP = 4.\n"
    )
    print("| train.cp | train.dp | GB of activations | the train phase |\n|---|---|---|---|")
    for cp in CONTEXT_SIZES:
        print(planned(cp))


if __name__ == "__main__":
    if "--rank" in sys.argv:
        at = sys.argv.index("--rank")
        of_rank(sys.argv[at + 1], int(sys.argv[at + 2]))
    else:
        main()
