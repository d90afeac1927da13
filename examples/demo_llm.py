"""Train a real language model with GRPO on a laptop, and show its answers before and after.

    python examples/demo_llm.py        # what `make demo-llm` runs

Each stage is one command that a user could type. A stage whose result exists already is skipped, so an interrupted
demo continues where it stopped; remove `build/demo-llm` and `runs/demo-llm` to start over.
"""

import sys
from pathlib import Path

from demo import run_stages

DATA = Path("build/demo-llm")
STAGES = (
    (
        "SmolLM2-135M-Instruct as a Hugging Face checkpoint, and questions",
        ["examples/make_demo_llm.py", str(DATA)],
        DATA / "eval.parquet",
    ),
    (
        "GRPO: Megatron PP2 trains, vLLM TP1 x DP2 generates, in the same two ranks",
        ["-m", "hybrid3d", "train", "recipes/demo-llm.yaml"],
        Path("runs/demo-llm/curves.png"),
    ),
    (
        "the trained model as a Hugging Face checkpoint",
        ["-m", "hybrid3d", "export", "runs/demo-llm", str(DATA / "trained")],
        DATA / "trained/model.safetensors",
    ),
    (
        "the held-out questions before and after, answered by transformers",
        ["examples/compare_answers.py", str(DATA / "model"), str(DATA / "trained"), str(DATA / "eval.parquet")],
        None,
    ),
)

if __name__ == "__main__":
    sys.exit(run_stages(STAGES))
