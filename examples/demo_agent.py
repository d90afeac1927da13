"""Warm a small model up for a calculator, and train it with the answers of an agent that has one, on a laptop.

    python examples/demo_agent.py        # what `make demo-agent` runs

The agent is `examples/calculator_agent.py`, a program of its own with OpenAI's client. Stages are as in `demo.py`.
"""

import sys
from pathlib import Path

from demo import run_stages

DATA = Path("build/demo-agent")
STAGES = (
    (
        "a small checkpoint, a tokenizer and data, with calculations",
        ["examples/make_demo.py", str(DATA), "--calculator"],
        DATA / "eval.parquet",
    ),
    (
        "supervised warm-up (Megatron, TP2 x PP2)",
        [
            *("-m", "hybrid3d", "train", "recipes/demo-warmup.yaml", "name=demo-agent-warmup"),
            *(f"model.path={DATA}/base", f"data.train={DATA}/warmup.parquet", f"data.eval={DATA}/eval.parquet"),
        ],
        Path("runs/demo-agent-warmup/curves.png"),
    ),
    (
        "the warmed-up policy as a Hugging Face checkpoint",
        ["-m", "hybrid3d", "export", "runs/demo-agent-warmup", str(DATA / "model")],
        DATA / "model/model.safetensors",
    ),
    (
        "GRPO with the answers of an agent: one process of it beside each vLLM engine",
        ["-m", "hybrid3d", "train", "recipes/demo-agent.yaml"],
        Path("runs/demo-agent/curves.png"),
    ),
)


if __name__ == "__main__":
    sys.exit(run_stages(STAGES))
