"""Makes the audit's environment: CUDA builds from PyPI, Transformer Engine's Python, a libcuda that does nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from audit import pypi

PYTHON = (3, 12)  # the image's; else that of this process
INSTALL_SECONDS = 3000
# Functions of the CUDA driver that vLLM's libraries name when they are loaded
DRIVER = """
cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString cuGetProcAddress_v2
cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess
cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled
""".split()
TE = "transformer-engine"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
VERSIONS = "import json, sys; from importlib.metadata import version; print(json.dumps([*map(version, sys.argv[1:])]))"
SHOWN = ("vllm", "torch", "megatron-core", "transformers", "nvidia-cudnn-cu13")


@dataclass(frozen=True)
class Environment:
    """Where the audit's environment is.

    Attributes:
        python: the interpreter that has the CUDA builds.
        transformer_engine: the folder with Transformer Engine's Python.
        stub: the folder with the libcuda.so.1 that does nothing.
        install_seconds: how long installing took, once.
    """

    python: Path
    transformer_engine: Path
    stub: Path
    install_seconds: float

    def versions(self) -> dict[str, str]:
        """Return the versions of what is audited."""
        done = subprocess.run([self.python, "-c", VERSIONS, *SHOWN], capture_output=True, text=True, check=True)
        about = subprocess.run([self.python, "--version"], capture_output=True, text=True, check=True)
        (metadata,) = self.transformer_engine.glob("transformer_engine-*.dist-info")
        versions = dict(zip(SHOWN, json.loads(done.stdout), strict=True))
        versions["transformer-engine"] = metadata.name.removesuffix(".dist-info").partition("-")[2]
        return versions | {"python": about.stdout.split()[1]}


def make(folder: Path, replaced: Mapping[str, str] = MappingProxyType({})) -> Environment:
    """Make the environment in a folder, or find it there if it has the same requirements.

    Args:
        replaced: versions of distributions in place of those of this process, and of the Dockerfile's Transformer
            Engine. Checks that compare with the CPU build then find what differs between the versions, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    versions = pypi.versions_here() | {TE: pypi.dockerfile_argument("TE_VERSION")} | replaced
    wanted = [*_requirements(versions), f"{TE}=={versions[TE]}"]
    stamp = folder / "installed.json"
    installed = json.loads(stamp.read_text()) if stamp.exists() else {}
    if installed.get("requirements") != wanted:
        start = time.monotonic()
        _install(folder, versions)
        installed = {"requirements": wanted, "seconds": time.monotonic() - start}
        stamp.write_text(json.dumps(installed))
    found = Environment(
        _python(folder), folder / "transformer_engine", folder / "stub", install_seconds=installed["seconds"]
    )
    _compile_stub(found.stub)
    return found


def _python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def _requirements(versions: Mapping[str, str]) -> list[str]:
    """Return what is installed: what the package asks for, those of these versions exactly, without Transformer Engine.

    What Transformer Engine itself needs is among it.
    """
    asked = [one for one in pypi.gpu_requirements() if not one.startswith((TE, *versions))]
    return [*asked, *(f"{n}=={v}" for n, v in versions.items() if n != TE), *pypi.TE_TORCH_REQUIRES]


def _install(folder: Path, versions: Mapping[str, str]) -> None:
    for part in ("venv", "transformer_engine", "wheels"):
        shutil.rmtree(folder / part, ignore_errors=True)
    subprocess.run([_interpreter(), "-m", "venv", folder / "venv"], check=True)
    pip = _python(folder), "install", "--quiet", "--no-cache-dir"
    pypi.pip(*pip, "--upgrade", "pip", timeout=300)
    pypi.pip(*pip, *_requirements(versions), timeout=INSTALL_SECONDS)
    # Its Python is in the wheel of this name; the one with the core library is 180 MB, which cannot run here.
    wheels = folder / "wheels"
    download = "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(wheels)
    pypi.pip(_python(folder), *download, f"{TE}=={versions[TE]}", timeout=300)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "transformer_engine")
    shutil.rmtree(wheels)


def _interpreter() -> str:
    """Return an interpreter of the image's version if there is one, else this process's."""
    name = f"python{PYTHON[0]}.{PYTHON[1]}"
    candidates = [*Path.home().glob(f".pyenv/versions/{PYTHON[0]}.{PYTHON[1]}.*/bin/{name}"), shutil.which(name)]
    for candidate in map(str, filter(None, candidates)):
        if subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return candidate
    return sys.executable


def _compile_stub(folder: Path) -> None:
    """Compile a libcuda.so.1 that has the driver's functions and says that there is no device."""
    folder.mkdir(exist_ok=True)
    source = "\n".join(f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in DRIVER)
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True)
