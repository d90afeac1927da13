"""Measure what recording a step takes (`run.record`), seconds and bytes, and print it as Markdown.

    python benchmarks/recording.py > benchmarks/results/recording-cpu.md

One process trains GRPO on made-up samples, on its GPU or, without one, on its CPU; nothing is generated.
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
from typing import Any

PROMPTS, GROUP, TOKENS, STEPS = 4, 4, 32, 3  # TOKENS of a prompt, and of an answer
SIZES = dict(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
MB = 10**6


def measure(model: str, dtype: str, out: Path) -> dict[str, float]:
    """Return medians of the seconds of a step and of recording it, and the bytes that it writes by file."""
    import torch.distributed as dist

    from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Train
    from hybrid3d.config.sections.algorithm import Kl
    from hybrid3d.generation.samples import RolloutBatch, Sample
    from hybrid3d.inputs.models import read_config
    from hybrid3d.reshard.move.device import synchronize
    from hybrid3d.run.folder import RunFolder, recorded_folder
    from hybrid3d.run.health import Guard
    from hybrid3d.run.logger import Display, RunLogger
    from hybrid3d.run.metrics import PhaseTimer
    from hybrid3d.train.megatron import runtime
    from hybrid3d.train.megatron.policy import Policy
    from hybrid3d.trainer.learner import Learner
    from hybrid3d.trainer.models import Models
    from hybrid3d.trainer.step_recorder import StepRecorder

    recipe = Recipe(
        name=f"recording-{dtype}",
        model=Model(path=model, dtype=dtype),
        train=Train(micro_batch_size=GROUP),
        rollout=Rollout(max_model_len=2 * TOKENS, max_new_tokens=TOKENS),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(
            name="grpo", prompts_per_step=PROMPTS, samples_per_prompt=GROUP, kl=Kl(where="loss", coef=0.001)
        ),
        optimizer=Optimizer(lr=1e-5),
        run=Run(steps=100, record="always"),
    )
    group, folder = dist.group.WORLD, RunFolder(out / dtype)
    record = RunLogger(folder, 0, Display(recipe.name, 1, None), keeps_events=False)
    runtime.initialize(recipe.train, seed=1)
    models = Models.of(recipe, Policy(read_config(model), recipe, 0), group)
    guard = Guard(record)
    guard._engines_compared = True  # the log-probabilities below are not vLLM's
    learner = Learner(recipe, models, guard, 0, group)
    recorder = StepRecorder(models, folder, group)
    dice = random.Random(1)

    def tokens() -> tuple[int, ...]:
        return tuple(dice.randrange(SIZES["vocab_size"]) for _ in range(TOKENS))

    def sample() -> Sample:
        logprobs = tuple(-dice.random() for _ in range(TOKENS))
        return Sample("", tokens(), tokens(), (True,) * TOKENS, logprobs, "", dice.random(), (0,) * TOKENS)

    seconds: dict[str, list[float]] = {"step": [], "record": []}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        synchronize()
        start = time.perf_counter()
        result = act()
        synchronize()
        seconds[name][-1] += time.perf_counter() - start
        return result

    for step in range(STEPS + 1):
        generated, timer = RolloutBatch([sample() for _ in range(PROMPTS * GROUP)]), PhaseTimer()
        for values in seconds.values():
            values.append(0.0)
        experience = timed("step", lambda: learner.make_experience(generated, step, recipe))  # noqa: B023
        timed("record", lambda: recorder.begin(step, recipe, learner.progress, timer))  # noqa: B023
        metrics = timed("step", lambda: learner.update(experience, step, recipe))  # noqa: B023
        row = metrics.reduce(group)
        timed("record", lambda: recorder.finish(step, recipe, generated, experience, row, timer))  # noqa: B023
    runtime.shutdown()
    files = {path.name: float(path.stat().st_size) for path in recorded_folder(folder, STEPS).iterdir()}
    return files | {key: statistics.median(values[1:]) for key, values in seconds.items()}  # the first is warmup


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch
    import torch.distributed as dist
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from hybrid3d import distributed

    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    distributed.start(dist.HashStore())
    print("# Recording a step\n\n    python benchmarks/recording.py\n")
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
        model.save_pretrained(folder)
        rows = {dtype: measure(folder, dtype, Path(folder)) for dtype in ("float32", "bfloat16")}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    answers = PROMPTS * GROUP
    print(
        f"GRPO on {answers} answers of {TOKENS} tokens to prompts of {TOKENS}, with a reference; Qwen2 of "
        f"{model.num_parameters() / MB:.1f} million parameters, {SIZES['num_hidden_layers']} layers; medians of "
        f"{STEPS} steps, one rank with one thread; {gpu} ({platform.machine()}), {time.strftime('%Y-%m-%d')}. A step "
        "is its log-probabilities and its update; recording it is fingerprints before and after, and files.\n"
    )
    print("| dtype | s of a step | s to record it | bytes | of these, samples | experience | fingerprints | others |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype, row in rows.items():
        kinds = [row.pop(f"{name}.safetensors") for name in ("samples", "experience", "fingerprints")]
        step, record = row.pop("step"), row.pop("record")
        numbers = [sum(kinds) + sum(row.values()), *kinds, sum(row.values())]
        print(f"| {dtype} | {step:.2f} | {record:.2f} | {' | '.join(f'{number:,.0f}' for number in numbers)} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
