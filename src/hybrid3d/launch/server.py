"""The command line of vLLM's OpenAI-compatible server, with the settings with which a run generates.

This module does not import vLLM: the server is a program of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from hybrid3d.config import Recipe
from hybrid3d.families import Config, UnsupportedModel, family_of

LATENT_ATTENTION = "CPU_MLA"  # the backend that works on a CPU for every dtype, also where there are AMX instructions

# Set for the server unless they are set: no usage statistics are sent, and threads are not bound to single cores.
SERVER_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def server_command(checkpoint: Path, name: str, host: str, port: int, recipe: Recipe | None) -> list[str]:
    """Return the command that serves a Hugging Face checkpoint to requests for `name`.

    The recipe's rollout layout and settings are used; without one vLLM's defaults.
    """
    # The program behind `vllm serve`, which asks for a package named vllm: that of the build for CPUs has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(checkpoint)]
    command += ["--served-model-name", name, "--host", host, "--port", str(port)]
    # Log-probabilities are those of the distribution that is sampled, as in a run.
    command += ["--logprobs-mode", "processed_logprobs"]
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        command += _cpu_options(checkpoint)
    return command + (_recipe_options(recipe, on_cpu) if recipe is not None else [])


def _recipe_options(recipe: Recipe, on_cpu: bool) -> list[str]:
    rollout = recipe.rollout
    assert rollout is not None, "checked by the command"
    options = ["--dtype", recipe.model.dtype, "--seed", str(recipe.run.seed)]
    options += ["--max-model-len", str(rollout.max_model_len), "--tensor-parallel-size", str(rollout.tp)]
    if rollout.dp > 1:
        options += ["--data-parallel-size", str(rollout.dp)]
    if rollout.expert_parallel:
        options += ["--enable-expert-parallel"]
    if on_cpu:
        options += ["--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * 2**30))]
    return options  # no rollout.gpu_memory_utilization: it leaves room for training, which does not run beside a server


def _cpu_options(checkpoint: Path) -> list[str]:
    """Return what vLLM 0.32 needs on CPU, as in a run (`rollout/engine.py`)."""
    options = ["--enforce-eager", "--no-enable-chunked-prefill"]
    options += ["--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]
    config: Config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    try:
        latents = family_of(config).latents(config)
    except UnsupportedModel:  # vLLM serves more models than can be trained
        latents = None
    return options if latents is None else [*options, "--attention-backend", LATENT_ATTENTION]
