"""Say which build of PyTorch pip has installed, what it takes on the disk, and how to get the smaller one.

python requirements/torch_build.py        # what `make setup` runs
"""

from importlib.metadata import distributions, version

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


if __name__ == "__main__":
    print(describe(version("torch"), installed_bytes("torch"), installed_bytes(*CUDA)))
