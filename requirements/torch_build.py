"""Say which build of PyTorch pip has installed, what it takes on the disk, and how to get the smaller one.

python requirements/torch_build.py            # what `make setup` runs
python requirements/torch_build.py --failed   # what it runs where pip has installed none: say what held pip back
"""

import re
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

# Packages that the CUDA build brings along: CUDA's libraries, their Python bindings, and a compiler of kernels
CUDA = ("nvidia-", "cuda-", "triton")


def installed_bytes(*prefixes: str) -> int:
    """Size of the files of every installed package whose name begins with one of `prefixes`, as its RECORD has it."""
    packages = [one for one in distributions() if one.metadata["Name"].lower().startswith(prefixes)]
    return sum(file.size or 0 for package in packages for file in package.files or ())


def describe(build: str, torch_bytes: int, cuda_bytes: int) -> str:
    """One line about the build, such as 2.13.0+cpu."""
    if build.endswith("+cpu"):
        return f"PyTorch {build}: the CPU build, {torch_bytes / 1e9:.1f} GB on the disk."
    return (
        f"PyTorch {build}: the CUDA build, {torch_bytes / 1e9:.1f} GB on the disk and {cuda_bytes / 1e9:.1f} GB for "
        "what it needs; it works without a GPU too. The CPU build takes 0.7 GB: set PIP_EXTRA_INDEX_URL to PyTorch's "
        "index of CPU builds (its address is on PyTorch's install page), remove .venv, and run make setup again."
    )


def constraints(config: str) -> list[str]:
    """Return what pip's own constraints ask of torch, each with its file; `config` is what `pip config list` prints."""
    found = []
    for files in re.findall(r"^\S+\.constraint='(.*)'$", config, re.MULTILINE):
        for file in files.replace("\\n", " ").split():
            text = Path(file).read_text(encoding="utf-8", errors="replace") if Path(file).is_file() else ""
            found += [f"{line} ({file})" for line in re.findall(r"^ *(torch\b(?!-).*?) *$", text, re.MULTILINE)]
    return found


def why_none() -> str:
    """One line about what may have kept pip from installing the pinned PyTorch."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    held = constraints(subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60).stdout)
    if not held:
        return "pip could not install the pinned PyTorch: its message is above."
    return (
        f"pip could not install the pinned PyTorch, which constraints of its configuration hold: {', '.join(held)}. "
        "If that is why, run this command again with PIP_CONSTRAINT=/dev/null before it."
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--failed"]:
        sys.exit(why_none())
    print(describe(version("torch"), installed_bytes("torch"), installed_bytes(*CUDA)))
