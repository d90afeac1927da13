"""Make a small task, warm a model up with supervised training, and train it with GRPO, on a laptop.

    python examples/demo.py        # what `make demo` runs

Each stage is one command that a user could type. A stage whose result exists already is skipped, so an interrupted
demo continues where it stopped; remove `build/demo` and `runs/demo-*` to start over.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DATA = Path("build/demo")
STAGES = (
    ("a small checkpoint, a tokenizer and data", ["examples/make_demo.py", str(DATA)], DATA / "eval.parquet"),
    (
        "supervised warm-up (Megatron, TP2 x PP2)",
        ["-m", "hybrid3d", "train", "recipes/demo-warmup.yaml"],
        Path("runs/demo-warmup/curves.png"),
    ),
    (
        "the warmed-up policy as a Hugging Face checkpoint",
        ["-m", "hybrid3d", "export", "runs/demo-warmup", str(DATA / "model")],
        DATA / "model/model.safetensors",
    ),
    (
        "GRPO: Megatron TP2 x PP2 trains, vLLM TP2 x DP2 generates, in the same four ranks",
        ["-m", "hybrid3d", "train", "recipes/demo-cpu.yaml"],
        Path("runs/demo-cpu/curves.png"),
    ),
)


Stage = tuple[str, list[str], Path | None]  # title, arguments of python, result (None if it only prints)


def run_stages(stages: Sequence[Stage]) -> int:
    """Run the stages whose results are missing, in order, and return the exit code of the first that fails, or 0."""
    start = time.monotonic()
    for number, (title, command, result) in enumerate(stages, 1):
        print(f"\n[{number}/{len(stages)}] {title}", flush=True)
        if result and result.exists():
            print(f"{result} exists already")
            continue
        print(f"$ {' '.join(['python', *command])}", flush=True)
        code = subprocess.run([sys.executable, *command]).returncode
        if code:
            return code
    print(f"\ndone in {(time.monotonic() - start) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(run_stages(STAGES))
