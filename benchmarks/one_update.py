"""Measure what a step takes with and without a pass before its only update, and print it as Markdown.

    python benchmarks/one_update.py > benchmarks/results/one-update-cpu.md

One process trains GRPO on made-up samples, on its GPU or, without one, on its CPU; nothing is generated. Steps of both
kinds alternate.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

PROMPTS, GROUP, TOKENS, STEPS = 4, 4, 64, 5  # TOKENS of a prompt, and of an answer
SIZES = dict(
    vocab_size=8192,
    hidden_size=768,
    intermediate_size=2304,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
KINDS = {True: "with a pass before the update", False: "without"}


def measure(model: str, out: Path) -> dict[bool, list[float]]:
    """Return the seconds of steps, by whether they have a pass before the update."""
    import torch.distributed as dist

    from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Train
    from hybrid3d.config.sections.algorithm import Kl
    from hybrid3d.generation.samples import RolloutBatch, Sample
    from hybrid3d.inputs.models import read_config
    from hybrid3d.reshard.move.device import synchronize
    from hybrid3d.run.folder import RunFolder
    from hybrid3d.run.health import Guard
    from hybrid3d.run.logger import Display, RunLogger
    from hybrid3d.train.megatron import runtime
    from hybrid3d.train.megatron.policy import Policy
    from hybrid3d.trainer import experience
    from hybrid3d.trainer.learner import Learner
    from hybrid3d.trainer.models import Models

    recipe = Recipe(
        name="one-update",
        model=Model(path=model, dtype="float32"),
        train=Train(micro_batch_size=GROUP),
        rollout=Rollout(max_model_len=2 * TOKENS, max_new_tokens=TOKENS),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=PROMPTS, samples_per_prompt=GROUP, kl=Kl(where="none")),
        optimizer=Optimizer(lr=1e-5),
        run=Run(steps=100),
    )
    group, dice = dist.group.WORLD, random.Random(1)
    runtime.initialize(recipe.train, seed=1)
    models = Models.of(recipe, Policy(read_config(model), recipe, 0), group)
    guard = Guard(RunLogger(RunFolder(out), 0, Display(recipe.name, 1, None), keeps_events=False))
    guard._engines_compared = True  # the log-probabilities below are not vLLM's
    learner = Learner(recipe, models, guard, 0, group)

    def tokens() -> tuple[int, ...]:
        return tuple(dice.randrange(SIZES["vocab_size"]) for _ in range(TOKENS))

    def sample() -> Sample:
        logprobs = tuple(-dice.random() for _ in range(TOKENS))
        return Sample("", tokens(), tokens(), (True,) * TOKENS, logprobs, "", dice.random(), (0,) * TOKENS)

    seconds: dict[bool, list[float]] = {kind: [] for kind in KINDS}
    for step in range(2 * (STEPS + 1)):
        with_pass, samples = step % 2 == 0, [sample() for _ in range(PROMPTS * GROUP)]
        experience.come_from_update = lambda *_, with_pass=with_pass: not with_pass
        synchronize()
        start = time.perf_counter()
        learner.update(learner.make_experience(RolloutBatch(samples), step, recipe), step, recipe)
        synchronize()
        seconds[with_pass].append(time.perf_counter() - start)
    runtime.shutdown()
    return {kind: values[1:] for kind, values in seconds.items()}  # the first is warmup


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch
    import torch.distributed as dist
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from hybrid3d import distributed

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    distributed.start(dist.HashStore())
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
        model.save_pretrained(folder)
        seconds = measure(folder, Path(folder) / "run")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print("# One update\n\n    python benchmarks/one_update.py\n")
    print(
        f"GRPO on {PROMPTS * GROUP} answers of {TOKENS} tokens to prompts of {TOKENS}, without generation; Qwen2 of "
        f"{model.num_parameters() / 1e6:.1f} million parameters; medians of {STEPS} steps of each kind, which "
        f"alternate, in one rank; {device} ({platform.machine()}), {time.strftime('%Y-%m-%d')}.\n"
    )
    print("| old log-probabilities | s of experience and update | least | most |\n|---|---|---|---|")
    for kind, name in KINDS.items():
        found = seconds[kind]
        print(f"| {name} | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
