"""The command line answers at once: what only helps or refuses imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hybrid3d

pytestmark = pytest.mark.processes

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "pyarrow",
    "vllm",
    "megatron",
    "matplotlib",
    "scipy",
    "safetensors",
    "pebble",
)
SECONDS = 1.0  # of CPU time, which other work on the machine does not add to; 0.2 to 0.3 on an idle core

# Runs the command line and then says which modules it has imported, and what CPU time it took, Python's start included.
RUN = """
import json, resource, sys
from hybrid3d import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = sorted({name.partition('.')[0] for name in sys.modules} & set(HEAVY))
print()
print(json.dumps([code, heavy, used.ru_utime + used.ru_stime]))
"""

RECIPE = {
    "name": "late",
    "model": {"path": "model"},
    "rollout": {"max_model_len": 128, "max_new_tokens": 8},
    "data": {"train": "train.parquet", "eval": "eval.parquet"},
    "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 2},
    "optimizer": {"lr": 1.0e-4},
    "run": {"steps": 2},
}
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "bad.yaml").write_text("name: [\n")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "config.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--help", 0, "train"),
        ("train --help", 0, "recipe"),
        ("--version", 0, hybrid3d.__version__),
        ("nonsense", 2, "nonsense"),
        ("plan bad.yaml", 2, "bad.yaml"),
        ("plan nowhere.yaml", 2, "nowhere.yaml"),
        ("train recipe.yaml train.ttp=2", 2, "train.ttp"),
        ("train recipe.yaml optimizer.lr=-1", 2, "optimizer.lr"),
        ("plan recipe.yaml algorithm.gamma=0.9", 2, "algorithm.gamma"),
        ("train recipe.yaml model.path=nowhere", 2, "nowhere/config.json cannot be read"),
        ("train recipe.yaml model.path=lists", 2, "lists/config.json is not JSON"),
        ("train recipe.yaml train.tp=3", 2, "nearest valid values of train.tp are 2, 4"),
        ("train recipe.yaml reward.name=gsm9k", 2, "reward.name: unknown reward 'gsm9k'"),
        ("train recipe.yaml rollout.environment=calc", 2, "rollout.environment: unknown environment 'calc'"),
        ("plan recipe.yaml train.pp=3", 2, "nearest valid values of train.pp are 2, 4"),
        ("plan recipe.yaml --picture a.txt", 2, "--picture"),
        ("bench recipe.yaml --layers 999999999", 2, "--layers 999999999"),
        ("eval nowhere", 2, "nowhere"),
        ("export nowhere out", 2, "nowhere"),
        ("report nowhere", 2, "nowhere"),
        ("replay nowhere --step 1", 2, "nowhere"),
        ("replay run --step 1", 2, "step 1 is not recorded"),
        ("replay run --step 1 optimizer.lr=1", 2, "only settings of train can differ"),
        ("replay run --against run train.tp=1", 2, "train.tp=1"),
        ("replay run", 2, "--step"),
    ],
)
def test_command_line_answers_at_once_without_heavy_imports(work: Path, line: str, code: int, said: str) -> None:
    ended, heavy, seconds = answer(work, line, said)
    assert (ended, heavy) == (code, [])
    assert seconds < SECONDS


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "train.parquet: no such file"),
        ("data.train=t.jsonl", "eval.parquet: no such file"),
        (
            "data.train=t.jsonl data.eval=t.jsonl data.answer=solution",
            "no column 'solution'; the columns there: question",
        ),
        ("data.train=t.jsonl data.eval=t.jsonl evaluation.data.more=u.jsonl", "u.jsonl: no such file"),
    ],
)
def test_mistake_in_data_is_found_before_torch_is_imported(work: Path, settings: str, said: str) -> None:
    (work / "t.jsonl").write_text('{"question": "2+3?", "answer": "5"}')
    ended, heavy, seconds = answer(work, f"train recipe.yaml {settings}", said)
    assert ended == 2
    assert {*heavy} <= {"pyarrow", "numpy"}
    assert seconds < 2 * SECONDS


def answer(work: Path, line: str, said: str) -> tuple[int, list[str], float]:
    """Run a command, which must print `said`; return its code, the heavy modules that it imported, and CPU seconds."""
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY}\n{RUN}", *line.split()],
        cwd=work,
        env={"PYTHONPATH": str(Path(hybrid3d.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said in done.stdout + done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.engines
def test_rank_imports_its_engines_while_it_awaits_the_placement() -> None:
    """And vLLM first: Megatron imports Inductor, which reads at import how many processes compile, which vLLM sets."""
    code = """
import sys
from hybrid3d.planning import agreed_placement
from hybrid3d.trainer import start
agreed_placement.choose_placement = lambda *arguments: sorted({"vllm", "megatron.core"} & set(sys.modules))
class Anything:
    store = path = restart_count = property(lambda self: self)
    progress = property(lambda self: self)
print(start._slots(None, Anything(), Anything()))
from torch._inductor import config
print(config.compile_threads)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert found.stdout.splitlines()[-2:] == ["['megatron.core', 'vllm']", "1"], found.stderr
